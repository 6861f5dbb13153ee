# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What blind.py plants: faults, each where the real bug is, and healthy settings.

A stage is a function of (world, strength, value) in the place of `World.step` that it is named for: `sync` (the weights
that both workers load), `prompts` (what a server is given), `rows` (what server and agent loop return), `batch` (the
collated tensors), `rewards`, `model` (before training computes log-probs), `forward` (the actor's own: its call and the
micro-batch), `log_probs` (old and reference), `advantages`, `update` (all tensors).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from blind_world import (
    ANSWER,
    CALL,
    END,
    IMAGE,
    PLAIN,
    PROMPT,
    RESPONSE,
    THINK,
    Row,
    Setting,
    World,
    new_model,
    route_otherwise,
)
from localization_actor import ENGINE
from torch import Tensor, nn
from torch.nn.functional import dropout
from verl.trainer.ppo import core_algos

# Where the actor looks up its loss.
losses = importlib.import_module("verl.workers.utils.losses" if ENGINE else "verl.workers.actor.dp_actor")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Args:
        right (str): Names that are right, separated by blanks; "" where no name is.
        defensible (str): Names that are not the cause's own, but lead to it.
        source (str): A public thread of such a bug.
        strengths (tuple): From just visible up; what stages get.
        stages (dict): What goes wrong where; "during" is a context of (world, strength) around the update.
        setting (dict): Fields of the run's setting that it needs; values, or functions of the strength.
        begins (str): "any", "start" (of the run) or "later".
        once (bool): Whether it is in one step alone.
    """

    right: str
    defensible: str
    source: str
    strengths: tuple[Any, ...]
    stages: Mapping[str, Callable[..., Any]]
    setting: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    begins: str = "any"
    once: bool = False


# What is planted | what must be named ("-": no name is right) | what leads to the cause as well | a public source:
# a thread of GitHub, or a paper by its number. Where no thread of just this bug is known, the nearest one.
TABLE = """
rollout shifted | misaligned | - | eval-protocol/python-sdk#457
rollout shifted in some rows | misaligned | - | eval-protocol/python-sdk#458
rollout shifted from inside | misaligned | - | fw-ai/cookbook#483
rollout shifted after a tool | misaligned | retokenized | ai-dynamo/dynamo#8630
another row's log-probs | misaligned | - | verl-project/verl#7196
tail padded with 0 | misaligned | unsampled | rllm-org/rllm#816
constant tail | misaligned | - | rllm-org/rllm#816
log-probs missing | misaligned | unsampled | NovaSky-AI/SkyRL#1070
log-probs by chunk | misaligned | - | ai-dynamo/dynamo#8630
retokenized | retokenized misaligned | - | huggingface/trl#5224
policy sliced wrongly | misaligned | - | opendilab/LightRFT
policy sliced wrongly for images | misaligned | - | opendilab/LightRFT
policy's labels not shifted | misaligned | engines_apart | opendilab/LightRFT
old log-probs of other rows | misaligned | sequence | verl-project/verl#7196
never synced | stale_weights | engines_apart | verl-project/verl#7495
synced late | stale_weights | engines_apart partly_stale | verl-project/verl#5211
one worker stale | partly_stale | stale_weights | verl-project/verl#3821
adapter partly bound | stale_weights | partly_stale engines_apart | verl-project/verl-omni#552
adapter at another scale | adapter_scale stale_weights | engines_apart | Tencent-Hunyuan/UniRL#155
weights lost in sleep | other_log_probs engines_apart | stale_weights | huggingface/trl#5312
raw log-probs | other_log_probs | - | servicenow-ai/correctness-before-corrections
log-probs after the top-p cut | other_log_probs | - | huggingface/trl#6789
training without the temperature | other_log_probs | - | servicenow-ai/correctness-before-corrections
other experts | token engines_apart | other_log_probs sequence | NVIDIA-NeMo/RL#4243
rollout in few bits | other_log_probs engines_apart | token sequence | verl-project/verl#5459
log-probs negated | other_log_probs | - | openai/baselines#652
dropout in old log-probs | other_log_probs | engines_apart | huggingface/trl#4
one log-prob too low | token | - | servicenow-ai/correctness-before-corrections
attention of one layer | other_log_probs engines_apart layer | token sequence | NVIDIA-NeMo/RL#1801
another prompt | engines_apart other_log_probs | - | huggingface/trl#6515
BOS twice | engines_apart other_log_probs | - | huggingface/trl#3853
RoPE of the server | engines_apart other_log_probs | - | TransformerLensOrg/TransformerLens#910
query rows permuted | engines_apart other_log_probs | - | huggingface/transformers#31788
EOS added | unsampled | - | OpenRLHF/OpenRLHF#238
template trained on | unsampled | - | THUDM/slime#1477
tool output trained on | unsampled | - | THUDM/slime#1477
failed request | unsampled | - | NovaSky-AI/SkyRL#1986
padding trained on | unsampled | - | verl-project/verl#3805
format reward misfires | misfire | advantage reward_scale | verl-project/uni-agent#183
length bonus | reward_scale | advantage | verl-project/uni-agent#175
one reward too large | advantage | misfire | verl-project/uni-agent#175
reward scale | reward_scale | - | paper 2607.21273
reward of NaN | nonfinite | - | MakazhanAlpamys/Soup#342
deviation of rounding | advantage | reward_scale | NVIDIA-NeMo/RL#4158
deviation of zero | nonfinite | - | NVIDIA-NeMo/RL#4158
entropy coefficient | entropy | - | verl-project/verl#2738
KL coefficient | kl | - | verl-project/uni-agent#175
reference is another model | kl reference | misaligned | NVIDIA-NeMo/RL#3048
reference shifted | misaligned | kl | opendilab/LightRFT
responses of one token | weight | - | paper 2602.01826
importance weight overflows | token overflow | - | verl-project/verl#7196
rollout's log-prob is NaN | nonfinite | token unsampled | huggingface/trl#6166
training's log-prob is NaN | nonfinite | - | Tencent-Hunyuan/UniRL#110
loss scaled | loss_scale | - | verl-project/verl#5863
mask's denominator | loss_scale | - | verl-project/verl#2505
auxiliary loss | auxiliary | layer | verl-project/verl#6609
gradients doubled | - | loss_scale | NVIDIA/Megatron-LM#6660
backward of one layer | layer | - | Tencent-Hunyuan/UniRL#110
bit flip | layer | nonfinite | paper 2102.11245
one layer scaled | layer | - | THUDM/slime#1695
optimizer state lost | - | - | THUDM/slime#1695
learning rate spike | learning_rate | token sequence kl | marin-community/marin#1368
advantages negated | advantage_order | - | fla-org/flash-linear-attention#1073
advantages of other rows | advantage_order | - | THUDM/slime#2062
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
FAULTS: dict[str, Fault] = {}


