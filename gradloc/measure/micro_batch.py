# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A micro-batch of a training pass, as it is kept until the optimizer step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..fsdp.torch_compat import tree_map_only

# (rank, index of the micro-batch in its rank's mini-batch).
MicroBatchName = tuple[int, int]


@dataclass
class MicroBatch:
    """A micro-batch of a training pass, kept until the optimizer step."""

    inputs: dict[str, Any]  # the inputs of `Forward`
    rows: list[int]  # its rows in its rank's mini-batch
    rng_state: tuple[Tensor, Tensor | None]  # torch's random state before the pass
    # Values of its tokens, each of shape (rows, response length).
    tokens: dict[str, Tensor] = field(default_factory=dict)
    # The squared norm of its local gradient in each layer, float64; zero if not measured.
    squares: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    loss_agg_mode: str | None = None  # verl's name for how its loss is aggregated, if that is known

    def broken(self, scaled: bool) -> Tensor:
        """Where a log-prob (a critic's value) or a coefficient is non-finite, bool of shape (rows, response length).

        Args:
            scaled (bool): Whether the loss is scaled. If so, an infinite coefficient in half precision does not count,
                because the scale may have made it overflow.
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
