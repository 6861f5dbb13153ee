# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A GRPO run of the embedded profile's model in one process, which can be stopped and resumed, with planted faults."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import random
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pandas
import torch
from auto_threshold_faults import FAULTS, MiniBatch, Policy, schedule
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils.gradloc import monitor
from verl.utils.gradloc.measure.token_weights import movable, square_weight
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig

# How many steps old the weights are that give the log-probs of the fault "stale".
STALE_STEPS = 3


@dataclasses.dataclass(frozen=True)
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
    """The run, from its checkpoint in the folder if there is one.

    Args:
        folder (Path): For records.jsonl, with one line for each mini-batch, and for the checkpoint.
        prepared (Path): What embedded/prepare.py made.
        settings (Settings): The size.
    """

    def __init__(self, folder: Path, prepared: Path, settings: Settings) -> None:
        self.settings = settings
        self._records_file, self._checkpoint = folder / "records.jsonl", folder / "checkpoint.pt"
        torch.manual_seed(settings.seed)
        tokenizer: Any = AutoTokenizer.from_pretrained(prepared / "model")
        self._tokenizer = tokenizer
        model = AutoModelForCausalLM.from_pretrained(prepared / "model", dtype=torch.float32)
        self._model: nn.Module = model
        self._stale: nn.Module | None = None
        self._data = pandas.read_parquet(prepared / "train.parquet")
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
        if self._checkpoint.exists():
            self._resume()

    def train_step(self) -> list[dict[str, Any]]:
        """One rollout and its updates; returns and writes their records."""
        settings = self.settings
        source = torch.Generator().manual_seed(1_000_003 * settings.seed + self.step)
        self._keep_stale_weights()
        started = time.perf_counter()
        rows, rewards = self._roll_out(source)
        seconds = time.perf_counter() - started
        order = torch.randperm(len(rewards), generator=source)
        records = []
        for i, chosen in enumerate(order.split(settings.mini_batch)):
            number = self.step * settings.mini_batches + i
            record = {"number": number, "step": self.step, "reward": rewards[chosen].mean().item()}
            records.append(record | self._update({name: tensor[chosen] for name, tensor in rows.items()}, number))
        records[0]["rollout_seconds"] = seconds
        self.step += 1
        with self._records_file.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        return records

    def save(self) -> None:
        """Writes the checkpoint."""
        state = {
            "step": self.step,
            "planted": self._planted,
            "model": self._model.state_dict(),
            "optimizer": self._actor.actor_optimizer.state_dict(),
            "gradloc": self._actor.gradloc.state_dict(),
            "stale": None if self._stale is None else self._stale.state_dict(),
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._checkpoint)

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True)
        self.step, self._planted = state["step"], state["planted"]
        self._model.load_state_dict(state["model"])
        self._actor.actor_optimizer.load_state_dict(state["optimizer"])
        self._actor.gradloc.load_state_dict(state["gradloc"])
        if state["stale"] is not None:
            self._copy_weights(state["stale"])
        # Steps after the checkpoint are repeated.
        with self._records_file.open("a+") as file:
            file.seek(0)
            kept = [line for line in file if json.loads(line)["step"] < self.step]
        self._records_file.write_text("".join(kept))

    def _keep_stale_weights(self) -> None:
        """Copies the weights if a stale fault comes in STALE_STEPS steps."""
        soon = {at // self.settings.mini_batches - STALE_STEPS for at, name in self._schedule if name == "stale"}
        if self.step in soon:
            self._copy_weights(self._model.state_dict())

    def _copy_weights(self, weights: dict[str, Tensor]) -> None:
        if self._stale is None:
            self._stale = AutoModelForCausalLM.from_config(self._model.config, dtype=torch.float32).eval()
        self._stale.load_state_dict(weights)

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
        started = time.perf_counter()
        prompts = rows.pop("prompts")
        batch = MiniBatch(**rows)
        fault, undo = self._plant(batch, prompts, number)
        data = self._inputs(batch, prompts)
        data |= {"response_mask": batch.mask, "old_log_probs": batch.old_log_probs, "advantages": batch.advantages}
        moved: list[int] = []
        with patch.object(monitor, "square_weight", partial(_counting, moved)):
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
            "passes": int(metrics["actor/gradloc/passes"]),
            "gradient_norm": _as_json(metrics["actor/grad_norm"][0]),
            "tokens": int(batch.mask.sum()),
            "movable": moved[0],
            "seconds": time.perf_counter() - started,
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


def _counting(counts: list[int], tokens: Mapping[str, Tensor]) -> Tensor:
    """What `square_weight` returns; adds the number of tokens that can move to `counts`."""
    counts.append(int(movable(tokens).sum()))
    return square_weight(tokens)


def _as_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
