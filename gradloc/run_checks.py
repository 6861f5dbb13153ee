# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of every step that need no spike: does the rollout have the policy's weights, and report its log-probs?"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# The limits of the checks, in nats where they are differences of log-probs; what ordinary runs give:
# docs/verdict-figures.md.
LARGEST = 10.0  # larger differences count as this, so that a single broken log-prob does not make a mean
STALE_RATIO = 0.5
INITIAL_RATIO = 0.2
STALE_GAP = 0.02
STALE_SHARE = 0.25
WHOLE_SHARE = 0.8
CLEAR_SHARE = 0.6
STALE_RESPONSES = 4
TREND_UPDATES = 4
TREND_GAP = 0.1
TREND_GROWTH = 4.0
TREND_HALFWAY = (0.25, 0.85)
ONE_SIDE_NATS = 0.01
ONE_SIDE_TOKENS = 0.25
ONE_SIDE = 0.85
CORRELATION = 0.6
# A correlation takes larger differences, and smaller log-probs, as these: otherwise one token may make it.
CORRELATED_NATS = 1.0
LEAST_LEVEL = -5.0
OTHER_GAP = 0.05
OTHER_LEAST = 0.25
# So many tokens of an update, at least, that the policy did not produce. Without such a fault there are none.
UNSAMPLED_TOKENS = 4
# A rule has to hold in so many updates in a row: neither a broken update nor a rollout that is late by a step or two is
# a lasting cause.
IN_A_ROW = 3
# So many steps after a loaded checkpoint, warnings and verdicts say that there was one.
RESUME_STEPS = 3

_READINGS = 64

# What `own_sums` gives, by place. "gap" is |rollout − policy|, "distance" is |rollout − reference|. A response is stale
# if its log-probs are the reference's and not the policy's, fresh if it is the other way round, and unclear if neither
# holds although one of the two is far. "weighted" are all tokens with a weight; those of them that the policy did not
# produce count nowhere else. "differing" have not the old log-prob for the rollout's.
_SUMS = (
    "weighted",
    "unsampled",
    "differing",
    "tokens",
    "gap",
    "larger",
    "smaller",
    "difference",
    "difference_square",
    "level",
    "level_square",
    "product",
    "responses",
    "over_usual",
    "stale",
    "fresh",
    "unclear",
    "stale_tokens",
    "stale_gap",
    "stale_distance",
)

UNSAMPLED = "unsampled"  # the rule's name, and the warning's
_WEIGHTS = "check that the weights, or the LoRA adapter, of every step reach every rollout worker"
_SAME_WEIGHTS = (
    "Print a checksum of one weight in training and in every rollout worker after each step: they should be equal."
)
_SEE = "In a checkout of GradLoc, `bash run_experiment.sh --embedded --fault {}` plants this fault."


def own_sums(
    micro_batches: Sequence[Mapping[str, Tensor]], first: bool, usual_gap: float, bypass: bool = True
) -> Tensor:
    """What one rank knows of a mini-batch, for `RunChecks.take_in`. No host sync.

    Only response tokens with a weight in the loss and finite log-probs count. The policy's log-probs are those before
    the update. Where there are none of their own (verl's bypass mode takes the rollout's for them), those of the
    update's first mini-batch are taken, which has changed no weight yet.

    Args:
        micro_batches (Sequence[Mapping[str, Tensor]]): Each micro-batch's tensors of shape (rows, response length):
            `response_mask`, `weight`, `log_prob`, `unsampled` (bool: the policy did not produce the token), and if
            available `old_log_prob`, `ref_log_prob`, `rollout_log_prob`.
        first (bool): Whether it is the update's first mini-batch.
        usual_gap (float): Responses whose mean gap is over this are counted.
        bypass (bool): Whether all earlier mini-batches of the update had the rollout's log-probs for the old ones.

    Returns:
        Tensor: float64 of shape (20,), zeros without rollout log-probs.
    """
    total = torch.zeros(len(_SUMS), dtype=torch.float64, device=micro_batches[0]["weight"].device)
    for tokens in micro_batches:
        if "rollout_log_prob" in tokens and ("old_log_prob" in tokens or first):
            total += _of_micro_batch(tokens, first, usual_gap, bypass)
    return total


