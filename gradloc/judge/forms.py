# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a broken identity is called: the closed form that explains its residual, or its own name if none does."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..levels import EXPLAINS, FACTOR, LATE, LEVEL, MOST, SAME, SHARE, SHIFT, SLOPE, UNRELATED
from .readings import COLUMNS
from .records import Readings
from .said import percent


class Form(NamedTuple):
    """What is wrong."""

    name: str  # the closed form's, or the identity's
    claim: str  # what is wrong, a clause that begins a sentence
    look: str  # where to look, a sentence; or nothing
    factor: float | None  # what the loss, or its KL part, is multiplied by


# By name, then by residual (or a word of its own), what is wrong: formats of the reading of that name, of all that are
# known (`now`), and of what a function adds.
_CLAIMS: Mapping[str, Mapping[str, str]] = {
    "nonfinite": {
        f"{of}.broken": f"`{column}` is NaN or infinite in {{:.0f}} of the responses" for of, column in COLUMNS.items()
    },
    "mask": {
        "sampled.inverted": "The response mask is inverted: sampled tokens are not trained, and others are",
        "sampled.last_lost": "The last token that the rollout sampled, usually the end token (EOS), is not trained",
    },
    "unsampled": {
        "sampled.after_end": "{:.0f} trained tokens are after their turn's end",
        "sampled.unlogged": "{:.0f} trained tokens have a log-prob of exactly 0 from the rollout",
    },
    "sampled": {"sampled.zero": "{:.1%} of trained tokens have a log-prob of 0 in the rollout alone"},
    "repeated_responses": {"responses.repeated": "{:.1%} of responses are the same as one to the same prompt"},
    "groups_of_one": {"groups.alone": "Every response has a `uid` of its own, and is compared with no other"},
    "mixed_groups": {"groups.mixed": "The `uid` of {:.1%} of rows has several prompts"},
    "advantage_order": {
        "advantages.not_following": "Advantages do not follow the rewards: among a prompt's responses, their "
        "correlation is {now[advantages.correlation]:.2f}",
    },
    "advantage_mask": {
        "advantages.cut": "In {:.1%} of the responses, as many first tokens have no advantage as the row has padding",
    },
    "advantages": {
        "advantages.zero": "Advantages are 0, although the rewards of a prompt's responses differ",
        "advantages.one_sided": "A prompt's advantages have one sign in {:.0%} of groups",
        "advantages.offset": "Advantages are {:.3g} times as far from 0 as from each other",
        "advantages.spread": "A prompt's advantages are {:.3g} times as far apart as rewards and deviation allow",
        "advantages.power_off": "Advantages are divided by power {now[advantages.power]:.2g} of the rewards' deviation",
    },
    "misaligned": {
        "moved": "{what} log-probs belong to other tokens: they fit training's {count} {side}{where}",
        "repeated": "{what} log-probs repeat one value: {share:.0%} equal the previous token's",
        "unrelated": "{what} log-probs are unrelated to training's in {share:.0%} of responses: other rows or labels",
    },
    "old_log_probs": {"old.gap": "Old log-probs are {:.2g} nats off the update's first forward"},
    "other_log_probs": {"other": "Rollout log-probs {how}"},
    "stale_weights": {
        "rollout.copied": "Rollout log-probs are the reference's, bit for bit: the rollout has its weights, or "
        "one column is a copy of the other",
        "stale": "The rollout has old weights: its log-probs lack {part:.0%} of what changed since the reference",
    },
    "partly_stale": {"partly_stale": "{share:.0%} of responses are of old weights, as if some workers got no new ones"},
    "adapter_scale": {"adapter_scale": "The rollout is {part:.2g} times as far from the reference as the policy"},
    "rollout_log_probs": {"rollout": "Rollout and training are {now[rollout.gap]:.2g} nats apart in the mean{where}"},
    "reference": {
        "reference.same": "Reference log-probs are the policy's own after it has moved: the reference follows it",
        "reference.first_gap": "Before any step, the reference is {:.2g} nats off in the mean",
        "reference": "Reference and policy are {now[reference.gap]:.2g} nats apart, more than the updates explain",
    },
    "loss_scale": {
        "loss.weights_off": "The weights of all tokens sum to {now[loss.weights]:.4g} instead of 1",
        "loss.factor": "The loss's gradient is {:.4g} times what weights, advantages and ratios give",
    },
    "loss_sign": {
        "loss.sign": "The loss has the wrong sign: its gradient is {now[loss.factor]:.3g} times what it should be",
        "loss.opposite": "The loss has lost the sign of the advantage for {:.0%} of the tokens",
    },
    "importance_weights": {
        "loss.against": "The rollout's importance weights are inverted: over 1 where it is the likelier to sample",
        "loss.without": "The rollout's importance weights are not in the loss: its gradient fits without them",
    },
    "kl_scale": {"loss.kl_off": "The KL loss's gradient is {now[loss.kl]:.3g} times what coefficient and type give"},
    "loss": {
        "loss.clipped_wrong": "{:.0%} of the clipped tokens are clipped on the side where a clip should do nothing",
        "loss.entropy_off": "The entropy bonus's gradient is {now[loss.entropy]:.3g} times what its factor gives",
        "loss.unfit": "For {:.1%} of the tokens, the loss's gradient is not −weight · advantage · ratio",
    },
    "last_pass": {"gradient.last_pass": "The optimizer's gradient is the last micro-batch's alone"},
    "gradient": {
        "gradient.zero": "{:.0f} layer(s), or their smallest tensors, have a gradient of exactly 0, unlike others",
        "gradient.off": "Small tensors' gradient is {:.0%} off the sum of the passes': {now[gradient.is]:.3g} times it",
        "gradient.above": "In some layers, the gradient is up to {now[gradient.factor]:.3g} times the passes' in sum",
    },
    "not_moving": {"weights.still": "{:.0f} of {now[weights.layers]:.0f} layers are the same after the step"},
    "ascent": dict.fromkeys(("weights.uphill", "weights.gained"), "Optimizer steps go up the gradient: the loss grows"),
    "weights": {
        "weights.between": "Weights have changed between two updates, without an optimizer step",
        "weights.apart": "Weights changed by {:.3g} times what an optimizer step should change",
    },
}
_NAMES = {key: name for name, claims in _CLAIMS.items() for key in claims}
# By residual, or by the name of several, where to look or what to try, if that is more than the claim says.
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
    "advantages.power_off": "Powers 0 and 1 are healthy: look for a second division, or for one by the variance.",
    "misaligned": "Look at where log-probs are gathered, sliced, padded or put in order.",
    "old_log_probs": "Look for dropout, another temperature, mask or precision, or log-probs of an earlier step.",
    "other_log_probs": "Compute both in nats, with one temperature, vocabulary, top-p and top-k.",
    "stale_weights": "Look at what sends weights to the rollout: which tensors and adapters get there.",
    "adapter_scale": "Look for a LoRA adapter that is both merged and loaded, or scaled twice (lora_alpha / r).",
    "rollout_log_probs": "The engines differ in weights, prompt (template, BOS), RoPE, kernels, experts or precision.",
    "reference.same": "Look at what the reference shares with the actor: its weights, its adapter.",
    "reference": "Unless another model was chosen, look at its path, adapter, precision, mask and temperature.",
    "loss_scale": "Take a step with other numbers of ranks and micro-batches: `actor/grad_norm` should hardly change.",
    "loss.opposite": "Look at what takes the size of advantages or ratios (abs, square, clamp).",
    "loss.against": "Look at the sign of the log-probs' difference: a weight is exp(old − rollout).",
    "loss.without": "Look at whether the loss function takes `rollout_is_weights`.",
    "loss": "Look for a term that is added or left out, for factors of single tokens, and at min and max in the clip.",
    "last_pass": "Look for a zero_grad between micro-batches, or for overwritten gradients.",
    "gradient.zero": "Look for a detach, a no_grad, or an adapter that is not used.",
    "gradient.off": "Look for what changes it between the passes and the step, and for ranks or passes left out.",
    "gradient.above": "Look for a second backward, hooks, a gradient not zeroed, or a sum over ranks for a mean.",
    "not_moving": "Look at which tensors the optimizer has, and for steps below the weights' precision.",
    "ascent": "Look at the loss's sign and at `maximize`.",
    "weights": "Look for what else writes weights (checkpoint, offloading, adapter), at decay and precision.",
}


