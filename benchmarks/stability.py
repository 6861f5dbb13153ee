"""Does LayerClip help? GRPO on sums with a tiny model, with spikes injected at known steps, on one CPU core.

A Llama of three layers learns two-digit sums from examples until a third of its sampled answers are right. Then verl's
patched actor continues training: sampled answers, GRPO advantages, PPO's clipped loss, two mini-batches a step, AdamW.

The runs differ in what is applied between the gradient and the optimizer:

- none: nothing; global: verl's grad_clip alone; fixed, ratio, zscore: LayerClip by that rule (defaults), then the same
  grad_clip. grad_clip is five times the usual norm, as in runs whose norms are well under it; "tight": half the usual
  norm, so that it acts in nearly every step.
- adagc, zclip: the rules of two papers with their own settings (rival_clips.py), then the same grad_clip.
- "+drop": also with GradLoc's spike_action=drop, at three times the usual token norm, with 64 passes at most.

The usual norms are medians over the first 10 steps of a run without spikes. Spikes come in step 20 and in each of
steps 35 to 37, in the first mini-batch:

- layer: the gradient of layers.1 times 1000;
- token: the advantage 1000 (ordinary ones are about 1) for the least likely token of the wrong answers;
- sequence: the same for every token of the wrong answer that holds it;
- no: none.

Reward is the probability of the right answer, averaged over 128 sums that are not trained on. The figures, as mean
(standard deviation) over seeds:

- before: the reward before the first spike; lowest: after it; end: after the last step;
- recover: steps from step 20 to 34, and from step 35 on, in which the reward is under its mean over the three steps
  before 20, or 35 (without spikes this also happens in a few steps);
- lost: the reward of the same run without spikes, less this one's, averaged over the steps from the first spike on;
- distance: between the final parameters and those of the same run without spikes, divided by the distance that the
  run without spikes moved; "other samples" is a run without spikes that draws other sums and answers;
- step: the size of the optimizer step of the first spike, in usual steps (of steps 10 to 19);
- speed: the size of the steps of layers.1 in steps 30 to 34, when Adam's momentum no longer holds the first spike,
  divided by that in the same run without spikes;
- clipped: the share of layers (adagc: of tensors; zclip: of steps) that were clipped, grad_clip apart;
- events: how many spikes GradLoc saw, of four.

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/stability.py --results build/stability.json

Finished runs are kept in the results and not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from operator import itemgetter
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy
import torch
import torch.distributed as dist
from rival_clips import AdaGC, ZClip
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, LayerClipConfig

KINDS = ("no", "layer", "token", "sequence")
LAYER_RULES = ("fixed", "ratio", "zscore")
RIVALS = ("adagc", "zclip")
LOOSE, TIGHT = 5.0, 0.5  # grad_clip in usual norms
TOKEN_THRESHOLD = 3.0  # GradLoc's, in usual token norms

PLUS, EQUALS, END, PAD = 10, 11, 12, 13
PROMPT, RESPONSE = 6, 4  # "12+34=", and up to three digits with an end
SPIKED_LAYER, SPIKE = "model.layers.1.", 1000.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """The size of the experiment.

    Args:
        steps (int): GRPO steps.
        events (tuple): In which of them spikes come: first and last step of each event.
        calibration (int): Steps from which the usual norms are taken.
        skill (float): The reward at which learning from examples stops.
        prompts (int): Sums in a step.
        answers (int): Answers to each.
        learning_rate (float): Of AdamW; beyond that, what verl takes by default.
        adagc_warmup (int): Optimizer steps of AdaGC's warm-up; its paper takes 100, which is most of this run.
    """

    steps: int = 60
    events: tuple[tuple[int, int], ...] = ((20, 20), (35, 37))
    calibration: int = 10
    skill: float = 0.35
    prompts: int = 12
    answers: int = 8
    learning_rate: float = 1e-4
    adagc_warmup: int = 20

    def spikes_in(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.events)


FULL = Settings()
QUICK = Settings(
    steps=13, events=((11, 11), (12, 13)), calibration=2, skill=0.06, prompts=6, answers=8, adagc_warmup=10
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is applied between the gradient and the optimizer.

    Args:
        rule (str): "none", "global", or one of LAYER_RULES or RIVALS.
        drop (bool): Whether GradLoc drops what it finds.
        clip (float): grad_clip in usual norms.
        other_samples (bool): Whether to draw other sums and answers.
    """

    rule: str
    drop: bool = False
    clip: float = LOOSE
    other_samples: bool = False

    @property
    def name(self) -> str:
        words = ", tight" * (self.clip == TIGHT) + ", other samples" * self.other_samples
        return self.rule + "+drop" * self.drop + words


