# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Plants a spike in a copy of a mini-batch, so that a user can see that the search finds it."""

import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .config import GradLocConfig
from .evidence.event import Done, build_event
from .fsdp import collectives
from .fsdp.state import clear_gradients, set_aside, undisturbed
from .lines import Drill, Event, PlantedToken, Where
from .measure.micro_batch import AllFigures, MicroBatch, MicroBatchName, TokenSubset, usable_tokens
from .measure.mini_batch import MiniBatch, OrdinaryGradient
from .measure.passes import Meter, Passes
from .search.investigation import SearchTime, investigate
from .threshold import Threshold

logger = logging.getLogger(__name__)

# How far the planted token's gradient exceeds what is needed to put its micro-batch over the threshold.
_MARGIN = 3.0

# log p changes too little with the parameters for a token that is more probable than this.
_SURE = 0.99


class DrillFailedError(RuntimeError):
    """The drill could not be made; raised on every rank with the same message."""


@dataclass(frozen=True)
class Planted:
    """The token whose coefficient is raised, the same on every rank."""

    micro_batch: MicroBatchName  # (rank, index of the micro-batch)
    row: int
    position: int
    mini_batch_row: int  # its row in its rank's mini-batch
    weight: float  # its weight w in the loss
    sign: float  # the sign of its coefficient ∂L/∂log p: -1 if the update raises its probability, else 1
    norm: float  # ‖∇log p‖, the norm of its gradient for a coefficient of 1


def hold(
    mini_batch: MiniBatch,
    tau: Threshold,
    config: GradLocConfig,
    ordinary: OrdinaryGradient,
    where: Where,
    search_time: SearchTime,
) -> Event:
    """Plants a spike in a copy of the mini-batch, searches for it, and restores everything. A collective call.

    Returns:
        Event: That of a drill that failed has an error, or no culprit at the planted place.
    """
    started = time.perf_counter()
    model, threshold = mini_batch.model, tau.of(mini_batch.finite_norm)
    planted: Planted | None = None
    searched = mini_batch
    mini_batch.global_norm()  # now: it is set aside below
    try:
        with undisturbed(model.module, model.device), set_aside(model.module):
            figures = mini_batch.gather_figures()
            passes = Passes(model, mini_batch.micro_batches, mini_batch.scale)
            planted = choose(figures, mini_batch, passes, where["global_step"] or 0)
            threshold = tau.of(mini_batch.finite_norm, planted.norm)
            copy = _with_spike(mini_batch, planted, figures, threshold)
            if not copy.is_over(threshold):
                raise DrillFailedError("the planted token did not put its micro-batch over the threshold")
            copy.global_norm()
            clear_gradients(model.module)  # the drill's own, which is measured by now
            findings = investigate(copy, threshold, config, ordinary.token_norm, search_time.drill())
            searched = copy
    except (DrillFailedError, collectives.RankFailedError) as error:
        limit = search_time.drill()
        findings = investigate(mini_batch, threshold, config, ordinary.token_norm, limit, prevented_by=str(error))
    place: PlantedToken | None = None
    found = False
    if planted is not None:
        place = {"rank": planted.micro_batch[0], "row": planted.mini_batch_row, "position": planted.position}
        found = (planted.micro_batch, planted.row, planted.position) in findings.culprits
    if not found and collectives.rank() == 0:
        logger.warning(
            "The spike drill in step %s FAILED: the planted token was not found (diagnosis: %s; error: %s; %d of "
            "%d passes%s). Do not rely on spike_detection in this configuration before a drill succeeds.",
            where["global_step"],
            findings.diagnosis,
            findings.error,
            findings.passes,
            config.bisect_budget_steps,
            f"; its {findings.budget_seconds:.0f} seconds were over" if findings.out_of_time else "",
        )
    of_drill: Drill = {"planted": place, "found": found, "passes": findings.passes}
    return build_event(searched, findings, ordinary, where, "log", Done(True), started, drill=of_drill)


