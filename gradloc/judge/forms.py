# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a broken identity is called: the closed form that explains its residual, or its own name if none does.

Each function takes the readings of the update and the residual that is most off.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..levels import EXPLAINS, FACTOR, LATE, LEVEL, MOST, SAME, SHARE, SHIFT, SLOPE, UNRELATED
from .readings import COLUMNS
from .records import Readings
from .said import percent


class Form(NamedTuple):
    """What is wrong.

    Args:
        name (str): The closed form's name, or the identity's.
        claim (str): What is wrong, a clause that begins a sentence.
        look (str): Where to look, a sentence; or nothing.
        factor (float, optional): What the loss, or its KL part, is multiplied by.
    """

    name: str
    claim: str
    look: str
    factor: float | None


# By name, then by key, what is wrong: formats of the readings `now`, and of what a function adds.
_CLAIMS: Mapping[str, Mapping[str, str]] = {
    "nonfinite": {"nonfinite": "`{column}` is NaN or infinite in {count:.0f} of the responses"},
    "mask": {
        "sampled.inverted": "The response mask is inverted: sampled tokens are not trained, and others are",
        "sampled.last_lost": "The last token that the rollout sampled, usually the end token (EOS), is not trained",
    },
    "unsampled": {
        "sampled.after_end": "{now[sampled.after_end]:.0f} trained tokens are after their turn's end",
        "sampled.unlogged": "{now[sampled.unlogged]:.0f} trained tokens have a log-prob of exactly 0 from the rollout",
    },
    "sampled": {"rollout.zero": "{now[rollout.zero]:.1%} of trained tokens have a log-prob of 0 in the rollout alone"},
    "repeated_responses": {
        "responses.repeated": "{now[responses.repeated]:.1%} of responses are the same as one to the same prompt",
    },
    "groups_of_one": {"groups.alone": "Every response has a `uid` of its own, and is compared with no other"},
    "mixed_groups": {"groups.mixed": "The `uid` of {now[groups.mixed]:.1%} of rows has several prompts"},
    "advantage_order": {
        "advantages.not_following": "Advantages do not follow the rewards: among a prompt's responses, their "
        "correlation is {now[advantages.correlation]:.2f}",
    },
    "advantage_mask": {
        "advantages.cut": "In {now[advantages.cut]:.1%} of the responses, as many first tokens have no advantage as "
        "the row has padding",
    },
    "advantages": {
        "advantages.zero": "Advantages are 0, although the rewards of a prompt's responses differ",
        "advantages.one_sided": "A prompt's advantages have one sign in {now[advantages.one_sided]:.0%} of groups",
        "advantages.offset": "Advantages are {now[advantages.offset]:.3g} times as far from 0 as from each other",
        "advantages.spread": "A prompt's advantages are {now[advantages.spread]:.3g} times as far apart as its rewards "
        "allow, even divided by their deviation",
        "advantages.power_off": "Advantages are divided by the power {now[advantages.power]:.2g} of the deviation of "
        "their prompt's rewards, instead of 1 or 0",
    },
    "misaligned": {
        "moved": "{what} log-probs belong to other tokens: they fit training's {count} {side}{where}",
        "repeated": "{what} log-probs repeat one value: {share:.0%} equal the previous token's",
        "unrelated": "{what} log-probs are unrelated to training's in {share:.0%} of responses: other rows or labels",
    },
    "old_log_probs": {"old": "Old log-probs are {now[old.gap]:.2g} nats off the update's first forward{how}"},
    "other_log_probs": {"other": "Rollout log-probs {how}"},
    "stale_weights": {
        "stale": "The rollout has old weights: its log-probs lack {part:.0%} of what changed since the reference",
        "rollout.copied": "Rollout log-probs are the reference's, bit for bit: the rollout has the reference's "
        "weights, or one column is a copy of the other",
    },
    "partly_stale": {"partly_stale": "{share:.0%} of responses are of old weights, as if some workers got no new ones"},
    "adapter_scale": {
        "adapter_scale": "The rollout's log-probs are {part:.2g} times as far from the reference's as the policy's",
    },
    "rollout_log_probs": {
        "rollout": "Rollout and training score the same tokens {now[rollout.gap]:.2g} nats apart in the mean{where}",
    },
    "reference": {
        "reference.same": "Reference log-probs are the policy's own after it has moved: the reference follows it",
        "reference.first_gap": "Before any step, the reference is {now[reference.first_gap]:.2g} nats off in the mean",
        "reference.jump": "Reference and policy are {now[reference.gap]:.2g} nats apart, more than the updates explain",
    },
    "loss_scale": {
        "loss.weights_off": "The weights of all tokens sum to {now[loss.weights]:.4g} instead of 1",
        "loss.factor": "The loss's gradient is {now[loss.factor]:.4g} times what weights, advantages and ratios give",
    },
    "loss_sign": {
        "loss.sign": "The loss has the wrong sign: its gradient is {now[loss.factor]:.3g} times what it should be",
        "loss.opposite": "The loss has lost the sign of the advantage for {now[loss.opposite]:.0%} of the tokens",
    },
    "importance_weights": {
        "loss.against": "The rollout's importance weights are inverted: over 1 where the rollout is likelier to sample "
        "the token",
        "loss.without": "The rollout's importance weights are not in the loss: its gradient fits without them",
    },
    "kl_scale": {"loss.kl_off": "The KL loss's gradient is {now[loss.kl]:.3g} times what coefficient and type give"},
    "loss": {
        "loss.clipped_wrong": "{now[loss.clipped_wrong]:.0%} of the clipped tokens are clipped on the wrong side: "
        "their ratio is low where the advantage is positive, or high where it is negative",
        "loss.entropy_off": "The entropy bonus's gradient is {now[loss.entropy]:.3g} times what its factor gives",
        "loss": "For {now[loss.unfit]:.1%} of the tokens, the loss's gradient is not −weight · advantage · ratio",
    },
    "last_pass": {"gradient.last_pass": "The optimizer's gradient is the last micro-batch's alone"},
    "gradient": {
        "gradient.zero": "{now[gradient.zero]:.0f} layer(s), or their smallest tensors, have a gradient of exactly 0, "
        "unlike the others of their kind",
        "gradient.off": "The optimizer's gradient is {now[gradient.off]:.0%} off the sum of the passes': in small "
        "tensors {now[gradient.is]:.3g} times it",
        "gradient.above": "The optimizer's gradient is up to {now[gradient.factor]:.3g} times the sum of the passes', "
        "in some layers",
    },
    "not_moving": {
        "weights.still": "{now[weights.still]:.0f} of {now[weights.layers]:.0f} layers are the same after the step",
    },
    "ascent": dict.fromkeys(("weights.uphill", "weights.gained"), "Optimizer steps go up the gradient: the loss grows"),
    "weights": {
        "weights.between": "Weights have changed between two updates, without an optimizer step",
        "weights.apart": "Weights changed by {now[weights.apart]:.3g} times what an optimizer step should change",
    },
}
_NAMES = {key: name for name, claims in _CLAIMS.items() for key in claims}
# By key, or by the name of several, where to look or what to try, if that is more than the claim says.
LOOKS: Mapping[str, str] = {
    "sampled.last_lost": "Look for a mask `ids != pad` where the padding token is the end token.",
    "unsampled": "Set response_mask to 0 for tokens that were added later (EOS, templates, tool output, padding).",
    "sampled": "Log-probs are missing, or were taken after a top-p or top-k cut.",
    "groups_of_one": "Set `uid` before prompts are repeated for the rollout. (Advantages without groups need none.)",
    "mixed_groups": "Look at how prompts are repeated for the rollout and put together with their responses.",
    "advantage_order": "Look for rows moved between rewards and advantages (sort, filter, gather), and at signs.",
    "advantage_mask": "Look for advantages that are padded to the left instead of to the right.",
    "advantages.one_sided": "Look for an operation that drops the sign: abs, clamp.",
    "advantages.offset": "The baseline is not of these rewards: look at running means, and at where they come from.",
    "advantages.spread": "Look for a division by a deviation that is 0 up to rounding.",
    "advantages.power_off": "Look for a division by it that is done twice, or by the variance.",
    "misaligned": "Look at where log-probs are gathered, sliced, padded or put in order.",
    "old_log_probs": "Look for dropout, another temperature, mask or precision, or log-probs of an earlier step.",
    "other_log_probs": "Compute both in nats, with one temperature, vocabulary, top-p and top-k.",
    "stale_weights": "Look at what sends weights to the rollout: which tensors and adapters get there.",
    "adapter_scale": "Look for a LoRA adapter that is both merged and loaded, or scaled twice (lora_alpha / r).",
    "rollout_log_probs": "The engines differ in weights, prompt (chat template, BOS), positions (RoPE), kernels, "
    "experts or precision.",
    "reference.same": "Look at what the reference shares with the actor: its weights, its adapter.",
    "reference": "Unless another model was chosen, look at its path, adapter, precision, mask and temperature.",
    "loss_scale": "Take one step with another number of ranks, and one with another number of micro-batches: "
    "`actor/grad_norm` should stay about the same.",
    "kl_scale": "One step with kl_loss_coef=0 shows its gradient.",
    "loss.opposite": "Look at what takes the size of advantages or ratios (abs, square, clamp).",
    "loss.against": "Look at the sign of the log-probs' difference: a weight is exp(old − rollout).",
    "loss.without": "Look at whether the loss function takes `rollout_is_weights`.",
    "loss": "Look for a term that is added or left out, for factors of single tokens, and at min and max in the clip.",
    "last_pass": "Look for a zero_grad between micro-batches, or for overwritten gradients.",
    "gradient.zero": "Look for a detach, a no_grad, or an adapter that is not used.",
    "gradient.off": "Look for what changes it between the passes and the step, and for ranks or passes left out.",
    "gradient.above": "Look for a backward that runs twice, hooks that multiply, a gradient that was not zeroed, or a "
    "sum where a mean over ranks should be.",
    "not_moving": "Look at which tensors the optimizer has, and for steps below the weights' precision.",
    "ascent": "Look at the loss's sign and at `maximize`.",
    "weights": "Look at what else writes weights (a checkpoint, an average, offloading, a merged adapter, a bad "
    "device), and at the optimizer's state, precision and weight decay.",
}