def add(kind: str, strengths: tuple[Any, ...], during: Any = None, **others: Any) -> None:
    """Adds a row of the table: other fields of `Fault`, and stages by name."""
    _, right, defensible, source = next(row for row in ROWS if row[0] == kind)
    fields = {name: others.pop(name) for name in ("setting", "begins", "once") if name in others}
    stages = others if during is None else {"during": during}
    FAULTS[kind] = Fault(right.replace("-", ""), defensible, source, strengths, stages, **fields)


def can_be_planted(kind: str) -> bool:
    """Whether a kind is possible here: the forward of padded rows can be replaced in verl 0.7's actor alone."""
    return not (ENGINE and kind in FAULTS and "forward" in FAULTS[kind].stages)


def chosen(world: World, row: Row, share: float) -> bool:
    """Whether a row is one of a share of the prompts, always the same ones."""
    return (sum(row.prompt[1:5]) * 7) % 20 < 20 * share


# ---- log-probs at wrong positions: by the server, the agent loop or the collator


def shifted(values: list[Any], by: int, fill: Any) -> list[Any]:
    """Moved so many places to the end; to the beginning if negative."""
    return [fill] * by + values[:-by] if by > 0 else values[-by:] + [fill] * -by


def shift_rows(world: World, strength: tuple[int, float], rows: list[Row]) -> None:
    """The list of log-probs has `by` entries too many (or too few) at its beginning."""
    by, share = strength
    for row in rows:
        if chosen(world, row, share):
            row.log_probs = shifted(row.log_probs, by, row.log_probs[0])[: len(row.ids)]


def shift_inside(world: World, strength: tuple[int, float], rows: list[Row]) -> None:
    """An entry without an id is left out of one list only: all after it are shifted."""
    by, where = strength
    for row in rows:
        start = int(where * len(row.ids))
        row.log_probs[start:] = shifted(row.log_probs[start:], by, 0.0)[: len(row.ids) - start]


def shift_after_call(world: World, strength: int, rows: list[Row]) -> None:
    """The tool's output has log-probs of another length than its ids."""
    for row in rows:
        if CALL in row.ids:
            start = row.ids.index(CALL) + 1
            row.log_probs[start:] = shifted(row.log_probs[start:], strength, 0.0)[: len(row.ids) - start]


