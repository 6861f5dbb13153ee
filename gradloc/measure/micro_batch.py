# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A micro-batch of a training pass: what is kept of it until the optimizer step, its weights, and what was measured."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..fsdp.torch_compat import tree_map_only
from ..threshold import is_over

MicroBatchName = tuple[int, int]  # (rank, index of the micro-batch in its rank's mini-batch)
Token = tuple[MicroBatchName, int, int]  # (micro-batch, row in it, position in the response)

_NO_LAYERS = torch.zeros(0, dtype=torch.float64)


@dataclass
class MicroBatch:
    """What is kept of a training pass until the optimizer step."""

    inputs: dict[str, Any]  # the inputs of `Forward`
    rows: list[int]  # its rows in its rank's mini-batch
    rng_state: tuple[Tensor, Tensor | None]  # torch's random state before the pass
    # Values of its tokens, each of shape (rows, response length).
    tokens: dict[str, Tensor] = field(default_factory=dict)
    # The squared norm of its local gradient in each layer, float64; zero if not measured.
    squares: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    # Sums of elements of its local gradient: `LocalNorms.sums`.
    sums: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    loss_agg_mode: str | None = None  # verl's name for how its loss is aggregated, if that is known

    def broken(self, scaled: bool) -> Tensor:
        """Where a log-prob (a critic's value) or a coefficient is non-finite, bool of shape (rows, response length).

        If the loss is `scaled`, an infinite coefficient in half precision does not count, because the scale may have
        made it overflow.
        """
        broken = ~self.tokens["log_prob" if "log_prob" in self.tokens else "value"].isfinite()
        for name in ("coefficient", "entropy_coefficient"):
            if name in self.tokens:
                coefficient = self.tokens[name]
                half = coefficient.dtype in (torch.float16, torch.bfloat16)
                broken |= coefficient.isnan() if scaled and half else ~coefficient.isfinite()
        return broken

    def has_advantages(self) -> Tensor:
        """Whether an advantage of a response token is not zero, or none is known; bool of shape (), no host sync."""
        if "advantage" not in self.tokens:
            return torch.ones((), dtype=torch.bool, device=self.tokens["weight"].device)
        return ((self.tokens["advantage"] != 0) & self.tokens["response_mask"].bool()).any()

    def portable(self, scale: float, inputs: bool = True) -> "MicroBatch":
        """A copy on the CPU, with suspicion, without the loss scale, and with or without the inputs."""
        # Clones: a pickled view, such as a row, takes its whole storage along.
        copies = tree_map_only(Tensor, lambda tensor: tensor.cpu().clone(), self.inputs if inputs else {})
        tokens = {
            name: tensor.cpu() if name == "token_id" else tensor.float().cpu() for name, tensor in self.tokens.items()
        }
        for name in ("coefficient", "entropy_coefficient"):
            tokens[name] = tokens[name] / scale if name in tokens else torch.zeros_like(tokens["weight"])
        tokens["broken"] = self.broken(scale != 1).cpu()
        # Computed on one rank for all: the search must be the same on all ranks, and the last bits of exp can differ
        # between processors.
        tokens["suspicion"] = suspicion(tokens)
        return MicroBatch(copies, self.rows, self.rng_state, tokens)


def suspicion(tokens: Mapping[str, Tensor]) -> Tensor:
    """s_t = |∂L/∂log p_t|·(1 − p_t), within a factor √2 of the norm of the loss's gradient w.r.t. the logits.

    An entropy bonus adds its own coefficient times the entropy, a rough estimate of its gradient norm. A token whose
    backward signal is known to be m times the usual largest one is taken to have m times the largest s_t/w_t.
    """
    found = tokens["coefficient"].abs() * (1 - tokens["log_prob"].exp())
    if "entropy" in tokens:
        found = found + tokens["entropy_coefficient"].abs() * tokens["entropy"].abs()
    if "outlier" in tokens and found.numel():
        weight = tokens["weight"].abs()
        usual = torch.where((weight > 0) & found.isfinite(), found / weight, 0.0).max()
        found = torch.where(tokens["outlier"] > 0, tokens["outlier"] * usual * weight, found)
    return found


@dataclass(frozen=True)
class TokenSubset:
    """A subset of a micro-batch's tokens."""

    micro_batch: MicroBatch
    keep: Tensor  # shape (rows, response length): which tokens (bool), or a factor for each one's gradient (float)


