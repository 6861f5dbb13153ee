# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The small RL stack of blind.py: servers, agent loop, collator, reward, reference, and verl's patched actor or engine.

A Llama of three layers has learned a random language: a response is a chain of words of very different probabilities,
then an answer to a question about the prompt's digits; with tools, the chain calls one now and then. Each step, two
rollout workers load the policy's weights, sample and report log-probs in their own precision, rows are collated, and
verl's actor computes the old log-probs and updates. A fault is a function that stands at one of these stages.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import torch
from localization_actor import ENGINE, Actor
from peft import LoraConfig, get_peft_model
from sums_task import tiny_llama
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from verl import DataProto
from verl.trainer.config.algorithm import AlgoConfig, RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import compute_gae_advantage_return, get_adv_estimator_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, PolicyLossConfig

if not ENGINE:
    from gradloc.adapters.dp_actor import write_evidence

FIRST_WORD, WORDS = 10, 24
PLAIN, IMAGE, TOOLS, THINK, ANSWER, CALL, RESULT, END, PAD, VOCABULARY = 34, 35, 36, 37, 38, 39, 40, 41, 42, 43
PROMPT, RESPONSE, TOOL_TOKENS = 6, 48, 3
RARE = 3  # times as many answers are sampled where a natural spike is wanted
TAU = 3.0  # in usual token norms; what a natural spike is over: NATURAL_TAU
NATURAL_TAU = 1.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a run is trained. Nothing of it is a fault."""

    rate: float = 3e-4  # the learning rate
    # The rollout's precision: "fp32", "bf16", "fp8" (weights rounded to float8), or "moe" (bf16, and in 1% of the
    # positions an expert of one layer is another one).
    engine: str = "fp32"
    behind: int = 0  # by how many steps the rollout's weights are late
    temperature: float = 1.0  # of sampling and training
    top_p: float = 1.0  # of sampling, with log-probs before the cut, as top_k, which is 0 for all
    top_k: int = 0
    limit: int = RESPONSE  # the most tokens of a response
    prefix: tuple[int, ...] = ()  # what each response is forced to begin with, not trained
    prompts: int = 8  # of a step, with `answers` each
    answers: int = 8
    length: int = 8  # the mean number of words that the start model gives, 8 or 16
    tools: bool = False  # whether responses call tools, whose output is not trained on
    advantage: str = "grpo"  # verl's name of the estimator, or "grpo without std"
    gamma: float = 1.0  # the estimator's discount
    kl: float = 0.0  # the KL loss's coefficient; `kl_reward` is that of a penalty in the reward
    kl_reward: float = 0.0
    reference: bool = True  # whether the batch has the reference's log-probs
    correction: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings of verl's rollout correction
    dense: bool = False  # rewards are graded instead of 0 and 1
    actor: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # other keys of the actor
    adapter: int = 0  # the rank of a LoRA adapter, which alone is trained; 0 for none
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    # Functions as a fault's, with None for its strength, that make a recipe of their own.
    stages: Mapping[str, Callable[[Any, Any, Any], Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Row:
    """A response as the agent loop has it: lists of one length, `mask` 0 for what a tool said."""

    prompt: list[int]
    ids: list[int]
    log_probs: list[float]
    mask: list[int]

    def append(self, token: int, log_prob: float, mask: int) -> None:
        self.ids, self.log_probs, self.mask = [*self.ids, token], [*self.log_probs, log_prob], [*self.mask, mask]

    def cut(self, kept: int) -> Row:
        self.ids, self.log_probs, self.mask = self.ids[:kept], self.log_probs[:kept], self.mask[:kept]
        return self


@dataclasses.dataclass(frozen=True)
class Start:
    """A model that has learned the language, and the usual token norm of a run that begins with it."""

    weights: dict[str, Tensor]
    token_norm: float


def initial(seed: int) -> LlamaForCausalLM:
    return tiny_llama(seed, VOCABULARY, 48, 64, pad_token_id=PAD, eos_token_id=END, bos_token_id=None)


def draw_prompts(count: int, tools: bool, generator: torch.Generator) -> Tensor:
    """Prompts of shape (count, PROMPT): a kind, four digits, THINK."""
    digits = torch.randint(10, (count, 4), generator=generator)
    kinds = torch.where(torch.rand(count, 1, generator=generator) < 0.3, IMAGE, PLAIN)
    return torch.cat([torch.full_like(kinds, TOOLS) if tools else kinds, digits, torch.full((count, 1), THINK)], 1)


def learn_language(seed: int, length: int) -> dict[str, Tensor]:
    """Weights after 300 steps on examples of a language that the seed draws."""
    generator = torch.Generator().manual_seed(seed)
    chain = (2.0 * torch.randn(WORDS, WORDS, generator=generator)).softmax(-1)
    model = initial(seed)
    steps, rows = 300, 48
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        prompts = draw_prompts(rows, step % 3 == 2, generator).tolist()
        examples = [prompt + _example(prompt, length, chain, generator) for prompt in prompts]
        width = max(map(len, examples))
        tokens = torch.tensor([example + [PAD] * (width - len(example)) for example in examples])
        labels = tokens.masked_fill(tokens == PAD, -100)
        labels[:, :PROMPT] = -100
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def _example(prompt: list[int], length: int, chain: Tensor, generator: torch.Generator) -> list[int]:
    def chance() -> float:
        return float(torch.rand((), generator=generator))

    word = int(torch.randint(WORDS, (), generator=generator))
    tokens = [FIRST_WORD + word]
    while chance() > 1 / length and len(tokens) < RESPONSE - 4:
        word = int(torch.multinomial(chain[word], 1, generator=generator))
        tokens.append(FIRST_WORD + word)
        if prompt[0] == TOOLS and chance() < 0.15 and len(tokens) < RESPONSE - 8:
            tokens += [CALL, RESULT, *torch.randint(10, (TOOL_TOKENS - 1,), generator=generator).tolist()]
    right = max(prompt[1:5]) if chance() < 0.5 else prompt[1 + int(4 * chance())]
    return [*tokens, ANSWER, right, min(prompt[1:5]), END]


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Tensor,
    setting: Setting,
    generator: torch.Generator,
    processed: str = "",
    penalty: Callable[[Tensor, list[Row]], Tensor] | None = None,
) -> list[Row]:
    """Samples with a KV cache, as a server does, and notes the sampler's log-probs.

    Prompts have the shape (rows, PROMPT). Log-probs are `processed`: "" at the temperature before any cut, as training
    computes them; "top_p" after the cut, "raw" before the temperature, "likeliest" those of the likeliest token. The
    penalty changes logits of shape (rows, VOCABULARY) by the rows so far.
    """
    rows = [Row(prompt, [], [], []) for prompt in prompts.tolist()]
    forced: list[deque[int]] = [deque(setting.prefix) for _ in rows]
    tokens, past = prompts, None
    for _ in range(setting.limit):
        output = model(input_ids=tokens, past_key_values=past, use_cache=True)
        past = output.past_key_values
        raw = output.logits[:, -1].float()
        if penalty is not None:
            raw = penalty(raw, rows)
        full = (raw / setting.temperature).log_softmax(-1)
        cut = full
        if setting.top_p < 1:
            ordered, order = full.exp().sort(descending=True)
            kept = torch.zeros_like(full, dtype=torch.bool)
            kept.scatter_(1, order, ordered.cumsum(-1) - ordered < setting.top_p)
            cut = full.masked_fill(~kept, -torch.inf).log_softmax(-1)
        if setting.top_k:
            cut = cut.masked_fill(cut < cut.topk(setting.top_k).values[:, -1:], -torch.inf).log_softmax(-1)
        chosen = torch.multinomial(cut.exp(), 1, generator=generator)
        of_all = {"top_p": cut, "raw": raw.log_softmax(-1)}.get(processed, full)
        named = of_all.argmax(-1, keepdim=True) if processed == "likeliest" else chosen
        reported = of_all.gather(-1, named)[:, 0].tolist()
        for i, row in enumerate(rows):
            if row.ids and row.ids[-1] == END:
                chosen[i] = PAD
            elif forced[i]:
                chosen[i] = forced[i].popleft()
                row.append(int(chosen[i]), 0.0, 0)
            else:
                row.append(int(chosen[i]), reported[i], 1)
                if setting.tools and int(chosen[i]) == CALL:
                    said = torch.randint(10, (TOOL_TOKENS - 1,), generator=generator).tolist()
                    forced[i].extend([RESULT, *said])
        tokens = chosen
        if bool((tokens == PAD).all()):
            break
    return rows


def padded(lists: list[list[Any]], value: float) -> Tensor:
    return torch.tensor([(each + [value] * RESPONSE)[:RESPONSE] for each in lists])


def collate(rows: list[Row]) -> dict[str, Tensor]:
    """verl's tensors of rows, of which each list is padded by itself."""
    prompts, responses = torch.tensor([row.prompt for row in rows]), padded([row.ids for row in rows], PAD)
    valid = torch.arange(RESPONSE) < torch.tensor([[len(row.ids)] for row in rows])
    attention_mask = torch.cat([torch.ones_like(prompts), valid.long()], 1)
    return {
        "prompts": prompts,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "responses": responses,
        "response_mask": padded([row.mask for row in rows], 0).float(),
        "rollout_log_probs": padded([row.log_probs for row in rows], 0.0).float(),
    }


