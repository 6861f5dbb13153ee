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
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from blind_world import ANSWER, CALL, END, IMAGE, PLAIN, PROMPT, RESPONSE, THINK, Row, Setting, World, initial, reroute
from localization_actor import ENGINE
from torch import Tensor, nn
from torch.nn.functional import dropout
from verl.trainer.ppo import core_algos, rollout_corr_helper

Stage = Callable[..., Any]
# The module in which the actor looks up its loss.
losses = importlib.import_module("verl.workers.utils.losses" if ENGINE else "verl.workers.actor.dp_actor")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    right: str  # names that are right, separated by blanks; "" where no name is
    defensible: str  # names that are not the cause's own, but lead to it
    identity: str  # the identities at which it is to be placed, or "changes"; "" where nothing is to be said
    source: str  # a public thread of such a bug
    strengths: tuple[Any, ...]  # from just visible up; what stages get
    stages: Mapping[str, Stage]  # what goes wrong where; "during" is a context of (world, strength) around the update
    setting: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # needed; values, or functions of the strength
    begins: str = "any"  # or "start" (of the run), or "later"
    once: bool = False  # whether it is in one step alone


# The planted fault | what must be named ("-": no name of its own) | what leads to the cause as well | where it is to be
# placed: the identities that break, "changes" of the run, or a fact of the culprits ("-": nothing is to be said) | a
# public source: a thread of GitHub, or a paper by its number. Where no thread of just this bug is known, the nearest
# one.
TABLE = """
rollout shifted | misaligned | - | rollout_log_probs | eval-protocol/python-sdk#457
rollout shifted in some rows | misaligned | - | rollout_log_probs | eval-protocol/python-sdk#458
rollout shifted from inside | misaligned | - | rollout_log_probs | fw-ai/cookbook#483
rollout shifted after a tool | misaligned | retokenized | rollout_log_probs | ai-dynamo/dynamo#8630
another row's log-probs | misaligned | - | rollout_log_probs | verl-project/verl#7196
tail padded with 0 | misaligned | unsampled | rollout_log_probs sampled | rllm-org/rllm#816
constant tail | misaligned | - | rollout_log_probs | rllm-org/rllm#816
log-probs missing | misaligned | unsampled | rollout_log_probs sampled | NovaSky-AI/SkyRL#1070
log-probs by chunk | misaligned | - | rollout_log_probs | ai-dynamo/dynamo#8630
retokenized | retokenized misaligned | - | sampled rollout_log_probs | huggingface/trl#5224
policy sliced wrongly | misaligned | - | rollout_log_probs | opendilab/LightRFT
policy sliced wrongly for images | misaligned | - | rollout_log_probs | opendilab/LightRFT
policy's labels not shifted | misaligned | - | rollout_log_probs | opendilab/LightRFT
old log-probs of other rows | misaligned | sequence | old_log_probs | verl-project/verl#7196
never synced | stale_weights | - | rollout_log_probs | verl-project/verl#7495
synced late | stale_weights | partly_stale | rollout_log_probs | verl-project/verl#5211
one worker stale | partly_stale | stale_weights | rollout_log_probs | verl-project/verl#3821
adapter partly bound | stale_weights | partly_stale | rollout_log_probs | verl-project/verl-omni#552
adapter at another scale | adapter_scale stale_weights | - | rollout_log_probs | Tencent-Hunyuan/UniRL#155
weights lost in sleep | - | stale_weights other_log_probs | rollout_log_probs | huggingface/trl#5312
raw log-probs | other_log_probs | - | rollout_log_probs | servicenow-ai/correctness-before-corrections
log-probs after the top-p cut | other_log_probs | - | rollout_log_probs | huggingface/trl#6789
training without the temperature | other_log_probs | - | rollout_log_probs | huggingface/trl#3029
other experts | token | other_log_probs sequence | rollout_log_probs | NVIDIA-NeMo/RL#4243
rollout in few bits | - | token sequence other_log_probs | rollout_log_probs | verl-project/verl#5459
log-probs negated | other_log_probs | - | rollout_log_probs | openai/baselines#652
dropout in old log-probs | - | other_log_probs | old_log_probs | huggingface/trl#4
one log-prob too low | token | - | rollout_log_probs | servicenow-ai/correctness-before-corrections
attention of one layer | - | token sequence other_log_probs | rollout_log_probs | NVIDIA-NeMo/RL#1801
another prompt | - | other_log_probs | rollout_log_probs | huggingface/trl#6515
BOS twice | - | other_log_probs | rollout_log_probs | huggingface/trl#3853
RoPE of the server | - | other_log_probs | rollout_log_probs | TransformerLensOrg/TransformerLens#910
query rows permuted | - | other_log_probs | rollout_log_probs | huggingface/transformers#31788
EOS added | unsampled | - | sampled | OpenRLHF/OpenRLHF#238
template trained on | unsampled | - | sampled | THUDM/slime#1477
tool output trained on | unsampled | - | sampled | THUDM/slime#1477
failed request | unsampled | - | sampled | NovaSky-AI/SkyRL#1986
padding trained on | unsampled | - | sampled | verl-project/verl#3805
format reward misfires | - | - | changes advantage | verl-project/uni-agent#183
length bonus | - | - | changes advantage | verl-project/uni-agent#175
one reward too large | - | - | changes advantage | verl-project/uni-agent#175
reward scale | - | - | changes advantage | paper 2607.21273
reward of NaN | nonfinite | - | finite | MakazhanAlpamys/Soup#342
deviation of rounding | - | - | advantages | NVIDIA-NeMo/RL#4158
deviation of zero | nonfinite | - | finite | NVIDIA-NeMo/RL#4158
entropy coefficient | - | - | entropy | verl-project/verl#2738
KL coefficient | - | - | kl | verl-project/uni-agent#175
reference is another model | - | misaligned reference | reference | NVIDIA-NeMo/RL#3048
reference shifted | misaligned | - | reference | opendilab/LightRFT
responses of one token | - | - | weight | paper 2602.01826
importance weight overflows | token overflow | - | rollout_log_probs loss sampled | verl-project/verl#7196
rollout's log-prob is NaN | nonfinite | token unsampled | finite | huggingface/trl#6166
training's log-prob is NaN | nonfinite | - | finite | Tencent-Hunyuan/UniRL#110
loss scaled | loss_scale | - | loss | verl-project/verl#5863
mask's denominator | loss_scale | - | loss | verl-project/verl#2505
auxiliary loss | auxiliary | - | gradient | verl-project/verl#6609
gradients doubled | - | loss_scale | gradient | NVIDIA/Megatron-LM#6660
backward of one layer | - | - | gradient | Tencent-Hunyuan/UniRL#110
bit flip | - | nonfinite | weights | paper 2102.11245
one layer scaled | - | - | weights | THUDM/slime#1695
optimizer state lost | - | - | - | THUDM/slime#1695
learning rate spike | - | token sequence | changes | marin-community/marin#1368
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
the likeliest token's log-probs | - | other_log_probs | rollout_log_probs | NVIDIA-NeMo/RL#3297
repetition penalty | - | other_log_probs | rollout_log_probs | verl-project/verl#7270
log-probs drift | - | other_log_probs token sequence | rollout_log_probs | sgl-project/sglang#25790
one worker's temperature | - | partly_stale other_log_probs | rollout_log_probs | huggingface/trl#4159
one worker in few bits | - | partly_stale other_log_probs | rollout_log_probs | verl-project/verl#5459
last log-probs are 0 | misaligned unsampled | - | rollout_log_probs sampled | rllm-org/rllm#816
log-probs rounded | - | other_log_probs | rollout_log_probs | PrimeIntellect-ai/verifiers#2495
served without the adapter | stale_weights | adapter_scale | rollout_log_probs | radixark/miles#2075
old log-probs of the step before | - | stale_weights | old_log_probs | thu-ml/tianshou#745
old log-probs at another temperature | - | other_log_probs | old_log_probs | OpenRLHF/OpenRLHF#853
old log-probs without the tools' output | - | other_log_probs | old_log_probs | Time-Search/TimeSearch-R#7
old log-probs at other positions | - | other_log_probs | old_log_probs | CarperAI/trlx#509
reference follows the policy | - | stale_weights | reference | aburkov/theLMbook#8
dropout in the reference | - | other_log_probs | reference | huggingface/trl#3500
reference at another temperature | - | other_log_probs | reference | huggingface/trl#3169
a uid for each response | groups_of_one | mixed_groups | groups | NVIDIA-NeMo/RL#4013
prompts share a uid | mixed_groups | - | groups | dllm-reasoning/d1#19
one uid for all | mixed_groups | - | groups | PeterGriffinJin/Search-R1#39
uids of other rows | mixed_groups | - | groups | THUDM/slime#2062
advantages without a sign | advantage_order | - | advantages | Unity-Technologies/ml-agents#4538
negative advantages lost | - | advantage_order | advantages | callsys/GMPO#4
baseline of another run | - | - | advantages | ServiceNow/PipelineRL#54
advantages all zero | - | - | advantages | rllm-org/rllm#916
advantages at the other end | advantage_mask | - | advantages | NovaSky-AI/SkyRL#1285
advantages of the next group | advantage_order | - | advantages | huggingface/trl#6072
deviation twice | - | - | advantages | amazon-science/reskill#12
clipped on the wrong side | - | loss_sign | loss | tensorforce/tensorforce#106
KL loss negated | kl_scale | loss_sign | loss | qiancheng0/ToolRL#52
sign lost in the loss | loss_sign | - | loss | fla-org/flash-linear-attention#1073
importance weights left out | importance_weights | - | loss | rlcode/per#3
importance weights inverted | importance_weights | - | loss | THUDM/slime#179
entropy's sign | - | loss_sign | loss | PKU-Alignment/omnisafe#133
tokens weighted by position | - | loss_scale | loss | verl-project/verl#2505
last pass alone | last_pass | - | gradient | pytorch/torchtitan#3575
a layer without a gradient | - | - | gradient | Lightning-AI/pytorch-lightning#19517
divided twice by the passes | - | last_pass loss_scale | gradient | llm-random/llm-random#529
optimizer of other tensors | not_moving | - | weights gradient | huggingface/accelerate#3256
gradient ascent | ascent | - | weights | kozistr/pytorch_optimizer#528
optimizer without a layer | - | not_moving | weights gradient | zjunlp/HVPNeT#5
average of weights loaded | - | stale_weights | weights | aqlaboratory/openfold#90
decay far too large | - | - | weights | offbit/evo-design#3
learning rate of 0 | - | not_moving | weights changes | LINCellularNeuroscience/VAME#26
sandbox fails | - | - | changes | PrimeIntellect-ai/verifiers#659
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
FAULTS: dict[str, Any] = dict.fromkeys(row[0] for row in ROWS)  # in the table's order


def add(kind: str, strengths: tuple[Any, ...], during: Any = None, **others: Any) -> None:
    """Adds a row of the table: other fields of `Fault`, and stages by name."""
    names: Any = ([cell.replace("-", "") for cell in row[1:4]] + row[4:] for row in ROWS if row[0] == kind)
    fields = {name: others.pop(name) for name in ("setting", "begins", "once") if name in others}
    stages = others if during is None else {**others, "during": during}
    made: Any = Fault
    FAULTS[kind] = made(*next(names), strengths, stages, **fields)


def each(change: Callable[[Any, Row], Any], share: bool = False) -> Stage:
    """A stage that changes each row by (strength, row); with `share`, the strength or its last part is one of rows."""

    def stage(world: World, strength: Any, rows: list[Row]) -> None:
        for row in rows:
            if not share or chosen(row, last(strength)):
                change(strength, row)

    return stage


def reported(change: Callable[[Any, Row], list[Any]], share: bool = False, field: str = "log_probs") -> Stage:
    """A stage in which each row has other log-probs, or another list of its."""
    return each(lambda strength, row: setattr(row, field, change(strength, row)[: len(row.ids)]), share)


def column(name: str, change: Callable[[World, Any, dict[str, Any]], Any]) -> Stage:
    """A stage in which a column is another one."""
    return lambda world, strength, columns: columns.update({name: change(world, strength, columns)})


def served(change: Callable[[World, Any, str, Tensor], Tensor]) -> Stage:
    """A stage in which both workers load other weights than the first one's: by (world, strength, name, weight)."""
    return lambda world, strength, loaded: (
        [{name: change(world, strength, name, weight) for name, weight in loaded[0].items()}] * 2
    )