def named(now: Readings, key: str, factor: float | None = None, **more: Any) -> Form:
    """Where each residual has a text of its own; or of another key, with what its text needs besides the readings."""
    name = _NAMES[key]
    look = LOOKS.get(key) or LOOKS.get(name, "")
    return Form(name, _CLAIMS[name][key].format(now=now, **more), look, factor)


def finite(now: Readings, residual: str) -> Form:
    return named(now, "nonfinite", count=now[residual], column=COLUMNS[residual.partition(".")[0]])


def sampled(now: Readings, residual: str) -> Form:
    return named(now, "sampled.inverted" if now.get("sampled.inverted", 0.0) > EXPLAINS else residual)


def old(now: Readings, residual: str) -> Form:
    is_slope = now.get("old.slope", 0.0) > EXPLAINS
    how = f", as with another temperature, of slope {now['old.slope_is']:.3g}" if is_slope else ""
    return _misaligned(now, "old") or named(now, "old", how=how)


def _moved(now: Readings, pair: str) -> Form | None:
    """Log-probs at other positions."""
    far, unrelated, moved, shift = (now.get(f"{pair}.{of}", 0.0) for of in ("far", "unrelated", "moved", "shift"))
    if shift <= LEVEL * SHIFT or moved <= EXPLAINS * unrelated * UNRELATED:
        return None
    by = now[f"{pair}.shift_by"]
    count, side = f"{abs(by):.0f} position{'s' * (abs(by) != 1)}", "later" if by > 0 else "earlier"
    where = f", in {percent(far)} of the responses" if far < MOST else ""
    return named(now, "moved", what=pair.capitalize(), count=count, side=side, where=where)


