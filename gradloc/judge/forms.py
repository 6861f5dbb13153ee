# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a broken identity is called: the closed form that explains its residual, or its own name if none does.

Each function takes the readings of the update and the residual that is most off.
"""

import math
from dataclasses import dataclass

from ..levels import EXPLAINS, FACTOR, LATE, LEVEL, MOST, SAME, SHARE, SHIFT, UNRELATED
from .records import Readings
from .shares import percent


@dataclass(frozen=True)
class Form:
    """What is wrong.

    Args:
        name (str): That of the closed form, or of the identity.
        claim (str): What is wrong, a clause that begins a sentence.
        look (str): Where to look, a sentence.
        check (str): What would refute it on this run, a sentence or two.
        share (float, optional): Of the responses or tokens.
        column (str, optional): "rollout", "old" or "reference", if the column is wrong, and not training.
        factor (float, optional): What something is multiplied by.
    """

    name: str
    claim: str
    look: str
    check: str
    share: float | None = None
    column: str | None = None
    factor: float | None = None


_COLUMNS = {
    "advantages": "advantages",
    "rollout": "rollout_log_probs",
    "old": "old_log_probs",
    "reference": "ref_log_prob",
    "policy": "log_probs",
}


def finite(now: Readings, residual: str) -> Form:
    key = next(key for key in _COLUMNS if now.get(f"{key}.broken"))
    rows = f"{now[f'{key}.broken']:.0f} response{'s' * (now[f'{key}.broken'] != 1)}"
    look = {
        "advantages": "Look at rewards and their normalization: one bad reward makes the advantages of its group NaN.",
        "policy": "Look at the forward pass of the update: a kernel, a mask, an overflow in half precision.",
    }.get(key, "Look at the forward pass that computes them, and at its precision.")
    check = (
        f"Print `{_COLUMNS[key]}` of these rows before the update: if they are finite there, what follows breaks them."
    )
    return Form("nonfinite", f"`{_COLUMNS[key]}` are NaN or infinite in {rows}", look, check, column=key)


def sampled(now: Readings, residual: str) -> Form:
    check = (
        "Compare `response_mask` in the batch, row by row, with the token ids that the rollout returned: it should be 1 "
        "for these alone, the end token included."
    )
    if now.get("sampled.inverted", 0.0) > EXPLAINS:
        return Form(
            "mask",
            "The response mask is inverted: what was sampled is not trained, and what is was not sampled",
            "Look at how the mask is built.",
            check,
        )
    if residual == "sampled.last_lost":
        return Form(
            "mask",
            "The last token that the rollout sampled is not trained, which mostly is the end token (EOS)",
            "Look at masks that are made of `ids != pad`, where the padding token is the end token.",
            check,
            share=now["sampled.last_lost"],
        )
    count = now["sampled.unlogged"] + now["sampled.after_end"]
    if residual == "sampled.after_end":
        claim = f"Tokens after the end of their turn are trained on: {count:.0f} of {now['sampled.trained']:.0f}"
    else:
        claim = (
            f"{count:.0f} of {now['sampled.trained']:.0f} trained tokens have no log-prob of the rollout (exactly 0)"
        )
    return Form(
        "unsampled",
        claim,
        "Set response_mask to 0 for tokens that were added later (EOS tokens, templates, tool output, padding); if these "
        "were sampled, their log-probs were lost.",
        check,
        share=count / max(now["sampled.trained"], 1.0),
    )


def responses(now: Readings, residual: str) -> Form:
    share = now["responses.repeated"]
    return Form(
        "repeated_responses",
        f"{percent(share)} of the responses are the same, token for token, as an earlier one to their prompt",
        "The rollout samples with one seed, or rows are doubled.",
        "Print the ids of the responses of one `uid` after the rollout. If they are the same there, look at seeds, "
        "temperature, top-p and top-k of the server; if not, at what pads, repeats or gathers rows.",
        share=share,
    )


def groups(now: Readings, residual: str) -> Form:
    if residual == "groups.alone":
        return Form(
            "groups_of_one",
            "Every response has a `uid` of its own, although several are to one prompt: none is compared with another",
            "Look at where `uid` is set: before prompts are repeated for the rollout.",
            "Print `uid` and the decoded prompt of each row: rows with one prompt should have one `uid`, unless the "
            "advantage is computed without groups.",
        )
    return Form(
        "mixed_groups",
        f"Rewards of different prompts are compared: {percent(now['groups.mixed'])} of the rows have a `uid` with several",
        "Look at the order in which prompts are repeated for the rollout and put together with their responses.",
        "Print `uid` and the decoded prompt of each row: rows with one `uid` are of one prompt, or of one trajectory.",
        share=now["groups.mixed"],
    )


def advantages(now: Readings, residual: str) -> Form:
    check = (
        "Before the update, print `uid`, the sum of `token_level_rewards` and the advantage of each row: of the rows with "
        "one `uid`, that with the highest reward has the highest advantage, and they are on both sides of 0."
    )
    if residual == "advantages.contradicting":
        share = now["advantages.contradicting"]
        turned = share > 1 - FACTOR
        how = "their sign is turned" if turned else "that of a better response is lower"
        return Form(
            "advantage_order",
            f"Advantages do not follow the rewards: {how} in {percent(share)} of the pairs to one prompt",
            "Look at the loss's sign and at rewards that are costs."
            if turned
            else "Look for rows that are moved between rewards and advantages (a sort, a filter, padding, a gather).",
            check,
            share=share,
        )
    if residual == "advantages.cut":
        return Form(
            "advantage_mask",
            f"In {percent(now['advantages.cut'])} of the responses, the first tokens have no advantage, as many as the row "
            "has padding",
            "Look at how advantages are padded: to the left instead of to the right.",
            "Print `advantages` and `response_mask` of one row: where the mask is 1, the advantage is the response's.",
            share=now["advantages.cut"],
        )
    claim, look = {
        "advantages.zero": (
            "are 0, although the rewards of a prompt's responses differ",
            "Look at what they are made of.",
        ),
        "advantages.one_sided": (
            "have one sign in groups whose rewards differ",
            "Look at what loses the other: abs, clamp.",
        ),
        "advantages.offset": (
            f"are all far on one side of 0: {now.get('advantages.offset', 0.0):.3g} times as far as they are apart",
            "The baseline is not these rewards': look at running means, and at what they were computed from.",
        ),
        "advantages.spread": (
            f"of a prompt's responses are {now.get('advantages.spread', 0.0):.3g} times as far apart as rewards, or a "
            "division by their deviation, can make them",
            "Look at divisions by a deviation that is 0 but for rounding.",
        ),
    }[residual]
    return Form("advantages", f"Advantages {claim}", look, check)


_SIDE_BY_SIDE = (
    "Print `responses`, `rollout_log_probs`, `old_log_probs` and `ref_log_prob` of one row side by side, and compare "
    "columns and neighbours."
)


def _moved(now: Readings, pair: str, what: str) -> Form | None:
    """Log-probs at other positions, of other rows, or missing."""
    repeated = now.get(f"{pair}.repeated", 0.0)
    unrelated, far = now.get(f"{pair}.unrelated", 0.0), now.get(f"{pair}.far", 0.0)
    shift, by, moved = (now.get(f"{pair}.{name}", 0.0) for name in ("shift", "shift_by", "moved"))
    look = "Look at where log-probs are gathered, sliced, padded or put in order."

    def form(claim: str, share: float) -> Form:
        return Form("misaligned", f"{what} {claim}", look, _SIDE_BY_SIDE, share, pair)

    if shift > LEVEL * SHIFT and moved > EXPLAINS * unrelated * UNRELATED:
        count = f"{abs(by):.0f} position{'s' * (abs(by) != 1)} {'later' if by > 0 else 'earlier'}"
        where = f", in {percent(far)} of the responses" if far < MOST else ""
        return form(f"belong to other tokens: they fit training's {count}{where}", max(far, moved))
    if repeated > LEVEL * SHARE:
        return form(f"repeat one value: {percent(repeated)} have that of the token before", repeated)
    if unrelated > max(EXPLAINS * far, LEVEL * SHARE):
        return form(
            f"have no relation to training's in {percent(unrelated)} of the responses: other rows, or labels", unrelated
        )
    return None


def old(now: Readings, residual: str) -> Form:
    if now["old.unrelated"] > EXPLAINS * now["old.far"] and now["old.unrelated"] > LEVEL * SHARE:
        return Form(
            "misaligned",
            f"Old log-probs have no relation to those of the update's own forward in "
            f"{percent(now['old.unrelated'])} of the responses: they are of other rows",
            "Look at how rows are ordered, balanced and put back.",
            _SIDE_BY_SIDE,
            now["old.unrelated"],
            "old",
        )
    how = ""
    if now.get("old.slope", 0.0) > EXPLAINS:
        how = f", as at another temperature (slope {now['old.slope_is']:.3g})"
    return Form(
        "old_log_probs",
        f"Old log-probs differ from those of the update's first forward by {now['old.gap']:.2g} nats in the mean{how}, with "
        "the same weights",
        "Look for dropout (the model in training mode), another temperature, attention mask or precision, or log-probs of "
        "an earlier step.",
        "Compute the old log-probs twice: if they differ, the forward is random; if not, compare what both calls get.",
        column="old",
    )


def rollout(now: Readings, residual: str) -> Form:
    gap, what = now["rollout.gap"], "Rollout log-probs"
    correlation = now.get("rollout.correlation", 1.0)
    same = (
        "Compute the log-probs of one response with the weights that the server has and with training's, on the same ids: "
        "if they agree, the weights are not the cause."
    )
    if correlation < -UNRELATED:
        return _other(f"{what} have the wrong sign", now)
    lasting = now.get("rollout.slope", 0.0) > EXPLAINS
    if now["rollout.differing"] > EXPLAINS and now["rollout.one_sided"] > LEVEL * LATE and correlation > UNRELATED:
        if not lasting:
            larger = "larger" if now["rollout.larger"] else "smaller"
            return _other(
                f"{what} are {larger} than training's for nearly all tokens, as from after a top-p or top-k cut, "
                "or of the likeliest token",
                now,
            )
    if lasting and correlation > UNRELATED:
        slope = now["rollout.slope_is"]
        base = next(
            (name for name, b in (("log2", 1 / math.log(2)), ("log10", 1 / math.log(10))) if abs(slope / b - 1) < SAME),
            "",
        )
        how = f"in {base} instead of nats" if base else f"as at {'a lower' if slope > 1 else 'a higher'} temperature"
        return _other(f"{what} are training's times {slope:.3g}, {how}", now)
    way = now.get("rollout.way", 0.0)
    # What was there before any optimizer step has not come with steps.
    is_late = now.get("rollout.first_gap", 0.0) < LEVEL * SAME and not now.get("policy_jumped")
    if now.get("rollout.way_explains", 0.0) > EXPLAINS and is_late:
        if way < -EXPLAINS / 2:
            part = now["rollout.far"]
            whole = part > MOST
            where = "" if whole else f"For {percent(part)} of the responses, as of one of several workers, the rollout"
            claim = f"{where or 'The rollout'} still samples from old weights: log-probs lack {percent(-way)} of the policy's way from the reference"
            return Form(
                "stale_weights" if whole else "partly_stale",
                claim,
                "Look at what sends weights to the rollout: which tensors, adapters and workers get them.",
                same,
                1.0 if whole else part,
                "rollout",
            )
        if way > FACTOR:
            return Form(
                "adapter_scale",
                f"The rollout has gone {1 + way:.2g} times as far from the reference as the policy",
                "Look for a LoRA adapter that is merged into the weights and loaded as well, or scaled twice (lora_alpha / r).",
                same,
                column="rollout",
            )
    if (moved := _moved(now, "rollout", what)) is not None:
        return moved
    where = ""
    if now["rollout.far"] < MOST and now["rollout.far_gap"] > LEVEL * max(now["rollout.near_gap"], SAME):
        where = (
            f": by {now['rollout.far_gap']:.2g} in {percent(now['rollout.far'])} of the responses and by "
            f"{now['rollout.near_gap']:.2g} in the others. Look at what these have in common, as a worker, or a kind of "
            "prompt"
        )
    elif now["rollout.later"] > EXPLAINS / 2:
        where = ", ever more the later a token is"
    return Form(
        "rollout_log_probs",
        f"Rollout and training score the same tokens differently, by {gap:.2g} nats in the mean{where}",
        "The engines have other weights, another prompt (chat template, BOS token), other positions (RoPE), kernels or "
        "experts, or a coarser precision.",
        same,
        column="rollout",
    )


def _other(claim: str, now: Readings) -> Form:
    return Form(
        "other_log_probs",
        claim,
        "Let both be of the same temperature and vocabulary, in nats, from before or after the same top-p and top-k.",
        "`gradloc replay BUNDLE` looks for the temperature that fits; or score one response with the server at "
        "temperature 1, without top-p.",
        1.0,
        "rollout",
    )


def reference(now: Readings, residual: str) -> Form:
    what = "Reference log-probs"
    if residual in ("reference.shift", "reference.moved") and (moved := _moved(now, "reference", what)) is not None:
        return moved
    check = "Print a checksum of one weight in the actor and in the reference, before the first step and after it."
    if residual == "reference.same":
        return Form(
            "reference",
            f"{what} are the policy's own, after the policy has moved: the reference follows it",
            "Look at what the reference shares with the actor: its weights, its adapter.",
            check,
            column="reference",
        )
    return Form(
        "reference",
        f"{what} differ from the policy's by {now['reference.gap']:.2g} nats in the mean, before any optimizer step",
        "Unless another model was chosen for the reference, look at its path, adapter, precision, attention mask and "
        "temperature.",
        check,
        column="reference",
    )


def loss(now: Readings, residual: str) -> Form:
    check = (
        "Take one step with another number of ranks, and one with another number of micro-batches: `actor/grad_norm` should "
        "stay about the same."
    )
    of_tokens = "Print the policy loss of each token, before the mean, and its advantage: where the ratio is 1, it is −advantage."
    factor, kl = now.get("loss.factor", 1.0), now.get("loss.kl_factor", 1.0)
    if residual == "loss.weights":
        return Form(
            "loss_scale",
            f"The weights of all tokens sum to {now['loss.weights']:.4g} instead of 1",
            "Look at what the loss is divided by.",
            check,
            factor=now["loss.weights"],
        )
    if residual == "loss.clipped_wrong":
        return Form(
            "loss",
            f"{percent(now['loss.clipped_wrong'])} of the clipped tokens are clipped on the wrong side: their "
            "ratio is low where the advantage is positive, or high where it is negative",
            "Look at min and max in the clipped loss.",
            of_tokens,
        )
    if residual == "loss.against":
        return Form(
            "importance_weights",
            "The rollout's importance weights are inverted: over 1 where the old policy is less "
            "likely to sample the token than the rollout was",
            "Look at the sign of the log-probs' difference.",
            "Print `rollout_is_weights`, `old_log_probs` and `rollout_log_probs` of one row: a weight is exp(old − rollout).",
        )
    if (
        now.get("loss.kl_explained", 0.0) > 1 - FACTOR
        and abs(kl - 1) > LEVEL * FACTOR
        or now.get("loss.beside", 1.0) < FACTOR
    ):
        what = "is not in the gradient" if abs(kl) < FACTOR else f"counts {kl:.3g} times in the gradient"
        return Form(
            "kl_scale",
            f"The KL loss {what}, by its coefficient and type",
            "Look at where it is scaled or detached.",
            "Take one step with kl_loss_coef=0: the gradient differs by that of the KL loss.",
            factor=kl,
        )
    if (
        now.get("loss.without_explained", 0.0) > max(now.get("loss.explained", 0.0), 1 - SAME)
        and abs(now["loss.without"] - 1) < FACTOR
    ):
        return Form(
            "importance_weights",
            "The rollout's importance weights are not in the loss: its gradient fits without them",
            "Look at whether the loss function takes `rollout_is_weights`.",
            of_tokens,
        )
    if now.get("loss.explained", 0.0) > 1 - SAME:
        if factor < 0:
            return Form(
                "loss_sign",
                f"The loss's sign is turned: its gradient is {factor:.3g} times what weights, advantages "
                "and ratios give",
                "Look at the sign of the policy loss.",
                of_tokens,
                factor=factor,
            )
        return Form(
            "loss_scale",
            f"The loss's gradient is {factor:.4g} times what its weights, advantages and ratios give",
            "Look at what it is multiplied and divided by.",
            check,
            factor=factor,
        )
    if now["loss.opposite"] > EXPLAINS * now["loss.unfit"]:
        return Form(
            "loss_sign",
            f"The loss has lost the sign of the advantage for {percent(now['loss.opposite'])} of the tokens",
            "Look at what takes the size of advantages or ratios (abs, square, clamp).",
            of_tokens,
            now["loss.opposite"],
        )
    return Form(
        "loss",
        f"For {percent(now['loss.unfit'])} of the tokens, the loss's gradient is not −weight · advantage · ratio",
        "Look for a term that is added or left out, and at what multiplies single tokens.",
        of_tokens,
        now["loss.unfit"],
    )


def gradient(now: Readings, residual: str) -> Form:
    check = "On one rank, compare the norm of a parameter's `grad` after each backward pass with that before the optimizer step."
    if residual == "gradient.last_pass":
        return Form(
            "last_pass",
            "The optimizer's gradient is that of the last micro-batch alone",
            "Look for a zero_grad between micro-batches, or gradients that are overwritten.",
            check,
        )
    if residual == "gradient.zero":
        return Form(
            "gradient",
            f"{now['gradient.zero']:.0f} layer(s) have a gradient of exactly 0, unlike the others of their kind",
            "Look for a detach, a no_grad, or an adapter that is not used.",
            check,
        )
    if residual == "gradient.less":
        return Form(
            "gradient",
            f"The optimizer's gradient is {now['gradient.less']:.3g} times smaller than the passes' together",
            "Look for what zeroes or divides it between the passes and the step.",
            check,
        )
    return Form(
        "loss_scale",
        f"The optimizer's gradient is up to {now['gradient.factor']:.3g} times the sum of the passes'",
        "Look for a backward that runs twice, hooks that multiply, or a sum where a mean over ranks should be.",
        check,
        factor=now["gradient.factor"],
    )


def weights(now: Readings, residual: str) -> Form:
    check = "Compare a parameter before and after `optimizer.step()`, and with the next step's: print its norm and its grad's."
    if residual == "weights.still":
        all_of = now["weights.still"] >= now["weights.layers"]
        what = (
            "Nothing moves"
            if all_of
            else f"{now['weights.still']:.0f} of {now['weights.layers']:.0f} layers do not move"
        )
        return Form(
            "not_moving",
            f"{what}: weights are bit for bit those before the optimizer step",
            "Look at which tensors the optimizer has, and whether the learning rate is below the weights' precision.",
            check,
        )
    if residual == "weights.between":
        return Form(
            "weights",
            "Weights have changed between two updates, without an optimizer step",
            "Look at what else writes weights: a loaded checkpoint, an average of weights, offloading, a merged adapter.",
            check,
        )
    if residual in ("weights.uphill", "weights.gained"):
        return Form(
            "ascent",
            "Optimizer steps go along the gradient, and not against it: the loss grows",
            "Look at the loss's sign and at `maximize`.",
            check,
        )
    return Form(
        "weights",
        "Weights changed by more than an optimizer step should change them",
        "Look at the optimizer (its state after a resume, its precision, weight decay), and at what else writes "
        "weights: a loaded checkpoint, offloading, a merged adapter, a faulty device.",
        check,
    )
