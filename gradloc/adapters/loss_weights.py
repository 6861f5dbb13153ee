# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How much each token counts in verl's losses."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos

from ..evidence.token_facts import find_after_eos
from ..fsdp import collectives
from ..guarded import ForeseenError, warn_once
from ..measure.micro_batch import token_weights

# Warnings that this process has given.
_said: set[str] = set()


@dataclass(frozen=True)
class AggregationCall:
    """What a policy loss called verl's `agg_loss` with. It holds tensors of the size of a micro-batch.

    A loss may give it one loss of each token, one of each sequence, or anything else.
    """

    aggregate: Callable[[Tensor], Tensor]  # gives the loss for other losses of the same shape
    shape: tuple[int, ...]  # that of the losses
    mask: Tensor  # which of them count
    mode: str  # how it aggregates
    options: Mapping[str, Any] | None  # its other arguments, by name; None if some have none

    def is_of_tokens(self, shape: Sequence[int]) -> bool:
        """Whether it has one loss of each token, whose shape (rows, response length) is given."""
        return self.shape == tuple(shape)

    def is_known(self, shape: Sequence[int]) -> bool:
        """Whether it has one loss of each token or of each sequence, so that the tokens' weights follow from it."""
        forms = (tuple(shape), (shape[0],), (shape[0], 1))
        return self.shape in forms and tuple(self.mask.shape) in forms

    def has_same_weights(self, response_mask: Tensor, mode: str, options: Mapping[str, Any]) -> bool:
        """Whether the terms of KL and entropy, with this mask, mode and options, have the weights of its tokens."""
        is_mask = self.mask.data_ptr() == response_mask.data_ptr() and self.mask.shape == response_mask.shape
        is_same = is_mask and self.is_of_tokens(response_mask.shape)
        if not is_same or self.mode != mode or self.options is None or self.options.keys() != options.keys():
            return False
        # Values on a device are not compared, which would wait for it.
        return all(self.options[key] is value for key, value in options.items())

    def kept(self, response_mask: Tensor) -> Tensor:
        """The response tokens that it counts, bool of the mask's shape."""
        return self.mask.reshape(len(response_mask), -1).bool() & response_mask.bool()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it, a module of verl has this value by this name."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def recorded_aggregation(act: Callable[[AggregationCall], object] | None = None) -> Iterator[list[AggregationCall]]:
    """Within it, the first call of verl's `agg_loss` that a policy loss makes is put in the list that it yields.

    verl's policy losses take that function from their module, so it is replaced there. The terms of KL and entropy,
    which import it by name, are not seen. `act` is called with the call at once, within the loss; it must not raise.
    """
    calls: list[AggregationCall] = []
    original = core_algos.agg_loss

    @functools.wraps(original)
    def recorded(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, *rest: Any, **options: Any) -> Tensor:
        if not calls:  # the loss itself; what follows are figures for the log
            calls.append(
                AggregationCall(
                    lambda x: original(x, loss_mask, loss_agg_mode, *rest, **options),
                    tuple(loss_mat.shape),
                    loss_mask.detach(),
                    loss_agg_mode,
                    None if rest else options,
                )
            )
            if act is not None:
                act(calls[0])
        return original(loss_mat, loss_mask, loss_agg_mode, *rest, **options)

    with replaced(core_algos, "agg_loss", recorded):
        yield calls


def policy_weights(call: AggregationCall | None, config: Any, response_mask: Tensor, **options: Any) -> Tensor:
    """The weight of each token in a policy loss.

    The weight is the derivative of the loss with respect to the token's own loss. verl 0.7's factor for gradient
    accumulation, which comes after the aggregation, is left out. A sequence's weight is divided evenly among its
    tokens, as in verl's geometric mean. Of a loss in another form, the mode of `config` is assumed. Either assumption
    is logged once.

    Args:
        call (AggregationCall, optional): What the loss called; None if it does not call `agg_loss`.
        config (ActorConfig): verl's configuration of the actor.
        response_mask (Tensor): Which tokens are responses, shape (batch size, response length).
        options (Any): More arguments with which verl aggregates the terms of KL and entropy.

    Returns:
        Tensor: float32, same shape.
    """
    like = response_mask.float()
    if call is None or not call.is_known(like.shape):
        mode, sizes = _mode_without_a_call(config), config.global_batch_info
        if _is_geo_mean(config):
            sizes = {"global_batch_size": len(like)}  # it counts all sequences, also those without a token
        else:
            _say_once(
                "The policy loss does not give verl's agg_loss one loss of each response token or sequence: GradLoc "
                f"assumes the tokens' weights to be those of loss_agg_mode={mode}."
            )
        return mode_weights(mode, response_mask, **sizes)
    of_losses, shape = call.aggregate, call.shape
    if call.is_of_tokens(like.shape):
        weight = token_weights(of_losses, like)
    else:
        _say_once(
            "The policy loss gives verl's agg_loss one loss of each sequence: GradLoc divides a sequence's weight "
            "evenly among its tokens."
        )
        counts = like.sum(1).clamp(min=1)
        weight = token_weights(lambda x: of_losses(((x * like).sum(1) / counts).view(shape)), like)
    if _has_more_terms(config) and not call.has_same_weights(response_mask, config.loss_agg_mode, options):
        # These terms remain for a token that the loss has rejected.
        whole = mode_weights(config.loss_agg_mode, response_mask, **options)
        weight = torch.where(call.kept(response_mask), weight, whole)
    return weight


