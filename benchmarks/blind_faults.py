# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What blind.py plants: faults, each where the real bug is, and healthy settings.

A stage is a function of (world, strength, value) in the place of `World.step` that it is named for: `sync` (the weights
that both workers load), `rows` (what server and agent loop return), `batch` (the collated tensors), `rewards`, `model`
(before training computes log-probs), `forward` (the actor's own: its call and the micro-batch), `log_probs` (old and
reference), `advantages`, `update` (all tensors).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from blind_world import CALL, IMAGE, RESPONSE, Row, Setting, World
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Args:
        source (str): A public thread of such a bug.
        right (str): Names that are right, separated by blanks; "" where no name is.
        strengths (tuple): From just visible up; what stages get.
        stages (dict): What goes wrong where.
        defensible (str): Names that are not the cause's own, but lead to it.
        setting (dict): Fields of the run's setting that it needs; values, or functions of the strength.
        begins (str): "any", "start" (of the run) or "later".
        once (bool): Whether it is in one step alone.
        during (Callable): A context of (world, strength) around the update, where "during" is in `stages`.
    """

    source: str
    right: str
    strengths: tuple[Any, ...]
    stages: Mapping[str, Callable[..., Any]]
    defensible: str = ""
    setting: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    begins: str = "any"
    once: bool = False
    during: Callable[..., Any] = lambda *_: nullcontext()


VERL = "https://github.com/verl-project/verl/issues/"
TRL = "https://github.com/huggingface/trl/issues/"
FAULTS: dict[str, Fault] = {}


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


ALIGNED = dict(right="misaligned", defensible="")
FAULTS |= {
    "rollout shifted": Fault(
        "https://github.com/eval-protocol/python-sdk/pull/457",
        **ALIGNED,
        strengths=((1, 1.0), (-1, 1.0), (2, 1.0), (-2, 1.0)),
        stages={"rows": shift_rows},
    ),
    "rollout shifted in some rows": Fault(
        "https://github.com/eval-protocol/python-sdk/pull/458",
        **ALIGNED,
        strengths=((1, 0.2), (1, 0.5), (-1, 0.2), (-1, 0.5), (2, 0.5)),
        stages={"rows": shift_rows},
    ),
    "rollout shifted from inside": Fault(
        "https://github.com/fw-ai/cookbook/pull/483",
        **ALIGNED,
        strengths=((-1, 0.6), (-1, 0.3), (1, 0.3), (-2, 0.5)),
        stages={"rows": shift_inside},
    ),
    "rollout shifted after a tool": Fault(
        "https://github.com/ai-dynamo/dynamo/pull/8630",
        right="misaligned",
        defensible="retokenized",
        strengths=(-1, 1, 3),
        stages={"rows": shift_after_call},
        setting={"tools": True},
    ),
    "another row's log-probs": Fault(
        "https://github.com/verl-project/verl/issues/7196",
        **ALIGNED,
        strengths=("neighbours", "group", "all"),
        stages={"rows": other_rows},
    ),
    "tail padded with 0": Fault(
        "https://github.com/rllm-org/rllm/issues/816",
        right="misaligned",
        defensible="unsampled",
        strengths=((0.0, 0.0), (0.2, 0.0), (0.5, 0.0)),
        stages={"rows": cut_tail},
    ),
    "constant tail": Fault(
        "https://github.com/rllm-org/rllm/issues/816",
        **ALIGNED,
        strengths=((0.2, -1.0), (0.5, -1.0), (0.5, -0.1)),
        stages={"rows": cut_tail},
    ),
    "log-probs by chunk": Fault(
        "https://github.com/ai-dynamo/dynamo/pull/8630",
        **ALIGNED,
        strengths=(0.3, 0.7),
        stages={"rows": repeat_last},
    ),
    "retokenized": Fault(
        TRL + "5224",
        right="retokenized misaligned",
        defensible="",
        strengths=(0.5, 1.0),
        stages={"rows": encode_again},
        setting={"tools": True},
    ),
}


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


URSA = "https://github.com/opendilab/LightRFT"
FAULTS |= {
    "policy sliced wrongly": Fault(
        URSA, **ALIGNED, strengths=((1, ""), (-1, ""), (2, "")), stages={"forward": slice_wrongly}
    ),
    "policy sliced wrongly for images": Fault(
        URSA, **ALIGNED, strengths=((1, "images"), (-1, "images")), stages={"forward": slice_wrongly}
    ),
    "policy's labels not shifted": Fault(URSA, **ALIGNED, strengths=(1,), stages={"forward": label_wrongly}),
    "old log-probs of other rows": Fault(
        VERL + "7196",
        right="misaligned",
        defensible="sequence",
        strengths=("roll", "sorted"),
        stages={"log_probs": rows_not_restored},
    ),
}

# ---- nothing wrong

HEALTHY: dict[str, Setting] = {
    "ordinary": Setting(),
    "bf16": Setting(engine="bf16"),
    "fp8": Setting(engine="fp8"),
    "moe": Setting(engine="moe"),
    "1 step late": Setting(behind=1),
    "2 steps late": Setting(behind=2),
    "3 steps late": Setting(behind=3, engine="bf16"),
    "late and fast": Setting(behind=1, rate=1e-3),
    "fp8, late": Setting(engine="fp8", behind=2),
    "no reference": Setting(engine="bf16", reference=False),
    "tools": Setting(tools=True, engine="bf16"),
    "tools, late": Setting(tools=True, behind=2),
    "temperature 0.7": Setting(temperature=0.7, engine="bf16"),
    "temperature 1.3": Setting(temperature=1.3, engine="fp8"),
    "top-p 0.9": Setting(top_p=0.9, engine="bf16"),
    "long": Setting(length=16, engine="bf16"),
    "groups of 2": Setting(prompts=32, answers=2),
    "gspo": Setting(actor={"loss_mode": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
}
