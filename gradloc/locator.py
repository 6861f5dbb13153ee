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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor, nn

from . import distributed, evidence, gradients
from .config import GradLocConfig
from .search import Culprit, Search, Segment
from .taps import GradientTaps

logger = logging.getLogger(__name__)

# A unit's name: (rank, index of the micro-batch in the mini-batch).
UnitName = tuple[int, int]


def token_weights(aggregate: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The weight that a loss aggregation gives to each token, from autograd: w = ∂ aggregate(x) / ∂x.

    Args:
        aggregate (Callable): Maps per-token losses to the scalar loss; linear in them.
        like (Tensor): A tensor of the per-token losses' shape, dtype and device.
    """
    with torch.enable_grad():
        x = torch.zeros_like(like, requires_grad=True)
        return torch.autograd.grad(aggregate(x), x)[0]


def keep_gradient(values: Tensor | None, keep: Tensor) -> Tensor | None:
    """The same values; only those where `keep` holds pass a gradient on."""
    return None if values is None else torch.where(keep, values, values.detach())


@dataclass
class _MicroBatch:
    """What this rank remembers of a micro-batch until the optimizer step."""

    inputs: Any
    rows: list[int]
    rng_state: tuple[Tensor, Tensor | None]
    tokens: dict[str, Tensor] = field(default_factory=dict)
    squares: Tensor | None = None

    def catch(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self.tokens[name] = gradient.detach()

        return hook


@dataclass
class _Shared:
    """A suspect micro-batch as every rank has it: its inputs until its search is over, and its tokens."""

    micro_batch: _MicroBatch
    candidates: Tensor
    suspicion: Tensor


@dataclass(frozen=True)
class _UnitSummary:
    """The figures of a micro-batch that all ranks share when a search begins."""

    rows: int
    tokens: int
    norm: float
    root_square_weight: float
    layer_norms: dict[str, float]

    @property
    def token_equivalent(self) -> float:
        if self.root_square_weight > 0 or not math.isfinite(self.norm):
            return self.norm / self.root_square_weight if self.root_square_weight > 0 else math.inf
        return 0.0 if self.norm == 0 else math.inf


class GradLoc:
    """Watches the training passes of a (sharded) model and finds the tokens behind a spike of its gradient.

    The trainer wraps each training pass in `micro_batch`, calls `observe` in it once the log-probs are there, and
    `locate` before the optimizer step. All are called by all ranks alike.

    Args:
        module (nn.Module): The model; ranks hold different data (FSDP1, FSDP2, or a single process).
        config (GradLocConfig): When a norm counts as a spike.
        probe (Callable): `probe(inputs, keep)` runs forward and backward of the micro-batch that `inputs` stands for,
            exactly as in training, but with the gradient of all tokens outside of `keep` (bool, CPU, shape (rows,
            response length)) taken out by `keep_gradient`.
        device (str | torch.device): Where the model computes.
        loss_scale (Callable): Gives the factor by which backward passes are scaled (for fp16); 1 by default.
        squared_norms (Callable, optional): `LayerClip.squared_norms`, where that is on too: then the reduced gradient
            is measured once for both.

    Attributes:
        squared_norms (Tensor | None): What it gave for the gradient that the last `locate` has left behind (without
            the loss scale), if it was called.
        events (list[dict]): The events since `start_update`, the same on every rank, ready for `jsonable`.
    """

    def __init__(
        self,
        module: nn.Module,
        config: GradLocConfig,
        probe: Callable[[Any, Tensor], None],
        device: str | torch.device = "cpu",
        loss_scale: Callable[[], float] = lambda: 1.0,
        squared_norms: Callable[[], Tensor] | None = None,
    ) -> None:
        self.config = config
        self.squared_norms: Tensor | None = None
        self.events: list[dict[str, Any]] = []
        self._module = module
        self._probe = probe
        self._loss_scale = loss_scale
        self._measure = squared_norms
        self._event: dict[str, Any] | None = None
        self._device = torch.device(device)
        self._taps = GradientTaps(module, self._device)
        self._failure = distributed.FailureNotice()
        self._micro_batches: list[_MicroBatch] = []
        self._current: _MicroBatch | None = None
        self._global_step: int | None = None
        self._token_norm_max = 0.0

    def start_update(self, global_step: int | None = None) -> None:
        """Forgets the last update's events and figures."""
        self.events = []
        self._micro_batches = []
        self._global_step = global_step
        self._token_norm_max = 0.0

    @contextmanager
    def micro_batch(self, inputs: Any, rows: Sequence[int]) -> Iterator[None]:
        """Goes around one training pass (forward and backward).

        Args:
            inputs (Any): What the probe needs to run the pass again; picklable, best on the CPU.
            rows (Sequence[int]): The micro-batch's rows in this rank's mini-batch.
        """
        current = _MicroBatch(inputs, list(rows), gradients.get_rng_state(self._device))
        self._current = current
        self._taps.start()
        try:
            yield
        finally:
            self._current = None
            current.squares = self._taps.stop()
        self._micro_batches.append(current)

    def observe(self, log_prob: Tensor, entropy: Tensor | None, weight: Tensor, **tokens: Tensor) -> None:
        """Notes the tokens of the pass under way, and their coefficients ∂L/∂log p once its backward runs.

        Args:
            log_prob (Tensor): The log-probs that the loss is computed from, shape (rows, response length).
            entropy (Tensor, optional): Likewise the entropies.
            weight (Tensor): w of each token, gradient accumulation included.
            tokens (Tensor): Whatever `evidence.token_evidence` reports; `response_mask` and `token_id` at least.
        """
        if self._current is None:
            raise RuntimeError("observe() belongs inside of micro_batch().")
        noted = {"log_prob": log_prob, "weight": weight, **tokens}
        if entropy is not None:
            noted["entropy"] = entropy
        self._current.tokens = {name: tensor.detach() for name, tensor in noted.items()}
        for name, tensor in (("coefficient", log_prob), ("entropy_coefficient", entropy)):
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(self._current.catch(name))

    def locate(self, epoch: int, mini_batch: int) -> None:
        """Checks the mini-batch's gradient, and on a spike finds the culprits. A collective call.

        Gradients, random state and training flags are afterwards what they were before, bit for bit.

        Args:
            epoch (int): The PPO epoch, for the event.
            mini_batch (int): The mini-batch's index in the update, for the event.

        Raises:
            RankLostError: A probe failed on this rank alone, in the middle of FSDP's collective calls. Any other error
                of the search is logged, and training goes on.
        """
        micro_batches, self._micro_batches = self._micro_batches, []
        self._event = self.squared_norms = None
        try:
            self._locate(micro_batches, epoch, mini_batch)
        except distributed.RankLostError:
            raise
        except Exception:
            logger.warning("the search for the tokens behind a gradient spike failed; training goes on", exc_info=True)

    def add_to_event(self, **facts: Any) -> None:
        """Adds what became of the gradient to the event of the last `locate`, if that found a spike."""
        if self._event is not None:
            self._event.update(facts)

    def metrics(self) -> dict[str, float]:
        """The update's figures for the training log, the same on every rank."""
        return {
            "actor/gradloc/token_norm_max": self._token_norm_max,
            "actor/gradloc/triggered": len(self.events),
            "actor/gradloc/culprits": sum(len(event["culprits"]) for event in self.events),
            "actor/gradloc/passes": sum(event["passes"] for event in self.events),
            "actor/gradloc/seconds": sum(event["seconds"] for event in self.events),
        }

    def _locate(self, micro_batches: list[_MicroBatch], epoch: int, mini_batch: int) -> None:
        started = time.perf_counter()
        scale = self._loss_scale()
        squares = torch.stack([micro_batch.squares for micro_batch in micro_batches]) / scale**2
        square_weights = torch.stack([mb.tokens["weight"].double().square().sum() for mb in micro_batches])
        figures = _largest_token_equivalent(squares.sum(1), square_weights)
        figures = torch.stack([figures, square_weights.sum()]).to(self._device)
        by_rank = torch.stack(distributed.gather(figures))
        token_norm_max = float(by_rank[:, 0].max())
        self._token_norm_max = max(self._token_norm_max, token_norm_max)

        # The data-parallel mean gives each token 1/W of its weight in the reduced gradient.
        world_size = distributed.world_size()
        global_threshold = self.config.threshold * math.sqrt(float(by_rank[:, 1].sum())) / world_size
        if self.config.trigger == "unit":
            if token_norm_max <= self.config.threshold:
                return
            global_norm = self._reduced_norm(scale)
        else:
            global_norm = self._reduced_norm(scale)
            if global_norm <= global_threshold:
                return

        units = self._share_summaries(micro_batches, squares, square_weights)
        suspects = sorted(
            (name for name, unit in units.items() if not unit.token_equivalent <= self.config.threshold),
            key=lambda name: (math.isfinite(units[name].norm), -_finite(units[name].token_equivalent), name),
        )
        run = _Run(self, micro_batches, units, suspects, scale)
        rng_state = gradients.get_rng_state(self._device)
        with gradients.set_aside(self._module), gradients.training_flags(self._module):
            try:
                run.search_all()
            finally:
                gradients.set_rng_state(rng_state, self._device)

        if self.config.trigger == "global":
            trigger = {"kind": "global", "norm": global_norm, "threshold": global_threshold}
        else:
            worst = units[suspects[0]]
            threshold = self.config.threshold * worst.root_square_weight
            trigger = {"kind": "unit", "norm": worst.norm, "threshold": threshold}
        seconds = distributed.gather_objects((time.perf_counter() - started, datetime.now(timezone.utc).isoformat()))
        event = {
            "schema": evidence.SCHEMA,
            "time": seconds[0][1],
            "global_step": self._global_step,
            "epoch": epoch,
            "mini_batch": mini_batch,
            "trigger": trigger,
            "threshold": self.config.threshold,
            "global_norm": global_norm,
            "units": [self._unit_evidence(name, units[name]) for name in suspects],
            "culprits": run.culprits(),
            "passes": run.passes,
            "budget": self.config.budget,
            "complete": run.complete,
            "open_segments": run.open_segments(),
            "action": self.config.action,
            "seconds": max(entry[0] for entry in seconds),
            "search": "local",
            "world_size": world_size,
            "error": run.error,
            "layer_clip": None,
        }
        self.events.append(event)
        self._event = event

    def _reduced_norm(self, scale: float) -> float:
        if self._measure is None:
            return gradients.reduced_norm(self._module, self._device) / scale
        self.squared_norms = self._measure() / scale**2
        return float(self.squared_norms.sum().sqrt())

    def _share_summaries(
        self, micro_batches: list[_MicroBatch], squares: Tensor, square_weights: Tensor
    ) -> dict[UnitName, _UnitSummary]:
        roots = squares.sqrt().cpu()
        own = [
            _UnitSummary(
                rows=len(micro_batch.rows),
                tokens=int(micro_batch.tokens["response_mask"].sum()),
                norm=float(roots[i].square().sum().sqrt()),
                root_square_weight=float(square_weights[i].sqrt()),
                layer_norms=dict(zip(self._taps.layers, roots[i].tolist(), strict=True)),
            )
            for i, micro_batch in enumerate(micro_batches)
        ]
        by_rank = distributed.gather_objects(own)
        return {(rank, i): unit for rank, units in enumerate(by_rank) for i, unit in enumerate(units)}

    def _unit_evidence(self, name: UnitName, unit: _UnitSummary) -> dict[str, Any]:
        return {
            "rank": name[0],
            "micro_batch": name[1],
            "rows": unit.rows,
            "tokens": unit.tokens,
            "norm": unit.norm,
            "threshold": self.config.threshold * unit.root_square_weight,
            "token_equivalent": unit.token_equivalent,
            "layer_norms": unit.layer_norms,
        }


class _Run:
    """One search, from the suspect units to the culprits. Every rank measures one segment a pass."""

    def __init__(
        self,
        owner: GradLoc,
        micro_batches: list[_MicroBatch],
        units: dict[UnitName, _UnitSummary],
        suspects: list[UnitName],
        scale: float,
    ) -> None:
        self.passes = 0
        self.error: str | None = None
        self._owner = owner
        self._micro_batches = micro_batches
        self._units = units
        self._waiting = list(suspects)
        self._scale = scale
        self._search = Search(owner.config.threshold)
        self._shared: dict[UnitName, _Shared] = {}
        self._layer_norms: dict[tuple[UnitName, int], list[float]] = {}

    @property
    def complete(self) -> bool:
        return self.error is None and not self._waiting and not self._search.open_segments

    def search_all(self) -> None:
        """Measures until every suspect unit is settled, the budget is spent, or a pass failed."""
        world_size = distributed.world_size()
        while self.passes < self._owner.config.budget:
            while self._waiting and len(self._search.open_segments) < world_size:
                self._share(self._waiting[0])
                del self._waiting[0]
            segments = self._search.next(world_size)
            if not segments:
                return
            self.passes += 1
            squares = self._pass(segments)
            if squares is None:
                return
            layer_norms = squares.sqrt()
            for segment, norms in zip(segments, layer_norms.tolist(), strict=True):
                if segment.size == 1:
                    self._layer_norms[segment.unit, self._search.candidates(segment)[0]] = norms
            self._search.record(list(zip(segments, squares.sum(1).sqrt().tolist(), strict=True)))
            self._release_settled()

    def culprits(self) -> list[dict[str, Any]]:
        """The evidence on each culprit, the largest first."""
        found = [self._culprit_evidence(culprit) for culprit in self._search.culprits]
        return sorted(found, key=lambda culprit: (math.isfinite(culprit["grad_norm"]), -_finite(culprit["grad_norm"])))

    def open_segments(self) -> list[dict[str, Any]]:
        """What the search did not get to, best first; a unit not begun is a segment of all its tokens."""
        begun = [
            {
                "rank": segment.unit[0],
                "micro_batch": segment.unit[1],
                "tokens": segment.size,
                "threshold": self._search.threshold(segment),
            }
            for segment in self._search.open_segments
        ]
        return begun + [
            {
                "rank": name[0],
                "micro_batch": name[1],
                "tokens": self._units[name].tokens,
                "threshold": self._owner.config.threshold * self._units[name].root_square_weight,
            }
            for name in self._waiting
        ]

    def _share(self, name: UnitName) -> None:
        """Gives every rank the suspect's inputs and tokens, and opens it for the search. A collective call."""
        rank, index = name
        micro_batch = distributed.broadcast(lambda: _to_cpu(self._micro_batches[index], self._scale), rank)
        tokens = micro_batch.tokens
        suspicion = _suspicion(tokens)
        involved = (tokens["coefficient"] != 0) | (tokens["entropy_coefficient"] != 0)
        candidates = (involved & (tokens["weight"] != 0)).nonzero()
        at = tuple(candidates.T)
        self._shared[name] = _Shared(micro_batch, candidates, suspicion[at])
        self._search.add_unit(name, self._units[name].norm, suspicion[at], tokens["weight"][at])

    def _release_settled(self) -> None:
        searched = {segment.unit for segment in self._search.open_segments}
        for name, shared in self._shared.items():
            if name not in searched:
                shared.micro_batch.inputs = None

    def _pass(self, segments: list[Segment]) -> Tensor | None:
        """One forward and backward on every rank.

        Returns:
            Tensor: float64 of shape (segments, layers), the squared norms of each segment's gradient; None, on every
                rank, when the pass failed on any.
        """
        taps = self._owner._taps
        failure = self._owner._failure
        failure.next_round()
        rank = distributed.rank()
        error = self._attempt(segments[rank] if rank < len(segments) else None)
        if error is not None:
            # With no FSDP unit begun, nothing was communicated: an idle pass keeps step with the other ranks.
            in_step = taps.forwards == 0 and self._attempt(None) is None
            if not in_step:
                failure.failed(error)
                self._tell(error)
                return None
        squares = taps.stop().to(self._owner._device) / self._scale**2
        failed = torch.full_like(squares[:1], error is not None)
        gathered = torch.stack(distributed.gather(torch.cat([squares, failed])))
        if gathered[:, -1].any():
            self._tell(error)
            return None
        return gathered[: len(segments), :-1]

    def _attempt(self, segment: Segment | None) -> Exception | None:
        """Measures a segment on this rank, or runs along without one.

        Returns:
            Exception: What went wrong, if anything did.
        """
        owner = self._owner
        owner._taps.start()
        try:
            if segment is None:
                micro_batch = self._micro_batches[0]
                keep = torch.zeros_like(micro_batch.tokens["response_mask"], dtype=torch.bool, device="cpu")
            else:
                shared = self._shared[segment.unit]
                micro_batch = shared.micro_batch
                keep = torch.zeros_like(micro_batch.tokens["response_mask"], dtype=torch.bool)
                keep[tuple(shared.candidates[self._search.candidates(segment)].T)] = True
            gradients.set_rng_state(micro_batch.rng_state, owner._device)
            owner._probe(micro_batch.inputs, keep)
        except Exception as error:
            gradients.reset_sharding(owner._module)
            return error
        finally:
            gradients.clear(owner._module)
        return None

    def _tell(self, error: Exception | None) -> None:
        """Gives every rank the same message about a failed pass. A collective call."""
        if error is not None:
            logger.warning("a pass of the gradient search failed; training goes on", exc_info=error)
        messages = distributed.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        self.error = next(f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None)

    def _culprit_evidence(self, culprit: Culprit) -> dict[str, Any]:
        shared = self._shared[culprit.unit]
        row, position = shared.candidates[culprit.candidate].tolist()
        facts = evidence.token_evidence(shared.micro_batch.tokens, row, position)
        weight = abs(facts["weight"])
        layers = self._owner._taps.layers
        layer_norms = [norm / weight for norm in self._layer_norms[culprit.unit, culprit.candidate]]
        found = {
            "rank": culprit.unit[0],
            "micro_batch": culprit.unit[1],
            "row": shared.micro_batch.rows[row],
            "position": position,
            "grad_norm": culprit.norm / weight,
            "threshold": self._owner.config.threshold,
            "suspicion": float(shared.suspicion[culprit.candidate]),
            "share": culprit.norm / self._units[culprit.unit].norm,
            **facts,
            "layer_norms": dict(zip(layers, layer_norms, strict=True)),
        }
        return {**found, "source": evidence.classify(found)}


def _largest_token_equivalent(squares: Tensor, square_weights: Tensor) -> Tensor:
    """The largest norm/sqrt(Σw²) of a rank's micro-batches, shape (); NaN counts as infinite, no host sync."""
    ratio = (squares / square_weights).sqrt()
    ratio = torch.where((squares == 0) & (square_weights == 0), 0.0, ratio)
    return ratio.nan_to_num(nan=math.inf, posinf=math.inf).max()


def _suspicion(tokens: dict[str, Tensor]) -> Tensor:
    """s_t = |∂L/∂log p_t|·(1 − p_t), within √2 of the norm of the gradient by the logits.

    An entropy bonus adds its own coefficient times the entropy, a rough measure of its gradient.
    """
    suspicion = tokens["coefficient"].abs() * (1 - tokens["log_prob"].exp())
    if "entropy" in tokens:
        suspicion = suspicion + tokens["entropy_coefficient"].abs() * tokens["entropy"].abs()
    return suspicion


def _to_cpu(micro_batch: _MicroBatch, scale: float) -> _MicroBatch:
    tokens = {name: tensor.float().cpu() for name, tensor in micro_batch.tokens.items() if name != "token_id"}
    tokens["token_id"] = micro_batch.tokens["token_id"].cpu()
    for name in ("coefficient", "entropy_coefficient"):
        tokens[name] = tokens[name] / scale if name in tokens else torch.zeros_like(tokens["weight"])
    return _MicroBatch(micro_batch.inputs, micro_batch.rows, micro_batch.rng_state, tokens)


def _finite(norm: float) -> float:
    return norm if math.isfinite(norm) else math.inf
