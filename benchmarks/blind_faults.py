# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What blind.py plants: faults, each where the real bug is, and healthy settings.

A stage is a function of (world, strength, value) in the place of `World.step` that it is named for: `sync` (the weights
that both workers load), `tasks` (the rows' prompts), `prompts` (what a server is given), `rows` (what server and agent
loop return), `batch` (the collated tensors), `columns` (uids), `rewards`, `model` (before training computes log-probs),
`forward` (the actor's own: its call and the micro-batch), `log_probs` (old and reference), `advantages`, `update` (all
tensors).
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
from collections import Counter
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
        identity (str): The identities at which it is to be placed, or "changes"; "" where nothing is to be said.
        source (str): A public thread of such a bug.
        strengths (tuple): From just visible up; what stages get.
        stages (dict): What goes wrong where; "during" is a context of (world, strength) around the update.
        setting (dict): Fields of the run's setting that it needs; values, or functions of the strength.
        begins (str): "any", "start" (of the run) or "later".
        once (bool): Whether it is in one step alone.
    """

    right: str
    defensible: str
    identity: str
    source: str
    strengths: tuple[Any, ...]
    stages: Mapping[str, Callable[..., Any]]
    setting: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    begins: str = "any"
    once: bool = False


# What is planted | what must be named ("-": no name of its own) | what leads to the cause as well | where it is to be
# placed: the identities that break, or "changes" of the run ("-": nothing is to be said) | a public source: a thread of
# GitHub, or a paper by its number. Where no thread of just this bug is known, the nearest one.
TABLE = """
rollout shifted | misaligned | - | rollout_log_probs | eval-protocol/python-sdk#457
rollout shifted in some rows | misaligned | - | rollout_log_probs | eval-protocol/python-sdk#458
rollout shifted from inside | misaligned | - | rollout_log_probs | fw-ai/cookbook#483
rollout shifted after a tool | misaligned | retokenized | rollout_log_probs | ai-dynamo/dynamo#8630
another row's log-probs | misaligned | - | rollout_log_probs | verl-project/verl#7196
tail padded with 0 | misaligned | unsampled | rollout_log_probs | rllm-org/rllm#816
constant tail | misaligned | - | rollout_log_probs | rllm-org/rllm#816
log-probs missing | misaligned | unsampled | rollout_log_probs | NovaSky-AI/SkyRL#1070
log-probs by chunk | misaligned | - | rollout_log_probs | ai-dynamo/dynamo#8630
retokenized | retokenized misaligned | - | sampled rollout_log_probs | huggingface/trl#5224
policy sliced wrongly | misaligned | - | rollout_log_probs | opendilab/LightRFT
policy sliced wrongly for images | misaligned | - | rollout_log_probs | opendilab/LightRFT
policy's labels not shifted | misaligned | engines_apart | rollout_log_probs | opendilab/LightRFT
old log-probs of other rows | misaligned | sequence | old_log_probs | verl-project/verl#7196
never synced | stale_weights | engines_apart | rollout_log_probs | verl-project/verl#7495
synced late | stale_weights | engines_apart partly_stale | rollout_log_probs | verl-project/verl#5211
one worker stale | partly_stale | stale_weights | rollout_log_probs | verl-project/verl#3821
adapter partly bound | stale_weights | partly_stale engines_apart | rollout_log_probs | verl-project/verl-omni#552
adapter at another scale | adapter_scale stale_weights | engines_apart | rollout_log_probs | Tencent-Hunyuan/UniRL#155
weights lost in sleep | other_log_probs engines_apart | stale_weights | rollout_log_probs | huggingface/trl#5312
raw log-probs | other_log_probs | - | rollout_log_probs | servicenow-ai/correctness-before-corrections
log-probs after the top-p cut | other_log_probs | - | rollout_log_probs | huggingface/trl#6789
training without the temperature | other_log_probs | - | rollout_log_probs | huggingface/trl#3029
other experts | token engines_apart | other_log_probs sequence | rollout_log_probs | NVIDIA-NeMo/RL#4243
rollout in few bits | other_log_probs engines_apart | token sequence | rollout_log_probs | verl-project/verl#5459
log-probs negated | other_log_probs | - | rollout_log_probs | openai/baselines#652
dropout in old log-probs | other_log_probs | engines_apart | old_log_probs | huggingface/trl#4
one log-prob too low | token | - | rollout_log_probs | servicenow-ai/correctness-before-corrections
attention of one layer | other_log_probs engines_apart layer | token sequence | rollout_log_probs | NVIDIA-NeMo/RL#1801
another prompt | engines_apart other_log_probs | - | rollout_log_probs | huggingface/trl#6515
BOS twice | engines_apart other_log_probs | - | rollout_log_probs | huggingface/trl#3853
RoPE of the server | engines_apart other_log_probs | - | rollout_log_probs | TransformerLensOrg/TransformerLens#910
query rows permuted | engines_apart other_log_probs | - | rollout_log_probs | huggingface/transformers#31788
EOS added | unsampled | - | sampled | OpenRLHF/OpenRLHF#238
template trained on | unsampled | - | sampled | THUDM/slime#1477
tool output trained on | unsampled | - | sampled | THUDM/slime#1477
failed request | unsampled | - | sampled | NovaSky-AI/SkyRL#1986
padding trained on | unsampled | - | sampled | verl-project/verl#3805
format reward misfires | misfire | advantage reward_scale | changes | verl-project/uni-agent#183
length bonus | reward_scale | advantage | changes | verl-project/uni-agent#175
one reward too large | advantage | misfire | changes | verl-project/uni-agent#175
reward scale | reward_scale | - | changes | paper 2607.21273
reward of NaN | nonfinite | - | advantages | MakazhanAlpamys/Soup#342
deviation of rounding | advantage | reward_scale | advantages | NVIDIA-NeMo/RL#4158
deviation of zero | nonfinite | - | advantages | NVIDIA-NeMo/RL#4158
entropy coefficient | entropy | - | changes | verl-project/verl#2738
KL coefficient | kl | - | changes | verl-project/uni-agent#175
reference is another model | kl reference | misaligned | reference | NVIDIA-NeMo/RL#3048
reference shifted | misaligned | kl | reference | opendilab/LightRFT
responses of one token | weight | - | changes | paper 2602.01826
importance weight overflows | token overflow | - | rollout_log_probs loss | verl-project/verl#7196
rollout's log-prob is NaN | nonfinite | token unsampled | rollout_log_probs | huggingface/trl#6166
training's log-prob is NaN | nonfinite | - | rollout_log_probs gradient | Tencent-Hunyuan/UniRL#110
loss scaled | loss_scale | - | loss | verl-project/verl#5863
mask's denominator | loss_scale | - | loss | verl-project/verl#2505
auxiliary loss | auxiliary | layer | gradient | verl-project/verl#6609
gradients doubled | - | loss_scale | - | NVIDIA/Megatron-LM#6660
backward of one layer | layer | - | gradient | Tencent-Hunyuan/UniRL#110
bit flip | layer | nonfinite | weights | paper 2102.11245
one layer scaled | layer | - | weights | THUDM/slime#1695
optimizer state lost | - | - | - | THUDM/slime#1695
learning rate spike | learning_rate | token sequence kl | changes | marin-community/marin#1368
advantages negated | advantage_order | - | advantages | fla-org/flash-linear-attention#1073
advantages of other rows | advantage_order | - | advantages | THUDM/slime#2062
EOS never trained | mask | - | sampled | NVIDIA-NeMo/Automodel#1336
mask inverted | mask | unsampled | sampled | THUDM/slime#1418
mask shifted at tools | mask unsampled | - | sampled | verl-project/verl#3287
last tokens lost | - | mask | sampled | rllm-org/rllm#575
one seed for a group | repeated_responses | - | responses | tenstorrent/tt-metal#53077
two workers, one seed | repeated_responses | - | responses | modelscope/ms-swift#3450
failed rows copied | repeated_responses | - | responses | verl-project/verl-omni#602
base of the logarithm | other_log_probs | - | rollout_log_probs | EricLBuehler/mistral.rs#2327
the likeliest token's log-probs | other_log_probs | - | rollout_log_probs | NVIDIA-NeMo/RL#3297
repetition penalty | other_log_probs | engines_apart | rollout_log_probs | verl-project/verl#7270
log-probs drift | - | engines_apart other_log_probs token sequence | rollout_log_probs | sgl-project/sglang#25790
one worker's temperature | other_log_probs | partly_stale engines_apart | rollout_log_probs | huggingface/trl#4159
one worker in few bits | - | partly_stale engines_apart other_log_probs | rollout_log_probs | verl-project/verl#5459
last log-probs are 0 | misaligned unsampled | - | rollout_log_probs | rllm-org/rllm#816
log-probs rounded | - | engines_apart other_log_probs | rollout_log_probs | PrimeIntellect-ai/verifiers#2495
served without the adapter | stale_weights | adapter_scale engines_apart | rollout_log_probs | radixark/miles#2075
old log-probs of the step before | stale_weights | - | old_log_probs | thu-ml/tianshou#745
old log-probs at another temperature | other_log_probs | - | old_log_probs | OpenRLHF/OpenRLHF#853
old log-probs without the tools' output | - | other_log_probs engines_apart | old_log_probs | Time-Search/TimeSearch-R#7
old log-probs at other positions | - | other_log_probs engines_apart | old_log_probs | CarperAI/trlx#509
reference follows the policy | - | stale_weights | reference | aburkov/theLMbook#8
dropout in the reference | - | kl other_log_probs | reference | huggingface/trl#3500
reference at another temperature | other_log_probs | kl | reference | huggingface/trl#3169
a uid for each response | - | mixed_groups | groups | NVIDIA-NeMo/RL#4013
prompts share a uid | mixed_groups | - | groups | dllm-reasoning/d1#19
one uid for all | mixed_groups | - | groups | PeterGriffinJin/Search-R1#39
uids of other rows | mixed_groups | - | groups | THUDM/slime#2062
advantages without a sign | advantage_order | - | advantages | Unity-Technologies/ml-agents#4538
negative advantages lost | - | advantage_order advantage | advantages | callsys/GMPO#4
baseline of another run | - | advantage | advantages | ServiceNow/PipelineRL#54
advantages all zero | - | advantage | advantages | rllm-org/rllm#916
advantages at the other end | advantage_mask | - | advantages | NovaSky-AI/SkyRL#1285
advantages of the next group | advantage_order | - | advantages | huggingface/trl#6072
deviation twice | - | advantage reward_scale | advantages | amazon-science/reskill#12
clipped on the wrong side | - | loss_sign | loss | tensorforce/tensorforce#106
KL loss negated | kl_scale | kl loss_sign | loss | qiancheng0/ToolRL#52
sign lost in the loss | loss_sign | - | loss | fla-org/flash-linear-attention#1073
importance weights left out | importance_weights | - | loss | rlcode/per#3
importance weights inverted | importance_weights | - | loss | THUDM/slime#179
entropy's sign | - | entropy loss_sign | loss | PKU-Alignment/omnisafe#133
tokens weighted by position | - | loss_scale | loss | verl-project/verl#2505
last pass alone | last_pass | - | gradient | pytorch/torchtitan#3575
a layer without a gradient | - | layer | gradient | Lightning-AI/pytorch-lightning#19517
divided twice by the passes | - | last_pass loss_scale | gradient | llm-random/llm-random#529
optimizer of other tensors | not_moving | - | weights | huggingface/accelerate#3256
gradient ascent | ascent | - | weights | kozistr/pytorch_optimizer#528
optimizer without a layer | - | not_moving layer | weights | zjunlp/HVPNeT#5
average of weights loaded | - | stale_weights | weights | aqlaboratory/openfold#90
decay far too large | - | - | weights | offbit/evo-design#3
learning rate of 0 | not_moving | learning_rate | weights changes | LINCellularNeuroscience/VAME#26
sandbox fails | - | misfire | changes | PrimeIntellect-ai/verifiers#659
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
FAULTS: dict[str, Any] = dict.fromkeys(row[0] for row in ROWS)  # in the table's order
TOOLS = {"tools": True}