def _misaligned(now: Readings, pair: str) -> Form | None:
    """Log-probs at other positions, of other rows, or of the token before."""
    if (found := _moved(now, pair)) is not None:
        return found
    what = pair.capitalize()
    far, unrelated, repeated, differing, slope = (
        now.get(f"{pair}.{of}", 0.0) for of in ("far", "unrelated", "repeated", "differing", "slope")
    )
    # Those of other tokens are spread as training's are, unlike those of other weights.
    if unrelated > max((EXPLAINS if slope < SLOPE else MOST) * far, LEVEL * SHARE):
        return named(now, "unrelated", share=unrelated, what=what)
    # Where nearly all differ, as after rounding, neighbours are the same by chance.
    if repeated > LEVEL * SHARE and differing < max(MOST, repeated / EXPLAINS):
        return named(now, "repeated", share=repeated, what=what)
    return None


def rollout(now: Readings, residual: str) -> Form:
    if residual == "rollout.copied":
        return named(now, residual)
    return _other(now) or _stale(now) or _misaligned(now, "rollout") or named(now, "rollout", where=_where(now))


def _other(now: Readings) -> Form | None:
    """Other numbers for the same probabilities: a slope, a sign, a unit, or a cut."""
    correlation, slope = now.get("rollout.correlation", 1.0), now.get("rollout.slope_is", 1.0)
    how = ""
    if correlation < -UNRELATED:
        how = "have the wrong sign"
    elif correlation < UNRELATED:
        return None
    elif now.get("rollout.slope", 0.0) > EXPLAINS:
        bases = {"log2": 1 / math.log(2), "log10": 1 / math.log(10)}
        base = next((name for name, b in bases.items() if abs(slope / b - 1) < SAME), "")
        other = f"in {base} instead of nats" if base else f"as with a {'lower' if slope > 1 else 'higher'} temperature"
        how = f"are training's times {slope:.3g}, {other}"
    elif now.get("rollout.one_sided", 0.0) > LEVEL * LATE and (now["rollout.differing"] > EXPLAINS or _is_cut(now)):
        side, when = "smaller", "before a temperature under 1"
        if now["rollout.larger"]:
            side, when = "larger", "after a top-p or top-k cut, or of the likeliest token"
        how = f"are {side} than training's nearly everywhere that they differ, as {when}"
    return named(now, "other", how=how) if how else None


