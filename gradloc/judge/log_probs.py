# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of every update's log-probs: does the rollout have the policy's weights, and report its log-probs?

A name needs evidence for it. Old weights are named where the rollout agrees with an earlier policy, the reference. A
gap that has grown or jumped is reported as that. Positions come first: wrong ones make all else look wrong.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ..lines import RunWarning
from ..sums import APART_GAP, STALE_GAP, STALE_RATIO
from .alignment import Off, find_off, misaligned_warning
from .log_prob_sums import LogProbSums
from .progress import IN_A_ROW, SEE, Progress, RunCheck, as_warning
from .rows import REPEATED
from .shares import percent

# The warning that says what is seen, and no cause.
ENGINES_APART = "engines_apart"
# That the optimizer moved the policy too far.
LEARNING_RATE = "learning_rate"
# That the reference is another model.
REFERENCE = "reference"
# Those that are about some tokens alone, or say nothing of what makes a norm.
OF_SOME = ("unsampled", REFERENCE, REPEATED, ENGINES_APART)
# That the rollout goes farther than the policy.
ADAPTER_SCALE = "adapter_scale"
# Those that another temperature explains as well as tokens that were not sampled.
OTHER_LOG_PROBS = "other_log_probs"
# Rules that one update shows.
_SELF_EVIDENT = ("positive", "own_log_probs", "policy_log_probs", "misaligned", REFERENCE, LEARNING_RATE)
# Those about the rollout's log-probs.
OF_ROLLOUT = ("misaligned", "retokenized", "stale_weights", "partly_stale", ADAPTER_SCALE, OTHER_LOG_PROBS)

# The limits of the checks, in nats where they are differences of log-probs.
INITIAL_RATIO = 0.2
WHOLE_SHARE = 0.8
# A rollout that is late by up to three steps has the first weights until the fourth update.
STALE_UPDATES = 5
STALE_AT_ONCE = 0.1
# A gap over `APART_GAP` that is so many times what it was is reported: as a drift if it has grown all the time, so that
# halfway it was between these shares of the rise, and as a jump if one update made most of it. The first updates of a
# run whose rollout is late by a step or two have smaller gaps than all others.
APART_GROWTH = 4.0
APART_HALFWAY = (0.25, 0.75)
APART_UPDATES = 6
# The same before any optimizer step, when late weights make no gap: 8 bits make about half of it.
FIRST_GAP = 0.04
# A rollout that is at most so far from the reference as the policy is has weights of some steps before. They are old
# if the gap has risen so many times since it was over `APART_GAP`: that is no matter of being late by a step or two.
NEARER = 0.8
STILL_RISING = 1.5
# One of several workers has old weights if responses stay of two kinds, and the gap of the far ones grows so many
# times: that of a late one does not. Old weights lie on the policy's way from the reference, behind it: where that is
# known, differences have such a correlation with it.
SPLIT_GROWTH, BEHIND = 2.0, -0.25
# Weights of a step of this run are at most so many times as far from the policy as the reference is.
OFF_PATH = 1.5
# A rollout has a part of the policy's way from the reference, or more than all of it, if log-probs say so with so much
# of a correlation. A late rollout lacks ever less of a way that grows: about the part that the last steps' learning
# rates have of all. What is never sent stays as large a part of the way when that of the last step is halved.
LED_BY, LED_CORRELATION = 0.25, 0.6
LAST_PART, LAG_LEFT, LAG_MOST = 0.5, 0.7, 0.9
NEXT_LAG = 0.9  # lags are kept for parts of the last step that are by so much smaller than the one before
# An optimizer step does not make so large a gap of so small a one.
POLICY_GAP = (0.05, 0.3)
# The later mini-batches of an update show, in the mean, about half of how far its steps move the policy. A rollout that
# is late by up to `LATE_UPDATES` updates has a gap of at most `PATH` times the sum of these.
PATH, LATE_UPDATES = 2.5, 4
# A learning rate so many times the largest one before moves the policy farther than a rollout is late.
RATE_FACTOR = 5.0
# Log-probs of training that have so little relation to the rollout's, and are so many nats away, belong to others.
HARDLY_RELATED = 0.35
MISALIGNED_NATS = 1.0
# Of log-probs of the likeliest token, or cut at a floor, more have the same sign than other weights or prompts give.
ONE_SIDE, SURELY_ONE_SIDE = 0.85, 0.9
CORRELATION = 0.6
# The same where it has been so since the first update, in which both engines have the same weights.
FIRST_CORRELATION = 0.35
# The same where log-probs agreed before. Weights that are suddenly late make hardly as strong a correlation.
SUDDEN_CORRELATION = 0.65
OTHER_GAP = 0.05
# Where most have one sign, smaller differences tell; as something new, if at most so many had one before.
ONE_SIDE_GAP, MIXED = 0.02, 0.7
# Of the tokens' log-probs in both engines: those of other tokens are no other log-probs of the same.
OTHER_RELATED = 0.7
# No engine's own noise makes training's two log-probs of the same weights so different, in the mean.
OWN_GAP = 0.05
# The share of positive log-probs which no rounding gives.
POSITIVE = 0.05
# So many tokens of a run, at least, that the policy did not produce. Without such a fault there are none.
UNSAMPLED_TOKENS = 4
_READINGS = 64