def add(kind: str, strengths: tuple[Any, ...], during: Any = None, **others: Any) -> None:
    """Adds a row of the table: other fields of `Fault`, and stages by name."""
    names = ([cell.replace("-", "") for cell in row[1:4]] + row[4:] for row in ROWS if row[0] == kind)
    fields = {name: others.pop(name) for name in ("setting", "begins", "once") if name in others}
    stages = others if during is None else {**others, "during": during}
    FAULTS[kind] = Fault(*next(names), strengths, stages, **fields)


def each(field: str, change: Callable[[World, Any, Row], Any]) -> Callable[..., None]:
    """A stage in which `change` gives another list for a field of each row."""

    def stage(world: World, strength: Any, rows: list[Row]) -> None:
        for row in rows:
            setattr(row, field, change(world, strength, row))

    return stage


def column(name: str, change: Callable[[World, Any, dict[str, Any]], Any]) -> Callable[..., None]:
    """A stage in which `change` gives another column of this name."""

    def stage(world: World, strength: Any, columns: dict[str, Any]) -> None:
        columns[name] = change(world, strength, columns)

    return stage


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


def shift(world: World, strength: tuple[int, float], row: Row) -> list[float]:
    """The list of log-probs has `by` entries too many (or too few) at its beginning."""
    by, share = strength
    moved = shifted(row.log_probs, by, row.log_probs[0])[: len(row.ids)]
    return moved if chosen(world, row, share) else row.log_probs