def _with_spike(mini_batch: MiniBatch, planted: Planted, figures: AllFigures, threshold: float) -> MiniBatch:
    """The mini-batch with the planted token's coefficient raised; its gradient replaces the current one."""
    model, scale, own = mini_batch.model, mini_batch.scale, mini_batch.micro_batches
    whole = figures[planted.micro_batch]
    # The planted token may be one that could not move, and so did not count.
    needed = threshold * math.hypot(whole.root_square_weight, planted.weight) + _known(whole.norm)
    if mini_batch.trigger == "global":
        # The data-parallel mean gives each token 1/W of its weight in the reduced gradient.
        share = threshold * planted.weight / model.data_parallel_size
        norms = math.hypot(mini_batch.global_threshold(threshold), share) + _known(mini_batch.global_norm())
        needed = max(needed, model.data_parallel_size * norms)
    raised = planted.sign * _MARGIN * needed / planted.norm
    # With fp16, the raised coefficient must not overflow; without it, the loss is not scaled.
    new_scale = scale if scale == 1 else scale * min(1.0, planted.weight / abs(raised))
    with collectives.raised_on_all_ranks(model.device):
        micro_batches = plant(own, model.rank == planted.micro_batch[0], planted, raised, scale, new_scale)
    passes = Passes(model, micro_batches, new_scale)
    rerun(micro_batches, model.meter, passes, figures, reduced=mini_batch.trigger == "global")
    no_figures = torch.zeros(0, dtype=torch.float64, device=model.device)
    return MiniBatch(model, micro_batches, new_scale).gather(mini_batch.trigger, no_figures)


def _known(norm: float | None) -> float:
    """The norm; 0 if it is unknown or not finite."""
    return norm if norm is not None and math.isfinite(norm) else 0.0


def choose(figures: AllFigures, mini_batch: MiniBatch, passes: Passes, seed: int) -> Planted:
    """Chooses a token on a random rank, and measures its gradient in one pass. A collective call.

    Raises:
        DrillFailedError: No token has a gradient that can be scaled.
        RankFailedError: The pass failed on some rank.
    """
    generator = random.Random(seed)  # the same on every rank, as what it draws from
    usable = sorted(name for name, each in figures.items() if each.usable_tokens)
    if not usable:
        raise DrillFailedError("no response token of the mini-batch has a weight in the loss and finite log-probs")
    rank = generator.choice(sorted({rank for rank, _ in usable}))
    name = generator.choice([name for name in usable if name[0] == rank])
    meter = mini_batch.model.meter
    micro_batch = meter.obtain([name], mini_batch.micro_batches, passes.scale)[name]
    tokens = micro_batch.tokens
    with collectives.raised_on_all_ranks(mini_batch.model.device):
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


def plant(
    own: Sequence[MicroBatch], mine: bool, planted: Planted, raised: float, scale: float, new_scale: float
) -> list[MicroBatch]:
    """Copies this rank's micro-batches, with the raised coefficient if the token is `mine`, and another loss scale.

    Coefficients keep their precision, by which an overflow of the loss scale is told from a broken token.
    """
    copies = []
    for index, micro_batch in enumerate(own):
        tokens = dict(micro_batch.tokens)
        for name in ("coefficient", "entropy_coefficient"):
            if name in tokens:
                tokens[name] = (tokens[name].float() * (new_scale / scale)).to(tokens[name].dtype)
        if mine and index == planted.micro_batch[1]:
            known = tokens.get("coefficient", torch.zeros_like(tokens["weight"]))
            tokens["coefficient"] = known.clone()
            tokens["coefficient"][planted.row, planted.position] = raised * new_scale
        copies.append(replace(micro_batch, tokens=tokens))
    return copies


def rerun(own: Sequence[MicroBatch], meter: Meter, passes: Passes, figures: AllFigures, reduced: bool) -> None:
    """Adds the mini-batch's gradient to the current one, and measures every micro-batch. A collective call.

    `passes` are over `own`; `reduced` says whether the reduced gradient counts, and not only the local ones.

    Raises:
        RankFailedError: A pass failed on some rank, or would make the reduced gradient useless.
    """
    for index, subset_of in enumerate(passes.whole_micro_batches(figures)):
        if reduced:
            passes.check_dummy_inputs(subset_of)
        squares = passes.accumulate(subset_of, meter.stop)
        if index < len(own):
            own[index].squares = squares