def form_of(now: Readings, residual: str) -> Form:
    """What is wrong in an update with these readings, in which this residual is most off."""
    of = residual.partition(".")[0]
    form = None
    if residual.endswith(".broken"):
        pass
    elif of == "sampled" and now.get("sampled.inverted", 0.0) > EXPLAINS:
        form = _named(now, "sampled.inverted")
    elif of == "old":
        form = _misaligned(now, of)
    elif of == "rollout" and now.get("rollout.copied"):
        form = _named(now, "rollout.copied")
    elif of == "rollout":
        form = _other(now) or _stale(now) or _misaligned(now, of) or _named(now, of, where=_where(now))
    elif of == "reference":  # log-probs of another model may be unrelated
        form = _moved(now, of)
    elif of == "loss":
        form = _loss(now, residual)
    return form or _named(now, residual if residual in _NAMES else of)


def _named(now: Readings, key: str, factor: float | None = None, **more: Any) -> Form:
    name = _NAMES[key]
    claim = _CLAIMS[name][key].format(now.get(key), now=now, **more)
    return Form(name, claim, LOOKS.get(key) or LOOKS.get(name, ""), factor)


def _moved(now: Readings, pair: str) -> Form | None:
    """Log-probs at other positions."""
    far, unrelated, moved, shift = (now.get(f"{pair}.{of}", 0.0) for of in ("far", "unrelated", "moved", "shift"))
    if shift <= LEVEL * SHIFT or moved <= EXPLAINS * unrelated * UNRELATED:
        return None
    by = now[f"{pair}.shift_by"]
    count, side = f"{abs(by):.0f} position{'s' * (abs(by) != 1)}", "later" if by > 0 else "earlier"
    where = f", in {percent(far)} of the responses" if far < MOST else ""
    return _named(now, "moved", what=pair.capitalize(), count=count, side=side, where=where)


