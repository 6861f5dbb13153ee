# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""GRPO on sums with verl's patched actor, spikes that can be injected into it, and what can be done against them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from statistics import mean, median
from typing import Any
from unittest import mock

import numpy
import torch
from sums_task import PAD, PROMPT, RESPONSE, all_pairs, answer_mask, new_model, prompts_and_answers, reward_of, sample
from torch import Tensor, nn
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, LayerClipConfig, TokenClipConfig

LOOSE, TIGHT = 5.0, 0.5  # grad_clip in usual norms
LEARNING_RATE = 1e-4  # of AdamW; beyond that, what verl takes by default
TOKEN_THRESHOLD = 3.0  # GradLoc's, in usual token norms
SPIKED_LAYER, ABOVE, SPIKE, FLOOR = 1, 2, 1000.0, 1.1


@dataclasses.dataclass(frozen=True)
class Settings:
    """The size of a run, and how it is trained.

    Args:
        steps (int): GRPO steps.
        events (tuple): In which of them spikes come: first and last step of each event.
        calibration (int): Steps from which the usual norms are taken.
        skill (float): The reward at which learning from examples stops.
        prompts (int): Sums in a step.
        answers (int): Answers to each.
        warmup (int): Optimizer steps before LayerClip and TokenClip clip.
    """

    steps: int = 60
    events: tuple[tuple[int, int], ...] = ((20, 20), (35, 37))
    calibration: int = 10
    skill: float = 0.35
    prompts: int = 12
    answers: int = 8
    warmup: int = 20

    def spikes_in(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.events)


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is done against spikes.

    Args:
        name (str): As in the tables.
        rule (str): "none" for no clip at all, "global" for grad_clip alone, or "LayerClip" before it.
        token_clip (float): TokenClip's max_share, the largest share of the tokens that it drops; 0 without TokenClip.
        action (str): GradLoc's spike_action; "" without GradLoc.
        clip (float): grad_clip in usual norms.
    """

    name: str
    rule: str = "global"
    token_clip: float = 0.0
    action: str = ""
    clip: float = LOOSE


@dataclasses.dataclass(frozen=True)
class Usual:
    """Medians over the steps of a run without spikes: of the gradient's norm, and of GradLoc's token norm."""

    norm: float
    token_norm: float


@dataclasses.dataclass(frozen=True)
class Samples:
    """What one step trains on.

    Args:
        prompts (Tensor): Shape (rows, PROMPT).
        responses (Tensor): Shape (rows, RESPONSE).
        log_probs (Tensor): The sampler's, shape (rows, RESPONSE).
        right (Tensor): Whether the response is right, which is its reward; shape (rows,).
    """

    prompts: Tensor
    responses: Tensor
    log_probs: Tensor
    right: Tensor


class Run:
    """One GRPO run.

    Args:
        settings (Settings): Its size.
        weights (dict): What the model starts from.
        variant (Variant): What is tried.
        seed (int): Of the sums and the sampling.
        usual (Usual): The scale of the thresholds; None to measure it.

    Attributes:
        rewards (list[float]): Before the first step, and after each that was not replayed.
        moved (list[float]): Of every optimizer step: how far it went; 0 for one that was left out.
        clipped (list[float]): In every optimizer step, the share of the layers that LayerClip has cut.
        samples (list[Samples]): What every step trained on.
    """

    def __init__(
        self, settings: Settings, weights: dict[str, Tensor], variant: Variant, seed: int, usual: Usual | None
    ) -> None:
        self.settings = settings
        self.train, self.test = all_pairs(seed)
        self.random = torch.Generator().manual_seed(1000 + seed)
        self.model = new_model(seed)
        self.model.load_state_dict(weights)
        self.spike = Spike(self.model)
        rows = settings.prompts * settings.answers
        grad_clip = math.inf if variant.rule == "none" or usual is None else variant.clip * usual.norm
        config = FSDPActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_mini_batch_size=rows // 2,
            ppo_micro_batch_size_per_gpu=rows // 2,
            use_torch_compile=False,
            fsdp_config=FSDPEngineConfig(dtype="float32"),
            grad_clip=grad_clip,
            layer_clip=LayerClipConfig(enable=variant.rule == "LayerClip", warmup_steps=settings.warmup),
            spike_detection=bool(variant.action) or usual is None,
            spike_action=variant.action or "log",
            bisect_budget_steps=64,
            bisect_budget_seconds=None,
            spike_replay=0,
            grad_norm_threshold=1e9 if usual is None else TOKEN_THRESHOLD * usual.token_norm,
            token_clip=TokenClipConfig(
                enable=variant.token_clip > 0,
                action="drop",
                factor=4.0,
                max_share=variant.token_clip or TokenClipConfig.max_share,
                warmup_steps=settings.warmup,
            ),
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
        with contextlib.redirect_stdout(io.StringIO()):
            self.actor: Any = DataParallelPPOActor(config, self.model, optimizer)
        self.rewards = [reward_of(self.model, self.test)]
        self.moved: list[float] = []
        self.clipped: list[float] = []
        self.samples: list[Samples] = []
        self.metrics: list[dict[str, Any]] = []
        self._watch(optimizer)

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        before: list[Tensor] = []

        def remember(*_: Any) -> None:
            before[:] = [parameter.detach().clone() for parameter in self.model.parameters()]

        def measure(*_: Any) -> None:
            moved = torch._foreach_sub([parameter.detach() for parameter in self.model.parameters()], before)
            end_of_mini_batch(torch.stack(torch._foreach_norm(moved)).norm().item())

        def end_of_mini_batch(moved: float) -> None:
            self.moved.append(moved)
            self.spike.clear()  # it is in the first mini-batch only
            if self.actor.layer_clip is not None:
                factors = [layer["factor"] for layer in self.actor.layer_clip.last_step.values()]
                self.clipped.append(mean(factor < 1 for factor in factors))

        optimizer.register_step_pre_hook(remember)
        optimizer.register_step_post_hook(measure)
        watch = self.actor.watch
        if watch is not None:
            step = watch.step

            def step_or_none(epoch: int, mini_batch: int, optimizer_step: Any) -> Any:
                taken = mock.Mock(side_effect=optimizer_step)
                norm = step(epoch, mini_batch, taken)
                if not taken.called:
                    end_of_mini_batch(0.0)
                return norm

            watch.step = step_or_none  # steps left out have no other hook

    def draw(self) -> Samples:
        """Sums and sampled answers to them."""
        count = self.settings.prompts * self.settings.answers
        pairs = self.train[torch.randint(len(self.train), (self.settings.prompts,), generator=self.random)]
        prompts, right_responses = prompts_and_answers(pairs.repeat_interleave(self.settings.answers, 0))
        self.model.eval()
        responses, log_probs = sample(self.model, prompts, torch.rand(count, RESPONSE, generator=self.random))
        right = (responses == right_responses).all(1)
        return Samples(prompts, responses, log_probs, right)

    def step(self, kind: str, replayed: Samples | None = None) -> None:
        """One GRPO step, with a spike of a kind.

        Args:
            kind (str): "no", or a kind of `Spike`.
            replayed (Samples, optional): What to train on; None to draw it. With samples no reward is measured.
        """
        samples = self.draw() if replayed is None else replayed
        count = len(samples.prompts)
        mask = answer_mask(samples.responses)
        scores = torch.zeros(count, RESPONSE)
        scores[:, 0] = samples.right.float()
        groups = numpy.arange(count) // self.settings.answers
        advantages, _ = compute_grpo_outcome_advantage(scores, mask.float(), groups)
        tokens = torch.cat([samples.prompts, samples.responses], 1)
        attention_mask = torch.cat([torch.ones_like(samples.prompts), mask], 1)
        tensors = {
            "input_ids": tokens,
            "attention_mask": attention_mask,
            "position_ids": attention_mask.cumsum(1) - 1,
            "responses": samples.responses,
            "response_mask": mask.float(),
            "old_log_probs": self._log_probs(tokens, samples.responses),
            "advantages": advantages,
        }
        if kind != "no":
            self.spike.plant(kind, tokens[: count // 2], advantages, samples)
        batch = DataProto.from_dict(tensors, meta_info={"temperature": 1.0})
        self.metrics.append(self.actor.update_policy(batch))
        self.samples.append(samples)
        if replayed is None:
            self.rewards.append(reward_of(self.model, self.test))

    @torch.no_grad()
    def _log_probs(self, tokens: Tensor, responses: Tensor) -> Tensor:
        # Anew by the policy that is trained, as verl does, so that a replayed step is on-policy, too.
        logits = self.model(input_ids=tokens).logits[:, PROMPT - 1 : -1]
        return logits.log_softmax(-1).gather(-1, responses.unsqueeze(-1)).squeeze(-1)

    def parameters(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def logged(self, name: str) -> list[Any]:
        """A metric in each step, zero where it is not logged."""
        return [metrics.get(name, 0.0) for metrics in self.metrics]


class Spike:
    """Spikes of one optimizer step, until `clear`.

    - layer: the gradient of layers.1 times 1000; floor: times 1.1;
    - token: the advantage 1000 (ordinary ones are about 1) for the least likely token of the wrong answers;
    - sequence: the same for every token of the wrong answer that holds it;
    - blow: the least likely token of wrong answers that have an advantage; its backward signal is multiplied by 1000
      where it enters layers.1 from above, so that layers.1, layers.0 and the embedding get huge gradients, with a
      normal ratio and advantage.

    Args:
        model (nn.Module): The model. Its hooks come before all others, so that every rule sees the spike as if the
            model had made it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.factor = 1.0
        self.blown: tuple[Tensor, int] | None = None  # the row's tokens, and the position
        self._tokens = torch.empty(0)
        for name, parameter in model.named_parameters():
            if name.startswith(f"model.layers.{SPIKED_LAYER}."):
                parameter.register_hook(lambda gradient: gradient * self.factor)
        model.register_forward_pre_hook(self._remember, with_kwargs=True)
        model.get_submodule(f"model.layers.{ABOVE}").register_forward_pre_hook(self._blow)

    def clear(self) -> None:
        self.factor, self.blown = 1.0, None

    def plant(self, kind: str, tokens: Tensor, advantages: Tensor, samples: Samples) -> None:
        """Plants a spike in the first mini-batch.

        Args:
            kind (str): One of the above.
            tokens (Tensor): The mini-batch's, (rows, PROMPT + RESPONSE).
            advantages (Tensor): The whole batch's, (more rows, RESPONSE); changed in place.
            samples (Samples): The whole batch.
        """
        if kind in ("layer", "floor"):
            self.factor = SPIKE if kind == "layer" else FLOOR
            return
        rows = len(tokens)
        mask = answer_mask(samples.responses[:rows]).bool()
        wrong = mask & ~samples.right[:rows, None]
        eligible = [wrong, mask]
        if kind == "blow":
            # From a row that exists once, so that also passes over some of the rows find it.
            _, place, times = tokens.unique(dim=0, return_inverse=True, return_counts=True)
            alone = (times[place] == 1)[:, None] & (advantages[:rows] != 0)
            eligible = [wrong & alone, mask & alone, *eligible]
        chosen = next(where for where in eligible if where.any())
        least = int(samples.log_probs[:rows].masked_fill(~chosen, math.inf).argmin())
        row, position = divmod(least, RESPONSE)
        if kind == "blow":
            self.blown = tokens[row], PROMPT - 1 + position
        elif kind == "token":
            advantages[row, position] = SPIKE
        else:
            advantages[row] = SPIKE * mask[row]

    def _remember(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]

    def _blow(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = args[0]
        if self.blown is None or not hidden.requires_grad:
            return None
        tokens, position = self.blown
        width = self._tokens.shape[1]  # less in passes that leave out columns of padding
        rows = (self._tokens == tokens[:width]).all(1) & bool((tokens[width:] == PAD).all())
        if position >= width or not rows.any():
            return None
        weights = torch.ones(*hidden.shape[:2], 1)
        weights[rows, position] = SPIKE
        hidden = hidden.view_as(hidden)
        hidden.register_hook(lambda gradient: gradient * weights)
        return (hidden, *args[1:])


def measure_usual(settings: Settings, weights: dict[str, Tensor], seed: int) -> Usual:
    """The usual norms, from the first steps of a run without spikes and without clips."""
    run = Run(settings, weights, Variant("usual", "none"), seed, None)
    for _ in range(settings.calibration):
        run.step("no")
    norms = [norm for step in run.logged("actor/grad_norm") for norm in step]
    # Zeros are steps in which all answers to each sum were right, or all were wrong.
    return Usual(*(median(filter(None, values)) for values in (norms, run.logged("actor/gradloc/token_norm_max"))))
