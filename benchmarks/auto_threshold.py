# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Does grad_norm_threshold=auto alarm at spikes only? A natural GRPO run of a real model, with faults planted in it.

The embedded profile's SmolLM2-135M (embedded/prepare.py) answers sums of two one-digit numbers ("Question: What is
4 - 1?\\nAnswer:") at temperature 1, at most 12 tokens. The reward is 1 if the last whole number in the answer is the
right one. Advantages are GRPO's over 8 answers to each of 4 sums. The 32 answers of a step are shuffled and cut into
mini-batches of 4 of one micro-batch each, and verl's patched actor trains on them: PPO's clipped loss against the
rollout's log-probs, token-mean, AdamW with a learning rate of 1e-6, grad_clip 1, one process, float32. GradLoc runs
with grad_norm_threshold=auto and spike_action=log: the optimizer steps after every mini-batch, with a fault or not, and
norms of faults enter the window of the threshold like all others. A search has 6 passes at most, as only the alarm
matters here.

Faults are planted in single mini-batches after the warm-up, spaced evenly. Where a mini-batch has no place for a fault
(all its advantages are zero, say), the next one is taken:

- sequence ×10, ×100: the advantages of one answer are multiplied; ×100 is a reward of 100 instead of 1;
- token ×100, ×1000: the advantage of one token is multiplied, of those with a probability under 0.5;
- end: behind each answer that was cut off at the longest length, an end token that was not sampled;
- bit: the highest exponent bit of one random weight of a random layer is flipped, and after the update put back;
- nan: the advantage of one token is NaN;
- stale: the rollout's log-probs are those of the weights of three steps before;
- shifted: the rollout's log-probs are those of the positions before.

How it is judged (stated before the first run):

- A mini-batch without a fault is checked if it comes after the warm-up and its norm is not zero. An alarm there is a
  false alarm, also where an earlier fault may have caused it. The bound of their rate is the upper end of its one-sided
  95% interval (Clopper-Pearson).
- A fault is a spike if its largest token-equivalent norm is not finite, or is over the largest norm of the mini-batches
  without a fault among the 256 before it. A spike is caught if it alarmed, otherwise missed. A fault that is not a
  spike has no effect that one could see among ordinary mini-batches; it is listed with its norm.

The replays pass the recorded norms through the rule again, without a model: in other orders (the mini-batches without a
fault are shuffled, with 20 seeds), and as the largest of k mini-batches in a row, as in a run with k times as many
micro-batches.

The patched verl must be importable; after `bash tests/run.sh`:

    build/venv/bin/python embedded/prepare.py build/embedded
    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/auto_threshold.py --prepared build/embedded \\
        --folder build/auto_threshold --json build/auto_threshold.json

On one free core, 800 mini-batches take about 30 minutes. Without --prepared, the run recorded in the folder is judged.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy
import pandas
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils.gradloc.threshold import WARMUP, AutoThreshold
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig

# The highest exponent bit of a float32: 0 in every weight under 2, and flipping it multiplies the weight by 2^128.
EXPONENT_BIT = 1 << 30

# How many steps old the weights are that give the log-probs of the fault "stale".
STALE_STEPS = 3

# A fault is held against the norms without a fault among so many mini-batches before it.
ORDINARY = 256
SHUFFLES = 20
CONFIDENCE = 0.95

# The largest token-equivalent norm of a mini-batch (infinite where it is not finite), and whether it has a fault.
Norm = tuple[float, bool]


@dataclass(frozen=True)
class Settings:
    """The size of the run.

    Args:
        steps (int): Rollout steps.
        prompts (int): Sums in a step.
        answers (int): Answers to each.
        mini_batch (int): Answers in a mini-batch.
        micro_batch (int): Answers in a micro-batch.
        length (int): The longest answer, in tokens.
        learning_rate (float): Of AdamW, constant.
        first_fault (int): The mini-batch of the first fault.
        faults (int): How often each fault is planted.
        seed (int): Of the samples and the faults.
        equal_groups (float): The share of a step's prompts whose answers count as equally good: with advantages of 0.
    """

    steps: int = 100
    prompts: int = 4
    answers: int = 8
    mini_batch: int = 4
    micro_batch: int = 4
    length: int = 12
    learning_rate: float = 1e-6
    first_fault: int = 40
    faults: int = 4
    seed: int = 1
    equal_groups: float = 0.0

    @property
    def mini_batches(self) -> int:
        """Mini-batches in a step."""
        return self.prompts * self.answers // self.mini_batch