def sets(**attributes: Any) -> Stage:
    return lambda world, *_: vars(world).update(attributes)


def can_be_planted(kind: str) -> bool:
    """Whether a kind is possible here: the forward of padded rows can be replaced in verl 0.7's actor alone."""
    return not (ENGINE and kind in FAULTS and "forward" in FAULTS[kind].stages)


def chosen(row: Row, share: float) -> bool:
    """Whether a row is one of a share of the prompts, always the same ones."""
    return (sum(row.prompt[1:5]) * 7) % 20 < 20 * share


def last(strength: Any) -> float:
    return strength[-1] if isinstance(strength, tuple) else strength


masked = partial(reported, field="mask")
TOOLS, DENSE, EIGHT = {"tools": True}, {"dense": True}, {"answers": 8}
NO_STD: dict[str, Any] = {"advantage": "grpo without std"}
FAST, LATE = {"rate": last, "behind": 0}, {"rate": 0.001, "behind": 0}
KL, COEFFICIENT = {"kl": 0.05, "reference": True}, {"kl": last, "reference": True}
TEMPERATURE, ENTROPY = {"temperature": last}, {"actor": lambda coefficient: {"entropy_coeff": coefficient}}
NO_CLIP = {"clip_ratio": 1e9, "clip_ratio_low": 1e9, "clip_ratio_high": 1e9, "clip_ratio_c": 1e9}
BYPASS = {"correction": {"bypass_mode": True}, "actor": NO_CLIP}
WEIGHTS = {"engine": "fp8", "behind": 1, "rate": 0.001, "correction": {"rollout_is": "token"}}
SEQ_MEAN: dict[str, Any] = {"actor": {"loss_agg_mode": "seq-mean-token-mean"}}
OLD, REFERENCE, ROLLOUT, IMPORTANCE = "old_log_probs", "ref_log_prob", "rollout_log_probs", "rollout_is_weights"
LAST = "model.norm.weight"  # the logits are proportional to it