def _of_micro_batch(tokens: Mapping[str, Tensor], first: bool, usual_gap: float, bypass: bool) -> Tensor:
    log_prob, rollout = tokens["log_prob"].double(), tokens["rollout_log_prob"].double()
    weighted = tokens["response_mask"].bool() & (tokens["weight"] != 0)
    unsampled = weighted & tokens["unsampled"]
    counted = weighted & ~unsampled & rollout.isfinite()
    differing = torch.zeros_like(counted)
    policy = log_prob
    if "old_log_prob" in tokens:
        old = tokens["old_log_prob"].double()
        differing = counted & (old != rollout)
        bypassed = ~differing.any()
        policy = torch.where(bypassed, log_prob, old) if first else old
        if bypass and not first:
            counted = counted & ~bypassed
    counted = counted & policy.isfinite()
    reference = tokens["ref_log_prob"].double() if "ref_log_prob" in tokens else None
    if reference is not None:
        counted = counted & reference.isfinite()

    difference = torch.where(counted, (rollout - policy).clamp(-LARGEST, LARGEST), 0.0)
    gap = difference.abs()
    limited = difference.clamp(-CORRELATED_NATS, CORRELATED_NATS)
    level = torch.where(counted, ((rollout + policy) / 2).clamp(min=LEAST_LEVEL), 0.0)
    count = counted.sum(1)
    mean_gap = gap.sum(1) / count  # NaN without a token, which is over nothing
    sums = {
        "weighted": weighted.sum(),
        "unsampled": unsampled.sum(),
        "differing": differing.sum(),
        "tokens": count.sum(),
        "gap": gap.sum(),
        "larger": (difference > ONE_SIDE_NATS).sum(),
        "smaller": (difference < -ONE_SIDE_NATS).sum(),
        "difference": limited.sum(),
        "difference_square": limited.square().sum(),
        "level": level.sum(),
        "level_square": level.square().sum(),
        "product": (limited * level).sum(),
        "responses": (count > 0).sum(),
        "over_usual": (mean_gap > usual_gap).sum(),
    }
    if reference is not None:
        distance = torch.where(counted, (rollout - reference).clamp(-LARGEST, LARGEST).abs(), 0.0)
        mean_distance = distance.sum(1) / count
        stale = (mean_gap > STALE_GAP) & (mean_distance < STALE_RATIO * mean_gap)
        fresh = (mean_distance > STALE_GAP) & (mean_gap < STALE_RATIO * mean_distance)
        far = (mean_gap > STALE_GAP) | (mean_distance > STALE_GAP)
        of_stale = stale.unsqueeze(1)
        sums |= {
            "stale": stale.sum(),
            "fresh": fresh.sum(),
            "unclear": (far & ~stale & ~fresh).sum(),
            "stale_tokens": (counted & of_stale).sum(),
            "stale_gap": torch.where(of_stale, gap, 0.0).sum(),
            "stale_distance": torch.where(of_stale, distance, 0.0).sum(),
        }
    zero = torch.zeros((), dtype=torch.float64, device=log_prob.device)
    return torch.stack([sums[name].double() if name in sums else zero for name in _SUMS])


