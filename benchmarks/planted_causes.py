# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The causes that cause_remedy.py plants in a step of GRPO on sums, in its first mini-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from grpo_run import PROMPT, SPIKED_LAYER, Run, Samples
from sums_task import END, PAD, RESPONSE, answer_mask, prompts_and_answers, sample
from torch import Tensor, nn
from verl import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

REWARD = 100.0
STEPS_BEHIND = 3
NATS = 8.0
CUT_AFTER = 1  # tokens of a response that is cut
LARGEST_WEIGHT = 1e20  # a larger one overflows where a norm squares it

Tensors = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Cause:
    """What goes wrong in one step.

    Args:
        name (str): As in the tables.
        kind (str): One of `Spike.KINDS`.
        samples (Callable, optional): Gets the run, the samples and earlier weights; returns what is trained on.
        change (Callable, optional): Gets the run, the samples and the batch's tensors, which it changes in place.
        breaks (Callable, optional): Breaks the model that is trained, after the samples were drawn.
        ratio_clip (bool): Whether the loss has PPO's ratio clip.
    """

    name: str
    kind: str = "no"
    samples: Callable[[Run, Samples, list[Tensors]], Samples] | None = None
    change: Callable[[Run, Samples, Tensors], None] | None = None
    breaks: Callable[[nn.Module], None] | None = None
    ratio_clip: bool = True


def cut_with_an_end(run: Run, samples: Samples, past: list[Tensors]) -> Samples:
    """Each fourth response of the mini-batch is cut, and gets an EOS token with the log-prob 0."""
    return _cut(samples, slice(0, _half(samples), 4))


def cut_with_an_end_and_rewarded(run: Run, samples: Samples, past: list[Tensors]) -> Samples:
    """One response of the mini-batch is cut, gets an EOS token with the log-prob 0, and a reward of 100."""
    found = _cut(samples, slice(0, 1))
    found.rewards[0] = REWARD
    return found


def _cut(samples: Samples, rows: slice) -> Samples:
    responses, log_probs = samples.responses.clone(), samples.log_probs.clone()
    responses[rows, CUT_AFTER + 1 :] = PAD
    responses[rows, CUT_AFTER] = END
    log_probs[rows, CUT_AFTER] = 0.0
    right = (responses == _right_responses(samples)).all(1)
    return Samples(samples.prompts, responses, log_probs, right, right.float())


def drawn_with_earlier_weights(
    run: Run, samples: Samples, past: list[Tensors], steps_behind: int | None = None
) -> Samples:
    """The sums of the step with responses of the policy of some steps ago; of the first one without a number."""
    now = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(past[0 if steps_behind is None else -steps_behind])
    uniform = torch.rand(len(samples.prompts), RESPONSE, generator=run.random)
    responses, log_probs = sample(run.model, samples.prompts, uniform)
    run.model.load_state_dict(now)
    right = (responses == _right_responses(samples)).all(1)
    return Samples(samples.prompts, responses, log_probs, right, right.float())


def _right_responses(samples: Samples) -> Tensor:
    digits = samples.prompts
    pairs = torch.stack([10 * digits[:, 0] + digits[:, 1], 10 * digits[:, 3] + digits[:, 4]], 1)
    return prompts_and_answers(pairs)[1]


def _half(samples: Samples) -> int:
    return len(samples.prompts) // 2


def reward_of_100(run: Run, samples: Samples, tensors: Tensors) -> None:
    """One right response of the mini-batch (the first, if none is right) gets a reward of 100; no division by std."""
    rewards = samples.rewards.clone()
    rewards[int(rewards[: _half(samples)].argmax())] = REWARD
    tensors["advantages"][:] = advantages_of(run, samples, rewards, by_std=False)


def not_divided(run: Run, samples: Samples, tensors: Tensors) -> None:
    """Advantages without the division by the standard deviation."""
    tensors["advantages"][:] = advantages_of(run, samples, samples.rewards, by_std=False)


def advantages_of(run: Run, samples: Samples, rewards: Tensor, by_std: bool) -> Tensor:
    """GRPO's advantages of other rewards, with or without the division by the standard deviation."""
    scores = torch.zeros(samples.responses.shape)
    scores[:, 0] = rewards
    groups = torch.arange(len(scores)) // run.settings.answers
    mask = answer_mask(samples.responses).float()
    return compute_grpo_outcome_advantage(scores, mask, groups.numpy(), norm_adv_by_std_in_grpo=by_std)[0]