def shifted(values: list[Any], by: int, fill: Any, start: int = 0) -> list[Any]:
    """From a place on moved so many places to the end; to the beginning if negative."""
    rest = values[start:]
    return values[:start] + ([fill] * by + rest[:-by] if by > 0 else rest[-by:] + [fill] * -by)


def tail_of(row: Row, count: int, value: float) -> list[float]:
    """The log-probs of the last so many tokens are one value."""
    return row.log_probs[: len(row.ids) - count] + [value] * min(count, len(row.ids))


def after_call(by: int, row: Row) -> list[float]:
    """The tool's output has log-probs of another length than its ids."""
    return shifted(row.log_probs, by, 0.0, row.ids.index(CALL) + 1) if CALL in row.ids else row.log_probs


def first_of_chunk(share: float, row: Row) -> list[float]:
    """The client gives each token of a chunk (here, the end of the response) its first one's log-prob."""
    kept = int((1 - share) * len(row.ids))
    return tail_of(row, len(row.ids) - kept, row.log_probs[kept])


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


def encode_again(strength: float, row: Row) -> None:
    """Turns are decoded and encoded again: pairs of words become one other token; log-probs are those sampled."""
    ids: list[int] = []
    start = int((1 - strength) * len(row.ids))
    for i, token in enumerate(row.ids):
        if i > start and ids and (ids[-1] + token) % 5 == 0 and 10 <= token < 34 and 10 <= ids[-1] < 34:
            ids[-1] = 10 + (ids[-1] * 5 + token) % 24
        else:
            ids.append(token)
    row.cut(len(ids))
    row.ids = ids


# The list of log-probs has entries too many (or too few) at its beginning, or from some place on.
shift_all = reported(lambda by, row: shifted(row.log_probs, by[0], row.log_probs[0]), share=True)
shift_inside = reported(lambda by, row: shifted(row.log_probs, by[0], 0.0, int(by[1] * len(row.ids))))
in_tail = reported(lambda of, row: tail_of(row, max(int(of[0] * len(row.ids)), 1), of[1]))
add("rollout shifted", ((1, 1.0), (-1, 1.0), (2, 1.0), (-2, 1.0)), rows=shift_all)
add("rollout shifted in some rows", ((1, 0.2), (1, 0.5), (-1, 0.2), (-1, 0.5), (2, 0.5)), rows=shift_all)
add("rollout shifted from inside", ((-1, 0.6), (-1, 0.3), (1, 0.3), (-2, 0.5)), rows=shift_inside)
add("rollout shifted after a tool", (-1, 1, 3), setting=TOOLS, rows=reported(after_call))
add("another row's log-probs", ("neighbours", "group", "all"), rows=other_rows)
add("tail padded with 0", ((0.0, 0.0), (0.2, 0.0), (0.5, 0.0)), rows=in_tail)
add("constant tail", ((0.2, -1.0), (0.5, -1.0), (0.5, -0.1)), rows=in_tail)
add("last log-probs are 0", (1, 3), rows=reported(lambda count, row: tail_of(row, count, 0.0)))
# Some requests do not ask for log-probs, and zeros are filled in.
add("log-probs missing", (1, 4), rows=lambda _, every, rows: reported(lambda *_: [0.0] * RESPONSE)(_, 0, rows[::every]))
add("log-probs by chunk", (0.3, 0.7), rows=reported(first_of_chunk))
add("retokenized", (0.5, 1.0), setting=TOOLS, rows=each(encode_again))


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
    return call(batch)[0], score(world.model, batch, world.setting.temperature, strength)


def rows_not_restored(world: World, strength: str, tensors: dict[str, Tensor]) -> None:
    """The old log-probs of a dynamic batch are not brought back into the rows' order."""
    length = tensors["attention_mask"].sum(1)
    order = length.argsort() if strength == "sorted" else torch.arange(len(length)).roll(1)
    tensors["old_log_probs"] = tensors["old_log_probs"][order]