@dataclass
class MiniBatch:
    """A mini-batch before its update; a fault changes its tensors in place. All have shape (rows, response width).

    Args:
        responses (Tensor): Token ids. The last column is empty: only a fault uses it.
        mask (Tensor): 1.0 for the tokens of the response.
        old_log_probs (Tensor): The rollout's.
        advantages (Tensor): 0 outside of the mask.
    """

    responses: Tensor
    mask: Tensor
    old_log_probs: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class Policy:
    """What a fault may use of the policy.

    Args:
        model (nn.Module): In training.
        log_probs (Callable): The current log-probs of a mini-batch's responses, shape (rows, response width).
        stale_log_probs (Callable): The same by the weights of some steps before.
        end (int): The token that ends a response.
    """

    model: nn.Module
    log_probs: Callable[[], Tensor]
    stale_log_probs: Callable[[], Tensor]
    end: int


# Plants the fault, or returns None where the mini-batch has no place for it. Otherwise returns what it did in words,
# and what undoes it after the update.
Fault = Callable[[MiniBatch, Policy, random.Random], "tuple[str, Callable[[], None]] | None"]


def _nothing() -> None:
    pass


def _sequence(factor: float) -> Fault:
    def plant(batch: MiniBatch, _policy: Policy, chance: random.Random) -> tuple[str, Callable[[], None]] | None:
        rows = batch.advantages.any(1).nonzero().flatten().tolist()
        if not rows:
            return None
        row = chance.choice(rows)
        batch.advantages[row] *= factor
        return f"row {row}", _nothing

    return plant


def _token(factor: float) -> Fault:
    def plant(batch: MiniBatch, _policy: Policy, chance: random.Random) -> tuple[str, Callable[[], None]] | None:
        # A token that the policy is sure of has hardly a gradient, whatever its advantage.
        places = ((batch.advantages != 0) & (batch.old_log_probs < -0.7)).nonzero().tolist()
        if not places:
            return None
        row, position = chance.choice(places)
        batch.advantages[row, position] *= factor
        return f"row {row}, position {position}, p = {batch.old_log_probs[row, position].exp():.2g}", _nothing

    return plant


def _end(batch: MiniBatch, policy: Policy, _chance: random.Random) -> tuple[str, Callable[[], None]] | None:
    cut = (batch.mask[:, -2] == 1) & (batch.responses[:, -2] != policy.end) & batch.advantages.any(1)
    if not cut.any():
        return None
    batch.responses[cut, -1] = policy.end
    batch.mask[cut, -1] = 1.0
    batch.advantages[cut, -1] = batch.advantages[cut, -2]
    batch.old_log_probs[cut, -1] = policy.log_probs()[cut, -1]
    likeliest = batch.old_log_probs[cut, -1].max().exp()
    return f"{int(cut.sum())} answers, p up to {likeliest:.2g}", _nothing


def _bit(batch: MiniBatch, policy: Policy, chance: random.Random) -> tuple[str, Callable[[], None]] | None:
    if not batch.advantages.any():
        return None
    matrices = [(n, p) for n, p in policy.model.named_parameters() if ".layers." in n and p.dim() == 2]
    name, parameter = chance.choice(matrices)
    weights = parameter.detach().view(-1)
    place = chance.randrange(len(weights))
    before = weights[place].clone()
    bits = weights[place : place + 1].view(torch.int32)
    bits ^= EXPONENT_BIT

    def undo() -> None:
        weights[place] = before

    return f"{name}[{place}], {float(before):.3g} to {float(weights[place]):.3g}", undo


