"""Policy losses as users register them, which do not give verl's `agg_loss` one loss of each response token."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.trainer.ppo import core_algos


def flat(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The response tokens of all rows, one after the other."""
    losses = (-advantages * (log_prob - old_log_prob).exp())[response_mask.bool()][None]
    return core_algos.agg_loss(losses, torch.ones_like(losses), "token-mean", **config.global_batch_info), {}


def of_sequences(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """One loss of each row: its mean advantage times the geometric mean of its ratios."""
    lengths = response_mask.sum(1, keepdim=True)
    log_ratio, advantage = (
        (values * response_mask).sum(1, keepdim=True) / lengths.clamp(min=1)
        for values in (log_prob - old_log_prob, advantages)
    )
    losses, mask = -advantage * log_ratio.exp(), (lengths > 0).float()
    return core_algos.agg_loss(losses, mask, "seq-mean-token-mean", **config.global_batch_info), {}


LOSSES = {"flat": flat, "of_sequences": of_sequences}


@contextmanager
def registered() -> Iterator[None]:
    core_algos.POLICY_LOSS_REGISTRY.update(LOSSES)
    try:
        yield
    finally:
        for name in LOSSES:
            del core_algos.POLICY_LOSS_REGISTRY[name]


def with_losses(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of a rank, which finds them registered."""
    with registered():
        return function(*arguments)