add("policy sliced wrongly", ((1, ""), (-1, ""), (2, "")), forward=slice_wrongly)
add("policy sliced wrongly for images", ((1, "images"), (-1, "images")), forward=slice_wrongly)
add("policy's labels not shifted", (1,), forward=label_wrongly)
add("old log-probs of other rows", ("roll", "sorted"), log_probs=rows_not_restored)

add("never synced", (0.0003, 0.001, 0.002), setting=FAST, sync=lambda world, *_: [world.past[world.begin]] * 2)
add("served without the adapter", (0.001, 0.003), setting=FAST, begins="later", sync=lambda of, *_: of.past[:1] * 2)
add("synced late", (4, 6), setting=LATE, sync=lambda world, late, _: world.past[-1 - late :][:1] * 2)
add("one worker stale", (0.0003, 0.001, 0.002), setting=FAST, sync=lambda run, _, of: [of[0], run.past[run.begin]])
# Modules whose name does not fit keep what they had, as those that an adapter is not bound to.
part = served(lambda world, of, name, weight: world.past[world.begin][name] if of[0] in name else weight)
add("adapter partly bound", (("mlp", 0.001), ("layers", 0.001)), setting=FAST, sync=part)
# The server takes another lora_alpha / r: what training has added to the first weights is scaled.
rescaled = served(lambda world, factor, name, weight: world.past[0][name].lerp(weight, factor))
add("adapter at another scale", (0.5, 2.0), setting=LATE, sync=rescaled)
# The server slept, and one tensor was not restored.
lost = served(lambda _, of, name, weight: 0.0 * weight if of in name else weight)
add("weights lost in sleep", ("layers.0.mlp.down_proj", "layers.2.self_attn.o_proj"), sync=lost)


def route(world: World, strength: float, loaded: list[Any]) -> None:
    """Experts are chosen otherwise than in training: in the server, so that only it has the jumps."""
    if world.step_number == world.begin:
        for worker in world.workers:
            reroute(worker, strength, world.random)


def quantized(_: World, bits: int, name: str, weight: Tensor) -> Tensor:
    """Weights in so many bits, with one scale for a whole tensor."""
    scale = weight.abs().max() / (2 ** (bits - 1) - 1)
    return (weight / scale).round() * scale if weight.dim() == 2 else weight


def score(model: nn.Module, tensors: Any, temperature: float, later: int = 0, **other: Tensor) -> Tensor:
    """A model's log-probs of the responses, from logits some places later; `other` inputs are not the batch's."""
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask", "position_ids")}
    length = tensors["responses"].shape[1]
    start = inputs["input_ids"].shape[1] - length - 1 + later
    logits = model(**{**inputs, **other}).logits[:, start : start + length]
    return (logits / temperature).log_softmax(-1).gather(-1, tensors["responses"].unsqueeze(-1)).squeeze(-1)


def scored(name: str, weights: int, make: Callable[[Any, dict[str, Tensor]], dict[str, Any]]) -> Stage:
    """A stage that computes log-probs anew, with the weights of a step and other inputs or settings."""

    @torch.no_grad()
    def change(world: World, strength: Any, tensors: dict[str, Tensor]) -> Tensor:
        options = {"temperature": world.trained_temperature, "rate": 0.0, **make(strength, tensors)}
        model, rate = world.copy_of(world.past[max(weights, -len(world.past))]), options.pop("rate")
        for block in (module for name, module in model.named_modules() if name.endswith("mlp")):
            block.register_forward_hook(lambda *passed: dropout(passed[2], rate))
        return score(model, tensors, **options)

    return column(name, change)