def _nan(batch: MiniBatch, _policy: Policy, chance: random.Random) -> tuple[str, Callable[[], None]] | None:
    row, position = chance.choice(batch.mask.nonzero().tolist())
    batch.advantages[row, position] = torch.nan
    return f"row {row}, position {position}", _nothing


def _stale(batch: MiniBatch, policy: Policy, _chance: random.Random) -> tuple[str, Callable[[], None]] | None:
    return _replace_log_probs(batch, policy.stale_log_probs())


def _shifted(batch: MiniBatch, _policy: Policy, _chance: random.Random) -> tuple[str, Callable[[], None]] | None:
    return _replace_log_probs(batch, batch.old_log_probs.roll(1, 1))


def _replace_log_probs(batch: MiniBatch, log_probs: Tensor) -> tuple[str, Callable[[], None]] | None:
    if not batch.advantages.any():
        return None
    logarithms = (batch.old_log_probs - log_probs)[batch.mask.bool()]
    batch.old_log_probs[batch.mask.bool()] = log_probs[batch.mask.bool()]
    return f"ratios from {logarithms.min().exp():.2g} to {logarithms.max().exp():.2g}", _nothing


FAULTS: dict[str, Fault] = {
    "sequence ×10": _sequence(10),
    "sequence ×100": _sequence(100),
    "token ×100": _token(100),
    "token ×1000": _token(1000),
    "end": _end,
    "bit": _bit,
    "nan": _nan,
    "stale": _stale,
    "shifted": _shifted,
}