def shift_from(start: int, row: Row, by: int) -> list[float]:
    """Only one list has an entry without an id, or lacks one that has: all after it are shifted."""
    return row.log_probs[:start] + shifted(row.log_probs[start:], by, 0.0)[: len(row.ids) - start]


def shift_after_call(world: World, by: int, row: Row) -> list[float]:
    """The tool's output has log-probs of another length than its ids."""
    return shift_from(row.ids.index(CALL) + 1, row, by) if CALL in row.ids else row.log_probs


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


def replace_tail(count: int, row: Row, value: float) -> list[float]:
    return row.log_probs[: len(row.ids) - count] + [value] * min(count, len(row.ids))


def lose_log_probs(world: World, every: int, rows: list[Row]) -> None:
    """Some requests do not ask for log-probs, and zeros are filled in."""
    for row in rows[::every]:
        row.log_probs = [0.0] * len(row.ids)


def repeat_last(world: World, strength: float, row: Row) -> list[float]:
    """The client gives each token of a chunk (here, the end of the response) its first one's log-prob."""
    kept = int((1 - strength) * len(row.ids))
    return replace_tail(len(row.ids) - kept, row, row.log_probs[kept])


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


add("rollout shifted", ((1, 1.0), (-1, 1.0), (2, 1.0), (-2, 1.0)), rows=each("log_probs", shift))
add("rollout shifted in some rows", ((1, 0.2), (1, 0.5), (-1, 0.2), (-1, 0.5), (2, 0.5)), rows=each("log_probs", shift))
add(
    "rollout shifted from inside",
    ((-1, 0.6), (-1, 0.3), (1, 0.3), (-2, 0.5)),
    rows=each("log_probs", lambda _, strength, row: shift_from(int(strength[1] * len(row.ids)), row, strength[0])),
)
add("rollout shifted after a tool", (-1, 1, 3), setting=TOOLS, rows=each("log_probs", shift_after_call))
add("another row's log-probs", ("neighbours", "group", "all"), rows=other_rows)
in_tail = each("log_probs", lambda _, of, row: replace_tail(max(int(of[0] * len(row.ids)), 1), row, of[1]))
add("tail padded with 0", ((0.0, 0.0), (0.2, 0.0), (0.5, 0.0)), rows=in_tail)
add("constant tail", ((0.2, -1.0), (0.5, -1.0), (0.5, -0.1)), rows=in_tail)
add("last log-probs are 0", (1, 3), rows=each("log_probs", lambda _, count, row: replace_tail(count, row, 0.0)))
add("log-probs missing", (1, 4), rows=lose_log_probs)
add("log-probs by chunk", (0.3, 0.7), rows=each("log_probs", repeat_last))
add("retokenized", (0.5, 1.0), setting=TOOLS, rows=encode_again)


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


