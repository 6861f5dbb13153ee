# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Plants a spike in a copy of a mini-batch, so that a user can see that the search finds it."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .fsdp import collectives
from .measure.meter import Meter, Unit
from .measure.passes import MicroBatch, Passes, TokenSubset, UnitName

# How far the planted token's gradient exceeds what is needed to put its micro-batch over the threshold.
_MARGIN = 3.0

# log p changes too little with the parameters for a token that is more probable than this.
_SURE = 0.99


class DrillFailedError(RuntimeError):
    """The drill could not be made; raised on every rank with the same message."""


@dataclass(frozen=True)
class Planted:
    """The token whose coefficient is raised, the same on every rank.

    Args:
        unit (UnitName): (rank, index of the micro-batch).
        row (int): Its row in the micro-batch.
        position (int): Its index in the response.
        mini_batch_row (int): Its row in its rank's mini-batch.
        weight (float): Its weight w in the loss.
        sign (float): The sign of its coefficient ∂L/∂log p: -1 if the update raises its probability, else 1.
        norm (float): ‖∇log p‖, the norm of its gradient for a coefficient of 1.
    """

    unit: UnitName
    row: int
    position: int
    mini_batch_row: int
    weight: float
    sign: float
    norm: float

    def place(self) -> dict[str, int]:
        """Where it is, as the event names it."""
        return {"rank": self.unit[0], "row": self.mini_batch_row, "position": self.position}


def choose(
    units: Mapping[UnitName, Unit], meter: Meter, passes: Passes, own: Sequence[MicroBatch], seed: int
) -> Planted:
    """Chooses a token on a random rank, and measures its gradient in one pass. A collective call.

    Args:
        units (dict[UnitName, Unit]): The units of all ranks.
        meter (Meter): Measures the gradient.
        passes (Passes): Runs the pass.
        own (list[MicroBatch]): This rank's micro-batches.
        seed (int): The same on every rank.

    Raises:
        DrillFailedError: No token has a gradient that can be scaled.
        RankFailedError: The pass failed on some rank.
    """
    generator = random.Random(seed)  # the same on every rank, as what it draws from
    usable = sorted(name for name, unit in units.items() if unit.usable_tokens)
    if not usable:
        raise DrillFailedError("no response token of the mini-batch has a weight in the loss and finite log-probs")
    rank = generator.choice(sorted({rank for rank, _ in usable}))
    name = generator.choice([name for name in usable if name[0] == rank])
    micro_batch = meter.obtain([name], own, passes.scale)[name]
    tokens = micro_batch.tokens
    with collectives.same_on_all_ranks():
        possible = usable_tokens(tokens, tokens["broken"].bool())
        unsure = possible & (tokens["log_prob"] < math.log(_SURE))
        row, position = generator.choice((unsure if unsure.any() else possible).nonzero().tolist())
        alone = torch.zeros_like(possible)
        alone[row, position] = True
        weight, coefficient = float(tokens["weight"][row, position]), float(tokens["coefficient"][row, position])
        policy_only = {"coefficient": tokens["weight"], "entropy_coefficient": torch.zeros_like(tokens["weight"])}
        probe = {rank: TokenSubset(replace(micro_batch, tokens={**tokens, **policy_only}), alone)}
    norm = math.sqrt(float(meter.measure(passes, [lambda: probe]).sum())) / abs(weight)
    if not (norm > 0 and math.isfinite(norm)):
        raise DrillFailedError(f"the chosen token has a gradient of norm {norm:g}, which cannot be scaled")
    sign = 1.0 if coefficient > 0 else -1.0
    return Planted(name, row, position, micro_batch.rows[row], abs(weight), sign, norm)


def usable_tokens(tokens: Mapping[str, Tensor], broken: Tensor) -> Tensor:
    """Where a response token has a weight in the loss and is not broken; bool of shape (rows, response length).

    Args:
        tokens (dict[str, Tensor]): A micro-batch's tokens: their `response_mask` and `weight`.
        broken (Tensor): Where a log-prob or a coefficient is not finite, bool of the same shape.
    """
    return tokens["response_mask"].bool() & (tokens["weight"] != 0) & ~broken


def coefficient(planted: Planted, needed: float) -> float:
    """The coefficient ∂L/∂log p that the planted token gets.

    Args:
        planted (Planted): The token.
        needed (float): The norm that its gradient must exceed.
    """
    return planted.sign * _MARGIN * needed / planted.norm


def loss_scale(scale: float, raised: float, ordinary: float) -> float:
    """The loss scale for the drill's passes: with fp16, the raised coefficient must not overflow.

    Args:
        scale (float): The loss scale of training; if it is 1, the loss is not scaled.
        raised (float): The planted token's coefficient.
        ordinary (float): The size of an ordinary coefficient.
    """
    return scale if scale == 1 else scale * min(1.0, ordinary / abs(raised))


def plant(
    own: Sequence[MicroBatch], mine: bool, planted: Planted, raised: float, scale: float, new_scale: float
) -> list[MicroBatch]:
    """Copies this rank's micro-batches, with the raised coefficient and another loss scale.

    Coefficients keep their precision, by which an overflow of the loss scale is told from a broken token.

    Args:
        own (list[MicroBatch]): This rank's micro-batches.
        mine (bool): Whether the planted token is on this rank.
        planted (Planted): The token.
        raised (float): Its coefficient, without a loss scale.
        scale (float): The loss scale of `own`.
        new_scale (float): The loss scale of the copies.
    """
    copies = []
    for index, micro_batch in enumerate(own):
        tokens = dict(micro_batch.tokens)
        for name in ("coefficient", "entropy_coefficient"):
            if name in tokens:
                tokens[name] = (tokens[name].float() * (new_scale / scale)).to(tokens[name].dtype)
        if mine and index == planted.unit[1]:
            known = tokens.get("coefficient", torch.zeros_like(tokens["weight"]))
            tokens["coefficient"] = known.clone()
            tokens["coefficient"][planted.row, planted.position] = raised * new_scale
        copies.append(replace(micro_batch, tokens=tokens))
    return copies


def rerun(
    own: Sequence[MicroBatch], meter: Meter, passes: Passes, units: Mapping[UnitName, Unit], reduced: bool
) -> None:
    """Adds the mini-batch's gradient to the current one, and measures every micro-batch. A collective call.

    Args:
        own (list[MicroBatch]): This rank's micro-batches; their `squares` are set.
        meter (Meter): Measures the norms.
        passes (Passes): Runs a pass for each micro-batch, with the coefficients in `own`.
        units (dict[UnitName, Unit]): The units of all ranks.
        reduced (bool): Whether the reduced gradient counts, and not only the local ones.

    Raises:
        RankFailedError: A pass failed on some rank, or would make the reduced gradient useless.
    """

    def whole(rank: int, index: int) -> TokenSubset | None:
        if (rank, index) not in units:
            return None
        micro_batch = own[index].portable(passes.scale)
        return TokenSubset(micro_batch, micro_batch.tokens["response_mask"].bool())

    for index in range(1 + max(index for _, index in units)):
        if reduced:
            passes.check_dummy_inputs(partial(_ranks_with, units, index))
        meter.start()
        try:
            squares = passes.accumulate(partial(whole, index=index), meter.stop)
        finally:
            meter.stop()
        if index < len(own):
            own[index].squares = squares


def _ranks_with(units: Mapping[UnitName, Unit], index: int) -> set[int]:
    """The ranks that have a micro-batch of this index."""
    return {rank for rank, of_rank in units if of_rank == index}