def schedule(first: int, last: int, of_each: int, seed: int) -> list[tuple[int, str]]:
    """Which fault comes in which mini-batch, evenly spaced: rounds of all faults, each in an order of its own."""
    chance = random.Random(seed)
    names = [name for _ in range(of_each) for name in chance.sample(sorted(FAULTS), len(FAULTS))]
    return [(first + (last - first) * i // len(names), name) for i, name in enumerate(names)]


@torch.no_grad()
def sample(
    model: nn.Module, prompts: Tensor, length: int, end: int, pad: int, source: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Answers at temperature 1.

    Args:
        model (nn.Module): The policy.
        prompts (Tensor): Token ids, padded on the left, shape (rows, prompt length).
        length (int): The longest answer.
        end (int), pad (int): Tokens.
        source (torch.Generator): Of the random numbers.

    Returns:
        tuple: The tokens, their log-probs, and the mask of the answers up to their ends, each of shape (rows, length).
    """
    attention = (prompts != pad).long()
    tokens, past, columns = prompts, None, []
    running = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(length):
        positions = (attention.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        output = model(
            input_ids=tokens,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
        past = output.past_key_values
        log_probs = output.logits[:, -1].log_softmax(-1)
        tokens = torch.multinomial(log_probs.exp(), 1, generator=source)
        tokens[~running] = pad
        columns.append((tokens, log_probs.gather(1, tokens), running[:, None]))
        running = running & (tokens[:, 0] != end)
        attention = torch.cat([attention, columns[-1][2].long()], 1)
        if not running.any():
            break
    found, log_probs, mask = (torch.cat(parts, 1) for parts in zip(*columns, strict=True))
    missing = length - found.shape[1]
    pads = [nn.functional.pad(tensor, (0, missing), value=value) for tensor, value in ((found, pad), (log_probs, 0.0))]
    whole = nn.functional.pad(mask.float(), (0, missing))
    return pads[0], pads[1] * whole, whole


def reward(answer: str, truth: str) -> float:
    """1 if the last whole number in the answer is the right one, 0 otherwise."""
    numbers = re.findall(r"-?\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == int(truth))


class Run:
    """The run.

    Args:
        prepared (Path): What embedded/prepare.py made.
        settings (Settings): The size.
    """

    def __init__(self, prepared: Path, settings: Settings) -> None:
        self.settings = settings
        torch.manual_seed(settings.seed)
        tokenizer: Any = AutoTokenizer.from_pretrained(prepared / "model")
        self._tokenizer = tokenizer
        model = AutoModelForCausalLM.from_pretrained(prepared / "model", dtype=torch.float32)
        self._model: nn.Module = model
        self._stale: nn.Module | None = None
        self._data = pandas.read_parquet(prepared / "train.parquet")
        from verl.workers.actor.dp_actor import DataParallelPPOActor  # verl 0.9 has none

        config = FSDPActorConfig(
            rollout_n=1,
            ppo_mini_batch_size=settings.mini_batch,
            ppo_micro_batch_size_per_gpu=settings.micro_batch,
            use_rollout_log_probs=True,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            use_torch_compile=False,
            fsdp_config=FSDPEngineConfig(dtype="float32"),
            spike_detection=True,
            grad_norm_threshold="auto",
            bisect_budget_steps=6,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01, fused=True)
        with contextlib.redirect_stdout(io.StringIO()):
            self._actor: Any = DataParallelPPOActor(config, model, optimizer)
        count = settings.steps * settings.mini_batches
        self._schedule = schedule(settings.first_fault, count, settings.faults, settings.seed)
        self._planted = 0
        self.step = 0

    def train_step(self) -> list[dict[str, Any]]:
        """One rollout and its updates; returns their records."""
        settings = self.settings
        source = torch.Generator().manual_seed(1_000_003 * settings.seed + self.step)
        self._keep_stale_weights()
        rows, rewards = self._roll_out(source)
        order = torch.randperm(len(rewards), generator=source)
        records = []
        for i, chosen in enumerate(order.split(settings.mini_batch)):
            number = self.step * settings.mini_batches + i
            record = {"number": number, "step": self.step, "reward": rewards[chosen].mean().item()}
            records.append(record | self._update({name: tensor[chosen] for name, tensor in rows.items()}, number))
        self.step += 1
        return records

    def _keep_stale_weights(self) -> None:
        """Copies the weights if a stale fault comes in STALE_STEPS steps."""
        soon = {at // self.settings.mini_batches - STALE_STEPS for at, name in self._schedule if name == "stale"}
        if self.step in soon:
            if self._stale is None:
                self._stale = AutoModelForCausalLM.from_config(self._model.config, dtype=torch.float32).eval()
            self._stale.load_state_dict(self._model.state_dict())

    def _roll_out(self, source: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """The tensors of all answers of a step, each (rows, width), and their rewards."""
        settings = self.settings
        chosen = self._data.iloc[torch.randint(len(self._data), (settings.prompts,), generator=source).tolist()]
        sums = [prompt[0]["content"].split(": ")[-1].removesuffix(" =") for prompt in chosen["prompt"]]
        texts = [f"Question: What is {each}?\nAnswer:" for each in sums]
        encoded = [self._tokenizer(text)["input_ids"] for text in texts]
        pad, end, width = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, max(map(len, encoded))
        padded = torch.tensor([[pad] * (width - len(ids)) + ids for ids in encoded])
        prompts = padded.repeat_interleave(settings.answers, 0)
        self._model.eval()
        responses, log_probs, mask = sample(self._model, prompts, settings.length, end, pad, source)
        truths = [row["ground_truth"] for row in chosen["reward_model"] for _ in range(settings.answers)]
        answers = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        rewards = torch.tensor([reward(answer, truth) for answer, truth in zip(answers, truths, strict=True)])
        scores = torch.zeros_like(mask)
        scores[:, 0] = rewards
        groups = numpy.arange(len(rewards)) // settings.answers
        advantages, _ = compute_grpo_outcome_advantage(scores, mask, groups)
        if settings.equal_groups:
            count = round(settings.equal_groups * settings.prompts)
            equal = torch.randperm(settings.prompts, generator=source)[:count]
            advantages[torch.isin(torch.from_numpy(groups), equal)] = 0.0
        rows = {"responses": responses, "mask": mask, "old_log_probs": log_probs, "advantages": advantages}
        # A column for the fault that appends a token.
        rows = {name: nn.functional.pad(rows[name], (0, 1), value=pad * (name == "responses")) for name in rows}
        return rows | {"prompts": prompts}, rewards

    def _update(self, rows: dict[str, Tensor], number: int) -> dict[str, Any]:
        prompts = rows.pop("prompts")
        batch = MiniBatch(**rows)
        fault, undo = self._plant(batch, prompts, number)
        data = self._inputs(batch, prompts)
        data |= {"response_mask": batch.mask, "old_log_probs": batch.old_log_probs, "advantages": batch.advantages}
        metrics = self._actor.update_policy(DataProto.from_dict(data, meta_info={"temperature": 1.0}))
        undo()
        events = self._actor.gradloc.events
        culprits = [culprit for event in events for culprit in event["culprits"]]
        return {
            "norm": _as_json(metrics["actor/gradloc/token_norm_max"]),
            "threshold": metrics.get("actor/gradloc/threshold"),
            "alarm": bool(events),
            "fault": fault,
            "diagnosis": events[0]["diagnosis"] if events else None,
            "sources": sorted({culprit["source"] for culprit in culprits}),
        }

    def _plant(self, batch: MiniBatch, prompts: Tensor, number: int) -> tuple[dict[str, str] | None, Any]:
        if self._planted == len(self._schedule) or number < self._schedule[self._planted][0]:
            return None, lambda: None
        name = self._schedule[self._planted][1]

        def log_probs(model: nn.Module | None) -> Tensor:
            assert model is not None  # the stale weights are kept before a stale fault
            return self._log_probs(model, batch, prompts)

        policy = Policy(
            self._model, lambda: log_probs(self._model), lambda: log_probs(self._stale), self._tokenizer.eos_token_id
        )
        done = FAULTS[name](batch, policy, random.Random(1000 * self.settings.seed + number))
        if done is None:
            return None, lambda: None
        self._planted += 1
        return {"name": name, "what": done[0]}, done[1]

    def _inputs(self, batch: MiniBatch, prompts: Tensor) -> dict[str, Tensor]:
        attention = torch.cat([(prompts != self._tokenizer.pad_token_id).long(), batch.mask.long()], 1)
        return {
            "input_ids": torch.cat([prompts, batch.responses], 1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "responses": batch.responses,
        }

    @torch.no_grad()
    def _log_probs(self, model: nn.Module, batch: MiniBatch, prompts: Tensor) -> Tensor:
        inputs = self._inputs(batch, prompts)
        responses = inputs.pop("responses")
        logits = model(**inputs, logits_to_keep=responses.shape[1] + 1).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1)


def _as_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


@dataclass(frozen=True)
class Judged:
    """A mini-batch in its place among others.

    Args:
        norm (float): The largest token-equivalent norm; infinite where it is not finite.
        has_fault (bool): Whether a fault was planted.
        largest_ordinary (float): The largest finite norm without a fault among the ORDINARY mini-batches before.
    """

    norm: float
    has_fault: bool
    largest_ordinary: float

    @property
    def is_spike(self) -> bool:
        """Whether a fault's norm is over what ordinary mini-batches show."""
        return self.has_fault and self.norm > self.largest_ordinary


@dataclass(frozen=True)
class Replayed:
    """Counts of mini-batches.

    Args:
        checked (int): Without a fault, after the warm-up, with a norm that is not zero.
        false_alarms (int): Of these.
        faults (int), spikes (int), caught (int): Faults; those that are spikes; spikes that alarmed.
    """

    checked: int = 0
    false_alarms: int = 0
    faults: int = 0
    spikes: int = 0
    caught: int = 0

    def __add__(self, other: Replayed) -> Replayed:
        return Replayed(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def norms_of(records: Sequence[dict[str, Any]]) -> list[Norm]:
    """The norms of a run's records."""
    norms = [float(record["norm"]) for record in records]
    faults = [record["fault"] is not None for record in records]
    return [(norm if math.isfinite(norm) else math.inf, fault) for norm, fault in zip(norms, faults, strict=True)]


def in_place(norms: Sequence[Norm]) -> list[Judged]:
    """Mini-batches with what is ordinary at their places."""
    batches = []
    for i, (norm, has_fault) in enumerate(norms):
        before = norms[max(0, i - ORDINARY) : i]
        ordinary = [other for other, other_has_fault in before if not other_has_fault and math.isfinite(other)]
        batches.append(Judged(norm, has_fault, max(ordinary, default=0.0)))
    return batches


def replay(norms: Sequence[Norm], alarms: Sequence[bool] | None = None) -> Replayed:
    """Counts what the rule does, or with `alarms` what it did."""
    found = Replayed()
    auto = AutoThreshold()
    for i, batch in enumerate(in_place(norms)):
        threshold = auto.value
        auto.take_in(batch.norm)
        over = not math.isfinite(batch.norm) or (threshold is not None and batch.norm > threshold)
        alarm = over if alarms is None else alarms[i]
        checked = not batch.has_fault and threshold is not None and batch.norm != 0
        found += Replayed(
            checked=int(checked),
            false_alarms=int(checked and alarm),
            faults=int(batch.has_fault),
            spikes=int(batch.is_spike),
            caught=int(batch.is_spike and alarm),
        )
    return found


def replays(norms: Sequence[Norm]) -> dict[str, Replayed]:
    """The counts in the run's order, in other orders, and of k mini-batches at once."""
    found = {"in its order": replay(norms)}
    shuffled = [replay(_shuffled(norms, random.Random(seed))) for seed in range(SHUFFLES)]
    found[f"shuffled, {SHUFFLES} seeds"] = sum(shuffled, Replayed())
    for k in (2, 4, 8):
        parts = [norms[i : i + k] for i in range(0, len(norms), k)]
        largest = [(max(norm for norm, _ in part), any(fault for _, fault in part)) for part in parts]
        found[f"largest of {k}"] = replay(largest)
    return found


def _shuffled(norms: Sequence[Norm], chance: random.Random) -> list[Norm]:
    """Faults in their places, the others shuffled."""
    ordinary = [norm for norm in norms if not norm[1]]
    chance.shuffle(ordinary)
    rest = iter(ordinary)
    return [norm if norm[1] else next(rest) for norm in norms]


def upper_bound(count: int, total: int) -> float | None:
    """The upper end of the one-sided 95% Clopper-Pearson interval of a rate; None of nothing."""
    if total == 0:
        return None
    low, high = count / total, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        at_most = sum(math.comb(total, i) * rate**i * (1 - rate) ** (total - i) for i in range(count + 1))
        low, high = (rate, high) if at_most > 1 - CONFIDENCE else (low, rate)
    return high


def summary(records: list[dict[str, Any]], found: Replayed) -> dict[str, Any]:
    """The figures of the run.

    Args:
        records (list): Of all mini-batches.
        found (Replayed): The recorded alarms.
    """
    ordinary = [record["norm"] for record in records if record["fault"] is None and record["norm"] != 0]
    finite = [norm for norm in ordinary if not isinstance(norm, str)]
    part = max(1, len(finite) // 5)
    # Margins of the checked mini-batches that have a threshold.
    margins = [
        record["norm"] / record["threshold"]
        for record in records
        if record["fault"] is None and record["threshold"] and not isinstance(record["norm"], str)
    ]
    rewards = [record["reward"] for record in records]
    fifth = max(1, len(rewards) // 5)
    return {
        "steps": len({record["step"] for record in records}),
        "mini_batches": len(records),
        "zero_norm": sum(record["norm"] == 0 for record in records),
        "checked": found.checked,
        "false_alarms": found.false_alarms,
        "rate_bound": upper_bound(found.false_alarms, found.checked),
        "largest_margin": max(margins, default=None),
        "reward_first_fifth": mean(rewards[:fifth]),
        "reward_last_fifth": mean(rewards[-fifth:]),
        "median_norm_first_fifth": median(finite[:part]) if finite else None,
        "median_norm_last_fifth": median(finite[-part:]) if finite else None,
        "faults": found.faults,
        "spikes": found.spikes,
        "caught": found.caught,
    }


def fault_list(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each fault with its verdict: "caught", "missed", or "no spike"."""
    faults = []
    for batch, record in zip(in_place(norms_of(records)), records, strict=True):
        if record["fault"] is None:
            continue
        largest = batch.largest_ordinary
        norm = float(record["norm"])
        faults.append(
            {
                **record["fault"],
                "number": record["number"],
                "norm": record["norm"],
                "threshold": record["threshold"],
                "over_threshold": norm / record["threshold"] if record["threshold"] else None,
                "over_largest_ordinary": norm / largest if largest else None,
                "verdict": ("caught" if record["alarm"] else "missed") if batch.is_spike else "no spike",
                "alarm": record["alarm"],
                "diagnosis": record["diagnosis"],
                "sources": record["sources"],
            }
        )
    return faults


def number(value: float | None) -> str:
    """Three digits, or what is not finite."""
    return "–" if value is None else "∞" if not math.isfinite(value) else f"{value:.3g}"


def print_tables(figures: dict[str, Any], faults: list[dict[str, Any]], replayed: dict[str, Replayed]) -> None:
    """Prints everything in Markdown."""
    print("| figure | value |\n|---|---|")
    for name, value in figures.items():
        print(f"| {name} | {number(value)} |" if isinstance(value, float) else f"| {name} | {value} |")
    print("\n| fault | mini-batch | what | norm | over τ | over the largest ordinary | verdict | diagnosis | sources |")
    print("|---|---|---|---|---|---|---|---|---|")
    for fault in sorted(faults, key=lambda fault: (fault["name"], fault["number"])):
        cells = [fault["name"], str(fault["number"]), fault["what"]]
        cells += [number(float(fault["norm"])), number(fault["over_threshold"])]
        cells += [number(fault["over_largest_ordinary"]), fault["verdict"]]
        cells += [fault["diagnosis"] or "–", ", ".join(fault["sources"]) or "–"]
        print(f"| {' | '.join(cells)} |")
    print("\n| replay | checked | false alarms | in 1,000 | spikes caught |\n|---|---|---|---|---|")
    for name, row in replayed.items():
        rate = f"{1000 * row.false_alarms / row.checked:.2f}" if row.checked else "–"
        print(f"| {name} | {row.checked} | {row.false_alarms} | {rate} | {row.caught} of {row.spikes} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the run's records")
    parser.add_argument("--prepared", type=Path, help="what embedded/prepare.py made; without it, only the report")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    for field in dataclasses.fields(Settings):
        kind = type(field.default)
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=kind, default=field.default, help=f"(default: {field.default})")
    arguments = parser.parse_args()
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Settings)})
    warnings.filterwarnings("ignore", "CPU Autocast only supports")
    torch.set_num_threads(1)

    size_file, records_file = (arguments.folder / name for name in ("settings.json", "records.jsonl"))
    if arguments.prepared is not None:
        if settings.first_fault <= WARMUP:
            parser.error(f"--first-fault must be over the warm-up of {WARMUP} mini-batches, got {settings.first_fault}")
        arguments.folder.mkdir(parents=True, exist_ok=True)
        if records_file.exists():
            parser.error(f"{arguments.folder} holds a run: give another folder, or leave out --prepared to judge it")
        size_file.write_text(json.dumps(dataclasses.asdict(settings)))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        run = Run(arguments.prepared, settings)
        with records_file.open("x", buffering=1) as file:
            while run.step < settings.steps:
                records = run.train_step()
                file.writelines(json.dumps(record) + "\n" for record in records)
                alarms = sum(record["alarm"] for record in records)
                rewards = mean(record["reward"] for record in records)
                print(f"step {run.step}: reward {rewards:.2f}, {alarms} alarms", file=sys.stderr)
        dist.destroy_process_group()

    records = [json.loads(line) for line in records_file.open()] if records_file.exists() else []
    if not records:
        sys.exit(f"{arguments.folder} holds no step of a run: give --prepared")
    norms = norms_of(records)
    figures = summary(records, replay(norms, [record["alarm"] for record in records]))
    faults, replayed = fault_list(records), replays(norms)
    print_tables(figures, faults, replayed)
    if arguments.json is not None:
        found = {
            "settings": json.loads(size_file.read_text()),
            "run": figures,
            "faults": faults,
            "replays": {name: vars(row) for name, row in replayed.items()},
        }
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