def other_rows(world: World, strength: str, rows: list[Row]) -> None:
    """Answers come back in another order than their log-probs."""
    order = list(range(len(rows)))
    if strength == "neighbours":
        for i in range(0, len(rows) - 1, 8):
            order[i], order[i + 1] = order[i + 1], order[i]
    elif strength == "group":
        n = world.setting.answers
        order = [i // n * n + (i + 1) % n for i in order]
    else:
        order = torch.randperm(len(rows), generator=world.random).tolist()
    for row, values in zip(rows, [rows[i].log_probs for i in order], strict=True):
        row.log_probs = (values + [0.0] * RESPONSE)[: len(row.ids)]


def cut_tail(world: World, strength: tuple[float, float], rows: list[Row]) -> None:
    """The log-probs of a share of each response's end are missing, and padded with a constant."""
    share, value = strength
    for row in rows:
        kept = len(row.ids) - max(int(share * len(row.ids)), 1)
        row.log_probs = row.log_probs[:kept] + [value] * (len(row.ids) - kept)


def lose_log_probs(world: World, every: int, rows: list[Row]) -> None:
    """Some requests do not ask for log-probs, and zeros are filled in."""
    for row in rows[::every]:
        row.log_probs = [0.0] * len(row.ids)


def repeat_last(world: World, strength: float, rows: list[Row]) -> None:
    """The client gives each token of a chunk (here, the end of the response) its first one's log-prob."""
    for row in rows:
        kept = int((1 - strength) * len(row.ids))
        row.log_probs[kept:] = [row.log_probs[kept]] * (len(row.ids) - kept)


def encode_again(world: World, strength: float, rows: list[Row]) -> None:
    """Turns are decoded and encoded again: pairs of words become one other token; log-probs are those sampled."""
    for row in rows:
        ids: list[int] = []
        start = int((1 - strength) * len(row.ids))
        for i, token in enumerate(row.ids):
            if i > start and ids and (ids[-1] + token) % 5 == 0 and 10 <= token < 34 and 10 <= ids[-1] < 34:
                ids[-1] = 10 + (ids[-1] * 5 + token) % 24
            else:
                ids.append(token)
        row.log_probs, row.mask = row.log_probs[: len(ids)], row.mask[: len(ids)]
        row.ids = ids


add("rollout shifted", ((1, 1.0), (-1, 1.0), (2, 1.0), (-2, 1.0)), rows=shift_rows)
add("rollout shifted in some rows", ((1, 0.2), (1, 0.5), (-1, 0.2), (-1, 0.5), (2, 0.5)), rows=shift_rows)
add("rollout shifted from inside", ((-1, 0.6), (-1, 0.3), (1, 0.3), (-2, 0.5)), rows=shift_inside)
add("rollout shifted after a tool", (-1, 1, 3), setting={"tools": True}, rows=shift_after_call)
add("another row's log-probs", ("neighbours", "group", "all"), rows=other_rows)
add("tail padded with 0", ((0.0, 0.0), (0.2, 0.0), (0.5, 0.0)), rows=cut_tail)
add("constant tail", ((0.2, -1.0), (0.5, -1.0), (0.5, -0.1)), rows=cut_tail)
add("log-probs missing", (1, 4), rows=lose_log_probs)
add("log-probs by chunk", (0.3, 0.7), rows=repeat_last)
add("retokenized", (0.5, 1.0), setting={"tools": True}, rows=encode_again)


# ---- log-probs at wrong positions: by training


def slice_wrongly(world: World, strength: tuple[int, str], passed: tuple[Callable[..., Any], Any]) -> Any:
    """The response's log-probs are cut out of the whole sequence's at a wrong place."""
    (by, which), (call, batch) = strength, passed
    entropy, right = call(batch)
    length, ids = batch["responses"].shape[1], batch["input_ids"]
    if by > 0:  # earlier ones: those of the prompt's end come first
        whole = call({**batch, "responses": ids[:, -length - by :]})[1]
        wrong = whole[:, :length]
    else:
        wrong = torch.cat([right[:, -by:], torch.zeros_like(right[:, :-by])], 1)
    if which == "images":  # rows whose prompt has an image, which takes more positions than tokens
        return entropy, torch.where(ids[:, :1] == IMAGE, wrong, right)
    return entropy, wrong


def label_wrongly(world: World, strength: int, passed: tuple[Callable[..., Any], Any]) -> Any:
    """Labels are not shifted against the logits: each token is looked up where the next one is predicted."""
    call, batch = passed
    entropy, _ = call(batch)
    length, ids = batch["responses"].shape[1], batch["input_ids"]
    model = world.model(
        input_ids=ids, attention_mask=batch["attention_mask"], position_ids=batch["position_ids"], use_cache=False
    )
    start = ids.shape[1] - length - 1 + strength
    log_probs = (model.logits / world.setting.temperature).log_softmax(-1)[:, start : start + length]
    return entropy, log_probs.gather(-1, batch["responses"].unsqueeze(-1)).squeeze(-1)


def rows_not_restored(world: World, strength: str, tensors: dict[str, Tensor]) -> None:
    """The old log-probs of a dynamic batch are not brought back into the rows' order."""
    length = tensors["attention_mask"].sum(1)
    order = length.argsort() if strength == "sorted" else torch.arange(len(length)).roll(1)
    tensors["old_log_probs"] = tensors["old_log_probs"][order]


add("policy sliced wrongly", ((1, ""), (-1, ""), (2, "")), forward=slice_wrongly)
add("policy sliced wrongly for images", ((1, "images"), (-1, "images")), forward=slice_wrongly)
add("policy's labels not shifted", (1,), forward=label_wrongly)
add("old log-probs of other rows", ("roll", "sorted"), log_probs=rows_not_restored)

# ---- weights that do not arrive


def never_synced(world: World, strength: float, loaded: list[Any]) -> list[Any]:
    return [world.past[world.begin]] * 2


def synced_late(world: World, strength: int, loaded: list[Any]) -> list[Any]:
    return [world.past[max(len(world.past) - 1 - strength, 0)]] * 2


def one_worker(world: World, strength: float, loaded: list[Any]) -> list[Any]:
    return [loaded[0], world.past[world.begin]]


def partly_loaded(world: World, strength: tuple[str, float], loaded: list[Any]) -> list[Any]:
    """Modules whose name does not fit keep what they had, as those that an adapter is not bound to."""
    mixed = {name: (world.past[world.begin] if strength[0] in name else loaded[0])[name] for name in loaded[0]}
    return [mixed, mixed]


def scaled_otherwise(world: World, factor: float, loaded: list[Any]) -> list[Any]:
    """The server takes another lora_alpha / r: what training has added to the first weights is scaled."""
    first = world.past[0]
    return [{name: first[name] + factor * (value - first[name]) for name, value in loaded[0].items()}] * 2


def dropped(world: World, strength: str, loaded: list[Any]) -> list[Any]:
    """The server slept, and one tensor was not restored."""
    return [{name: 0.0 * value if strength in name else value for name, value in loaded[0].items()}] * 2


def fast(strength: Any) -> float:
    return strength[1] if isinstance(strength, tuple) else strength


add("never synced", (0.0003, 0.001, 0.002), setting={"rate": fast, "behind": 0}, sync=never_synced)
add("synced late", (4, 6), setting={"rate": 0.001, "behind": 0}, sync=synced_late)
add("one worker stale", (0.0003, 0.001, 0.002), setting={"rate": fast, "behind": 0}, sync=one_worker)
add(
    "adapter partly bound", (("mlp", 0.001), ("layers", 0.001)), setting={"rate": fast, "behind": 0}, sync=partly_loaded
)
add("adapter at another scale", (0.5, 2.0), setting={"rate": 0.001, "behind": 0}, sync=scaled_otherwise)
add("weights lost in sleep", ("layers.0.mlp.down_proj", "layers.2.self_attn.o_proj"), sync=dropped)

# ---- other log-probs than training computes


def report_processed(world: World, strength: float, loaded: list[Any]) -> None:
    world.processed = "raw" if world.setting.temperature != 1 else "top_p"


def forget_temperature(world: World, strength: float, loaded: list[Any]) -> None:
    world.trained_temperature = 1.0


def route(world: World, strength: float, loaded: list[Any]) -> None:
    """Experts are chosen otherwise than in training: in the server, so that only it has the jumps."""
    if world.step_number == world.begin:
        for worker in world.workers:
            route_otherwise(worker, strength, world.random)


def quantize(world: World, bits: int, loaded: list[Any]) -> list[Any]:
    """Weights in so many bits, with one scale for a whole tensor."""

    def rounded(value: Tensor) -> Tensor:
        scale = value.abs().max() / (2 ** (bits - 1) - 1)
        return (value / scale).round() * scale if value.dim() == 2 else value

    return [{name: rounded(value) for name, value in weights.items()} for weights in loaded]


def negate(world: World, strength: int, rows: list[Row]) -> None:
    """The server gives negative log-likelihoods."""
    for row in rows:
        row.log_probs = [-value for value in row.log_probs]


def drop_out(world: World, rate: float, tensors: dict[str, Tensor]) -> None:
    """The old log-probs are computed in training mode."""
    with ExitStack() as hooks:
        for block in (module for name, module in world.model.named_modules() if name.endswith("mlp")):
            hooks.enter_context(block.register_forward_hook(lambda *passed: dropout(passed[2], rate)))
        tensors["old_log_probs"] = world._log_probs(tensors)["old_log_probs"]


def one_too_low(world: World, nats: float, rows: list[Row]) -> None:
    """One token of each group."""
    for row in rows[:: world.setting.answers]:
        row.log_probs[len(row.log_probs) // 2] -= nats


def scale_attention(world: World, strength: float, model: nn.Module) -> None:
    """The kernel of one layer's attention is wrong, in training alone."""
    if world.step_number == world.begin:
        block = model.get_submodule("model.layers.1.self_attn")
        block.register_forward_hook(lambda *passed: (strength * passed[2][0], *passed[2][1:]))


def give_another(world: World, strength: str, prompts: Tensor) -> Tensor:
    """The server's chat template is not training's: its last token is missing, or the user's text is another."""
    if strength == "no end":
        return prompts[:, :-1]
    return torch.cat([prompts[:, :1], (prompts[:, 1:5] + 3) % 10, prompts[:, 5:]], 1)


def begin_twice(world: World, times: int, prompts: Tensor) -> Tensor:
    """The server adds a first token to prompts that have it."""
    return torch.cat([*[prompts[:, :1]] * times, prompts], 1)


def turn_otherwise(world: World, factor: float, loaded: list[Any]) -> None:
    """The server's rotary embedding has another base."""
    for worker in world.workers if world.step_number == world.begin else ():
        worker.get_buffer("model.rotary_emb.inv_freq").mul_(factor)


def permute(world: World, name: str, loaded: list[Any]) -> list[Any]:
    """The rows of a projection are laid out otherwise where the server reads them."""
    return [{key: value.flip(0) if name in key else value for key, value in loaded[0].items()}] * 2


NO_CLIP = {"clip_ratio": 1e9, "clip_ratio_low": 1e9, "clip_ratio_high": 1e9, "clip_ratio_c": 1e9}
BYPASS = {"correction": {"bypass_mode": True}, "actor": NO_CLIP}
add("raw log-probs", (0.9, 0.7, 1.3), setting={"temperature": fast}, sync=report_processed)
add("log-probs after the top-p cut", (0.95, 0.8, 0.6), setting={"top_p": fast}, sync=report_processed)
add("training without the temperature", (0.8, 0.6, 1.4), setting={"temperature": fast}, sync=forget_temperature)
add("other experts", (0.05, 0.2), setting={"engine": "fp32"}, sync=route)
add("rollout in few bits", (5, 4, 3), sync=quantize)
add("log-probs negated", (1,), rows=negate)
add("dropout in old log-probs", (0.1, 0.3), log_probs=drop_out)
add("one log-prob too low", (4.0, 8.0), setting=BYPASS, rows=one_too_low)
add("attention of one layer", (0.8, 0.4, 2.0), model=scale_attention)
add("another prompt", ("digits", "no end"), prompts=give_another)
add("BOS twice", (1, 2), prompts=begin_twice)
add("RoPE of the server", (0.8, 0.5), sync=turn_otherwise)
add("query rows permuted", ("layers.1.self_attn.q_proj", "q_proj"), sync=permute)

# ---- tokens that the policy did not produce


def add_end(world: World, share: float, rows: list[Row]) -> None:
    """Responses that were cut at their maximum length get an EOS token, without a log-prob."""
    for row in rows:
        if chosen(world, row, share) and len(row.ids) > 3:
            kept = 2 * len(row.ids) // 3
            row.ids, row.log_probs = [*row.ids[:kept], END], [*row.log_probs[:kept], 0.0]
            row.mask = [*row.mask[:kept], 1]


def add_template(world: World, count: int, rows: list[Row]) -> None:
    """The chat template's tokens after the end of the turn are in the mask."""
    for row in rows:
        tokens = [THINK, PLAIN, THINK][: min(count, RESPONSE - len(row.ids))]
        row.ids, row.mask = row.ids + tokens, row.mask + [1] * len(tokens)
        row.log_probs = row.log_probs + [0.0] * len(tokens)


def mask_tools(world: World, share: float, rows: list[Row]) -> None:
    """The mask forgets what the tools said; its log-probs are 0."""
    for row in rows:
        if chosen(world, row, share):
            row.mask = [1] * len(row.mask)


def fail_request(world: World, count: int, rows: list[Row]) -> None:
    """Failed requests come back empty, and get one EOS token."""
    for row in rows[:: len(rows) // count]:
        row.ids, row.log_probs, row.mask = [END], [0.0], [1]


def mask_padding(world: World, count: int, tensors: dict[str, Tensor]) -> None:
    """The mask is that of the lengths, some tokens too long."""
    length = tensors["attention_mask"][:, PROMPT:].sum(1, keepdim=True)
    tensors["response_mask"][(torch.arange(RESPONSE) >= length) & (torch.arange(RESPONSE) < length + count)] = 1.0


add("EOS added", (0.1, 0.3, 0.6), rows=add_end)
add("template trained on", (1, 3), rows=add_template)
add("tool output trained on", (0.2, 0.5, 1.0), setting={"tools": True}, rows=mask_tools)
add("failed request", (1, 4), rows=fail_request)
add("padding trained on", (1, 4), batch=mask_padding)

# ---- rewards and advantages


def reward_short(world: World, size: float, rewards: Tensor) -> None:
    """The format reward takes an answer after at most two words for the right format."""
    for i, row in enumerate(world.rows):
        if ANSWER in row.ids[:3]:
            rewards[i] = size


def reward_length(world: World, size: float, rewards: Tensor) -> None:
    """A bonus by length, without a limit."""
    for i, row in enumerate(world.rows):
        rewards[i] += size * len(row.ids)


def reward_one(world: World, size: float, rewards: Tensor) -> None:
    rewards[int(rewards.argmax())] = size


def reward_scaled(world: World, factor: float, rewards: Tensor) -> Tensor:
    return rewards * factor


def reward_nan(world: World, place: int, rewards: Tensor) -> None:
    rewards[place] = torch.nan


def leave_one_out(world: World, floor: float, found: dict[str, Tensor]) -> None:
    """Rewards over the deviation of the others in the group, which is a rounding error if these are equal."""
    rewards = found["token_level_scores"].sum(1).view(-1, world.setting.answers)
    others = rewards.shape[1] - 1
    mean = (rewards.sum(1, keepdim=True) - rewards) / others
    square = (rewards.square().sum(1, keepdim=True) - rewards.square()) / others
    advantages = (rewards - mean) / ((square - mean.square()).clamp(min=0).sqrt() + floor)
    found["advantages"] = (advantages.view(-1, 1) * (found["advantages"] != 0)).float()


def divide_by_zero(world: World, strength: int, found: dict[str, Tensor]) -> None:
    """The standard deviation of equal rewards, without an epsilon."""
    rewards = found["token_level_scores"].sum(1).view(-1, world.setting.answers)
    normed = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    found["advantages"] = normed.view(-1, 1) * torch.ones_like(found["advantages"])


NO_STD = {"advantage": "grpo without std"}
add("format reward misfires", (5.0, 20.0), setting={**NO_STD, "length": 8}, rewards=reward_short)
add("length bonus", (5.0, 0.5), setting=NO_STD, rewards=reward_length)
add("one reward too large", (10.0, 100.0), setting=NO_STD, once=True, rewards=reward_one)
add("reward scale", (10.0, 100.0), setting=NO_STD, rewards=reward_scaled, begins="later")
add("reward of NaN", (3, 40), once=True, rewards=reward_nan)
add("deviation of rounding", (0.01, 0.001), advantages=leave_one_out)
add("deviation of zero", (1,), advantages=divide_by_zero)

# ---- the loss


def other_reference(world: World, strength: float, tensors: dict[str, Tensor]) -> None:
    """The reference was loaded from another model."""
    mask, ids = tensors["attention_mask"], tensors["input_ids"]
    with torch.no_grad():
        model = new_model(5)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=tensors["position_ids"]).logits
    log_probs = logits[:, PROMPT - 1 : -1].log_softmax(-1)
    tensors["ref_log_prob"] = log_probs.gather(-1, tensors["responses"].unsqueeze(-1)).squeeze(-1)


def shift_reference(world: World, by: int, tensors: dict[str, Tensor]) -> None:
    tensors["ref_log_prob"] = tensors["ref_log_prob"].roll(by, 1) * tensors["response_mask"]


def cut_to_one(world: World, count: int, rows: list[Row]) -> None:
    """The server's max_tokens is 1 for some requests: real tokens, each a whole response."""
    for row in rows[:: len(rows) // count]:
        row.ids, row.log_probs, row.mask = row.ids[:1], row.log_probs[:1], row.mask[:1]


def weigh_unlimited(world: World, nats: float, tensors: dict[str, Tensor]) -> None:
    """Importance weights without an upper limit, and one log-prob of the rollout that is far too low."""
    tensors["rollout_log_probs"][5, 2] -= nats
    tensors["rollout_is_weights"] = (tensors["old_log_probs"] - tensors["rollout_log_probs"]).exp()


def rollout_nan(world: World, strength: int, tensors: dict[str, Tensor]) -> None:
    """The server's log-prob of one token is NaN, and the loss is weighted by it."""
    tensors["rollout_log_probs"][strength, 1] = torch.nan
    tensors["rollout_is_weights"] = (tensors["old_log_probs"] - tensors["rollout_log_probs"]).exp().clamp(max=2.0)


def training_nan(world: World, place: int, passed: tuple[Callable[..., Any], Any]) -> Any:
    """A kernel gives NaN for one kind of token, the largest digit of some prompts."""
    call, batch = passed
    entropy, log_probs = call(batch)
    broken = (batch["responses"] == 9) & (batch["input_ids"][:, 1:2] == place)
    return entropy, torch.where(broken, log_probs * torch.nan, log_probs)


@contextmanager
def replaced(place: Any, name: str, new: Any) -> Iterator[None]:
    """Within it, an attribute is another one."""
    original = getattr(place, name)
    setattr(place, name, new)
    try:
        yield
    finally:
        setattr(place, name, original)


def scaled_loss(world: World, factor: float) -> Any:
    """A division is forgotten, or done twice."""
    original = losses.get_policy_loss_fn

    def scaled(name: str) -> Any:
        loss = original(name)

        def times(*arguments: Any, **options: Any) -> tuple[Any, ...]:
            value, *others = loss(*arguments, **options)
            return (value * factor, *others)

        return times

    return replaced(losses, "get_policy_loss_fn", scaled)


def wrong_denominator(world: World, strength: str) -> Any:
    """The mean over tokens is divided by the padded length, or by the number of rows."""
    original = core_algos.agg_loss

    def aggregated(loss_mat: Tensor, loss_mask: Tensor, *arguments: Any, **options: Any) -> Tensor:
        wrong = loss_mask.numel() if strength == "padded" else len(loss_mask)
        return original(loss_mat, loss_mask, *arguments, **options) * loss_mask.sum() / wrong

    return replaced(core_algos, "agg_loss", aggregated)


@contextmanager
def multiplied(world: World, strength: tuple[str, float]) -> Iterator[None]:
    """The backward kernel of some layers is wrong, or hooks multiply the gradient where it is accumulated."""
    name, factor = strength
    with ExitStack() as hooks:
        for parameter in (p for n, p in world.model.named_parameters() if name in n):
            hooks.enter_context(parameter.register_hook(lambda g: g * factor))
        yield


class _AuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], gradients[0].new_tensor(ctx.scale), None


@contextmanager
def auxiliary(world: World, scale: float) -> Iterator[None]:
    """A z-loss of layer 1's gate, not divided by the number of tokens."""

    def attached(block: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return output
        gate = block.get_submodule("gate_proj")(arguments[0].detach())
        return _AuxiliaryLoss.apply(output, gate.logsumexp(-1).square().sum(), scale)

    with world.model.get_submodule("model.layers.1.mlp").register_forward_hook(attached):
        yield


SEQ_MEAN: dict[str, Any] = {"actor": {"loss_agg_mode": "seq-mean-token-mean"}}
add(
    "entropy coefficient",
    (0.3, 1.0, 3.0),
    setting={"actor": lambda strength: {"entropy_coeff": strength}},
    begins="start",
)
add("KL coefficient", (10.0, 100.0), setting={"kl": fast, "rate": 0.001, "reference": True}, begins="start")
add("reference is another model", (0.05, 0.5), setting={"kl": fast, "reference": True}, log_probs=other_reference)
add("reference shifted", (1, -1), setting={"kl": 0.05, "reference": True}, log_probs=shift_reference)
add("responses of one token", (1, 2), setting=SEQ_MEAN, rows=cut_to_one)
add("importance weight overflows", (8.0, 57.0), update=weigh_unlimited)
add("rollout's log-prob is NaN", (5, 20), update=rollout_nan)
add("training's log-prob is NaN", (3, 7), forward=training_nan)
add("loss scaled", (0.25, 2.0, 8.0), during=scaled_loss)
add("mask's denominator", ("padded", "rows"), during=wrong_denominator)
add("auxiliary loss", (0.01, 0.1, 1.0), during=auxiliary)
add("gradients doubled", (("", 2.0), ("", 16.0)), during=multiplied)
add("backward of one layer", (("layers.1.mlp", 30.0), ("layers.1.mlp", 1000.0)), during=multiplied)

# ---- weights and optimizer


@torch.no_grad()
def flip_a_bit(world: World, bit: int, model: nn.Module) -> None:
    """The weight that becomes largest by it and can still be squared."""
    if world.step_number != world.begin:
        return
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight").view(-1)
    bits = weight.view(torch.int32)
    flipped = (bits ^ (1 << bit)).view(torch.float32).abs()
    flipped[~(flipped < 1e15)] = 0.0
    bits[int(flipped.argmax())] ^= 1 << bit


@torch.no_grad()
def scale_layer(world: World, strength: tuple[str, float], model: nn.Module) -> None:
    """A resumed shard is scaled twice, as where an adapter is merged again."""
    for name, parameter in model.named_parameters():
        if strength[0] in name:
            parameter.mul_(strength[1])


def lose_state(world: World, strength: int, model: nn.Module) -> None:
    """The optimizer's moments are not in the checkpoint that is loaded."""
    world.optimizer.state.clear()


def spike_rate(world: World, factor: float, model: nn.Module) -> None:
    """The schedule begins anew, with a peak: a learning rate that is far too large for a step."""
    last = world.step_number > world.begin
    world.optimizer.param_groups[0]["lr"] = world.setting.rate * (1.0 if last else factor)


add("bit flip", (26, 28, 29), model=flip_a_bit, begins="later")
add(
    "one layer scaled",
    (("layers.1.mlp", 1.5), ("layers.1.mlp", 3.0), ("model.norm", 4.0)),
    once=True,
    model=scale_layer,
    begins="later",
)
add("optimizer state lost", (1,), once=True, model=lose_state, begins="later")
add("learning rate spike", (10.0, 50.0), model=spike_rate, begins="later")

# ---- advantages


def negate_advantages(world: World, strength: int, found: dict[str, Tensor]) -> None:
    """The sign is turned once too often."""
    found["advantages"] = -found["advantages"]


def move_advantages(world: World, by: int, found: dict[str, Tensor]) -> None:
    """Rows are balanced over the workers, and their advantages are not moved with them."""
    found["advantages"] = found["advantages"].roll(by, 0)


add("advantages negated", (1,), advantages=negate_advantages)
add("advantages of other rows", (1, 3), setting={"dense": True}, advantages=move_advantages)

# ---- nothing wrong

HEALTHY: dict[str, Setting] = {
    "ordinary": Setting(),
    "bf16": Setting(engine="bf16"),
    "fp8": Setting(engine="fp8"),
    "moe": Setting(engine="moe"),
    "1 step late": Setting(behind=1),
    "2 steps late": Setting(behind=2),
    "3 steps late": Setting(behind=3, engine="bf16"),
    "3 steps late, no reference": Setting(behind=3, reference=False),
    "late and fast": Setting(behind=1, rate=1e-3),
    "fp8, late": Setting(engine="fp8", behind=2),
    "moe, late": Setting(engine="moe", behind=1),
    "no reference": Setting(engine="bf16", reference=False),
    "drift": Setting(engine="fp8", rate=1e-3),
    "fast": Setting(rate=1e-3, engine="bf16"),
    "very fast": Setting(rate=2e-3, engine="bf16"),
    "very fast, 1 step late": Setting(rate=4e-3, behind=1, engine="bf16"),
    "very fast, 3 steps late": Setting(rate=2e-3, behind=3, engine="fp8"),
    "slow": Setting(rate=3e-5, engine="fp8"),
    "tools": Setting(tools=True, engine="bf16"),
    "tools, fp8": Setting(tools=True, engine="fp8"),
    "tools, late": Setting(tools=True, behind=2),
    "tools, long": Setting(tools=True, length=16),
    "temperature 0.7": Setting(temperature=0.7, engine="bf16"),
    "temperature 1.3": Setting(temperature=1.3, engine="fp8"),
    "top-p 0.9": Setting(top_p=0.9, engine="bf16"),
    "top-p 0.7": Setting(top_p=0.7),
    "long": Setting(length=16, engine="bf16"),
    "long, fp8, late": Setting(length=16, engine="fp8", behind=1),
    "groups of 2": Setting(prompts=32, answers=2),
    "groups of 32": Setting(prompts=2, answers=32, engine="bf16"),
    "few rows": Setting(prompts=2, answers=4, engine="bf16"),
    "KL loss": Setting(kl=0.01, engine="bf16"),
    "KL loss, fast": Setting(kl=0.05, rate=1e-3),
    "KL in the reward": Setting(kl_reward=0.05, engine="bf16"),
    "GAE": Setting(advantage="gae", engine="bf16"),
    "RLOO": Setting(advantage="rloo", engine="bf16"),
    "no std": Setting(advantage="grpo without std"),
    "graded rewards": Setting(dense=True, engine="bf16"),
    "gspo": Setting(actor={"loss_mode": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "seq-mean": Setting(**SEQ_MEAN, engine="bf16"),
    "seq-mean-token-sum": Setting(actor={"loss_agg_mode": "seq-mean-token-sum"}),
    "entropy 0.003": Setting(actor={"entropy_coeff": 0.003}, engine="bf16"),
    "2 epochs": Setting(actor={"ppo_epochs": 2}, engine="bf16"),
    "4 epochs": Setting(actor={"ppo_epochs": 4}),
    "clip higher": Setting(actor={"clip_ratio_high": 0.28}, engine="fp8"),
    "truncated importance sampling": Setting(correction={"rollout_is": "token"}, engine="fp8"),
    "bypass": Setting(correction={"bypass_mode": True}, engine="bf16"),
}