def advantage_of_nan(run: Run, samples: Samples, tensors: Tensors) -> None:
    """One token of the response with the largest advantage."""
    sizes = tensors["advantages"][: _half(samples)].abs().sum(1)
    row = int(sizes.argmax())
    tensors["advantages"][row, int(tensors["response_mask"][row].sum()) // 2] = torch.nan


def trusts_the_rollout(run: Run, samples: Samples, tensors: Tensors) -> None:
    """The old log-probs are the rollout's, not computed anew."""
    rows = _half(samples)
    tensors["old_log_probs"][:rows] = tensors["rollout_log_probs"][:rows]


def of_another_temperature(run: Run, samples: Samples, tensors: Tensors, temperature: float) -> None:
    """The log-probs that the rollout gives are of logits that were divided by a temperature; its samples are not."""
    logits = run.model(input_ids=tensors["input_ids"]).logits[:, PROMPT - 1 : -1].detach() / temperature
    log_probs = logits.log_softmax(-1).gather(-1, samples.responses.unsqueeze(-1)).squeeze(-1)
    rows = _half(samples)
    tensors["rollout_log_probs"][:rows] = log_probs[:rows]
    trusts_the_rollout(run, samples, tensors)


def one_log_prob_too_low(run: Run, samples: Samples, tensors: Tensors) -> None:
    """The rollout's log-prob of one token is too low: the least likely one that has an advantage."""
    rows = _half(samples)
    eligible = tensors["response_mask"][:rows].bool() & (tensors["advantages"][:rows] != 0)
    least = int(samples.log_probs[:rows].masked_fill(~eligible, torch.inf).argmin())
    tensors["rollout_log_probs"][divmod(least, RESPONSE)] -= NATS
    trusts_the_rollout(run, samples, tensors)


def shifted(run: Run, samples: Samples, tensors: Tensors) -> None:
    """Each token gets the rollout's log-prob of the token after it, the last one gets 0."""
    rows = _half(samples)
    mask = tensors["response_mask"][:rows]
    given = (samples.log_probs[:rows] * mask).roll(-1, 1)
    given[:, -1] = 0.0
    tensors["rollout_log_probs"][:rows] = given
    trusts_the_rollout(run, samples, tensors)


@torch.no_grad()
def flip_a_bit(model: nn.Module) -> None:
    """Flips one exponent bit of one weight, that with the largest result which can still be squared."""
    weight = model.get_parameter(f"model.layers.{SPIKED_LAYER}.mlp.down_proj.weight").view(-1)
    bits = weight.view(torch.int32)
    best = (0.0, 0, 0)
    for bit in range(23, 31):
        flipped = (bits ^ (1 << bit)).view(torch.float32).abs()
        flipped[~(flipped < LARGEST_WEIGHT)] = 0.0
        best = max(best, (float(flipped.max()), bit, int(flipped.argmax())))
    _, bit, place = best
    bits[place] ^= 1 << bit


def _with_and_without_ratio_clip(cause: Cause) -> list[Cause]:
    return [cause, dataclasses.replace(cause, name=f"{cause.name}, no ratio clip", ratio_clip=False)]


CAUSES = [
    Cause("token", "token"),
    Cause("sequence", "sequence"),
    Cause("blow", "blow"),
    Cause("layer", "layer"),
    Cause("advantage", change=reward_of_100),
    Cause("nan", change=advantage_of_nan),
    Cause("unsampled", samples=cut_with_an_end),
    Cause("unsampled, reward 100", samples=cut_with_an_end_and_rewarded, change=not_divided),
    Cause("bitflip", breaks=flip_a_bit),
    *_with_and_without_ratio_clip(Cause("one log-prob", change=one_log_prob_too_low)),
    *_with_and_without_ratio_clip(Cause("temperature 0.5", change=partial(of_another_temperature, temperature=0.5))),
    *_with_and_without_ratio_clip(Cause("temperature 2", change=partial(of_another_temperature, temperature=2.0))),
    *_with_and_without_ratio_clip(Cause("shifted", change=shifted)),
    *_with_and_without_ratio_clip(
        Cause(
            f"stale by {STEPS_BEHIND}",
            samples=partial(drawn_with_earlier_weights, steps_behind=STEPS_BEHIND),
            change=trusts_the_rollout,
        )
    ),
    *_with_and_without_ratio_clip(
        Cause("stale from the start", samples=drawn_with_earlier_weights, change=trusts_the_rollout)
    ),
]


def prepare(cause: Cause, run: Run, past: list[Tensors]) -> Samples:
    """What the run's next step trains on; the model may be broken after that.

    Args:
        cause (Cause): What is planted.
        run (Run): The run.
        past (list[dict]): The weights before each step so far.
    """
    samples = run.draw()
    if cause.samples is not None:
        samples = cause.samples(run, samples, past)
    if cause.breaks is not None:
        cause.breaks(run.model)
    return samples


@dataclasses.dataclass(frozen=True)
class Planted:
    """An error of the backward pass, as `Spike` has it: a layer's factor, and the blown token."""

    factor: float = 1.0
    blown: tuple[Tensor, int] | None = None


def take_step(cause: Cause, run: Run, samples: Samples, correction: dict[str, Any] | None = None) -> Planted:
    """The step with the cause in it.

    Args:
        cause (Cause): What is planted.
        run (Run): The run.
        samples (Samples): What `prepare` gave.
        correction (dict, optional): Settings of verl's rollout correction.
    """
    planted = Planted()

    def change(tensors: Tensors) -> None:
        nonlocal planted
        planted = Planted(run.spike.factor, run.spike.blown)
        tensors["rollout_log_probs"] = samples.log_probs.clone()
        if cause.change is not None:
            cause.change(run, samples, tensors)
        if correction is not None:
            correct(tensors, correction)

    run.step(cause.kind, samples, change)
    return planted


def correct(tensors: Tensors, settings: dict[str, Any]) -> None:
    """What verl's trainer does to a batch with these settings of `algorithm.rollout_correction`."""
    batch = DataProto.from_dict(tensors)
    compute_rollout_correction_and_add_to_batch(batch, RolloutCorrectionConfig(**settings))
    for name in ("response_mask", "rollout_is_weights"):
        if name in batch.batch:
            tensors[name] = batch.batch[name]