def mode_weights(mode: str, response_mask: Tensor, **options: Any) -> Tensor:
    """The weight of each token by a mode of verl's `agg_loss`, as in the terms of KL and entropy: float32."""
    return token_weights(lambda x: core_algos.agg_loss(x, response_mask, mode, **options), response_mask.float())


def aggregation_mode(call: AggregationCall | None, config: Any, shape: Sequence[int]) -> str | None:
    """How a policy loss aggregates its tokens: some of verl's losses have a mode of their own, whatever `config` says.

    Args:
        call (AggregationCall, optional): As `policy_weights` takes it.
        shape (Sequence[int]): Batch size and response length.

    Returns:
        str | None: verl's name for it; None if it aggregates sequences.
    """
    if call is None or not call.is_known(shape):
        return _mode_without_a_call(config)
    return call.mode if call.is_of_tokens(shape) else None


def _say_once(message: str) -> None:
    if collectives.rank() == 0:
        warn_once(_said, message)


def _has_more_terms(config: Any) -> bool:
    """Whether the whole loss has more terms than the policy loss: those of KL and entropy."""
    return config.use_kl_loss or config.entropy_coeff != 0


def _mode_without_a_call(config: Any) -> str:
    return "seq-mean-token-mean" if _is_geo_mean(config) else config.loss_agg_mode


def _is_geo_mean(config: Any) -> bool:
    # A critic has no policy loss.
    return getattr(config, "policy_loss", {}).get("loss_mode", "vanilla") == "geo_mean"


def kl_coefficients(config: Any, weight: Tensor, log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """The derivative of the KL loss with respect to each log-prob; gradient accumulation is left out as above.

    It comes from verl's own KL loss by autograd, so it is exact for every kl_loss_type, including the straight-through
    ones (k1+, k3+), whose derivative is not that of their value.

    All tensors are of shape (batch size, response length); `weight` is that of each token in this term.
    """
    penalty: Any = core_algos.kl_penalty  # annotated for FloatTensor, which type checkers do not take a Tensor for
    with torch.enable_grad():
        x = log_prob.detach().requires_grad_()
        estimate = penalty(logprob=x, ref_logprob=ref_log_prob, kl_penalty=config.kl_loss_type)
        return torch.autograd.grad(estimate, x, weight.to(estimate.dtype) * config.kl_loss_coef)[0]


def with_derived(
    tokens: Mapping[str, Tensor],
    call: AggregationCall | None,
    config: Any,
    eos_tokens: Collection[int],
    factor: float,
    options: Mapping[str, Any],
) -> dict[str, Tensor]:
    """The tokens with what follows from their values and their loss.

    Args:
        tokens (Mapping): By the evidence's names, each of shape (rows, response length): `response_mask`, `log_prob`,
            `token_id`; with a KL loss, `ref_log_prob`. Of a critic, `response_mask` and `value`.
        call (AggregationCall, optional): As `policy_weights` takes it, as `options`.
        eos_tokens (Collection[int]): Where a rollout stops.
        factor (float): The micro-batch's part in the mini-batch's loss.

    Returns:
        dict: Also `weight`; where the policy loss has rejected some, `policy_loss_mask`; with a KL loss, its part
            `kl_coefficient` of the coefficient; with an entropy bonus, `entropy_expected`, what its coefficient should
            be; and what is `after_eos`. Of a critic, `weight` alone.

    Raises:
        ForeseenError: A critic's loss is not verl's value loss.
    """
    mask = tokens["response_mask"]
    if "value" in tokens:
        if call is None or not call.is_of_tokens(mask.shape):
            raise ForeseenError("the critic's loss is not verl's value loss")
        return {**tokens, "weight": token_weights(call.aggregate, mask.float()) * factor}
    weight = policy_weights(call, config, mask, **options)
    derived = {"weight": weight * factor}
    is_same = call is not None and call.has_same_weights(mask, config.loss_agg_mode, options)
    if call is not None and call.is_known(mask.shape) and _has_more_terms(config) and not is_same:
        derived["policy_loss_mask"] = call.kept(mask)  # else the weights alone tell
    of_terms = weight if is_same or not _has_more_terms(config) else mode_weights(config.loss_agg_mode, mask, **options)
    if config.entropy_coeff:
        derived["entropy_expected"] = of_terms * (-config.entropy_coeff * factor)
    if config.use_kl_loss:
        kl = kl_coefficients(config, of_terms, tokens["log_prob"], tokens["ref_log_prob"])
        derived["kl_coefficient"] = kl * factor
    if _is_geo_mean(config) and "rollout_is_weight" in tokens:  # which takes a sequence's mean, as of the ratio
        logs = torch.where(mask.bool(), (tokens["rollout_is_weight"] + 1e-10).log(), 0.0)
        mean = logs.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        derived["rollout_is_weight"] = mean.exp() * mask
    if eos_tokens:
        derived["after_eos"] = find_after_eos(tokens["token_id"], mask, eos_tokens)
    return {**tokens, **derived}


def eos_tokens(model: Any) -> set[int]:
    """The ids at which a rollout of a model stops, by the configurations that it has."""
    ends: set[int] = set()
    for name in ("generation_config", "config"):
        found = getattr(getattr(model, name, None), "eos_token_id", None)
        ends.update([found] if isinstance(found, int) else found or ())
    return ends