FAST = {"rate": fast, "behind": 0}
add("never synced", (0.0003, 0.001, 0.002), setting=FAST, sync=lambda world, *_: [world.past[world.begin]] * 2)
add(
    "served without the adapter",
    (0.001, 0.003),
    setting=FAST,
    begins="later",
    sync=lambda world, *_: world.past[:1] * 2,
)
add(
    "synced late",
    (4, 6),
    setting={"rate": 0.001, "behind": 0},
    sync=lambda world, late, _: [world.past[max(len(world.past) - 1 - late, 0)]] * 2,
)
add(
    "one worker stale",
    (0.0003, 0.001, 0.002),
    setting=FAST,
    sync=lambda world, _, loaded: [loaded[0], world.past[world.begin]],
)
add("adapter partly bound", (("mlp", 0.001), ("layers", 0.001)), setting=FAST, sync=partly_loaded)
add("adapter at another scale", (0.5, 2.0), setting={"rate": 0.001, "behind": 0}, sync=scaled_otherwise)
add("weights lost in sleep", ("layers.0.mlp.down_proj", "layers.2.self_attn.o_proj"), sync=dropped)

# ---- other log-probs than training computes


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


def score(model: nn.Module, tensors: dict[str, Tensor], temperature: float, **other: Tensor) -> Tensor:
    """A model's log-probs of the responses; `other` are inputs that it is given instead of the batch's."""
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        logits = model(**{**inputs, **other}).logits[:, PROMPT - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, tensors["responses"].unsqueeze(-1)).squeeze(-1)