def _is_cut(now: Readings) -> bool:
    """Whether tokens were left alone by a cut: they have a log-prob of 0, and in training a little less."""
    is_lost = now.get("sampled.unlogged", 0.0) > 0
    return bool(now["rollout.larger"]) and now["rollout.zero"] > LEVEL * SHARE and not is_lost


def _stale(now: Readings) -> Form | None:
    """Old weights: the rollout's log-probs lie between the reference's and the policy's, or beyond."""
    way, nearer, far = now.get("rollout.way", 0.0), now.get("rollout.nearer", 0.0), now["rollout.far"]
    # In some responses: most of the far ones are nearer to the reference.
    is_part = nearer > max(EXPLAINS * far, LEVEL * SHARE)
    least = FACTOR if now.get("rollout.is_current") else EXPLAINS / 2
    is_whole = now.get("rollout.way_explains", 0.0) > EXPLAINS and not -least < way < FACTOR
    # Training's own log-probs are wrong where they are too far from the reference.
    if now.get("policy.jump", 0.0) > 2 or not (is_part or is_whole):
        return None
    if way > 0:
        return named(now, "adapter_scale", part=1 + way)
    share = max(far, nearer)  # while the policy has hardly moved, none is far
    if share > MOST or not (is_part or _is_split(now)):
        return named(now, "stale", part=-way)
    return named(now, "partly_stale", share=share)


def _is_split(now: Readings) -> bool:
    """Whether some responses are much farther apart than the others."""
    return now["rollout.far_gap"] > LEVEL * max(now["rollout.near_gap"], SAME)


def _where(now: Readings) -> str:
    if now.get("rollout.rounded", 0.0) > EXPLAINS:
        return ", evenly up to a limit, as if they were rounded"
    if now["rollout.far"] < MOST and _is_split(now):
        return (
            f": by {now['rollout.far_gap']:.2g} in {percent(now['rollout.far'])} of the responses, as of one worker or "
            f"one kind of prompt, and by {now['rollout.near_gap']:.2g} in the others"
        )
    return ", ever more the later a token is" if now["rollout.later"] > EXPLAINS / 2 else ""


def reference(now: Readings, residual: str) -> Form:
    if residual == "reference.same":
        return named(now, residual)
    if residual == "reference.first_gap":  # log-probs of another model may be unrelated
        return _moved(now, "reference") or named(now, residual)
    return _misaligned(now, "reference") or named(now, "reference.jump")


def loss(now: Readings, residual: str) -> Form:
    if residual == "loss.weights_off":
        return named(now, residual, now["loss.weights"])
    if residual in ("loss.clipped_wrong", "loss.against", "loss.entropy_off"):
        return named(now, residual)
    if now.get("loss.kl_off", 0.0) > FACTOR:
        return named(now, "loss.kl_off", now["loss.kl"])
    factor, explained = now.get("loss.factor", 1.0), now.get("loss.factor_explained", 0.0)
    without = now.get("loss.without_explained", 0.0)
    if without > max(explained, 1 - SAME) and abs(now["loss.without"] - 1) < FACTOR:
        return named(now, "loss.without")
    if explained > 1 - SAME and abs(factor - 1) > FACTOR:
        return named(now, "loss.sign" if factor < 0 else "loss.factor", factor)
    return named(now, "loss.opposite" if now["loss.opposite"] > EXPLAINS * now["loss.unfit"] else "loss")
