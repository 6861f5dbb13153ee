# Copyright 2026 The GradLoc Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""From a spike of the gradient norm to the tokens that caused it."""

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import distributed, evidence, gradients
from .config import GradLocConfig
from .lockstep import Lockstep, RankLostError
from .passes import Forward, MicroBatch, Passes, Share, UnitName
from .search import Search, Segment
from .taps import GradientTaps

logger = logging.getLogger(__name__)

# How many of the largest tokens an event names for a spike without a culprit.
_LARGEST_TOKENS = 3

# The culprits' gradient may be subtracted from the whole if what is left is no smaller than this share of it: float32
# then keeps five digits. Otherwise the rest is computed anew.
_CANCELLATION = 1e-2


def token_weights(aggregate: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The weight that a loss aggregation gives to each token, from autograd: w = ∂ aggregate(x) / ∂x.

    Args:
        aggregate (Callable): Maps per-token losses to the scalar loss; linear in them.
        like (Tensor): A tensor of the per-token losses' shape, dtype and device.
    """
    with torch.enable_grad():
        x = torch.zeros_like(like, requires_grad=True)
        return torch.autograd.grad(aggregate(x), x)[0]


@dataclass(frozen=True)
class _Unit:
    """The figures of a micro-batch that all ranks share when a search begins.

    Args:
        rows (int): Its rows.
        tokens (int): Its response tokens.
        broken_tokens (int): Those of them whose log-prob is not a finite number.
        norm (float): The norm of its local gradient.
        root_square_weight (float): sqrt(Σ w_t²).
        layer_norms (dict[str, float]): The norm in each layer.
    """

    rows: int
    tokens: int
    broken_tokens: int
    norm: float
    root_square_weight: float
    layer_norms: dict[str, float]

    @property
    def token_equivalent(self) -> float:
        if self.root_square_weight > 0 and math.isfinite(self.norm):
            return self.norm / self.root_square_weight
        return 0.0 if self.norm == 0 else math.inf


class GradLoc:
    """Watches the training passes of a (sharded) model and finds the tokens behind a spike of its gradient.

    For each micro-batch the trainer calls `begin_pass`, then its forward, then `observe`, then its backward, then
    `end_pass`; and before the optimizer step `locate`. All ranks call all of them alike.

    Args:
        module (nn.Module): The model; ranks hold different data (FSDP1, FSDP2, or a single process).
        config (GradLocConfig): When a norm counts as a spike, and what to do.
        forward (Callable): `forward(inputs, rows, response_length)` computes (entropy or None, log_prob), each of shape
            (len(rows), response_length), of some rows of a micro-batch, with their responses cut to that length.
        device (str | torch.device): Where the model computes.
        loss_scale (Callable): Gives the factor by which backward passes are scaled (for fp16); 1 by default.
        squared_norms (Callable, optional): `LayerClip.squared_norms`, where that is on too: then the reduced gradient
            is measured once for both.

    Attributes:
        squared_norms (Tensor | None): What it gave, less the loss scale, for the gradient that `locate` has left
            behind; None where that was not measured.
        events (list[dict]): The events since `start_update`, the same on every rank, ready for `evidence.jsonable`.
    """

    def __init__(
        self,
        module: nn.Module,
        config: GradLocConfig,
        forward: Forward,
        device: str | torch.device = "cpu",
        loss_scale: Callable[[], float] = lambda: 1.0,
        squared_norms: Callable[[], Tensor] | None = None,
    ) -> None:
        self.config = config
        self.squared_norms: Tensor | None = None
        self.events: list[dict[str, Any]] = []
        self._module = module
        self._forward = forward
        self._device = torch.device(device)
        self._loss_scale = loss_scale
        self._measure = squared_norms
        self._event: dict[str, Any] | None = None
        self._taps = GradientTaps(module, self._device)
        self._lockstep = Lockstep()
        self._micro_batches: list[MicroBatch] = []
        self._current: MicroBatch | None = None
        self._global_step: int | None = None
        self._token_norm_max = 0.0
        self._misaligned = self._compared = 0.0

    def start_update(self, global_step: int | None = None) -> None:
        """Forgets the last update's events and figures."""
        self.events = []
        self._micro_batches = []
        self._global_step = global_step
        self._token_norm_max = 0.0
        self._misaligned = self._compared = 0.0

    def begin_pass(self, inputs: dict[str, Any], rows: Sequence[int]) -> None:
        """Called before a training pass.

        Args:
            inputs (dict): What `forward` needs; picklable. Kept until `locate`.
            rows (Sequence[int]): The micro-batch's rows in this rank's mini-batch.
        """
        self._current = MicroBatch(inputs, [int(row) for row in rows], gradients.get_rng_state(self._device))
        self._taps.start()
        if not self._lockstep.has_pattern:
            self._lockstep.start()

    def observe(self, log_prob: Tensor, entropy: Tensor | None, weight: Tensor, **tokens: Tensor) -> None:
        """Notes the tokens of the pass under way, and their coefficients ∂L/∂log p once its backward runs.

        Args:
            log_prob (Tensor): The log-probs that the loss is computed from, shape (rows, response length).
            entropy (Tensor, optional): Likewise the entropies.
            weight (Tensor): w of each token, gradient accumulation included.
            tokens (Tensor): Whatever `evidence.token_evidence` reports; `response_mask` and `token_id` at least.
        """
        current = self._current
        if current is None:
            raise RuntimeError("observe() belongs between begin_pass() and end_pass().")
        noted = {"log_prob": log_prob, "weight": weight, **tokens}
        if entropy is not None:
            noted["entropy"] = entropy
        shapes = {name: tuple(tensor.shape) for name, tensor in noted.items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"all token tensors must be of one shape (rows, response length), got {shapes}.")
        current.tokens = {name: tensor.detach() for name, tensor in noted.items()}
        for name, tensor in (("coefficient", log_prob), ("entropy_coefficient", entropy)):
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(_catch(current.tokens, name))

    def end_pass(self) -> None:
        """Called after the backward of a training pass."""
        if self._current is None:
            raise RuntimeError("end_pass() comes after begin_pass().")
        self._lockstep.stop()
        self._current.squares = self._taps.stop()
        self._micro_batches.append(self._current)
        self._current = None

    def locate(self, epoch: int, mini_batch: int) -> bool:
        """Checks the mini-batch's gradient, and on a spike finds the culprits. A collective call.

        With the actions "log" and "skip", gradients, random state and training flags are afterwards what they were
        before, bit for bit. With "drop", the gradient is without the culprits'.

        Args:
            epoch (int): The PPO epoch, for the event.
            mini_batch (int): The mini-batch's index in the update, for the event.

        Returns:
            bool: Whether the optimizer is to step.

        Raises:
            RankLostError: A pass failed on this rank in the middle of FSDP's collective calls, and it could not make
                the rest of them. Any other error of the search is logged, and training goes on.
        """
        micro_batches, self._micro_batches = self._micro_batches, []
        self._event = self.squared_norms = None
        try:
            return self._locate(micro_batches, epoch, mini_batch)
        except RankLostError:
            raise
        except Exception:
            logger.warning("the search for the tokens behind a gradient spike failed; training goes on", exc_info=True)
            return True

    def add_to_event(self, **facts: Any) -> None:
        """Adds what became of the gradient to the event of the last `locate`, if that found a spike."""
        if self._event is not None:
            self._event.update(facts)

    def metrics(self) -> dict[str, float]:
        """The update's figures for the training log, the same on every rank.

        `misaligned_share`, where there are rollout log-probs: the share of response tokens whose log-prob differs from
        the rollout's by more than a nat.
        """
        compared = {"actor/gradloc/misaligned_share": self._misaligned / self._compared} if self._compared else {}
        return compared | {
            "actor/gradloc/token_norm_max": self._token_norm_max,
            "actor/gradloc/triggered": len(self.events),
            "actor/gradloc/culprits": sum(len(event["culprits"]) for event in self.events),
            "actor/gradloc/passes": sum(event["passes"] for event in self.events),
            "actor/gradloc/seconds": sum(event["seconds"] for event in self.events),
            "actor/gradloc/skipped": sum(event["action"] == "skip" and event["applied"] for event in self.events),
        }

    def _locate(self, micro_batches: list[MicroBatch], epoch: int, mini_batch: int) -> bool:
        started = time.perf_counter()
        scale = self._loss_scale()
        squares = torch.stack([micro_batch.squares for micro_batch in micro_batches]) / scale**2
        square_weights = torch.stack([mb.tokens["weight"].double().square().sum() for mb in micro_batches])
        largest = _largest_token_equivalent(squares.sum(1), square_weights)
        figures = torch.stack([largest, square_weights.sum(), *_count_misaligned(micro_batches)])
        by_rank = torch.stack(distributed.gather(figures.to(self._device)))
        self._compare_with_rollout(*by_rank[:, 2:].sum(0).tolist())
        token_norm_max = float(by_rank[:, 0].max())
        self._token_norm_max = max(self._token_norm_max, token_norm_max)

        threshold = self.config.threshold
        if self.config.trigger == "unit" and token_norm_max <= threshold:
            return True
        # The data-parallel mean gives each token 1/W of its weight in the reduced gradient.
        global_threshold = threshold * math.sqrt(float(by_rank[:, 1].sum())) / distributed.world_size()
        global_norm = self._reduced_norm(scale)
        if self.config.trigger == "global" and global_norm <= global_threshold:
            return True

        units = self._share_units(micro_batches, squares, square_weights)
        passes = Passes(
            self._module, self._taps, self._forward, self._device, self._lockstep, scale, own=micro_batches[0]
        )
        localization = _Localization(
            threshold, self.config.budget, self._taps.layers, passes, micro_batches, units, scale
        )
        rng_state = gradients.get_rng_state(self._device)
        with gradients.training_flags(self._module):
            try:
                with gradients.SetAside(self._module):
                    localization.run()
                applied = self._act(localization, global_norm, scale)
            finally:
                gradients.set_rng_state(rng_state, self._device)

        trigger = {"kind": "global", "norm": global_norm, "threshold": global_threshold}
        if self.config.trigger == "unit":
            worst = units[localization.suspects[0]]
            trigger = {"kind": "unit", "norm": worst.norm, "threshold": threshold * worst.root_square_weight}
        clocks = distributed.gather_objects((time.perf_counter() - started, datetime.now(timezone.utc).isoformat()))
        self.events.append(
            {
                "schema": evidence.SCHEMA,
                "time": clocks[0][1],
                "global_step": self._global_step,
                "epoch": epoch,
                "mini_batch": mini_batch,
                "trigger": trigger,
                "threshold": threshold,
                "global_norm": global_norm,
                "global_threshold": global_threshold,
                "ordinary_layer_norms": _ordinary_layer_norms(units, localization.suspects),
                "diagnosis": localization.diagnosis,
                "units": localization.unit_evidence(),
                "culprits": localization.culprit_evidence(),
                "diffuse": localization.diffuse_evidence(),
                "passes": passes.count,
                "budget": self.config.budget,
                "complete": localization.complete,
                "open_segments": localization.open_segments(),
                "action": self.config.action,
                "applied": applied,
                "seconds": max(seconds for seconds, _ in clocks),
                "search": "local",
                "world_size": distributed.world_size(),
                "loss_scale": scale,
                "error": localization.error,
                "layer_clip": None,
            }
        )
        self._event = self.events[-1]
        return not (self.config.action == "skip" and applied)

    def _compare_with_rollout(self, misaligned: float, tokens: float) -> None:
        self._misaligned += misaligned
        self._compared += tokens
        if misaligned > evidence.MISALIGNED_SHARE * tokens and distributed.rank() == 0:
            logger.warning(
                "%.0f of %.0f response tokens have log-probs that differ from the rollout's by more than %g nat: "
                "they may belong to other positions, weights or temperatures",
                misaligned,
                tokens,
                evidence.MISALIGNED_NATS,
            )

    def _reduced_norm(self, scale: float) -> float:
        if self._measure is None:
            return gradients.reduced_norm(self._module, self._device) / scale
        self.squared_norms = self._measure() / scale**2
        return float(self.squared_norms.sum().sqrt())

    def _act(self, localization: "_Localization", global_norm: float, scale: float) -> bool:
        """Does what `spike_action` asks for; returns whether it could be done. The same on every rank."""
        if self.config.action == "skip":
            # After an overflow the gradient scaler leaves the step out itself, and has to see it to lower its scale.
            return scale == 1 or math.isfinite(global_norm)
        if self.config.action == "drop":
            self.squared_norms = None
            return localization.drop(self._module, self._device)
        return True

    def _share_units(
        self, micro_batches: list[MicroBatch], squares: Tensor, square_weights: Tensor
    ) -> dict[UnitName, _Unit]:
        roots = squares.sqrt().cpu()
        own = []
        for i, micro_batch in enumerate(micro_batches):
            mask = micro_batch.tokens["response_mask"].bool()
            unit = _Unit(
                rows=len(micro_batch.rows),
                tokens=int(mask.sum()),
                broken_tokens=int((~micro_batch.tokens["log_prob"].isfinite() & mask).sum()),
                norm=float(roots[i].square().sum().sqrt()),
                root_square_weight=float(square_weights[i].sqrt()),
                layer_norms=dict(zip(self._taps.layers, roots[i].tolist(), strict=True)),
            )
            own.append(unit)
        return {(r, i): unit for r, units in enumerate(distributed.gather_objects(own)) for i, unit in enumerate(units)}


@dataclass
class _BrokenRow:
    """A row whose forward gives log-probs that are not numbers, and where it may begin to.

    A NaN may show before its place, too: attention multiplies it with the zeros of its causal mask. So the row is
    computed up to this or that token: with the input that breaks it, some are not numbers; without it, all are.

    Args:
        positions (list[int]): Its response tokens.
        low (int), high (int): Indices into `positions`: the first prefix that is broken ends between them, inclusive.
    """

    unit: UnitName
    row: int
    positions: list[int]
    low: int
    high: int

    @classmethod
    def of(cls, unit: UnitName, row: int, mask: Tensor, broken: Tensor) -> "_BrokenRow":
        """From a row's masks of response tokens and of broken ones among them, each of shape (response length,)."""
        positions = mask.nonzero().flatten().tolist()
        first = int(broken[mask].nonzero()[0])
        # Finite log-probs before it mean that nothing spreads backwards here.
        return cls(unit, row, positions, first, first if first else len(positions) - 1)

    @property
    def settled(self) -> bool:
        return self.low == self.high

    def cuts(self, count: int) -> list[int]:
        """Up to `count` indices that cut the interval into even parts."""
        width = self.high - self.low
        return sorted({self.low + (i + 1) * width // (count + 1) for i in range(count)})

    def record(self, index: int, broken: bool) -> None:
        """Takes in whether the prefix that ends with a token is broken."""
        if broken:
            self.high = min(self.high, index)
        else:
            self.low = max(self.low, index + 1)


class _Localization:
    """One search, from the suspect units to the culprits. In every pass each rank measures one segment."""

    def __init__(
        self,
        threshold: float,
        budget: int,
        layers: list[str],
        passes: Passes,
        micro_batches: list[MicroBatch],
        units: dict[UnitName, _Unit],
        scale: float,
    ) -> None:
        self.error: str | None = None
        self.suspects = sorted(
            (name for name, unit in units.items() if not unit.token_equivalent <= threshold),
            key=lambda name: (-units[name].token_equivalent, name),
        )
        self._threshold = threshold
        self._budget = budget
        self._layers = layers
        self._passes = passes
        self._micro_batches = micro_batches
        self._units = units
        self._scale = scale
        self._search = Search(threshold)
        self._shared: dict[UnitName, MicroBatch] = {}
        self._candidates: dict[UnitName, Tensor] = {}
        self._waiting = list(self.suspects)
        # (unit, row, position) -> the token's share of the gradient in each layer.
        self._measured: dict[tuple[UnitName, int, int], list[float]] = {}
        # Tokens whose coefficient is not a number, and rows whose log-probs are not: known without a measurement.
        self._unmeasurable: list[tuple[UnitName, int, int]] = []
        self._broken_rows: list[_BrokenRow] = []

    @property
    def everything_broken(self) -> bool:
        """Whether no log-prob of any rank is a number: the weights are broken, not a token."""
        return any(unit.tokens for unit in self._units.values()) and all(
            unit.broken_tokens == unit.tokens for unit in self._units.values()
        )

    @property
    def overflow(self) -> bool:
        """Whether the loss scale may be all that is wrong: fp16 gradients overflowed, the log-probs are numbers."""
        worst = [self._units[name] for name in self.suspects]
        return self._scale != 1 and any(not math.isfinite(unit.norm) and not unit.broken_tokens for unit in worst)

    @property
    def complete(self) -> bool:
        settled = all(row.settled for row in self._broken_rows)
        return self.error is None and settled and not self._waiting and not self._search.open_segments

    @property
    def diagnosis(self) -> str:
        """What the event is, in a word; the README states the rules."""
        if self.everything_broken:
            return "nonfinite"
        if self._culprits():
            return "tokens"
        if self.overflow:
            return "overflow"
        if self._search.broken:
            return "nonfinite"
        return "diffuse" if self.complete else "incomplete"

    def run(self) -> None:
        """Measures until every suspect unit is settled, the budget is spent, or a pass failed. A collective call."""
        if self.everything_broken or self.overflow:
            self._waiting = []
            return
        world_size = distributed.world_size()
        try:
            while self._passes.count < self._budget:
                while self._waiting and len(self._search.open_segments) < world_size:
                    self._open(self._waiting[0])
                    del self._waiting[0]
                rows = [row for row in self._broken_rows if not row.settled][:world_size]
                if rows:
                    self._narrow(rows)
                    continue
                segments = self._search.next(world_size)
                if not segments:
                    return
                squares = self._passes.measure([self._share_of(segment) for segment in segments])
                for segment, norms in zip(segments, squares.sqrt().tolist(), strict=True):
                    if segment.size == 1:
                        self._measured[self._token(segment.unit, self._search.candidates(segment)[0])] = norms
                self._search.record(list(zip(segments, squares.sum(1).sqrt().tolist(), strict=True)))
        except distributed.RankFailedError as error:
            self.error = str(error)

    def drop(self, module: nn.Module, device: torch.device) -> bool:
        """Takes the culprits' gradient out of the module's. A collective call.

        Returns:
            bool: Whether it is out; if not, the gradient is as it was.
        """
        culprits = self._culprit_masks()
        if not culprits or self.error is not None:
            return False
        subtracted = False
        try:
            if math.isfinite(gradients.reduced_norm(module, device)):
                subtracted, precise = self._subtract(module, device, culprits)
                if precise:
                    return True
            return self._recompute(module, device, culprits) or subtracted
        except distributed.RankFailedError as error:
            self.error = str(error)
            return subtracted

    def _culprit_masks(self) -> dict[UnitName, Tensor]:
        """The culprits' places in each unit, bool of shape (rows, response length)."""
        masks: dict[UnitName, Tensor] = {}
        for name, row, position in self._culprits():
            shape = self._shared[name].tokens["response_mask"]
            masks.setdefault(name, torch.zeros_like(shape, dtype=torch.bool))[row, position] = True
        return masks

    def _subtract(self, module: nn.Module, device: torch.device, culprits: dict[UnitName, Tensor]) -> tuple[bool, bool]:
        """Measures the culprits' own gradient, one micro-batch on every rank, and takes it away.

        Returns:
            tuple[bool, bool]: Whether it was taken away, and whether enough is left to be precise.
        """
        shares = [Share(self._shared[name], mask) for name, mask in culprits.items()]
        world_size = distributed.world_size()
        if self._passes.count + math.ceil(len(shares) / world_size) > self._budget:
            return False, False
        with gradients.SetAside(module) as gradient:
            for i in range(0, len(shares), world_size):
                batch = dict(enumerate(shares[i : i + world_size]))
                self._passes.accumulate(batch.get)
            taken = gradients.reduced_norm(module, device)
            gradient.subtract()
        return True, gradients.reduced_norm(module, device) >= _CANCELLATION * taken

    def _recompute(self, module: nn.Module, device: torch.device, culprits: dict[UnitName, Tensor]) -> bool:
        """Computes the mini-batch's gradient anew without the culprits."""

        def share_of(rank: int, index: int) -> Share | None:
            if (rank, index) not in self._units:
                return None
            micro_batch = self._micro_batches[index].portable(self._scale)
            keep = micro_batch.tokens["response_mask"].bool()
            return Share(micro_batch, keep & ~culprits.get((rank, index), torch.zeros_like(keep)))

        count = 1 + max(index for _, index in self._units)
        if self._passes.count + count > self._budget:
            return False
        with gradients.SetAside(module) as gradient:
            for i in range(count):
                self._passes.accumulate(partial(share_of, index=i))
            finite = math.isfinite(gradients.reduced_norm(module, device))
            if finite:
                gradient.replace()
        return finite

    def culprit_evidence(self) -> list[dict[str, Any]]:
        """The evidence on each culprit, the largest first."""
        found = [self._evidence_on(*token) for token in self._culprits()]
        return sorted(found, key=lambda culprit: -_finite(culprit["grad_norm"]))

    def unit_evidence(self) -> list[dict[str, Any]]:
        """The units over their threshold, the largest first."""
        return [
            {
                "rank": name[0],
                "micro_batch": name[1],
                "rows": unit.rows,
                "tokens": unit.tokens,
                "broken_tokens": unit.broken_tokens,
                "norm": unit.norm,
                "threshold": self._threshold * unit.root_square_weight,
                "token_equivalent": unit.token_equivalent,
                "layer_norms": unit.layer_norms,
            }
            for name, unit in ((name, self._units[name]) for name in self.suspects)
        ]

    def diffuse_evidence(self) -> list[dict[str, Any]]:
        """The smallest parts over their threshold without a token over its own, with the largest tokens measured."""
        found = []
        for segment, norm in self._search.diffuse:
            candidates = self._candidates[segment.unit][self._search.candidates(segment)]
            tokens = [(segment.unit, row, position) for row, position in candidates.tolist()]
            largest = sorted((t for t in tokens if t in self._measured), key=self._grad_norm, reverse=True)
            rows = sorted({self._shared[segment.unit].rows[row] for _, row, _ in tokens})
            found.append(
                {
                    "rank": segment.unit[0],
                    "micro_batch": segment.unit[1],
                    "rows": rows,
                    "tokens": segment.size,
                    "norm": norm,
                    "threshold": self._search.threshold(segment),
                    "largest_tokens": [
                        {
                            "row": self._shared[name].rows[row],
                            "position": position,
                            "grad_norm": self._grad_norm((name, row, position)),
                        }
                        for name, row, position in largest[:_LARGEST_TOKENS]
                    ],
                }
            )
        return found

    def open_segments(self) -> list[dict[str, Any]]:
        """What the search did not get to, best first; a unit not begun is a segment of all its tokens."""
        begun = [(s.unit, s.size, self._search.threshold(s)) for s in self._search.open_segments if s.size]
        waiting = [
            (name, self._units[name].tokens, self._threshold * self._units[name].root_square_weight)
            for name in self._waiting
        ]
        return [
            {"rank": name[0], "micro_batch": name[1], "tokens": tokens, "threshold": threshold}
            for name, tokens, threshold in begun + waiting
        ]

    def _open(self, name: UnitName) -> None:
        """Gives every rank the suspect's inputs and tokens, and opens it for the search. A collective call."""
        rank, index = name
        micro_batch = distributed.broadcast(lambda: self._micro_batches[index].portable(self._scale), rank)
        self._shared[name] = micro_batch
        tokens = micro_batch.tokens
        mask = tokens["response_mask"].bool()
        broken = ~tokens["log_prob"].isfinite() & mask
        for row in broken.any(1).nonzero().flatten().tolist():
            self._broken_rows.append(_BrokenRow.of(name, row, mask[row], broken[row]))
        coefficient, entropy_coefficient = tokens["coefficient"], tokens["entropy_coefficient"]
        healthy = ~broken.any(1, keepdim=True)
        nonfinite = ~(coefficient.isfinite() & entropy_coefficient.isfinite())
        self._unmeasurable += [(name, row, position) for row, position in (nonfinite & healthy).nonzero().tolist()]
        involved = ((coefficient != 0) | (entropy_coefficient != 0)) & (tokens["weight"] != 0) & ~nonfinite & healthy
        self._candidates[name] = involved.nonzero()
        suspicion = evidence.suspicion(tokens)[involved]
        norm, weight = self._units[name].norm, tokens["weight"][involved]
        self._search.add_unit(name, norm, suspicion, weight, probe_empty=bool(healthy.all()))

    def _narrow(self, rows: list["_BrokenRow"]) -> None:
        """One pass that narrows down where in some rows the forward breaks. A collective call."""
        world_size = distributed.world_size()
        probes = [(row, index) for row in rows for index in row.cuts(world_size // len(rows))]
        squares = self._passes.measure([self._share(row.unit, [(row.row, row.positions[i])]) for row, i in probes])
        for (row, index), broken in zip(probes, ~squares.sum(1).isfinite(), strict=True):
            row.record(index, bool(broken))

    def _share_of(self, segment: Segment) -> Share:
        return self._share(segment.unit, self._candidates[segment.unit][self._search.candidates(segment)])

    def _share(self, name: UnitName, places: Sequence[tuple[int, int]] | Tensor) -> Share:
        micro_batch = self._shared[name]
        keep = torch.zeros_like(micro_batch.tokens["response_mask"], dtype=torch.bool)
        keep[tuple(torch.as_tensor(places).T)] = True
        return Share(micro_batch, keep)

    def _token(self, name: UnitName, candidate: int) -> tuple[UnitName, int, int]:
        row, position = self._candidates[name][candidate].tolist()
        return name, row, position

    def _culprits(self) -> list[tuple[UnitName, int, int]]:
        rows = [(row.unit, row.row, row.positions[row.low]) for row in self._broken_rows if row.settled]
        return self._unmeasurable + rows + [self._token(c.unit, c.candidate) for c in self._search.culprits]

    def _weight(self, token: tuple[UnitName, int, int]) -> float:
        name, row, position = token
        return abs(float(self._shared[name].tokens["weight"][row, position]))

    def _grad_norm(self, token: tuple[UnitName, int, int]) -> float:
        return math.sqrt(sum(norm**2 for norm in self._measured[token])) / self._weight(token)

    def _evidence_on(self, name: UnitName, row: int, position: int) -> dict[str, Any]:
        token = (name, row, position)
        micro_batch = self._shared[name]
        tokens = micro_batch.tokens
        suspicion = evidence.suspicion(tokens)[row]
        measured = token in self._measured
        layer_norms = self._measured[token] if measured else [math.nan] * len(self._layers)
        grad_norm = self._grad_norm(token) if measured else math.nan
        found = {
            "rank": name[0],
            "micro_batch": name[1],
            "row": micro_batch.rows[row],
            "position": position,
            "grad_norm": grad_norm,
            "threshold": self._threshold,
            "suspicion": float(suspicion[position]),
            "share": grad_norm * self._weight(token) / self._units[name].norm,
            **evidence.token_evidence(tokens, row, position),
            "layer_norms": {
                layer: norm / self._weight(token) for layer, norm in zip(self._layers, layer_norms, strict=True)
            },
            "response_suspicion": evidence.response_window(suspicion, tokens["response_mask"][row], position),
            "response_kl": evidence.response_kl(tokens, row, position),
        }
        return {**found, "source": evidence.classify(found)}


def _ordinary_layer_norms(units: dict[UnitName, _Unit], suspects: list[UnitName]) -> dict[str, float] | None:
    """Each layer's norm for one ordinary token: the median of norm/sqrt(Σw²) over the units under their thresholds.

    What a suspect's norm leaves without its culprits would not do: where a culprit outweighs its unit, the remainder is
    smaller than the rounding and the correlation between the two.

    Returns:
        dict: By layer; None when no other unit has a gradient.
    """
    ordinary = [unit for name, unit in units.items() if name not in suspects and unit.norm > 0]
    if not ordinary:
        return None
    return {
        layer: statistics.median(unit.layer_norms[layer] / unit.root_square_weight for unit in ordinary)
        for layer in ordinary[0].layer_norms
    }


def _catch(tokens: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        tokens[name] = gradient.detach()

    return hook


def _count_misaligned(micro_batches: list[MicroBatch]) -> tuple[Tensor, Tensor]:
    """How many response tokens are off the rollout's log-probs, and how many there are; float64, shape ()."""
    counts = micro_batches[0].tokens["weight"].new_zeros(2, dtype=torch.float64)
    for tokens in (micro_batch.tokens for micro_batch in micro_batches):
        if "rollout_log_prob" in tokens:
            mask = tokens["response_mask"].bool()
            near = (tokens["log_prob"] - tokens["rollout_log_prob"]).abs() <= evidence.MISALIGNED_NATS
            counts += torch.stack([(mask & ~near).sum(), mask.sum()])
    return counts[0], counts[1]


def _largest_token_equivalent(squares: Tensor, square_weights: Tensor) -> Tensor:
    """The largest norm/sqrt(Σw²) of a rank's micro-batches, shape (); NaN counts as infinite, no host sync."""
    ratio = (squares / square_weights).sqrt()
    ratio = torch.where((squares == 0) & (square_weights == 0), 0.0, ratio)
    return ratio.nan_to_num(nan=math.inf, posinf=math.inf).max()


def _finite(norm: float) -> float:
    """The norm for sorting, NaN on top."""
    return norm if math.isfinite(norm) else math.inf