VARIANTS = [Variant(rule, drop) for rule in ("none", "global", *LAYER_RULES) for drop in (False, True)]
VARIANTS += [Variant(rule, clip=TIGHT) for rule in ("global", "zscore")]
VARIANTS += [Variant(rule) for rule in RIVALS]
QUICK_VARIANTS = [Variant("global"), Variant("fixed", drop=True), Variant("adagc")]
OTHER_SAMPLES = Variant("global", other_samples=True)


def numbers_of(values: Tensor, digits: int) -> Tensor:
    """Each number's last digits, shape (len(values), digits)."""
    return torch.stack([values // 10**i % 10 for i in reversed(range(digits))], 1)


def prompts_and_answers(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of sums, (count, PROMPT) and (count, RESPONSE), the answers padded after their end."""
    count = len(pairs)

    def column(token: int) -> Tensor:
        return torch.full((count, 1), token)

    prompts = torch.cat([numbers_of(pairs[:, 0], 2), column(PLUS), numbers_of(pairs[:, 1], 2), column(EQUALS)], 1)
    answers = torch.full((count, RESPONSE), PAD)
    for i, total in enumerate(pairs.sum(1).tolist()):
        tokens = [*map(int, str(total)), END]
        answers[i, : len(tokens)] = torch.tensor(tokens)
    return prompts, answers


def all_pairs(seed: int) -> tuple[Tensor, Tensor]:
    """The sums to train on, and 128 others."""
    pairs = torch.cartesian_prod(torch.arange(100), torch.arange(100))
    pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))]
    return pairs[128:], pairs[:128]


def answer_mask(answers: Tensor) -> Tensor:
    """1 up to the first end, that included; 0 after it."""
    ended = (answers == END).long().cumsum(1) - (answers == END).long()
    return (ended == 0).long()


@torch.no_grad()
def reward_of(model: LlamaForCausalLM, pairs: Tensor) -> float:
    """The probability that a sampled answer is right, averaged over sums."""
    prompts, answers = prompts_and_answers(pairs)
    logits = model(input_ids=torch.cat([prompts, answers], 1)).logits[:, PROMPT - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)
    return (log_probs * answer_mask(answers)).sum(1).exp().mean().item()


def new_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=14,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=16,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def learn_from_examples(seed: int, settings: Settings) -> dict[str, Tensor]:
    """Trains a model until its reward is the skill wanted; returns its weights."""
    model = new_model(seed)
    train, test = all_pairs(seed)
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(20000):
        pairs = train[torch.randint(len(train), (128,), generator=order)]
        prompts, answers = prompts_and_answers(pairs)
        logits = model(input_ids=torch.cat([prompts, answers], 1)).logits[:, PROMPT - 1 : -1]
        labels = answers.masked_fill(answer_mask(answers) == 0, -100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19 and reward_of(model, test) >= settings.skill:
            return {name: value.clone() for name, value in model.state_dict().items()}
    raise RuntimeError(f"the model did not reach a reward of {settings.skill} from examples (seed {seed})")


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Answers at temperature 1 and their tokens' log-probs, each of shape (len(prompts), RESPONSE).

    Args:
        random (Tensor): Uniform random numbers of that shape.
    """
    tokens, past = prompts, None
    answers, log_probs = [], []
    for i in range(RESPONSE):
        output = model(input_ids=tokens, past_key_values=past, use_cache=True)
        past = output.past_key_values
        probabilities = output.logits[:, -1].softmax(-1)
        tokens = (probabilities.cumsum(-1) < random[:, i : i + 1]).sum(-1, keepdim=True).clamp(max=PAD)
        answers.append(tokens)
        log_probs.append(probabilities.gather(-1, tokens).log())
    found = torch.cat(answers, 1)
    return found.masked_fill(answer_mask(found) == 0, PAD), torch.cat(log_probs, 1)


@dataclasses.dataclass(frozen=True)
class Usual:
    """Medians over the steps of a run without spikes: of the gradient's norm, and of GradLoc's token norm."""

    norm: float
    token_norm: float


class Run:
    """One GRPO run.

    Args:
        settings (Settings): Its size.
        weights (dict): What the model starts from.
        variant (Variant): What is tried.
        seed (int): Of the sums and the sampling.
        usual (Usual): The scale of the thresholds; None to measure it.
    """

    def __init__(
        self, settings: Settings, weights: dict[str, Tensor], variant: Variant, seed: int, usual: Usual | None
    ) -> None:
        self.settings = settings
        self.train, self.test = all_pairs(seed)
        self.random = torch.Generator().manual_seed(1000 + seed + 500 * variant.other_samples)
        self.model = new_model(seed)
        self.model.load_state_dict(weights)
        self.factor = 1.0
        # Before all other hooks, so that GradLoc sees the spike as if the layer itself had made it.
        for name, parameter in self.model.named_parameters():
            if name.startswith(SPIKED_LAYER):
                parameter.register_hook(lambda gradient: gradient * self.factor)
        rows = settings.prompts * settings.answers
        layer_rule = variant.rule if variant.rule in LAYER_RULES else None
        grad_clip = math.inf if variant.rule == "none" or usual is None else variant.clip * usual.norm
        config = FSDPActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_mini_batch_size=rows // 2,
            ppo_micro_batch_size_per_gpu=rows // 2,
            use_torch_compile=False,
            fsdp_config=FSDPEngineConfig(dtype="float32"),
            grad_clip=grad_clip,
            layer_clip=LayerClipConfig(rule=layer_rule, enable=True, max_norm=grad_clip)
            if layer_rule
            else LayerClipConfig(),
            spike_detection=variant.drop or usual is None,
            spike_action="drop",
            bisect_budget_steps=64,
            grad_norm_threshold=1e9 if usual is None else TOKEN_THRESHOLD * usual.token_norm,
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
        with contextlib.redirect_stdout(io.StringIO()):
            self.actor = DataParallelPPOActor(config, self.model, optimizer)
        self.rival: AdaGC | ZClip | None = None
        self.rival_clipped: list[float] = []  # in every optimizer step
        if variant.rule in RIVALS:
            self.rival = AdaGC(grad_clip, settings.adagc_warmup) if variant.rule == "adagc" else ZClip()
            self._clip_before_the_actor(self.rival)
        self.rewards = [reward_of(self.model, self.test)]
        # Of every optimizer step: how far it went, and how far the spiked layer.
        self.moved: list[tuple[float, float]] = []
        self.metrics: list[dict[str, Any]] = []
        self._watch(optimizer)

    def _clip_before_the_actor(self, rival: AdaGC | ZClip) -> None:
        step = self.actor._optimizer_step

        def clip_and_step() -> Tensor:
            gradients: list[Any] = [parameter.grad for parameter in self.model.parameters()]
            self.rival_clipped.append(rival.clip(gradients))
            return step()

        self.actor._optimizer_step = clip_and_step  # type: ignore[method-assign]  # the rival's hook

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        before: list[Tensor] = []
        spiked = [i for i, (name, _) in enumerate(self.model.named_parameters()) if name.startswith(SPIKED_LAYER)]

        def remember(*_: Any) -> None:
            before[:] = [parameter.detach().clone() for parameter in self.model.parameters()]

        def measure(*_: Any) -> None:
            moved = torch._foreach_sub([parameter.detach() for parameter in self.model.parameters()], before)
            norms = torch.stack(torch._foreach_norm(moved))
            self.moved.append((norms.norm().item(), norms[spiked].norm().item()))
            self.factor = 1.0  # the spike is in the first mini-batch only

        optimizer.register_step_pre_hook(remember)
        optimizer.register_step_post_hook(measure)

    def step(self, kind: str) -> None:
        """One GRPO step, with a spike of a kind."""
        count = self.settings.prompts * self.settings.answers
        pairs = self.train[torch.randint(len(self.train), (self.settings.prompts,), generator=self.random)]
        prompts, right = prompts_and_answers(pairs.repeat_interleave(self.settings.answers, 0))
        self.model.eval()
        responses, log_probs = sample(self.model, prompts, torch.rand(count, RESPONSE, generator=self.random))
        mask = answer_mask(responses)
        rewards = (responses == right).all(1).float()
        scores = torch.zeros(count, RESPONSE)
        scores[:, 0] = rewards
        groups = numpy.arange(count) // self.settings.answers
        advantages, _ = compute_grpo_outcome_advantage(scores, mask.float(), groups)
        if kind in ("token", "sequence"):
            plant(advantages[: count // 2], log_probs, mask, rewards, kind)
        attention_mask = torch.cat([torch.ones_like(prompts), mask], 1)
        batch = DataProto.from_dict(
            {
                "input_ids": torch.cat([prompts, responses], 1),
                "attention_mask": attention_mask,
                "position_ids": attention_mask.cumsum(1) - 1,
                "responses": responses,
                "response_mask": mask.float(),
                "old_log_probs": log_probs,
                "advantages": advantages,
            },
            meta_info={"temperature": 1.0},
        )
        self.factor = SPIKE if kind == "layer" else 1.0
        self.metrics.append(self.actor.update_policy(batch))
        self.rewards.append(reward_of(self.model, self.test))

    def parameters(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def logged(self, name: str) -> list[Any]:
        """A metric in each step, zero where it is not logged."""
        return [metrics.get(name, 0.0) for metrics in self.metrics]


def plant(advantages: Tensor, log_probs: Tensor, mask: Tensor, rewards: Tensor, kind: str) -> None:
    """Gives the least likely token of the wrong answers, or all of its answer, the advantage of a spike.

    Args:
        advantages (Tensor): Of the first mini-batch, (rows, RESPONSE); changed in place.
        log_probs (Tensor), mask (Tensor), rewards (Tensor): Of the whole batch.
    """
    rows = len(advantages)
    eligible = mask[:rows].bool() & (rewards[:rows, None] == 0)
    if not eligible.any():
        eligible = mask[:rows].bool()
    place = int(log_probs[:rows].masked_fill(~eligible, math.inf).argmin())
    row, position = divmod(place, advantages.shape[1])
    if kind == "token":
        advantages[row, position] = SPIKE
    else:
        advantages[row] = SPIKE * mask[row]


def measure_usual(settings: Settings, weights: dict[str, Tensor], seed: int) -> Usual:
    run = Run(settings, weights, Variant("none"), seed, None)
    for _ in range(settings.calibration):
        run.step("no")
    norms = [norm for step in run.logged("actor/grad_norm") for norm in step]
    # Zeros are steps in which all answers to each sum were right, or all were wrong.
    return Usual(*(median(filter(None, values)) for values in (norms, run.logged("actor/gradloc/token_norm_max"))))


def run_all_kinds(
    settings: Settings, weights: dict[str, Tensor], variant: Variant, seed: int, usual: Usual, beside: Tensor | None
) -> tuple[dict[str, dict[str, Any]], Tensor]:
    """The runs of one variant and seed, that without spikes first.

    Args:
        beside (Tensor, optional): Parameters to take the distance of the run without spikes from.

    Returns:
        tuple: What each run found, and the parameters of the run without spikes.
    """
    found: dict[str, dict[str, Any]] = {}
    start = clean = None
    for kind in KINDS if beside is None else KINDS[:1]:
        started = time.perf_counter()
        run = Run(settings, weights, variant, seed, usual)
        if start is None:
            start = run.parameters()
        for step in range(1, settings.steps + 1):
            run.step(kind if settings.spikes_in(step) else "no")
        end = run.parameters()
        if clean is None:
            clean = end
        distance = (end - (clean if beside is None else beside)).norm() / (clean - start).norm()
        found[kind] = {
            "rewards": run.rewards,
            "moved": run.moved,
            "distance": distance.item(),
            "events": run.logged("actor/gradloc/triggered"),
            "passes": run.logged("actor/gradloc/passes"),
            "clipped": run.logged("actor/layer_clip/fraction") if run.rival is None else run.rival_clipped,
            "seconds": time.perf_counter() - started,
        }
    assert clean is not None  # KINDS begins with the run without spikes
    return found, clean


def summary(settings: Settings, run: dict[str, Any], clean: dict[str, Any]) -> dict[str, float]:
    """A run's figures, as the module's docstring tells them. `rewards[i]` is the reward after step i."""
    rewards, first = run["rewards"], settings.events[0][0]
    starts = [event[0] for event in settings.events]
    recover = 0
    for start, end in zip(starts, [*starts[1:], settings.steps + 1], strict=True):
        level = mean(rewards[start - 3 : start])
        recover += sum(reward < level for reward in rewards[start:end])
    # Two optimizer steps in each step.
    steps = {step: slice(2 * (step - 1), 2 * step) for step in range(1, settings.steps + 1)}
    usual = median(moved for step in range(first - 10, first) for moved, _ in run["moved"][steps[step]])
    late = range(starts[1] - 5, starts[1])
    speeds = [median(moved for step in late for _, moved in either["moved"][steps[step]]) for either in (run, clean)]
    return {
        "before": rewards[first - 1],
        "lowest": min(rewards[first:]),
        "end": rewards[-1],
        "recover": recover,
        "lost": mean(clean["rewards"][first:]) - mean(rewards[first:]),
        "distance": run["distance"],
        "step": run["moved"][2 * (first - 1)][0] / usual,
        "speed": speeds[0] / speeds[1],
        "events": sum(run["events"]),
        "clipped": mean(run["clipped"]),
    }


def decimal(value: float, digits: int) -> str:
    """Without a sign before a rounded zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def print_tables(settings: Settings, variants: list[Variant], results: dict[str, Any]) -> None:
    """Prints the figures over all seeds whose runs are complete, as tables in Markdown."""
    seeds = complete_seeds(results, variants)
    print(f"Seeds: {len(seeds)}.\n")
    by_seed = [results["runs"][seed] for seed in seeds]
    found = {
        (name, kind): [summary(settings, runs[name][kind], runs[name]["no"]) for runs in by_seed]
        for name in (variant.name for variant in variants)
        for kind in KINDS
    }

    def cell(name: str, kind: str, figure: str, digits: int = 3) -> str:
        values = [each[figure] for each in found[name, kind]]
        spread = f" ({decimal(stdev(values), digits)})" if len(values) > 1 else ""
        return decimal(mean(values), digits) + spread

    print("| end · lost · recover · distance | no spikes: end | layer | token | sequence |\n|---|---|---|---|---|")
    short = {"end": 3, "lost": 3, "recover": 0, "distance": 2}
    for variant in variants:
        cells = [f"{mean(each['end'] for each in found[variant.name, 'no']):.3f}"]
        for kind in KINDS[1:]:
            values = {name: mean(map(itemgetter(name), found[variant.name, kind])) for name in short}
            cells.append(" · ".join(decimal(value, short[name]) for name, value in values.items()))
        print(f"| {variant.name} | {' | '.join(cells)} |")
    digits = {"lowest": 3, "end": 3, "recover": 0, "lost": 3, "distance": 2, "step": 1, "speed": 2, "events": 1}
    for kind in KINDS[1:]:
        print(f"\n| {kind} | {' | '.join(digits)} |\n|{'---|' * (len(digits) + 1)}")
        for variant in variants:
            print(f"| {variant.name} | {' | '.join(cell(variant.name, kind, *column) for column in digits.items())} |")
    columns = ["end", "recover", "mean reward less global's", "clipped", "events"]
    print(f"\n| no spikes | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    means = {variant.name: [mean(runs[variant.name]["no"]["rewards"]) for runs in by_seed] for variant in variants}
    for variant in variants:
        gains = [ours - theirs for ours, theirs in zip(means[variant.name], means["global"], strict=True)]
        spread = f" ({stdev(gains):.4f})" if len(gains) > 1 else ""
        clipped = mean(each["clipped"] for each in found[variant.name, "no"])
        cells = [
            cell(variant.name, "no", "end"),
            cell(variant.name, "no", "recover", 0),
            decimal(mean(gains), 4) + spread,
        ]
        cells += [f"{clipped:.2%}", cell(variant.name, "no", "events", 1)]
        print(f"| {variant.name} | {' | '.join(cells)} |")
    before = mean(each["before"] for each in found["global", "no"])
    others = [runs[OTHER_SAMPLES.name]["no"] for runs in by_seed]
    print(f"\nReward before the first spike (global): {before:.3f}.")
    print(
        f"Without spikes, with other samples: end {mean(run['rewards'][-1] for run in others):.3f}, "
        f"distance {mean(run['distance'] for run in others):.2f}."
    )


def complete_seeds(results: dict[str, Any], variants: list[Variant]) -> list[str]:
    names = {variant.name for variant in [*variants, OTHER_SAMPLES]}
    return [seed for seed, runs in results["runs"].items() if names <= set(runs)]


def plot(settings: Settings, results: dict[str, Any], picture: Path) -> None:
    """Draws the reward curves, means over the seeds, and has Chromium take their picture."""
    from plotly.subplots import make_subplots

    seeds = complete_seeds(results, VARIANTS)
    colors = {
        "none": "#999999",
        "global": "#000000",
        "global+drop": "#0072B2",
        "adagc": "#009E73",
        "zclip": "#56B4E9",
        "fixed": "#E69F00",
        "ratio": "#CC79A7",
        "zscore": "#D55E00",
    }
    titles = {
        "no": "no spikes",
        "layer": "one layer's gradient × 1000",
        "token": "one token's advantage 1000",
        "sequence": "one answer's advantages 1000",
    }
    options = {"shared_yaxes": "all", "shared_xaxes": "all", "vertical_spacing": 0.1}
    chart = make_subplots(2, 2, subplot_titles=[titles[kind] for kind in KINDS], **options)
    for i, kind in enumerate(KINDS):
        place = {"row": i // 2 + 1, "col": i % 2 + 1}
        for name, color in colors.items():
            curves = [results["runs"][seed][name][kind]["rewards"] for seed in seeds]
            means = [mean(values) for values in zip(*curves, strict=True)]
            line = {"color": color, "width": 1.5, "dash": "dot" if "drop" in name else "solid"}
            chart.add_scatter(y=means, name=name, mode="lines", line=line, showlegend=i == 0, **place)
        for first, last in settings.events if kind != "no" else ():
            shape = {"x0": first - 1, "x1": last, "fillcolor": "#d00000", "opacity": 0.15, "line_width": 0}
            chart.add_vrect(**shape, **place)
    chart.update_yaxes(title_text="reward", col=1)
    chart.update_xaxes(title_text="step", row=2)
    chart.update_layout(template="simple_white", width=1000, height=640, margin={"t": 40, "l": 60, "r": 20, "b": 50})
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        chart.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
        chromium = shutil.which("chromium")
        if chromium is None:
            raise FileNotFoundError("Chromium is not installed; on Debian: apt-get install chromium")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/user"]
        flags += ["--window-size=1020,660", "--virtual-time-budget=10000", f"--screenshot={picture.resolve()}"]
        subprocess.run([chromium, *flags, page.as_uri()], check=True, capture_output=True, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="JSON file of the runs; read first if it exists")
    parser.add_argument("--seeds", type=int, default=5, help="seeds (default: 5)")
    parser.add_argument("--plot", type=Path, help="picture (PNG) of the reward curves; needs Chromium")
    parser.add_argument("--quick", action="store_true", help="two variants, a few steps: shows that it runs")
    arguments = parser.parse_args()
    settings, variants = (QUICK, QUICK_VARIANTS) if arguments.quick else (FULL, VARIANTS)
    if arguments.quick and arguments.plot:
        parser.error("--plot needs the runs that --quick leaves out")
    warnings.filterwarnings("ignore", "CPU Autocast only supports")
    torch.set_num_threads(1)

    size = json.loads(json.dumps(dataclasses.asdict(settings)))
    results: dict[str, Any] = {"settings": size, "runs": {}}
    if arguments.results.exists():
        results = json.loads(arguments.results.read_text())
        if results["settings"] != size:
            sys.exit(f"{arguments.results} holds runs of other settings: give another file, or remove it")
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for seed in range(arguments.seeds):
        done = results["runs"].setdefault(str(seed), {})
        if len(done) == len(variants) + 1:
            continue
        weights = learn_from_examples(seed, settings)
        usual = measure_usual(settings, weights, seed)
        print(f"seed {seed}: usual norm {usual.norm:.2f}, token norm {usual.token_norm:.0f}", file=sys.stderr)
        for variant in variants:
            if variant.name in done:
                continue
            started = time.perf_counter()
            done[variant.name], clean = run_all_kinds(settings, weights, variant, seed, usual, None)
            if variant.name == "global":
                done[OTHER_SAMPLES.name], _ = run_all_kinds(settings, weights, OTHER_SAMPLES, seed, usual, clean)
            arguments.results.write_text(json.dumps(results))
            print(f"seed {seed}, {variant.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    dist.destroy_process_group()
    print_tables(settings, variants, results)
    if arguments.plot:
        plot(settings, results, arguments.plot)


if __name__ == "__main__":
    main()