def _misaligned(now: Readings, pair: str) -> Form | None:
    """Log-probs at other positions, of other rows, or of the token before."""
    what = pair.capitalize()
    far, unrelated, repeated, differing, slope = (
        now.get(f"{pair}.{of}", 0.0) for of in ("far", "unrelated", "repeated", "differing", "slope")
    )
    if (found := _moved(now, pair)) is not None:
        return found
    # Those of other tokens are spread as training's are, unlike those of other weights.
    if unrelated > max((EXPLAINS if slope < SLOPE else MOST) * far, LEVEL * SHARE):
        return _named(now, "unrelated", share=unrelated, what=what)
    # Where nearly all differ, as after rounding, neighbours are the same by chance.
    if repeated > LEVEL * SHARE and differing < MOST:
        return _named(now, "repeated", share=repeated, what=what)
    return None


def _other(now: Readings) -> Form | None:
    """Other numbers for the same probabilities: a slope, a sign, a unit, or a cut."""
    correlation, slope = now.get("rollout.correlation", 1.0), now.get("rollout.slope_is", 1.0)
    if correlation < -UNRELATED:
        how = "have the wrong sign"
    elif correlation < UNRELATED:
        return None
    elif now.get("rollout.slope", 0.0) > EXPLAINS:
        bases = {"log2": 1 / math.log(2), "log10": 1 / math.log(10)}
        base = next((name for name, b in bases.items() if abs(slope / b - 1) < SAME), "")
        other = f"in {base} instead of nats" if base else f"as with a {'lower' if slope > 1 else 'higher'} temperature"
        how = f"are training's times {slope:.3g}, {other}"
    elif now.get("rollout.one_sided", 0.0) > LEVEL * LATE:
        smaller, larger = "smaller, as before a temperature under 1", "larger, as after a top-p or top-k cut"
        how = f"are nearly everywhere {larger if now['rollout.larger'] else smaller}"
    else:
        return None
    return _named(now, "other", how=how)


def _stale(now: Readings) -> Form | None:
    """Old weights: the rollout's log-probs lie between the reference's and the policy's, or beyond."""
    way, nearer, far = now.get("rollout.way", 0.0), now.get("rollout.nearer", 0.0), now["rollout.far"]
    # In some responses: most of the far ones are nearer to the reference.
    is_part = nearer > max(EXPLAINS * far, LEVEL * SHARE)
    # Training's own log-probs are wrong where they are too far from the reference.
    if now.get("policy.jump", 0.0) > 2 or not (is_part or now.get("rollout.way_explains", 0.0) > EXPLAINS):
        return None
    if way > 0:
        return _named(now, "adapter_scale", part=1 + way)
    if is_part and max(far, nearer) <= MOST:  # while the policy has hardly moved, none is far
        return _named(now, "partly_stale", share=max(far, nearer))
    return _named(now, "stale", part=-way)


def _where(now: Readings) -> str:
    far, far_gap, near_gap = (now[f"rollout.{of}"] for of in ("far", "far_gap", "near_gap"))
    if now.get("rollout.rounded", 0.0) > EXPLAINS:
        return ", evenly up to a limit, as if they were rounded"
    if far < MOST and far_gap > LEVEL * max(near_gap, SAME):
        return f", mostly in {percent(far)} of the responses, as of one worker or one kind of prompt"
    return ", ever more the later a token is" if now["rollout.later"] > EXPLAINS / 2 else ""


def _loss(now: Readings, residual: str) -> Form | None:
    """A factor of the loss, or of a part of it, that explains its gradient."""
    factor, explained = now.get("loss.factor", 1.0), now.get("loss.factor_explained", 0.0)
    if residual == "loss.weights_off":
        return _named(now, residual, now["loss.weights"])
    if residual in ("loss.clipped_wrong", "loss.against", "loss.entropy_off"):
        return None
    if now.get("loss.kl_off", 0.0) > FACTOR:
        return _named(now, "loss.kl_off", now["loss.kl"])
    if now.get("loss.without_explained", 0.0) > max(explained, 1 - SAME):
        return _named(now, "loss.without")
    if explained > 1 - SAME and abs(factor - 1) > FACTOR:
        return _named(now, "loss.sign" if factor < 0 else "loss.factor", factor)
    return _named(now, "loss.opposite") if now["loss.opposite"] > EXPLAINS * now["loss.unfit"] else None