def scored(name: str, weights: int, make: Callable[[Any, dict[str, Tensor]], dict[str, Any]]) -> Callable[..., None]:
    """A stage that computes log-probs anew, with the weights of a step and other inputs or settings."""

    def change(world: World, strength: Any, tensors: dict[str, Tensor]) -> Tensor:
        options = {"temperature": world.trained_temperature, **make(strength, tensors)}
        model = world.copy_of(world.past[max(weights, -len(world.past))])
        with ExitStack() as hooks:
            rate = options.pop("rate", 0.0)
            for block in (module for name, module in model.named_modules() if name.endswith("mlp")):
                hooks.enter_context(block.register_forward_hook(lambda *passed: dropout(passed[2], rate)))
            return score(model, tensors, **options)

    return column(name, change)


def without_tools(_: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The loss's mask is taken for the attention's."""
    return {"attention_mask": torch.cat([tensors["attention_mask"][:, :PROMPT], tensors["response_mask"].long()], 1)}


def from_response(_: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Positions begin anew at the response."""
    positions = tensors["position_ids"]
    return {"position_ids": torch.cat([positions[:, :PROMPT], (positions[:, PROMPT:] - PROMPT).clamp(min=0)], 1)}


def drift(world: World, size: float, row: Row) -> list[float]:
    """Errors that grow with the context, as those of a quantized cache."""
    noise = torch.randn(len(row.ids), generator=world.random).tolist()
    return [value + size * i * apart for i, (value, apart) in enumerate(zip(row.log_probs, noise, strict=True))]


def penalize(world: World, penalty: float, loaded: list[Any]) -> None:
    """The server takes a repetition penalty from the checkpoint's generation config."""

    def penalized(logits: Tensor, rows: list[Row]) -> Tensor:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for i, row in enumerate(rows):
            seen[i, row.prompt + row.ids] = True
        return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    world.penalty = penalized


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


def turn_otherwise(world: World, factor: float, loaded: list[Any]) -> None:
    """The server's rotary embedding has another base."""
    for worker in world.workers if world.step_number == world.begin else ():
        worker.get_buffer("model.rotary_emb.inv_freq").mul_(factor)


LAST = "model.norm.weight"  # the logits are proportional to it
NO_CLIP = {"clip_ratio": 1e9, "clip_ratio_low": 1e9, "clip_ratio_high": 1e9, "clip_ratio_c": 1e9}
BYPASS = {"correction": {"bypass_mode": True}, "actor": NO_CLIP}


def report(world: World, processed: str) -> None:
    world.processed = processed


add("raw log-probs", (0.9, 0.7, 1.3), setting={"temperature": fast}, sync=lambda world, *_: report(world, "raw"))
add(
    "log-probs after the top-p cut",
    (0.95, 0.8, 0.6),
    setting={"top_p": fast},
    sync=lambda world, *_: report(world, "top_p"),
)
add("the likeliest token's log-probs", (1,), sync=lambda world, *_: report(world, "likeliest"))
add("repetition penalty", (1.05, 1.2), sync=penalize)
add(
    "base of the logarithm",
    (10.0, 2.0),
    rows=each("log_probs", lambda _, base, row: [value / math.log(base) for value in row.log_probs]),
)
add("log-probs drift", (0.005, 0.02), rows=each("log_probs", drift))
add(
    "log-probs rounded",
    (1, 0),
    rows=each("log_probs", lambda _, digits, row: [round(value, digits) for value in row.log_probs]),
)
add(
    "one worker's temperature",
    (0.8, 1.25),
    sync=lambda _, by, loaded: [loaded[0], {**loaded[0], LAST: loaded[0][LAST] / by}],
)
add("one worker in few bits", (4, 3), sync=lambda world, bits, loaded: [loaded[0], *quantize(world, bits, loaded[1:])])
add(
    "training without the temperature",
    (0.8, 0.6, 1.4),
    setting={"temperature": fast},
    sync=lambda world, *_: setattr(world, "trained_temperature", 1.0),
)
add("other experts", (0.05, 0.2), setting={"engine": "fp32"}, sync=route)
add("rollout in few bits", (5, 4, 3), sync=quantize)
add("log-probs negated", (1,), rows=each("log_probs", lambda _, __, row: [-value for value in row.log_probs]))
OLD, REFERENCE = "old_log_probs", "ref_log_prob"
add("dropout in old log-probs", (0.1, 0.3), log_probs=scored(OLD, -1, lambda rate, _: {"rate": rate}))
add(
    "old log-probs of the step before", (0.001, 0.003), setting={"rate": fast}, log_probs=scored(OLD, -2, lambda *_: {})
)
add("old log-probs at another temperature", (0.8, 1.3), log_probs=scored(OLD, -1, lambda by, _: {"temperature": by}))
add("old log-probs without the tools' output", (1,), setting=TOOLS, log_probs=scored(OLD, -1, without_tools))
add("old log-probs at other positions", (1,), log_probs=scored(OLD, -1, from_response))
KL = {"kl": 0.05, "reference": True}
add("reference follows the policy", (1,), setting=KL, log_probs=scored(REFERENCE, -1, lambda *_: {}))
add("dropout in the reference", (0.1, 0.3), setting=KL, log_probs=scored(REFERENCE, 0, lambda rate, _: {"rate": rate}))
add(
    "reference at another temperature",
    (0.8, 1.3),
    setting=KL,
    log_probs=scored(REFERENCE, 0, lambda by, _: {"temperature": by}),
)
add("one log-prob too low", (4.0, 8.0), setting=BYPASS, rows=one_too_low)
add("attention of one layer", (0.8, 0.4, 2.0), model=scale_attention)
add("another prompt", ("digits", "no end"), prompts=give_another)
add("BOS twice", (1, 2), prompts=lambda _, times, prompts: torch.cat([*[prompts[:, :1]] * times, prompts], 1))
add("RoPE of the server", (0.8, 0.5), sync=turn_otherwise)
add(
    "query rows permuted",
    ("layers.1.self_attn.q_proj", "q_proj"),
    sync=lambda _, name, loaded: (
        [{key: value.flip(0) if name in key else value for key, value in loaded[0].items()}] * 2
    ),
)

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
add(
    "tool output trained on",
    (0.2, 0.5, 1.0),
    setting=TOOLS,
    rows=each("mask", lambda world, share, row: [1] * len(row.mask) if chosen(world, row, share) else row.mask),
)
add("failed request", (1, 4), rows=fail_request)
add("padding trained on", (1, 4), batch=mask_padding)
add("EOS never trained", (1,), rows=each("mask", lambda _, __, row: [int(token != END) for token in row.ids]))
add("mask inverted", (1,), setting=TOOLS, rows=each("mask", lambda _, __, row: [1 - each for each in row.mask]))
add("mask shifted at tools", (1, -1), setting=TOOLS, rows=each("mask", lambda _, by, row: shifted(row.mask, by, 1)))


def lose_end(world: World, count: int, rows: list[Row]) -> None:
    """Responses are cut where a stop string or a limit of the turn is taken for theirs."""
    for row in rows:
        kept = max(len(row.ids) - count, 1)
        row.ids, row.log_probs, row.mask = row.ids[:kept], row.log_probs[:kept], row.mask[:kept]


def copy_rows(world: World, which: Callable[[int, int], int], rows: list[Row]) -> list[Row]:
    """Each row is one of its group: `which` of (its place, the group's size)."""
    size = world.setting.answers
    return [copy.deepcopy(rows[i // size * size + which(i % size, size)]) for i in range(len(rows))]


add("last tokens lost", (1, 4), rows=lose_end)
add(
    "one seed for a group",
    (1, 2),
    rows=lambda world, every, rows: [
        same if i // world.setting.answers % every == 0 else row
        for i, (row, same) in enumerate(zip(rows, copy_rows(world, lambda *_: 0, rows), strict=True))
    ],
)
add(
    "two workers, one seed",
    (1,),
    rows=lambda world, _, rows: copy_rows(world, lambda place, size: place % (size // 2), rows),
)
add(
    "failed rows copied",
    (1, 3),
    rows=lambda world, failed, rows: copy_rows(world, lambda at, size: at if at < size - failed else 0, rows),
)
add(
    "a uid for each response", (1,), columns=column("uid", lambda *given: [f"{i}" for i in range(len(given[2]["uid"]))])
)
add(
    "prompts share a uid",
    (2, 4),
    columns=column(
        "uid", lambda world, shared, of: [f"{i // world.setting.answers // shared}" for i in range(len(of["uid"]))]
    ),
)
add("one uid for all", (1,), columns=column("uid", lambda *given: ["0"] * len(given[2]["uid"])))
add("uids of other rows", (1, 3), columns=column("uid", lambda _, by, of: of["uid"][-by:] + of["uid"][:-by]))

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
add("reward scale", (10.0, 100.0), setting=NO_STD, rewards=lambda _, by, rewards: rewards * by, begins="later")
add(
    "reward of NaN",
    (3, 40),
    once=True,
    rewards=lambda _, place, rewards: rewards.index_fill(0, torch.tensor(place), torch.nan),
)
add(
    "sandbox fails",
    (0.5, 1.0),
    begins="later",
    rewards=lambda world, share, rewards: rewards * (torch.rand(len(rewards), generator=world.random) >= share),
)
add("deviation of rounding", (0.01, 0.001), advantages=leave_one_out)
add("deviation of zero", (1,), advantages=divide_by_zero)

# ---- the loss


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


def in_loss(change: Callable[[World, Any, dict[str, Any]], tuple[float, dict[str, Any]]]) -> Callable[..., Any]:
    """A context in which the policy loss is another one: `change` gives a factor of it and other arguments."""

    def during(world: World, strength: Any) -> Any:
        original = losses.get_policy_loss_fn

        def get(name: str) -> Any:
            def changed(**given: Any) -> tuple[Any, ...]:
                factor, others = change(world, strength, given)
                value, *more = original(name)(**{**given, **others})
                return (value * factor, *more)

            return changed

        return replaced(losses, "get_policy_loss_fn", get)

    return during


def without_signs(world: World, every: int, given: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """A kernel takes the size of every so many tokens' advantages."""
    advantages = given["advantages"].clone()
    advantages[:, ::every] = advantages[:, ::every].abs()
    return 1.0, {"advantages": advantages}


def by_position(world: World, slope: float, given: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Later tokens weigh less."""
    weights = (1 - slope * torch.arange(RESPONSE) / RESPONSE) / (1 - slope / 2)
    return 1.0, {"advantages": given["advantages"] * weights[: given["advantages"].shape[1]]}


def negated(name: str) -> Callable[..., Any]:
    """A context in which a part of the loss, which is computed by a function of this name, has the wrong sign."""

    def during(world: World, strength: Any) -> Any:
        original = getattr(losses, name)
        return replaced(losses, name, lambda *given, **options: -original(*given, **options))

    return during


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


def detached(world: World, name: str) -> Any:
    """A module is computed without a graph."""
    return world.model.get_submodule(name).register_forward_hook(lambda *passed: passed[2].detach())


@contextmanager
def divided_twice(world: World, strength: int) -> Iterator[None]:
    """What the last pass leaves is divided by the number of passes, as their losses were."""
    passes = world.config.ppo_mini_batch_size // world.config.ppo_micro_batch_size_per_gpu
    done: Counter[Tensor] = Counter()

    def divide(parameter: Tensor) -> None:
        done[parameter] += 1
        if done[parameter] % passes == 0:
            parameter.grad.div_(passes)

    with ExitStack() as hooks:
        for parameter in world.model.parameters():
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(divide))
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
add("entropy's sign", (0.01, 0.1), setting={"actor": lambda by: {"entropy_coeff": by}}, during=negated("agg_loss"))
add("KL coefficient", (10.0, 100.0), setting={"kl": fast, "rate": 0.001, "reference": True}, begins="start")
add("KL loss negated", (0.05, 0.5), setting={"kl": fast, "reference": True}, during=negated("kl_penalty"))
add(
    "reference is another model",
    (0.05, 0.5),
    setting={"kl": fast, "reference": True},
    log_probs=column(REFERENCE, lambda _, __, tensors: score(new_model(5), tensors, 1.0)),
)
add(
    "reference shifted",
    (1, -1),
    setting=KL,
    log_probs=column(REFERENCE, lambda _, by, tensors: tensors[REFERENCE].roll(by, 1) * tensors["response_mask"]),
)
add("responses of one token", (1, 2), setting=SEQ_MEAN, rows=cut_to_one)
add("importance weight overflows", (8.0, 57.0), update=weigh_unlimited)
add("rollout's log-prob is NaN", (5, 20), update=rollout_nan)
add("training's log-prob is NaN", (3, 7), forward=training_nan)
add("loss scaled", (0.25, 2.0, 8.0), during=in_loss(lambda _, factor, __: (factor, {})))
add(
    "clipped on the wrong side",
    (0.001, 0.003),
    setting={"rate": fast, "actor": {"ppo_epochs": 4}},
    during=in_loss(lambda _, __, given: (-1.0, {"advantages": -given["advantages"]})),
)
add("sign lost in the loss", (2, 5), during=in_loss(without_signs))
add("tokens weighted by position", (0.5, 1.0), during=in_loss(by_position))
WEIGHTS = {"engine": "fp8", "behind": 1, "rate": 0.001, "correction": {"rollout_is": "token"}}
add(
    "importance weights left out", (1,), setting=WEIGHTS, during=in_loss(lambda *_: (1.0, {"rollout_is_weights": None}))
)
add(
    "importance weights inverted",
    (1,),
    setting=WEIGHTS,
    update=column("rollout_is_weights", lambda _, __, of: (of["rollout_log_probs"] - of[OLD]).exp().clamp(max=2.0)),
)
add("mask's denominator", ("padded", "rows"), during=wrong_denominator)
add("auxiliary loss", (0.01, 0.1, 1.0), during=auxiliary)
add("gradients doubled", (("", 2.0), ("", 16.0)), during=multiplied)
add("last pass alone", (1,), during=in_loss(lambda world, *_: (1.0, world.optimizer.zero_grad() or {})))
add("a layer without a gradient", ("model.layers.1.mlp", "model.layers.2.self_attn.v_proj"), during=detached)
add("divided twice by the passes", (1,), during=divided_twice)
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


def in_group(**changes: Callable[[World, Any], Any]) -> Callable[..., None]:
    """A stage that gives the optimizer other settings."""

    def stage(world: World, strength: Any, model: nn.Module) -> None:
        group = world.optimizer.param_groups[0]
        group.update({name: change(world, strength) for name, change in changes.items()})

    return stage


def without_layer(world: World, name: str) -> list[Tensor]:
    return [parameter for key, parameter in world.model.named_parameters() if name not in key]


@contextmanager
def averaged(world: World, decay: float) -> Iterator[None]:
    """An average for the validation stays in the model after it."""
    yield
    with torch.no_grad():
        for name, parameter in world.model.named_parameters():
            parameter.lerp_(world.past[-1][name], decay)


add("bit flip", (26, 28, 29), model=flip_a_bit, begins="later")
add(
    "one layer scaled",
    (("layers.1.mlp", 1.5), ("layers.1.mlp", 3.0), ("model.norm", 4.0)),
    once=True,
    model=scale_layer,
    begins="later",
)
add("optimizer state lost", (1,), once=True, model=lambda world, *_: world.optimizer.state.clear(), begins="later")
add(
    "learning rate spike",  # the schedule begins anew, with a peak
    (10.0, 50.0),
    begins="later",
    model=in_group(lr=lambda world, by: world.setting.rate * (by if world.step_number == world.begin else 1.0)),
)
add("learning rate of 0", (1,), begins="later", model=in_group(lr=lambda *_: 0.0))
add("gradient ascent", (1,), model=in_group(maximize=lambda *_: True))
add("decay far too large", (30.0, 300.0), model=in_group(weight_decay=lambda _, decay: decay))
add(
    "optimizer of other tensors",
    (1,),
    model=in_group(params=lambda world, _: [parameter.detach().clone() for parameter in world.model.parameters()]),
)
add("optimizer without a layer", ("layers.1", "layers.2.self_attn"), model=in_group(params=without_layer))
add("average of weights loaded", (0.5, 0.9), during=averaged)

# ---- advantages


def advantages(change: Callable[[World, Any, Tensor], Tensor]) -> Callable[..., None]:
    return column("advantages", lambda world, strength, found: change(world, strength, found["advantages"]))


def deviate_twice(world: World, strength: int, found: dict[str, Tensor]) -> Tensor:
    deviation = found["token_level_scores"].sum(1).view(-1, world.setting.answers).std(1)
    return found["advantages"] / (deviation.repeat_interleave(world.setting.answers)[:, None] + 1e-6)


add("advantages negated", (1,), advantages=advantages(lambda _, __, values: -values))
add("advantages of other rows", (1, 3), setting={"dense": True}, advantages=advantages(lambda _, by, x: x.roll(by, 0)))
add("advantages of the next group", (1,), advantages=advantages(lambda world, _, x: x.roll(world.setting.answers, 0)))
add("advantages without a sign", (1,), advantages=advantages(lambda _, __, values: values.abs()))
add("negative advantages lost", (1,), advantages=advantages(lambda _, __, values: values.clamp(min=0)))
add("advantages all zero", (1,), advantages=advantages(lambda _, __, values: values * 0))
add("advantages at the other end", (1,), advantages=advantages(lambda _, __, values: values.flip(1)))
add(
    "baseline of another run",
    (2.0, -1.0),
    update=column(
        "advantages", lambda _, by, of: of["response_mask"] * (of["token_level_scores"].sum(1)[:, None] - by)
    ),
)
add("deviation twice", (1,), advantages=column("advantages", deviate_twice))

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