def reward_of(row: Row, dense: bool = False) -> float:
    """1 for an answer that is the largest digit; graded, one tenth less for each digit that it is too small."""
    if ANSWER not in row.ids or row.ids.index(ANSWER) + 1 >= len(row.ids):
        return 0.0
    answer, right = row.ids[row.ids.index(ANSWER) + 1], max(row.prompt[1:5])
    return max(1.0 - abs(answer - right) / 10, 0.0) if dense and answer < 10 else float(answer == right)


class World:
    """A run."""

    def __init__(
        self,
        setting: Setting,
        start: Start,
        seed: int,  # of everything that is drawn
        fault: Any,  # with `stages`: functions of (world, strength, value), which change it or return another one
        strength: Any,
        begin: int,  # the step, from 0, from which on they are called
        tau: float,  # GradLoc's threshold in usual token norms
        natural: int,  # the step in which rare responses are preferred, or -1
        directory: str,  # where the evidence is written
    ) -> None:
        self.setting, self.fault, self.strength, self.begin, self.natural = setting, fault, strength, begin, natural
        self.step_number = 0
        self.random = torch.Generator().manual_seed(1000 + seed)
        self.model: Any = self.copy_of(start.weights)
        if setting.adapter:
            self.model = get_peft_model(self.model, LoraConfig(r=setting.adapter, target_modules="all-linear"))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: Any = setting.optimizer(trained, lr=setting.rate, weight_decay=0.01)
        rows = setting.prompts * setting.answers
        policy_loss = PolicyLossConfig(loss_mode=setting.actor.get("loss_mode", "vanilla"))
        options: dict[str, Any] = dict(
            strategy="fsdp2" if ENGINE else "fsdp",
            rollout_n=1,
            ppo_mini_batch_size=rows // 2,
            ppo_micro_batch_size_per_gpu=rows // 4,
            use_torch_compile=False,
            fsdp_config=FSDPEngineConfig(dtype="float32", use_torch_compile=False),
            policy_loss=policy_loss,
            use_kl_loss=setting.kl > 0,
            kl_loss_coef=setting.kl,
            spike_detection=True,
            grad_norm_threshold=tau * start.token_norm,
            bisect_budget_steps=32,
            bisect_budget_seconds=None,
            bisect_dump_dir=directory,
            spike_replay=0,
        )
        options |= {key: value for key, value in setting.actor.items() if key != "loss_mode"}
        with contextlib.redirect_stdout(io.StringIO()):
            self.config = FSDPActorConfig(**options)
            self.actor: Any = Actor(self.config, self.model, self.optimizer)
            self.reference: Any = Actor(self.config, self.copy_of(start.weights))
        self.past = [self.weights()]
        self.workers = [self.copy_of(start.weights) for _ in range(2)]
        self.penalty: Callable[[Tensor, list[Row]], Tensor] | None = None  # faults change these
        self.processed, self.trained_temperature = "", setting.temperature
        self.rows: list[Row] = []
        self.token_norms: list[float] = []
        self.gaps: list[float] = []
        self.reward_mean = 0.5
        if not ENGINE:
            self._stand_in_forward()

    def _stand_in_forward(self) -> None:
        forward = self.actor._forward_micro_batch

        def stood_in(micro_batch: Any, temperature: float, calculate_entropy: bool = False) -> Any:
            def call(changed: Any) -> Any:
                return forward(changed, temperature=temperature, calculate_entropy=calculate_entropy)

            if self.is_struck("forward"):
                return self.fault.stages["forward"](self, self.strength, (call, micro_batch))
            return call(micro_batch)

        self.actor._forward_micro_batch = stood_in

    @staticmethod
    def copy_of(weights: dict[str, Tensor]) -> LlamaForCausalLM:
        model = initial(0)
        model.load_state_dict(weights)
        return model.eval()

    def weights(self) -> dict[str, Tensor]:
        model = copy.deepcopy(self.model).merge_and_unload() if self.setting.adapter else self.model
        return {name: value.clone() for name, value in model.state_dict().items()}

    def is_struck(self, stage: str) -> bool:
        struck = self.fault is not None and stage in self.fault.stages
        return struck and (self.step_number == self.begin if self.fault.once else self.step_number >= self.begin)

    def at(self, stage: str, value: Any) -> Any:
        """A value after what the recipe, and the fault if there is one now, do at this stage."""
        struck = self.fault.stages if self.is_struck(stage) else {}
        for stages, strength in ((self.setting.stages, None), (struck, self.strength)):
            changed = stages[stage](self, strength, value) if stage in stages else None
            value = value if changed is None else changed
        return value

    def uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self.random)

    def normal(self, count: int) -> Tensor:
        return torch.randn(count, generator=self.random)

    def step(self) -> None:
        setting = self.setting
        late = self.past[max(len(self.past) - 1 - setting.behind, 0)]
        loaded = self.at("sync", [late, late])
        for worker, weights in zip(self.workers, loaded, strict=True):
            worker.load_state_dict(weights)
        # Workers with the same weights give what one of them gives, in half the time.
        self.rows = self.at("rows", self._sample(self.workers[: 1 if loaded[0] is loaded[1] else 2]))
        tensors = self.at("batch", collate(self.rows))
        uids: Any = [f"{self.step_number}-{i // setting.answers}" for i in range(len(self.rows))]
        columns: dict[str, Any] = {"uid": uids, "data_source": ["digits"] * len(uids)}
        columns = {name: numpy.array(each, dtype=object) for name, each in self.at("columns", columns).items()}
        rewards = self.at("rewards", torch.tensor([reward_of(row, setting.dense) for row in self.rows]))
        self.at("model", self.model)
        tensors |= self._log_probs(tensors)
        tensors = self.at("log_probs", tensors)
        tensors |= self._advantages(tensors, rewards, columns["uid"])
        if setting.correction.get("bypass_mode"):
            tensors["old_log_probs"] = tensors["rollout_log_probs"].clone()
        elif setting.correction:
            batch = DataProto.from_dict(tensors)
            compute_rollout_correction_and_add_to_batch(batch, RolloutCorrectionConfig(**setting.correction))
            tensors |= {name: batch.batch[name] for name in batch.batch.keys()}
        tensors = self.at("update", tensors)
        # verl's own loops are never late, and say so.
        meta = {"temperature": self.trained_temperature, "rollout_is_current": not setting.behind}
        data = DataProto.from_dict(tensors, columns, meta_info={**meta, "global_steps": self.step_number + 1})
        with self.fault.stages["during"](self, self.strength) if self.is_struck("during") else contextlib.nullcontext():
            with contextlib.redirect_stdout(io.StringIO()):
                metrics = self.actor.update_policy(data)
        if not ENGINE:  # which writes it itself
            write_evidence(self.actor, data, None, metrics)
        self.token_norms.append(float(metrics["actor/gradloc/token_norm_max"]))
        mask = tensors["response_mask"].bool()
        self.gaps.append(float((tensors["rollout_log_probs"] - tensors["old_log_probs"])[mask].abs().nanmean()))
        self.past.append(self.weights())
        self.step_number += 1

    def _sample(self, workers: list[LlamaForCausalLM]) -> list[Row]:
        setting = self.setting
        rare = RARE if self.step_number == self.natural else 1
        prompts = draw_prompts(setting.prompts, setting.tools, self.random).repeat_interleave(setting.answers, 0)
        prompts = self.at("tasks", prompts).repeat_interleave(rare, 0)
        rows: list[Row] = []
        for worker, own in zip(workers, prompts.chunk(len(workers)), strict=True):
            served, given = self._served(worker), self.at("prompts", own)
            rows += generate(served, given, setting, self.random, self.processed, self.penalty)
        for row, prompt in zip(rows, prompts.tolist(), strict=True):
            row.prompt = prompt
        if rare > 1:  # of each group those with the rarest tokens
            groups = [rows[i : i + rare * setting.answers] for i in range(0, len(rows), rare * setting.answers)]
            rows = [row for group in groups for row in sorted(group, key=lambda x: min(x.log_probs))[: setting.answers]]
        return rows

    def _served(self, worker: nn.Module) -> nn.Module:
        """A worker's model in the engine's precision."""
        if self.setting.engine == "fp32":
            return worker
        model = copy.deepcopy(worker).to(torch.bfloat16)
        if self.setting.engine == "fp8":
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.data = parameter.data.to(torch.float8_e4m3fn).to(torch.bfloat16)
        if self.setting.engine == "moe":
            reroute(model, 0.01, self.random)
        return model

    def _log_probs(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        meta = {"micro_batch_size": len(self.rows), "temperature": self.trained_temperature, "use_dynamic_bsz": False}
        data = DataProto.from_dict(tensors, meta_info=meta)

        def of(actor: Any) -> Tensor:
            if not ENGINE:
                return actor.compute_log_prob(data)[0]
            with torch.no_grad():
                return actor.forward(tensors, self.trained_temperature)[0]

        found = {"old_log_probs": of(self.actor)}
        if self.setting.reference:
            found["ref_log_prob"] = of(self.reference)
        return found

    def _advantages(self, tensors: dict[str, Tensor], rewards: Tensor, uids: numpy.ndarray) -> dict[str, Tensor]:
        setting, mask = self.setting, tensors["response_mask"]
        last = (tensors["attention_mask"][:, PROMPT:].sum(1) - 1).clamp(min=0)
        scores = rewards if rewards.dim() == 2 else torch.zeros_like(mask)  # a recipe may reward each token
        if rewards.dim() == 1:
            scores[torch.arange(len(scores)), last] = rewards
        token_rewards = scores.clone()
        if setting.kl_reward:
            token_rewards -= setting.kl_reward * (tensors["old_log_probs"] - tensors["ref_log_prob"]) * mask
        if setting.advantage == "gae":
            values = torch.full_like(mask, self.reward_mean)
            advantages, returns = compute_gae_advantage_return(token_rewards, values, mask, setting.gamma, 0.95)
            self.reward_mean += 0.2 * (float(scores.sum(1).mean()) - self.reward_mean)
        else:
            name, *without_std = setting.advantage.split(" without ")
            options: dict[str, Any] = {"norm_adv_by_std_in_grpo": False} if without_std else {}
            advantages, returns = get_adv_estimator_fn(name)(
                token_rewards, mask, index=uids, config=AlgoConfig(gamma=setting.gamma), **options
            )
        found = {"advantages": advantages, "returns": returns, "token_level_scores": scores}
        return self.at("advantages", {**found, "token_level_rewards": token_rewards})


def reroute(model: nn.Module, share: float, generator: torch.Generator) -> None:
    """In a share of the positions, layer 1's MLP gives half of what it should, as where another expert is taken."""

    def routed(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        jumps = torch.rand(output.shape[:-1], generator=generator) < share
        return torch.where(jumps[..., None], 0.5 * output.roll(1, -1), output)

    model.get_submodule("model.layers.1.mlp").register_forward_hook(routed)


def start_of(seed: int, length: int, folder: Path) -> Start:
    """One of three starts, kept in a folder."""
    path = folder / f"{seed % 3}-{length}.pt"
    if not path.exists():
        weights = learn_language(seed % 3, length)
        world = World(Setting(length=length), Start(weights, 1e9), 77, None, None, 0, 1.0, -1, str(folder / "usual"))
        for _ in range(5):
            world.step()
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        torch.save((weights, median(world.token_norms)), part)
        part.replace(path)
    return Start(*torch.load(path, weights_only=True))


def lines_in(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run's steps, and of its spikes."""
    paths = [path for name in ("steps.jsonl", "spikes.jsonl") if (path := directory / name).exists()]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def times_in(lines: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The largest residual of each identity in a run, in times of the usual."""
    found: dict[str, float] = {}
    for line in lines:
        for name, state in line.get("identities", {}).items():
            if state["state"] != "unchecked":
                found[name] = max(found.get(name, 0.0), 1e6 if state["times"] is None else state["times"])
    return found


def said_in(lines: Iterable[dict[str, Any]]) -> list[tuple[int, str, str, str]]:
    """What a user reads: (step, "warning", "verdict", "change" or "fact", name, identity or place) of every line.

    The name is "" for a spike of no known cause, the identity "" where none is given.
    """
    said = []
    for line in lines:
        step, verdict = line["global_step"], line.get("verdict")
        if "verdict" not in line:  # of a step; a spike has its step's warnings
            said += [(step, "warning", each["name"], each.get("identity", "")) for each in line.get("warnings", ())]
            said += [(step, "change", each["what"], "changes") for each in line.get("changes", ())]
        elif verdict:
            said.append((step, "verdict", verdict["cause"] or "", ""))
            said += [(step, "fact", each["source"], each["source"]) for each in verdict.get("facts", ())]
    return said