_OFF = "off"  # the updates with a response whose log-probs belong to other tokens, clear or not
UNSAMPLED = "unsampled"  # the rule's name, and the warning's
_BEFORE = "already before any optimizer step"
_WEIGHTS = (
    "check that the weights, or the LoRA adapter, of every step reach every rollout worker, and that no old responses "
    "are trained on again"
)
_SAME_WEIGHTS = (
    "Print a checksum of one weight in training and in every rollout worker after each step: they should be equal."
)
_SAME_SCORES = (
    "Let the engine score `input_ids` of one row (vLLM: prompt_logprobs). If that agrees with `old_log_probs`, the "
    "responses were sampled after another prompt: compare the token ids that the engine was given with `prompts`. If "
    "not, compare a checksum of each weight in both, then their RoPE settings."
)


class LogProbChecks(RunCheck):
    """The checks of log-probs, by what `own_sums` and `own_alignment` give.

    The gap is the mean difference |rollout − policy| of an update. `_readings` holds [gap, step] of every `_stride`-th
    update. If it falls to under half of the last ones' median, the rollout got new weights, and the readings begin
    again with that update.
    """

    NOW = ("_sums",)

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress)
        self._sums = LogProbSums()
        self._readings: list[list[Any]] = []
        self._stride, self._since_reading = 1, 0
        # By rule, in how many updates it held since one contradicted it; the gap of the last update, and the smallest.
        self._times: dict[str, int] = {}
        self._updates = 0
        self._last_gap = math.inf
        self._least = math.inf
        # The gap of the last update before any optimizer step.
        self._first_gap = 0.0
        # The first step since which log-probs are misaligned.
        self._misaligned_since: int | None = None
        # `LogProbSums.tilt` of the last update.
        self._last_tilt: float | None = None
        # `LogProbSums.share_of_one_sign` of the last update, 0 where few differ.
        self._one_side = 0.0
        # Of the updates in a row whose responses are of two kinds, the smallest gap of the far ones, and how many.
        self._split: tuple[float, int] = (math.inf, 0)
        # Whether they were so before any optimizer step, when all workers have the same weights.
        self._split_at_first = False
        # Since the rollout lacks a part of the policy's way: [the last step's part of it, what the rollout lacks].
        self._lags: list[list[float]] = []
        # How far each of the last updates' own steps moved the policy; empty where updates have a single step.
        self._steps: list[float] = []
        # The mean |rollout − reference| of the last update.
        self._distance = 0.0
        # The last rule about log-probs, its warning, the gap of the last update that had the evidence for it, and how
        # many since then had none.
        self._said: tuple[str, RunWarning, float, int] | None = None
        # How many tokens the updates before had that the policy did not produce.
        self._unsampled_before = 0.0

    def take_in(self, sums: Sequence[float] | None, alignment: Sequence[float] | None) -> None:
        """Adds a mini-batch; see `RunChecks.take_in`."""
        self._sums.add(sums, alignment)

    def warnings(self) -> list[RunWarning]:
        """Of the update so far, but for `unsampled`; one at most."""
        found = self._holding()
        warning = found[1] if found and self._is_certain(found[0]) else self._lasting()
        return [] if warning is None else [warning]

    def unsampled(self) -> list[RunWarning]:
        """The warning of tokens that the policy did not produce, once the run has had some."""
        count = self._sums["unsampled"]
        if not count or self._unsampled_before + count < UNSAMPLED_TOKENS:
            return []
        return [
            as_warning(
                UNSAMPLED,
                "Tokens that the policy did not produce are trained on",
                "; set response_mask to 0 for tokens that were added later: EOS tokens, templates, tool output. If "
                "the policy did produce them, their log-probs are missing: take the engine's.",
                "`response_mask` in the batch should be 1 for the tokens that the rollout returned alone. "
                + SEE.format("unsampled"),
                f"{count / self._sums['weighted']:.2%} of the response tokens: they follow an EOS token, or the "
                "rollout gives NaN, or exactly 0 for one that training finds very unlikely",
            )
        ]

    def end_update(self) -> None:
        """Takes the update's figures into what later ones are compared with."""
        self._unsampled_before += self._sums["unsampled"]
        if self._sums["tokens"]:
            self._end_gap()
        self._sums = LogProbSums()

    def _leaps(self) -> bool:
        """Whether the gap was small in the last update, and is large now: no optimizer step does that."""
        before, after = POLICY_GAP
        return self._last_gap < before and self._sums.mean("gap") > after

    def _may_have_moved(self, updates: int) -> bool | None:
        """Whether the last updates may have moved the policy by the gap; None where nothing shows how far they went."""
        return self._sums.mean("gap") <= PATH * sum(self._steps[-updates:]) if self._steps else None

    def _is_far_by_late_weights(self) -> bool:
        """Whether the policy moves so far in a few updates that late weights may make a gap as large as a fault's."""
        return sum(self._steps) >= POLICY_GAP[1] and bool(self._may_have_moved(LATE_UPDATES))

    def _begins(self) -> bool:
        """Whether differences are suddenly others: larger, tilted, or of one sign. Late weights begin in update 2."""
        is_of_one_sign = self._one_side < MIXED and (self._sums.share_of_one_sign() or 0.0) >= ONE_SIDE
        # Late weights do not make differences depend on how likely a token is.
        before, tilt = self._last_tilt, abs(self._sums.tilt())
        is_tilted = before is not None and abs(before) < CORRELATION / 2 and tilt >= SUDDEN_CORRELATION
        return self._leaps() or (self._updates > 1 and (is_of_one_sign or is_tilted))

    def _lasting(self, rule: str | None = None) -> RunWarning | None:
        """The last one (of a rule), while the gap stays: one or two updates that cannot tell say what others said."""
        if self._said is None or not self._sums["tokens"] or rule not in (None, self._said[0]):
            return None
        _, warning, gap, updates = self._said
        return warning if updates < IN_A_ROW - 1 and self._sums.mean("gap") >= gap / 2 else None

    def _is_certain(self, rule: str) -> bool:
        """Whether the update shows for certain what holds in it, or others before it have shown the same."""
        if rule in _SELF_EVIDENT:
            return True
        if rule == "stale_reference":
            part = self._sums["stale_distance"] / self._sums["stale_gap"]
            if self._updates < (STALE_UPDATES - 1 if part <= STALE_AT_ONCE else STALE_UPDATES):
                return False
            # A late rollout's responses may be nearer to the reference while the policy moves ever faster.
            if part >= INITIAL_RATIO and self._is_far_by_late_weights():
                return False
        is_first = self._progress.is_first
        at_once = {
            ENGINES_APART: self._leaps()
            or self._leaves_path()
            or (is_first and self._sums.mean("gap") > POLICY_GAP[1]),
            # Differences of one sign may be those of tokens that were not sampled: of some responses, or turns.
            OTHER_LOG_PROBS: is_first and abs(self._sums.tilt()) >= CORRELATION,
            # Without a reference, in two: responses differ.
            "stale_worker": self._sums["distance"] > 0 or self._times.get("stale_worker", 0) > 0,
        }
        return at_once.get(rule, False) or self._times.get(rule, 0) >= IN_A_ROW - 1

    def _end_gap(self) -> None:
        gap, off = self._sums.mean("gap"), self._off()
        held = self._holding()
        rule = "" if held is None else held[0]
        is_certain = held is not None and self._is_certain(rule)
        if held is not None and is_certain:
            # An update can tell that log-probs are no longer misaligned, and has a learning rate of its own.
            self._said = None if rule in ("misaligned", LEARNING_RATE) else (*held, gap, 0)
        elif self._said is not None:
            self._said = (*self._said[:3], self._said[3] + 1) if self._lasting() else None
        # Later updates do not show it, where log-probs have some relation again.
        is_of_policy = rule == "misaligned" and self._policy_by_reference() is not None
        is_silent = not rule and gap >= STALE_GAP  # an update that says nothing contradicts nothing
        for other in self._times.keys() - {_OFF, rule}:
            if not is_silent or (other == "stale_reference" and self._sums.share_of_reference() == 0):
                self._times[other] = 0
        if rule:
            self._times[rule] = max(self._times.get(rule, 0) + 1, IN_A_ROW * is_certain)
        if is_of_policy:
            self._times["policy_log_probs"] = IN_A_ROW
        if any(each is not None for each in off.values()):
            if self._times.get(_OFF, 0) == 0:
                self._misaligned_since = self._progress.step
            self._times[_OFF] = self._times.get(_OFF, 0) + 1
        elif off:
            self._times[_OFF] = 0
        self._least = gap if self._begins() else min(self._least, gap)
        self._one_side = self._sums.share_of_one_sign() or 0.0
        if self._progress.is_first:
            # That of a few tokens is no matter of all.
            is_of_all = self._sums.is_spread or self._sums.mean("bounded") >= OTHER_GAP
            self._first_gap = gap if is_of_all else 0.0
            self._split_at_first |= self._sums.two_kinds() is not None
        self._distance = self._sums.mean("distance")
        self._last_tilt = self._sums.tilt()
        if steps := self._sums["step_tokens"]:
            # Two passes with the same weights differ by a little. Each PPO epoch moves as far as the first.
            noise = self._sums["own_gap"] / (self._sums["own_tokens"] or 1.0)
            moved = self._sums.epochs * max(self._sums["step_gap"] / steps - noise, 0.0)
            self._steps = [*self._steps, moved][-LATE_UPDATES:]
        else:
            self._steps = []
        self._last_gap, self._updates = gap, self._updates + 1
        kinds = self._sums.two_kinds()
        self._split = (math.inf, 0) if kinds is None else (min(self._split[0], kinds[0]), self._split[1] + 1)
        lead, correlation = self._sums.lead()
        if correlation > -LED_CORRELATION:
            self._lags = []
        elif not self._lags or self._progress.last_part < NEXT_LAG * self._lags[-1][0]:
            self._lags.append([self._progress.last_part, -lead])
        self._read(gap)

    def _read(self, gap: float) -> None:
        if self._readings and gap < statistics.median(reading[0] for reading in self._readings[-IN_A_ROW:]) / 2:
            self._readings, self._stride, self._since_reading = [], 1, 0
        if self._since_reading == 0:
            self._readings.append([gap, self._progress.step])
        self._since_reading = (self._since_reading + 1) % self._stride
        if len(self._readings) > _READINGS:
            self._readings, self._stride = self._readings[::2], 2 * self._stride
            self._since_reading = 1

    def _off(self) -> dict[str, Off | None]:
        """What is misaligned in this update."""
        return {} if self._sums.alignment is None else find_off(self._sums.alignment)

    def _holding(self) -> tuple[str, RunWarning] | None:
        """The rule that holds in this update, and its warning; None if none does.

        Positions come first, then the reference, which says most: what agrees with it has its weights, whatever the
        differences look like.
        """
        rules: tuple[tuple[str, Callable[[], RunWarning | None]], ...] = (
            (LEARNING_RATE, lambda: self._far_step(has_moved=True)),
            ("positive", self._positive),
            ("misaligned", self._misaligned),
            ("own_log_probs", self._own_log_probs),
            # What the reference has shown stays true while the gap stays, although the policy moves away from it.
            ("policy_log_probs", lambda: self._lasting("policy_log_probs") or self._policy_by_reference()),
            ("stale_reference", self._stale_by_reference),
            (ADAPTER_SCALE, self._ahead),
            (OTHER_LOG_PROBS, self._other_log_probs),
            (REFERENCE, self._other_reference),
            ("stale_worker", self._stale_worker),
            ("partly_loaded", self._partly_loaded),
            (ENGINES_APART, lambda: self._apart() or self._apart_at_first()),
            (LEARNING_RATE, lambda: self._far_step(has_moved=False)),
        )
        if not self._sums["tokens"]:
            rules = (("misaligned", self._misaligned),)
        return next(((rule, warning) for rule, check in rules if (warning := check()) is not None), None)

    def _far_step(self, has_moved: bool) -> RunWarning | None:
        """A learning rate far over all before, once these are more than the first steps of a warm-up.

        Args:
            has_moved (bool): Whether the policy, or the rollout, has to be far from where it was.
        """
        if self._updates < IN_A_ROW:
            return None
        last, largest = self._progress.last_rate, self._progress.largest_rate
        if not 0 < RATE_FACTOR * largest <= last:
            return None
        moves = (self._sums.mean("moved"), self._distance), (self._sums.mean("gap"), self._last_gap)
        if has_moved and all(now < max(APART_GAP, APART_GROWTH * before) for now, before in moves):
            return None
        return as_warning(
            LEARNING_RATE,
            f"The learning rate of the last update was {last / largest:.3g} times the largest one before",
            ", which may move the policy too far. Look at the schedule of the learning rate, and at what a resume "
            "restores of it.",
            "Compare `actor/lr` in the log before and at that step.",
        )

    def _misaligned(self) -> RunWarning | None:
        """Log-probs that belong to other tokens; in few responses, only if some were seen in updates before."""
        times = self._times.get(_OFF, 0)
        warning = misaligned_warning(self._off(), lasting=times >= IN_A_ROW - 1)
        if warning is None:
            return None
        since = self._misaligned_since if times else self._progress.step
        return {**warning, "sentence": warning["sentence"] + ("" if since is None else f" Since step {since}.")}

    def _positive(self) -> RunWarning | None:
        """Positive numbers, which no log-probs are."""
        share = self._sums["positive"] / self._sums["tokens"]
        if share < POSITIVE:
            return None
        return as_warning(
            OTHER_LOG_PROBS,
            f"{share:.0%} of what the rollout gives as log-probs is positive, which no log-prob is",
            ": look for probabilities, or for a sign that was changed.",
            "Print `rollout_log_probs` and `old_log_probs` of one row side by side.",
        )

    def _own_log_probs(self) -> RunWarning | None:
        """Two log-probs that training computes of the same tokens with the same weights, and that differ."""
        sums = self._sums
        if sums["own_gap"] <= OWN_GAP * sums["own_tokens"]:
            return None
        first, second = "the old log-probs", "those of the update's first forward pass"
        if sums["own_to_rollout"] < NEARER * sums["own_old_to_rollout"]:
            side = f" The rollout fits the second: {first} are wrong."
        elif sums["own_old_to_rollout"] < NEARER * sums["own_to_rollout"]:
            side = " The rollout fits the first: the update's are wrong."
        else:
            side = ""
        relation = self._hardly_related("old")
        look = "dropout, temperature, attention mask, position ids, precision, an adapter"
        if relation:
            look = "another order of rows, padding, slices, or labels"
        return as_warning(
            "misaligned" if relation else OTHER_LOG_PROBS,
            "Training computes two log-probs of the same tokens with the same weights",
            f": {first} and {second} differ by {sums['own_gap'] / sums['own_tokens']:.2g} nats in the "
            f"mean{relation}.{side} Look for what only one of the two passes has: {look}.",
            "`actor/ppo_kl` of an update with one mini-batch should be about 0: compute both log-probs of one row "
            "again, without an optimizer step between them.",
        )

    def _policy_by_reference(self) -> RunWarning | None:
        """Rollout and reference agree, and the policy is where no optimizer step can have brought it."""
        share, gap = self._sums.share_of_reference(), self._sums.mean("gap")
        if not share or self._sums["stale"] < WHOLE_SHARE * self._sums["responses"]:
            return None
        # A rollout that goes back to the reference has its weights; the policy was away from them before.
        went_back = self._sums.mean("distance") < STALE_RATIO * self._distance and self._distance > STALE_GAP
        # After a loaded checkpoint, other weights may be in the rollout at first.
        jumped = self._leaps() and not went_back and self._progress.since_resume is None
        # Where nothing shows how far updates go, the first one may have gone far.
        jumped &= self._updates > 1 if (moved := self._may_have_moved(1)) is None else not moved
        since_first = self._progress.is_first or self._has_been_since_first()
        if not (since_first or jumped or self._times.get("policy_log_probs")):
            return None
        when, made = _BEFORE, "no optimizer step made that"
        if not since_first:
            when, made = "within one step", "no optimizer step makes that unless it is far too large"
        apart = (
            f"Training's log-probs differ from the rollout's by {gap:.2g} nats in the mean, and the reference's do not"
        )
        relation = self._hardly_related()
        if relation and gap > MISALIGNED_NATS:
            return as_warning(
                "misaligned",
                f"{apart}{relation}",
                ": training's belong to other tokens, or its weights were not loaded. Look at whether labels are "
                "shifted by one against the logits, and at what is gathered and sliced.",
                "Print `responses`, `rollout_log_probs` and `old_log_probs` of one row side by side, and the "
                "log-softmax of training's logits at the position before each token.",
                share=share,
            )
        return as_warning(
            OTHER_LOG_PROBS,
            f"{apart}, {when}",
            f": {made}. Look at what else writes weights, and at the forward pass of the update: which logits are "
            "gathered, the attention mask, position ids, kernels.",
            "`gradloc replay BUNDLE` compares the recorded log-probs with those of saved weights.",
            share=share,
        )

    def _stale_by_reference(self) -> RunWarning | None:
        """Responses whose log-probs are the reference's and not the policy's."""
        sums, share = self._sums, self._sums.share_of_reference()
        if not share:
            return None
        distance, gap = sums["stale_distance"] / sums["stale_tokens"], sums["stale_gap"] / sums["stale_tokens"]
        weights = "the weights of step 1" if distance < INITIAL_RATIO * gap else "old weights"
        why = f"are nearer to the reference's (mean difference {distance:.2g}) than to the policy's ({gap:.2g})"
        return _stale(weights, share, f"log-probs {why}")

    def _other_reference(self) -> RunWarning | None:
        """The reference is another model before any optimizer step, and rollout and policy agree."""
        share, distance = self._sums["fresh"] / self._sums["responses"], self._sums.mean("distance")
        if share < WHOLE_SHARE or distance < OTHER_GAP or not (self._progress.is_first or self._times.get(REFERENCE)):
            return None
        when = _BEFORE + self._hardly_related("reference")
        return as_warning(
            REFERENCE,
            f"The reference's log-probs differ from the policy's by {distance:.2g} nats in the mean, {when}, while "
            "rollout and policy agree",
            ": unless another model was chosen for the reference, it has other weights, none that were loaded, or "
            "other inputs. Look at its path, adapter, precision, attention mask, labels and temperature.",
            "Print a checksum of one weight in the actor and in the reference before the first step: they should "
            "be equal; if they are, compare what both are given.",
            share=share,
        )

    def _hardly_related(self, pair: str = "rollout") -> str:
        """That two columns have hardly a relation, as the end of a clause; nothing if they have, or none is known."""
        related = self._sums.related(pair)
        is_so = related is not None and related < HARDLY_RELATED
        return f", with hardly a relation (correlation {related:.2f})" if is_so else ""

    def _has_been_since_first(self) -> bool:
        """Whether the gap was there before any optimizer step, when both engines have the same weights."""
        return self._first_gap >= max(OTHER_GAP, self._sums.mean("gap") / 2)

    def _leaves_path(self) -> bool:
        """Whether the rollout suddenly differs by more than the policy has moved since the reference.

        No weights of an earlier step do: these lie between the two.
        """
        gap, moved = self._sums.mean("gap"), self._sums.mean("moved")
        is_far = gap >= APART_GAP and gap > OFF_PATH * moved
        return is_far and self._last_gap < POLICY_GAP[0] and self._sums["distance"] > 0

    def _stale_worker(self) -> RunWarning | None:
        """Some responses differ ever more, and the others hardly do."""
        kinds, (first, updates) = self._sums.two_kinds(), self._split
        if kinds is None or self._split_at_first or updates < IN_A_ROW - 1:
            return None
        far, near = kinds
        if far < SPLIT_GROWTH * first:
            return None
        if self._sums["distance"] and self._sums.lead()[1] > BEHIND:
            return None
        why = f"log-probs there differ by {far:.2g} nats in the mean, {first:.2g} at first, and by {near:.2g} elsewhere"
        return _stale("old weights", self._sums.far_share, why)

    def _partly_loaded(self) -> RunWarning | None:
        """The rollout lacks a part of the policy's way from the reference that stays as large while the way grows."""
        lead, correlation = self._sums.lead()
        if not LED_BY <= -lead <= LAG_MOST or correlation > -LED_CORRELATION:
            return None
        before = [lag for part, lag in self._lags if self._progress.last_part <= LAST_PART * part]
        if not before or -lead < LAG_LEFT * before[-1]:
            return None
        why = (
            f"log-probs have gone about {percent(1 + lead)} of the policy's way from the reference, as when that way "
            "was half as long"
        )
        return _stale("weights of which a part is old, or with a LoRA adapter at too small a scale", 1.0, why)

    def _ahead(self) -> RunWarning | None:
        """The rollout has gone farther from the reference than the policy, the same way, which begins with training."""
        lead, correlation = self._sums.lead()
        if lead < LED_BY or correlation < LED_CORRELATION or self._sums.mean("gap") < APART_GAP:
            return None
        if self._has_been_since_first():
            return None
        return as_warning(
            ADAPTER_SCALE,
            f"The rollout's log-probs have gone about {1 + lead:.2g} times as far from the reference's as the "
            "policy's, the same way",
            ": what training has learned counts more than once there. Look for a LoRA adapter that is merged into "
            "the weights and loaded as well, or scaled twice (lora_alpha / r).",
            _SAME_WEIGHTS,
        )

    def _apart(self) -> RunWarning | None:
        """A gap that is large from the start, or much larger than it was. This alone is no evidence of old weights."""
        readings = [*self._readings, [self._sums.mean("gap"), self._progress.step]]
        (first, start), (gap, _) = readings[0], readings[-1]
        if gap < FIRST_GAP:
            return None
        since = "" if start is None else f" since step {start}"
        if gap < APART_GROWTH * first:
            return self._apart_from_the_start(gap, since) if min(self._least, gap) >= APART_GAP else None
        small, large = POLICY_GAP
        least, most = APART_HALFWAY
        gaps = [reading[0] for reading in readings]
        at = max(range(1, len(gaps)), key=lambda i: gaps[i] - gaps[i - 1])
        before, (jumped, step) = max(gaps[:at]), readings[at]
        # The first updates of a late rollout have smaller gaps than those that follow.
        at_once = before < small and (self._leaves_path() or jumped > large)
        kinds = self._sums.two_kinds()
        is_wide = self._sums.is_spread or kinds is not None
        # At first, a late rollout differs by what the policy has moved since the reference.
        is_late = at < IN_A_ROW and not (self._sums["moved"] and abs(self._sums.lead()[1]) < LED_CORRELATION / 2)
        is_sudden = is_wide and not is_late and jumped >= max(FIRST_GAP, APART_GROWTH * before)
        is_moved = self._may_have_moved(LATE_UPDATES)
        is_long = len(readings) >= APART_UPDATES
        has_grown = is_long and gap >= max(APART_GAP, APART_GROWTH * max(each[0] for each in readings[: IN_A_ROW + 1]))
        is_steady = is_long and least <= (readings[len(readings) // 2][0] - first) / (gap - first) <= most
        if (is_sudden or at_once) and gap >= APART_GROWTH * before:
            about = "" if self._stride == 1 else "about "
            since = "" if step is None else f" since {about}step {step}"
            what = f"differ by {gap:.2g} nats in the mean{since}, and by {before:.2g} before"
            what += self._hardly_related()
            look = "" if is_moved else ": look at what changed then"
        elif has_grown or (is_steady and gap >= APART_GAP):
            what, look = f"have drifted apart{since}, from {first:.2g} to {gap:.2g} nats in the mean", ""
        else:
            return None
        rollout, policy = self._sums.mean("distance"), self._sums.mean("moved")
        if rollout < NEARER * policy and not self._is_far_by_late_weights():
            rising = [reading[0] for reading in readings if reading[0] >= APART_GAP]
            if len(rising) >= IN_A_ROW and gap >= STILL_RISING * rising[0]:
                nearer = (
                    f"nearer to the reference's (mean difference {rollout:.2g}) than the policy's are ({policy:.2g})"
                )
                return _stale(
                    "old weights", 1.0, f"log-probs differ ever more, by {gap:.2g} nats now, and are {nearer}"
                )
            why = (
                f"The rollout is nearer to the reference ({rollout:.2g}) than the policy is ({policy:.2g}), as with "
                "weights of some steps before."
            )
        elif is_moved:
            why = "The last updates have moved the policy as far: a rollout that is late by some steps differs as much."
        else:
            why = "Either the engines compute differently, or the rollout's weights are old"
            why += "." if rollout else "; a reference tells which (use_kl_loss=True with kl_loss_coef=0)."
        if kinds is not None:
            why += (
                f" In {percent(self._sums.far_share)} of the responses they differ by "
                f"{kinds[0]:.2g}, in the others by {kinds[1]:.2g}: look at what these have in common, as a worker, or "
                "a kind of prompt."
            )
        return as_warning(
            ENGINES_APART, f"The log-probs of rollout and training {what}", f"{look}. {why}", _SAME_WEIGHTS
        )

    def _apart_at_first(self) -> RunWarning | None:
        """A gap that was there before any optimizer step, and stays."""
        first = self._sums.mean("gap") if self._progress.is_first else self._first_gap
        if min(first, self._sums.mean("gap")) < FIRST_GAP or not self._sums.is_spread:
            return None
        return as_warning(
            ENGINES_APART,
            f"Rollout and training differed by {first:.2g} nats in the mean before any optimizer step, and still do",
            ": engines of the same weights differ by about 0.01 in bf16, and by about 0.03 in 8 bits. Look for "
            "another prompt (chat template, BOS token), other positions (RoPE), a kernel, experts that are routed "
            "otherwise, or a coarser precision.",
            _SAME_SCORES,
        )

    def _apart_from_the_start(self, gap: float, since: str) -> RunWarning:
        share = self._sums.far_share
        return as_warning(
            ENGINES_APART,
            f"Rollout and training score the same tokens differently in every step{since}",
            f": by {gap:.2g} nats in the mean, in {share:.0%} of the responses by over {APART_GAP:g}. So one of "
            "the two has other weights, another prompt (chat template, BOS token), other token ids or positions "
            "(RoPE), a sampler's penalty or a far coarser precision.",
            _SAME_SCORES,
            share=share,
        )

    def _other_log_probs(self) -> RunWarning | None:
        """Differences of one sign, or larger for likelier tokens, which were there in every step seen."""
        sums, gap = self._sums, self._sums.mean("gap")
        share = self._sums.share_of_one_sign()
        if share is None or gap < (OTHER_GAP if share < ONE_SIDE else ONE_SIDE_GAP):
            return None
        # In the first update both engines have the same weights. What comes with training may be a late rollout.
        if self._updates and not (self._times.get(OTHER_LOG_PROBS) or self._begins()):
            return None
        tilt = self._sums.tilt()
        related = self._sums.related()
        if related is not None and related < OTHER_RELATED and share < SURELY_ONE_SIDE:
            return None
        since_first = self._times.get(OTHER_LOG_PROBS, 0) >= self._updates
        if share < ONE_SIDE and abs(tilt) < (FIRST_CORRELATION if since_first else CORRELATION):
            return None
        if share >= ONE_SIDE:
            word = "larger" if sums["larger"] > sums["smaller"] else "smaller"
            what = (
                f"{word} for {share:.0%} of the tokens where they differ, as from before or after top-p or top-k, of "
                "the likeliest token, or cut at a floor"
            )
        elif tilt > 0:
            what = "larger for likely tokens and smaller for others, as at a lower temperature"
        else:
            what = "smaller for likely tokens and larger for others, as at a higher temperature, or cut off"
        return as_warning(
            OTHER_LOG_PROBS,
            "The rollout's log-probs are not the ones that training computes",
            f": they are {what} (mean difference {gap:.2g}); let both be of the same temperature and vocabulary, "
            "and from before or after the same top-p and top-k.",
            "`gradloc replay BUNDLE` looks for the temperature that fits; " + SEE.format("temperature"),
        )


def _stale(weights: str, share: float, why: str) -> RunWarning:
    if share >= WHOLE_SHARE:
        name, fault = "stale_weights", "never_synced"
        claim = f"The rollout still samples from {weights}"
    else:
        name, fault = "partly_stale", "one_worker"
        claim = (
            f"For {share:.0%} of the responses, as from one of several workers or before an in-flight weight update, "
            f"the rollout still samples from {weights}"
        )
    check = f"{_SAME_WEIGHTS} {SEE.format(fault)}"
    return as_warning(name, claim, f": its {why}; {_WEIGHTS}.", check, share=share)