def token_weights(aggregate: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Computes the weight that a loss aggregation gives to each token with autograd: w = ∂ aggregate(x) / ∂x.

    `aggregate` maps per-token losses, which have the shape and device of `like`, to the scalar loss, and is linear in
    them. The weights have that shape, and are at least float32.
    """
    with torch.enable_grad():
        # Log-probs may be in half precision, but the loss multiplies them by advantages in float32.
        dtype = torch.promote_types(like.dtype, torch.float32)
        x = torch.zeros_like(like, dtype=dtype, requires_grad=True)
        return torch.autograd.grad(aggregate(x), x)[0]


def movable(tokens: Mapping[str, Tensor]) -> Tensor:
    """The tokens that can move: those with a weight, and a coefficient that is known and not zero; NaN is not zero.

    A token that has an advantage of zero, or that PPO clips, has no gradient. If it counted, it would raise the
    threshold of every set that it is in.
    """
    moves = torch.zeros_like(tokens["weight"], dtype=torch.bool)
    for name in ("coefficient", "entropy_coefficient"):
        if name in tokens:
            moves |= tokens[name] != 0
    return moves & (tokens["weight"] != 0)


def square_weights(tokens: Mapping[str, Tensor]) -> Tensor:
    """Σ w_t² over the tokens that can move, and what the threshold of a micro-batch counts.

    That is the same, or Σ w_t² over all its tokens if none can move. The latter's gradient comes from no token (an
    auxiliary loss has one, say): it is a spike if it would be one of tokens. float64 of shape (2,), no host sync.
    """
    squares = tokens["weight"].double().square()
    of_movable = torch.where(movable(tokens), squares, 0.0).sum()
    return torch.stack([of_movable, torch.where(of_movable == 0, squares.sum(), of_movable)])


def usable_tokens(tokens: Mapping[str, Tensor], broken: Tensor) -> Tensor:
    """Where a response token has a weight in the loss and is not broken (see `MicroBatch.broken`), bool."""
    return tokens["response_mask"].bool() & (tokens["weight"] != 0) & ~broken


@dataclass(frozen=True, eq=False, slots=True)
class MicroBatchFigures:
    """What all ranks know about one rank's micro-batch when a search starts."""

    rows: int
    tokens: int  # the number of response tokens
    broken_tokens: int  # the number of response tokens with a non-finite log-prob or coefficient
    root_square_weight: float  # sqrt(Σ w_t²) over the tokens that can move, or over all if none can
    norm: float | None = None  # the norm of its gradient; None while it has not been measured
    layers: Sequence[str] = ()  # those in which it was measured
    by_layer: Tensor = _NO_LAYERS  # the norm in each, float64
    # The number of response tokens with a weight in the loss and finite log-probs and coefficients.
    usable_tokens: int = 0
    # Whether an advantage is not zero, or none is known. Otherwise only KL and entropy terms have a gradient, which is
    # not an ordinary one.
    has_advantages: bool = True

    @property
    def layer_norms(self) -> dict[str, float]:
        """The norm in each layer. Made when it is asked for: there are many micro-batches, and many layers."""
        return dict(zip(self.layers, self.by_layer.tolist(), strict=True))

    @property
    def token_equivalent(self) -> float:
        """Its norm/sqrt(Σ w_t²), infinite while its norm is unknown; see `token_equivalents`."""
        return math.inf if self.norm is None else token_equivalent(self.norm, self.root_square_weight)

    def is_over(self, threshold: float) -> bool:
        """Whether its norm is known and over its threshold for this τ."""
        return self.norm is not None and is_over(self.token_equivalent, threshold)


def token_equivalents(norms: Tensor, root_square_weights: Tensor) -> Tensor:
    """norm/sqrt(Σ w_t²) of micro-batches, which is compared with τ; float64, of the shape of both. No host sync.

    A norm that is not finite counts as infinite, and one of a micro-batch without tokens as 0.
    """
    ratio = norms / root_square_weights.masked_fill(root_square_weights == 0, math.inf)
    return ratio.nan_to_num(nan=math.inf, posinf=math.inf)


def token_equivalent(norm: float, root_square_weight: float) -> float:
    """`token_equivalents` of one, without a tensor: a search asks for those of all ranks."""
    ratio = norm / root_square_weight if root_square_weight else 0.0
    return ratio if math.isfinite(norm) and not math.isnan(ratio) else math.inf


AllFigures = Mapping[MicroBatchName, MicroBatchFigures]  # of the micro-batches of all ranks


def suspects(figures: AllFigures, threshold: float) -> list[MicroBatchName]:
    """The micro-batches measured over their threshold, largest first."""
    over = [name for name, each in figures.items() if each.is_over(threshold)]
    return sorted(over, key=lambda name: (-figures[name].token_equivalent, name))