class RunChecks:
    """Collects what `own_sums` gives over the steps of a run, and warns; the same on every rank.

    The gap is the mean difference |rollout − policy| of an update. `_readings` holds it for earlier updates, with the
    sum of the learning rates until then: [sum, gap, step]. If it falls to under half of its largest value, the rollout
    got new weights, and the readings begin again with that update.
    """

    def __init__(self) -> None:
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._step: int | None = None
        self._rates = self._rates_before = 0.0
        self._readings: list[list[Any]] = []
        # The rule that held in the last update, and in how many updates in a row; and the smallest gap of all updates.
        self._held, self._times = "", 0
        self._least = math.inf
        self._updates_since_resume: int | None = None
        # The warning of a wrongly scaled loss, of the last mini-batch and of the update; and how many mini-batches in a
        # row had one.
        self._scaled: dict[str, str] | None = None
        self._scaled_in_update: dict[str, str] | None = None
        self._scaled_times = 0
        # In how many updates in a row there were tokens that the policy did not produce.
        self._unsampled_times = 0

    @property
    def steps_since_resume(self) -> int | None:
        """1 in the first step after a loaded checkpoint; None if none was loaded."""
        return self._updates_since_resume

    @property
    def usual_gap(self) -> float:
        """A quarter of the last update's gap: responses over it are those that make the gap."""
        return self._readings[-1][1] / 4 if self._readings else math.inf

    @property
    def bypass(self) -> bool:
        """Whether the update so far had the rollout's log-probs for the old ones, as in verl's bypass mode."""
        return not self._sums["differing"]

    def start_update(self, global_step: int | None) -> None:
        """Begins an update."""
        self._end_update()
        self._step, self._rates_before = global_step, self._rates
        self._scaled_in_update = None
        if self._updates_since_resume is not None:
            self._updates_since_resume += 1

    def take_in(self, by_rank: Tensor | None, scaled: dict[str, str] | None = None) -> None:
        """Adds a mini-batch.

        Args:
            by_rank (Tensor, optional): What `own_sums` returned on each rank, shape (ranks, 20), on the CPU; None after
                the first PPO epoch, whose responses the others have again.
            scaled (dict, optional): A warning that its loss is scaled wrongly; said once there are three in a row.
        """
        self._scaled_times = 0 if scaled is None else self._scaled_times + 1
        self._scaled = scaled if self._scaled_times >= IN_A_ROW else None
        self._scaled_in_update = self._scaled or self._scaled_in_update
        if by_rank is not None:
            for name, value in zip(_SUMS, by_rank.sum(0).tolist(), strict=True):
                self._sums[name] += value

    def add_step(self, learning_rate: float) -> None:
        """Adds an optimizer step that is taken."""
        self._rates += learning_rate

    def warnings(self, of_mini_batch: bool = False) -> list[dict[str, str]]:
        """The warnings of the update so far: dicts of `name`, `sentence` and `check`.

        Args:
            of_mini_batch (bool): Leave out that of a wrongly scaled loss if the last mini-batch's was right.
        """
        note = resume_note(self.steps_since_resume)
        found = [
            warning
            for rule, warning in self._holding().items()
            # The trend is one of several updates already.
            if rule == "stale_trend" or (rule == self._held and self._times >= IN_A_ROW - 1)
        ]
        scaled = self._scaled if of_mini_batch else self._scaled_in_update
        if scaled is not None:
            found.append(scaled)
        if self._has_unsampled() and self._unsampled_times >= IN_A_ROW - 1:
            found.append(self._unsampled())
        return [{**warning, "sentence": warning["sentence"] + note} for warning in found]

    def state_dict(self) -> dict[str, Any]:
        """What later updates are compared with: the same on every rank and for any number of ranks."""
        # Of a copy: a checkpoint may be saved within an update, and by rank 0 alone.
        ended = copy.deepcopy(self)
        ended._end_update()
        held = {"rule": ended._held, "times": ended._times}
        return {"rates": ended._rates, "readings": ended._readings, "least": ended._least, "held": held}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state_dict` after a resume; with None (no saved state) the next step is the first one seen."""
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._rates = 0.0 if state is None else state["rates"]
        self._readings = [] if state is None else [list(reading) for reading in state["readings"]]
        self._least = math.inf if state is None else state["least"]
        self._held, self._times = ("", 0) if state is None else (state["held"]["rule"], state["held"]["times"])
        self._updates_since_resume = 0

    def _end_update(self) -> None:
        """Takes the update's gap into the readings."""
        if self._sums["weighted"]:
            self._unsampled_times = self._unsampled_times + 1 if self._has_unsampled() else 0
        if not self._sums["tokens"]:
            self._sums = dict.fromkeys(_SUMS, 0.0)
            return
        rule = next(iter(self._holding()), "")
        self._held, self._times = rule, self._times + 1 if rule == self._held else 1
        gap = self._mean("gap")
        self._least = min(self._least, gap)
        if any(gap < reading[1] / 2 for reading in self._readings):
            self._readings = []
        self._readings.append([self._rates_before, gap, self._step])
        if len(self._readings) > _READINGS:
            self._readings = self._readings[::2]
        self._sums = dict.fromkeys(_SUMS, 0.0)

    def _holding(self) -> dict[str, dict[str, str]]:
        """The rule that holds in this update, and its warning; empty if none does.

        The reference says most: what agrees with it has its weights, whatever the differences look like.
        """
        if not self._sums["tokens"]:
            return {}
        rules = {
            "stale_reference": self._stale_by_reference,
            "other_log_probs": self._other_log_probs,
            "stale_trend": self._stale_by_trend,
        }
        for rule, check in rules.items():
            if (warning := check()) is not None:
                return {rule: warning}
        return {}

    def _has_unsampled(self) -> bool:
        return self._sums["unsampled"] >= UNSAMPLED_TOKENS

    def _unsampled(self) -> dict[str, str]:
        share = self._sums["unsampled"] / self._sums["weighted"]
        return {
            "name": UNSAMPLED,
            "sentence": f"Tokens that the policy did not produce are trained on ({share:.2%} of the response tokens: "
            "they follow an EOS token, or the rollout gives NaN, or exactly 0 for one that training finds very "
            "unlikely); set response_mask to 0 for tokens that were added later: EOS tokens, templates, tool output.",
            "check": "`response_mask` in the batch should be 1 for the tokens that the rollout returned alone. "
            + _SEE.format("unsampled"),
        }

    def _mean(self, name: str) -> float:
        return self._sums[name] / self._sums["tokens"]

    def _stale_by_reference(self) -> dict[str, str] | None:
        """Responses whose log-probs are the reference's and not the policy's."""
        sums = self._sums
        stale, told = sums["stale"], sums["stale"] + sums["fresh"]
        if stale < STALE_RESPONSES or stale < STALE_SHARE * told or told < CLEAR_SHARE * (told + sums["unclear"]):
            return None
        share = stale / told
        distance, gap = sums["stale_distance"] / sums["stale_tokens"], sums["stale_gap"] / sums["stale_tokens"]
        if distance < INITIAL_RATIO * gap:
            weights = "the weights of step 1"
            agree = f"agree with the reference's (mean difference {distance:.2g}) and not with the policy's ({gap:.2g})"
        else:
            weights = "old weights"
            agree = f"are nearer to the reference's (mean difference {distance:.2g}) than to the policy's ({gap:.2g})"
        return _stale(weights, share, f"log-probs {agree}")

    def _stale_by_trend(self) -> dict[str, str] | None:
        """A gap that was next to nothing, and has grown with the sum of learning rates from then on."""
        if len(self._readings) + 1 < TREND_UPDATES:
            return None
        gap, (start, base, step) = self._mean("gap"), self._readings[0]
        rates = self._rates_before - start
        if not (rates > 0 and gap >= TREND_GAP and gap >= TREND_GROWTH * base):
            return None
        halfway = _interpolated([*self._readings, [self._rates_before, gap, None]], start + rates / 2)
        least, most = TREND_HALFWAY
        if not least <= (halfway - base) / (gap - base) <= most:
            return None
        weights = "the weights of the first step seen" if step is None else f"the weights of step {step}"
        grown = f"log-probs' mean difference from the policy's has grown from {base:.2g} to {gap:.2g} since then"
        return _stale(weights, self._sums["over_usual"] / self._sums["responses"], grown)

    def _other_log_probs(self) -> dict[str, str] | None:
        """Differences of one sign, or larger for likelier tokens, which were there in every step seen."""
        sums, gap = self._sums, self._mean("gap")
        if gap < OTHER_GAP or self._least < OTHER_LEAST * gap:
            return None
        signed = sums["larger"] + sums["smaller"]
        if signed < ONE_SIDE_TOKENS * sums["tokens"]:
            return None
        correlation = self._correlation()
        share = max(sums["larger"], sums["smaller"]) / signed
        if share < ONE_SIDE and abs(correlation) < CORRELATION:
            return None
        if share >= ONE_SIDE:
            word = "larger" if sums["larger"] > sums["smaller"] else "smaller"
            what = f"{word} for {share:.0%} of the tokens where they differ, as from before or after top-p or top-k"
        elif correlation > 0:
            what = "larger for likely tokens and smaller for others, as at a lower temperature"
        else:
            what = "smaller for likely tokens and larger for others, as at a higher temperature"
        return {
            "name": "other_log_probs",
            "sentence": f"The rollout's log-probs are not the ones that training computes: they are {what} (mean "
            f"difference {gap:.2g}); let both be of the same temperature, and from before or after the same top-p and "
            "top-k.",
            "check": "`python -m verl.utils.gradloc.replay BUNDLE` looks for the temperature that fits; "
            + _SEE.format("temperature"),
        }

    def _correlation(self) -> float:
        """Between rollout − policy and the mean of the two: noise in either of them hardly makes one."""
        mean, level = self._mean("difference"), self._mean("level")
        variance = (self._mean("difference_square") - mean**2) * (self._mean("level_square") - level**2)
        return (self._mean("product") - mean * level) / math.sqrt(variance) if variance > 1e-12 else 0.0


def resume_note(steps: int | None) -> str:
    """A sentence, in the first `RESUME_STEPS` steps after a loaded checkpoint; otherwise nothing."""
    return f" This is step {steps} after a checkpoint was loaded." if steps and steps <= RESUME_STEPS else ""


def _stale(weights: str, share: float, why: str) -> dict[str, str]:
    if share >= WHOLE_SHARE:
        name, fault = "stale_weights", "never_synced"
        claim = f"The rollout still samples from {weights}: its {why}"
    else:
        name, fault = "partly_stale", "one_worker"
        claim = (
            f"For {share:.0%} of the responses, as from one of several workers, the rollout still samples from "
            f"{weights}: its {why}"
        )
    return {"name": name, "sentence": f"{claim}; {_WEIGHTS}.", "check": f"{_SAME_WEIGHTS} {_SEE.format(fault)}"}


def _interpolated(readings: Sequence[Sequence[Any]], rates: float) -> float:
    """The gap at a sum of learning rates, between the readings around it."""
    after = next(i for i, reading in enumerate(readings) if reading[0] >= rates)
    (x0, y0, _), (x1, y1, _) = readings[max(after - 1, 0)], readings[after]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (rates - x0) / (x1 - x0)