def without_tools(_: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The loss's mask is taken for the attention's."""
    return {"attention_mask": torch.cat([tensors["attention_mask"][:, :PROMPT], tensors["response_mask"].long()], 1)}


def from_response(_: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Positions begin anew at the response."""
    positions = tensors["position_ids"]
    return {"position_ids": torch.cat([positions[:, :PROMPT], (positions[:, PROMPT:] - PROMPT).clamp(min=0)], 1)}


def drifted(size: float, row: Row) -> list[float]:
    """Errors that grow with the context, as those of a quantized cache."""
    noise = torch.randn(len(row.ids), generator=torch.Generator().manual_seed(sum(row.ids))).tolist()
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


add("raw log-probs", (0.9, 0.7, 1.3), setting=TEMPERATURE, sync=sets(processed="raw"))
add("log-probs after the top-p cut", (0.95, 0.8, 0.6), setting={"top_p": last}, sync=sets(processed="top_p"))
add("the likeliest token's log-probs", (1,), sync=sets(processed="likeliest"))
add("training without the temperature", (0.8, 0.6, 1.4), setting=TEMPERATURE, sync=sets(trained_temperature=1.0))
add("repetition penalty", (1.05, 1.2), sync=penalize)
add("base of the logarithm", (10.0, 2.0), rows=reported(lambda base, row: [x / math.log(base) for x in row.log_probs]))
add("log-probs negated", (1,), rows=reported(lambda _, row: [-x for x in row.log_probs]))
add("log-probs drift", (0.005, 0.02), rows=reported(drifted))
add("log-probs rounded", (1, 0), rows=reported(lambda digits, row: [round(x, digits) for x in row.log_probs]))
add("one worker's temperature", (0.8, 1.25), sync=lambda _, by, of: [of[0], {**of[0], LAST: of[0][LAST] / by}])
add("one worker in few bits", (4, 3), sync=lambda *given: [given[2][0], served(quantized)(*given)[0]])
add("rollout in few bits", (5, 4, 3), sync=served(quantized))
add("other experts", (0.05, 0.2), setting={"engine": "fp32"}, sync=route)
add("one log-prob too low", (4.0, 8.0), setting=BYPASS, rows=one_too_low)
add("attention of one layer", (0.8, 0.4, 2.0), model=scale_attention)
add("another prompt", ("digits", "no end"), prompts=give_another)
add("BOS twice", (1, 2), prompts=lambda _, times, prompts: torch.cat([*[prompts[:, :1]] * times, prompts], 1))
add("RoPE of the server", (0.8, 0.5), sync=turn_otherwise)
permuted = served(lambda _, of, name, weight: weight.flip(0) if of in name else weight)
add("query rows permuted", ("layers.1.self_attn.q_proj", "q_proj"), sync=permuted)
add("dropout in old log-probs", (0.1, 0.3), log_probs=scored(OLD, -1, lambda rate, _: {"rate": rate}))
add("old log-probs of the step before", (0.001, 0.003), setting=FAST, log_probs=scored(OLD, -2, lambda *_: {}))
add("old log-probs at another temperature", (0.8, 1.3), log_probs=scored(OLD, -1, lambda by, _: {"temperature": by}))
add("old log-probs without the tools' output", (1,), setting=TOOLS, log_probs=scored(OLD, -1, without_tools))
add("old log-probs at other positions", (1,), log_probs=scored(OLD, -1, from_response))
add("reference follows the policy", (1,), setting=KL, log_probs=scored(REFERENCE, -1, lambda *_: {}))
add("dropout in the reference", (0.1, 0.3), setting=KL, log_probs=scored(REFERENCE, 0, lambda rate, _: {"rate": rate}))
hot = scored(REFERENCE, 0, lambda temperature, _: {"temperature": temperature})
add("reference at another temperature", (0.8, 1.3), setting=KL, log_probs=hot)
other_model = column(REFERENCE, lambda _, __, tensors: score(initial(5), tensors, 1.0).detach())
add("reference is another model", (0.05, 0.5), setting=COEFFICIENT, log_probs=other_model)
moved = column(REFERENCE, lambda _, by, tensors: tensors[REFERENCE].roll(by, 1) * tensors["response_mask"])
add("reference shifted", (1, -1), setting=KL, log_probs=moved)


def add_end(share: float, row: Row) -> None:
    """Responses that were cut at their maximum length get an EOS token, without a log-prob."""
    if len(row.ids) > 3:
        row.cut(2 * len(row.ids) // 3)
        row.append(END, 0.0, 1)


def add_template(count: int, row: Row) -> None:
    """The chat template's tokens after the end of the turn are in the mask."""
    for token in [THINK, PLAIN, THINK][: min(count, RESPONSE - len(row.ids))]:
        row.append(token, 0.0, 1)


def in_some(change: Callable[[Any, Row], Any]) -> Stage:
    """A stage that changes so many rows."""
    return lambda world, count, rows: each(change)(world, count, rows[:: len(rows) // count])


def mask_padding(world: World, count: int, tensors: dict[str, Tensor]) -> None:
    """The mask is that of the lengths, some tokens too long."""
    length = tensors["attention_mask"][:, PROMPT:].sum(1, keepdim=True)
    tensors["response_mask"][(torch.arange(RESPONSE) >= length) & (torch.arange(RESPONSE) < length + count)] = 1.0


def copied(which: Callable[[Any, int, int], int]) -> Stage:
    """A stage in which each row is one of its group: the place by (strength, its own place, the group's size)."""

    def stage(world: World, strength: Any, rows: list[Row]) -> list[Row]:
        size = world.setting.answers
        return [copy.deepcopy(rows[i // size * size + which(strength, i % size, size)]) for i in range(len(rows))]

    return stage


def uids(which: Callable[[int, int, int], int]) -> Stage:
    """A stage in which each row's uid is a number by (strength, its place, answers of a prompt)."""
    return column("uid", lambda run, by, of: [f"{which(by, i, run.setting.answers)}" for i in range(len(of["uid"]))])


add("EOS added", (0.1, 0.3, 0.6), rows=each(add_end, share=True))
add("template trained on", (1, 3), rows=each(add_template))
every_token = masked(lambda _, row: [1] * len(row.mask), share=True)
add("tool output trained on", (0.2, 0.5, 1.0), setting=TOOLS, rows=every_token)
add("failed request", (1, 4), rows=in_some(lambda _, row: row.cut(0).append(END, 0.0, 1)))  # it is empty
add("responses of one token", (1, 2), setting=SEQ_MEAN, rows=in_some(lambda _, row: row.cut(1)))  # max_tokens is 1
add("padding trained on", (1, 4), batch=mask_padding)
add("EOS never trained", (1,), rows=masked(lambda _, row: [int(token != END) for token in row.ids]))
add("mask inverted", (1,), setting=TOOLS, rows=masked(lambda _, row: [1 - kept for kept in row.mask]))
add("mask shifted at tools", (1, -1), setting=TOOLS, rows=masked(lambda by, row: shifted(row.mask, by, 1)))
add("last tokens lost", (1, 4), rows=each(lambda count, row: row.cut(max(len(row.ids) - count, 1))))
add("one seed for a group", (1, 2), rows=copied(lambda seeds, place, size: place % seeds))
add("two workers, one seed", (1,), rows=copied(lambda _, place, size: place % (size // 2)))
add("failed rows copied", (1, 3), rows=copied(lambda failed, place, size: place if place < size - failed else 0))
add("a uid for each response", (1,), columns=uids(lambda _, place, answers: place))
add("prompts share a uid", (2, 4), columns=uids(lambda shared, place, answers: place // answers // shared))
add("one uid for all", (1,), columns=uids(lambda *_: 0))
add("uids of other rows", (1, 3), columns=column("uid", lambda _, by, of: of["uid"][-by:] + of["uid"][:-by]))


def by_row(change: Callable[[float, Row, float], float]) -> Stage:
    """A stage in which each row has another reward, by (strength, row, reward)."""
    return lambda world, strength, rewards: torch.tensor(
        [change(strength, row, reward) for row, reward in zip(world.rows, rewards.tolist(), strict=True)]
    )


def leave_one_out(floor: float, rewards: Tensor) -> Tensor:
    """Rewards over the deviation of the others in the group, which is a rounding error if these are equal."""
    others = rewards.shape[1] - 1
    mean = (rewards.sum(1, keepdim=True) - rewards) / others
    square = (rewards.square().sum(1, keepdim=True) - rewards.square()) / others
    return (rewards - mean) / ((square - mean.square()).clamp(min=0).sqrt() + floor)


def of_groups(change: Callable[[Any, Tensor], Tensor]) -> Stage:
    """A stage with other advantages, by (strength, rewards of shape (groups, answers))."""

    def advantages(world: World, strength: Any, found: dict[str, Tensor]) -> Tensor:
        rewards = found["token_level_scores"].sum(1).view(-1, world.setting.answers)
        return change(strength, rewards).view(-1, 1) * (found["advantages"] != 0)

    return column("advantages", advantages)


short = by_row(lambda size, row, reward: size if ANSWER in row.ids[:3] else reward)  # at most two words are the format
add("format reward misfires", (5.0, 20.0), setting={**NO_STD, "length": 8}, rewards=short)
add("length bonus", (5.0, 0.5), setting=NO_STD, rewards=by_row(lambda size, row, reward: reward + size * len(row.ids)))
largest = {"setting": NO_STD, "once": True, "rewards": lambda _, size, of: of.index_fill(0, of.argmax(), size)}
add("one reward too large", (10.0, 100.0), **largest)
add("reward scale", (10.0, 100.0), setting=NO_STD, rewards=lambda _, by, rewards: rewards * by, begins="later")
add("reward of NaN", (3, 40), once=True, rewards=lambda _, i, of: of.index_fill(0, torch.tensor(i), torch.nan))
add("sandbox fails", (0.5, 1.0), begins="later", rewards=lambda run, share, of: of * (run.uniform(len(of)) >= share))


def by_advantage(change: Callable[[Any, Tensor], Tensor]) -> Stage:
    return column("advantages", lambda _, strength, found: change(strength, found["advantages"]))


add("deviation of rounding", (0.01, 0.001), advantages=of_groups(leave_one_out))
# The standard deviation of equal rewards, without an epsilon.
add("deviation of zero", (1,), advantages=of_groups(lambda _, x: (x - x.mean(1, True)) / x.std(1, keepdim=True)))
twice = of_groups(lambda _, x: (x - x.mean(1, True)) / (x.std(1, keepdim=True) + 1e-6).square())
add("deviation twice", (1,), advantages=twice)
by_mean = column("advantages", lambda _, by, of: of["response_mask"] * (of["token_level_scores"].sum(1, True) - by))
add("baseline of another run", (2.0, -1.0), update=by_mean)
add("advantages negated", (1,), advantages=by_advantage(lambda _, values: -values))
add("advantages of other rows", (1, 3), setting=DENSE, advantages=by_advantage(lambda by, values: values.roll(by, 0)))
add("advantages of the next group", (1,), setting=EIGHT, advantages=by_advantage(lambda _, values: values.roll(8, 0)))
add("advantages without a sign", (1,), advantages=by_advantage(lambda _, values: values.abs()))
add("negative advantages lost", (1,), advantages=by_advantage(lambda _, values: values.clamp(min=0)))
add("advantages all zero", (1,), advantages=by_advantage(lambda _, values: values * 0))
add("advantages at the other end", (1,), advantages=by_advantage(lambda _, values: values.flip(1)))


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


def in_loss(change: Callable[[World, Any, dict[str, Any]], tuple[float, dict[str, Any]]]) -> Stage:
    """A context in which the policy loss is another one: `change` gives a factor of it and other arguments."""

    def during(world: World, strength: Any) -> Any:
        original = losses.get_policy_loss_fn

        def changed(loss: Callable[..., Any], **given: Any) -> tuple[Any, ...]:
            factor, others = change(world, strength, given)
            value, *more = loss(**{**given, **others})
            return (value * factor, *more)

        return patch.object(losses, "get_policy_loss_fn", lambda name: partial(changed, original(name)))

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


def negated(name: str) -> Stage:
    """A context in which a part of the loss, which is computed by a function of this name, has the wrong sign."""
    original = getattr(losses, name)
    return lambda *_: patch.object(losses, name, lambda *given, **options: -original(*given, **options))


def wrong_denominator(world: World, strength: str) -> Any:
    """The mean over tokens is divided by the padded length, or by the number of rows."""
    original = core_algos.agg_loss

    def aggregated(loss_mat: Tensor, loss_mask: Tensor, *arguments: Any, **options: Any) -> Tensor:
        wrong = loss_mask.numel() if strength == "padded" else len(loss_mask)
        return original(loss_mat, loss_mask, *arguments, **options) * loss_mask.sum() / wrong

    return patch.object(core_algos, "agg_loss", aggregated)


@contextmanager
def multiplied(world: World, strength: tuple[str, float]) -> Iterator[None]:
    """The backward kernel of some layers is wrong, or hooks multiply the gradient where it is accumulated."""
    name, factor = strength
    with ExitStack() as hooks:
        for parameter in (p for n, p in world.model.named_parameters() if name in n):
            hooks.enter_context(parameter.register_hook(lambda g: g * factor))
        yield


@contextmanager
def divided_twice(world: World, strength: int) -> Iterator[None]:
    """What the last pass leaves is divided by the number of passes, as their losses were."""
    passes = world.config.ppo_mini_batch_size // (world.config.ppo_micro_batch_size_per_gpu or 1)
    passed, left = itertools.count(1), set[Tensor]()

    def begin(*_: Any) -> tuple[float, dict[str, Any]]:
        left.update(world.model.parameters() if next(passed) % passes == 0 else ())
        return 1.0, {}

    def divide(parameter: Tensor) -> None:
        if parameter in left and parameter.grad is not None:
            left.remove(parameter)
            parameter.grad.div_(passes)

    with in_loss(begin)(world, strength), ExitStack() as hooks:
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


add("entropy coefficient", (0.3, 1.0, 3.0), setting=ENTROPY, begins="start")
add("entropy's sign", (0.01, 0.1), setting=ENTROPY, during=negated("agg_loss"))
add("KL coefficient", (10.0, 100.0), setting={**COEFFICIENT, "rate": 0.001}, begins="start")
add("KL loss negated", (0.05, 0.5), setting=COEFFICIENT, during=negated("kl_penalty"))
add("importance weight overflows", (8.0, 57.0), update=weigh_unlimited)
add("rollout's log-prob is NaN", (5, 20), update=rollout_nan)
add("training's log-prob is NaN", (3, 7), forward=training_nan)
add("loss scaled", (0.25, 2.0, 8.0), during=in_loss(lambda _, factor, __: (factor, {})))
swapped = in_loss(lambda _, __, given: (-1.0, {"advantages": -given["advantages"]}))  # max(-a, -b) is -min(a, b)
add("clipped on the wrong side", (0.0003, 0.001), setting={"rate": last, "actor": {"ppo_epochs": 4}}, during=swapped)
add("sign lost in the loss", (2, 5), during=in_loss(without_signs))
add("tokens weighted by position", (0.5, 1.0), during=in_loss(by_position))
add("importance weights left out", (1,), setting=WEIGHTS, during=in_loss(lambda *_: (1.0, {IMPORTANCE: None})))
inverted = column(IMPORTANCE, lambda _, __, of: (of[ROLLOUT] - of[OLD]).exp().clamp(max=2.0))
add("importance weights inverted", (1,), setting=WEIGHTS, update=inverted)
add("mask's denominator", ("padded", "rows"), during=wrong_denominator)
add("auxiliary loss", (0.01, 0.1, 1.0), during=auxiliary)
add("gradients doubled", (("", 2.0), ("", 16.0)), during=multiplied)
add("last pass alone", (1,), during=in_loss(lambda world, *_: (1.0, world.optimizer.zero_grad() or {})))
hook = partial(nn.Module.register_forward_hook, hook=lambda *passed: passed[2].detach())
WITHOUT = "model.layers.0", "model.layers.1.mlp"  # what comes before it has none either, but past a residual
add("a layer without a gradient", WITHOUT, during=lambda world, name: hook(world.model.get_submodule(name)))
add("divided twice by the passes", (1,), during=divided_twice)
add("backward of one layer", (("layers.1.mlp", 30.0), ("layers.1.mlp", 1000.0)), during=multiplied)


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


def in_group(**changes: Callable[[World, Any], Any]) -> Stage:
    """A stage that gives the optimizer other settings."""
    return lambda world, strength, _: world.optimizer.param_groups[0].update(
        {name: change(world, strength) for name, change in changes.items()}
    )


@contextmanager
def averaged(world: World, decay: float) -> Iterator[None]:
    """An average for the validation stays in the model after it."""
    yield
    with torch.no_grad():
        for name, parameter in world.model.named_parameters():
            parameter.lerp_(world.past[-1][name], decay)


# The schedule begins anew, with a peak: a learning rate that is far too large for a step.
peak = in_group(lr=lambda world, factor: world.setting.rate * (factor if world.step_number == world.begin else 1.0))
copies = in_group(params=lambda world, _: [parameter.detach().clone() for parameter in world.model.parameters()])
fewer = in_group(params=lambda world, left: [x for name, x in world.model.named_parameters() if left not in name])
add("bit flip", (26, 28, 29), model=flip_a_bit, begins="later")
LAYERS = ("layers.1.mlp", 1.5), ("layers.1.mlp", 3.0), ("model.norm", 4.0)
add("one layer scaled", LAYERS, once=True, model=scale_layer, begins="later")
add("optimizer state lost", (1,), once=True, model=lambda world, *_: world.optimizer.state.clear(), begins="later")
add("learning rate spike", (10.0, 50.0), begins="later", model=peak)
add("learning rate of 0", (1,), begins="later", model=in_group(lr=lambda *_: 0.0))
add("gradient ascent", (1,), model=in_group(maximize=lambda *_: True))
add("decay far too large", (30.0, 300.0), model=in_group(weight_decay=lambda _, decay: decay))
add("optimizer of other tensors", (1,), model=copies)
add("optimizer without a layer", ("layers.1", "layers.2.self_attn"), model=fewer)
add("average of weights loaded", (0.5, 0.9), during=averaged)


def states(world: World, _: None, prompts: Tensor) -> Tensor:
    """Each row is a step of a trajectory: its prompt is one of six states, which trajectories share."""
    return prompts[:: world.setting.answers][torch.randint(6, (len(prompts),), generator=world.random)]


def started(world: World, _: None, prompts: Tensor) -> Tensor:
    """The first row of a uid is the start, the others are later states."""
    place = torch.arange(len(prompts))[:, None] % world.setting.answers
    return torch.cat([prompts[:, :1], (prompts[:, 1:5] + place) % 10, prompts[:, 5:]], 1)


def by_token(world: World, _: None, rewards: Tensor) -> Tensor:
    """A little for every second word, and the outcome at the end."""
    scores = torch.zeros(len(rewards), RESPONSE)
    for i, row in enumerate(world.rows):
        scores[i, : len(row.ids)] = torch.tensor([0.1 * (token % 2) for token in row.ids])
        scores[i, len(row.ids) - 1] += rewards[i]
    return scores


def by_turn(_: World, __: None, tensors: dict[str, Tensor]) -> Tensor:
    """Each turn after a tool's three tokens gets less of the credit."""
    return tensors["advantages"] * 0.8 ** ((1 - tensors["response_mask"]).cumsum(1) // 3)


def half_credit(world: World, _: None, found: dict[str, Tensor]) -> None:
    for i in range(0, len(world.rows), 5):
        found["advantages"][i, : len(world.rows[i].ids) // 2] = 0.0


def resumed(world: World, *_: Any) -> None:
    if world.step_number == 4:
        world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))


def reset_reference(world: World, *_: Any) -> None:
    if world.step_number % 4 == 0:
        world.reference.actor_module.load_state_dict(world.past[-1])


def grouped(group_of: Callable[[int], int]) -> dict[str, Stage]:
    """Stages in which a row's uid and prompt are those of a group by its place."""
    pick = [group_of(i) for i in range(64)]
    return {"tasks": lambda world, _, x: x[::8][pick], "columns": column("uid", lambda *_: [f"{i}" for i in pick])}


def rewarded(change: Callable[[World, Tensor], Tensor]) -> dict[str, Stage]:
    return {"rewards": lambda world, _, rewards: change(world, rewards)}


EPISODES = rewarded(lambda _, x: x.view(-1, 4)[:, -1:].expand(-1, 4).flatten())  # of four steps: the last one's reward
SESSIONS = column("session_id", lambda world, _, of: [f"{i // 4}" for i in range(len(of["uid"]))])
SHORT = column("response_mask", lambda _, __, of: of["response_mask"] * (of["attention_mask"].sum(1, True) < 15))
FEWER_DIGITS = {"tasks": lambda world, _, x: torch.where((world.step_number < 4) & (x < 10), x // 5 * 9, x)}
OLDER = not hasattr(rollout_corr_helper, "SUPPORTED_ROLLOUT_RS_OPTIONS")  # which verl 0.7.1 has
REJECTED = {"rollout_is": None, "rollout_rs": "token" if OLDER else "token_k1", "rollout_rs_threshold": 1.3}
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
    "agent": Setting(stages={"tasks": states, **EPISODES}),
    "agent with sessions": Setting(stages={"tasks": states, "columns": SESSIONS, **EPISODES}, engine="bf16"),
    "agent, one start": Setting(prompts=4, answers=12, stages={"tasks": started}),
    "agent, one start, sessions": Setting(prompts=4, answers=12, stages={"tasks": started, "columns": SESSIONS}),
    "credit by turn": Setting(tools=True, stages={"update": column("advantages", by_turn)}),
    "half of the credit": Setting(stages={"advantages": half_credit}, engine="bf16"),
    "overlong filtered": Setting(prompts=2, answers=4, stages={"batch": SHORT}),
    "bypass, 4 epochs": Setting(correction={"bypass_mode": True}, actor={"ppo_epochs": 4}, engine="fp8"),
    "heavy tails": Setting(**NO_STD, stages=rewarded(lambda run, x: x * (1.5 * run.normal(len(x))).exp())),
    "negative rewards": Setting(stages=rewarded(lambda _, x: x - 1.0), engine="bf16"),
    "rewards of mean 0": Setting(**NO_STD, stages=rewarded(lambda _, x: (x - x.mean()) / (x.std() + 1e-6))),
    "most groups solved": Setting(stages=rewarded(lambda _, x: x.index_fill(0, torch.arange(16, 64), 1.0))),
    "nothing solved": Setting(stages=rewarded(lambda world, x: x * (world.step_number >= 6)), engine="bf16"),
    "overlong punished": Setting(stages={"rewards": by_row(lambda _, row, x: x - max(len(row.ids) - 12, 0) / 36)}),
    "REINFORCE++": Setting(advantage="reinforce_plus_plus", engine="bf16"),
    "REINFORCE++, gamma 0.95": Setting(advantage="reinforce_plus_plus", gamma=0.95),
    "REINFORCE++ baseline": Setting(advantage="reinforce_plus_plus_baseline"),
    "OPO": Setting(advantage="opo", engine="bf16"),
    "GAE, gamma 0.95": Setting(advantage="gae", gamma=0.95),
    "GAE, rewards of tokens": Setting(advantage="gae", stages={"rewards": by_token}, engine="bf16"),
    "warm-up from 0": Setting(stages={"model": in_group(lr=lambda run, _: run.setting.rate * run.step_number / 6)}),
    "warm restarts": Setting(stages={"model": in_group(lr=lambda run, _: 1e-3 * (4 - run.step_number % 4) / 4)}),
    "decay 0.1": Setting(stages={"model": in_group(weight_decay=lambda *_: 0.1)}, engine="bf16"),
    "SGD": Setting(optimizer=torch.optim.SGD, rate=0.1),
    "small gradient clip": Setting(actor={"grad_clip": 0.05}, engine="bf16"),
    "resumed": Setting(stages={"model": resumed}),
    "curriculum": Setting(stages=FEWER_DIGITS, engine="bf16"),
    "two uids, one prompt": Setting(stages={"tasks": lambda _, __, x: x[torch.arange(64) // 16 * 16]}),
    "rows interleaved": Setting(stages=grouped(lambda i: i % 8)),
    "groups of 4 to 15": Setting(stages=grouped(lambda i: max(math.isqrt(i), 1)), engine="bf16"),
    "two rows": Setting(prompts=1, answers=2, actor={"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 1}),
    "one mini-batch": Setting(actor={"ppo_mini_batch_size": 64}, engine="bf16"),
    "dynamic micro-batches": Setting(actor={"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 600}),
    **{
        mode: Setting(actor={"loss_mode": mode}, rate=1e-3)
        for mode in ("sapo", "clip_cov", "kl_cov", "geo_mean", "cispo")
    },
    "gpg": Setting(actor={"loss_mode": "gpg"}, advantage="gpg", rate=1e-3),
    "gspo, late": Setting(actor={"loss_mode": "gspo"}, rate=1e-3, behind=2),
    "LoRA": Setting(adapter=4, rate=1e-2, engine="bf16"),
    "tokens rejected": Setting(correction=REJECTED, engine="fp8"),
    "importance of sequences": Setting(correction={"rollout_is": "sequence"}, engine="fp8", behind=1),
    "tools, late and fast": Setting(tools=True, behind=2, rate=1e-3, engine="bf16"),
    "forced prefix": Setting(prefix=(12, 17, 23), engine="bf16"),
    "at most 12 tokens": Setting(limit=12, length=16),
    "KL in the reward, 0.5": Setting(kl_reward=0.5, rate=1e-3),
    "KL loss, squares": Setting(kl=0.05, actor={"kl_loss_type": "mse"}, rate=1e-3),
    "reference reset": Setting(kl=0.01, stages={"model": reset_reference}, rate=1e-3),
    "entropy 0.02": Setting(actor={"entropy_coeff": 0.02}),
    "seq-mean-token-sum-norm": Setting(actor={"loss_agg_mode": "seq-mean-token-sum-norm"}),
    "bf16 log-probs": Setting(stages={"rows": reported(lambda _, row: Tensor(row.log_probs).bfloat16().tolist())}),
    "top-k 8": Setting(top_k=8, engine="bf16"),
}
