# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Searches a bundle's micro-batches for the tokens behind its spike, as a search in training does.

What counts as a pass has as many probes as in training, where each rank measured one. So the search takes the same
decisions as that in training would, whatever the number of processes, which share the micro-batches and the probes.
In one process the model is that of a replay, and those of torchrun share one that FSDP2 has sharded.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from ..config import GradLocConfig
from ..convert.told import told_by_bundle
from ..evidence.event import Done, build_event
from ..fsdp import collectives
from ..fsdp.state import get_rng_state
from ..judge import judged
from ..measure.micro_batch import MicroBatch, MicroBatchName
from ..measure.mini_batch import MiniBatch, OrdinaryGradient
from ..measure.passes import Forward, LocalMeter, MakeProbe, Passes, WatchedModel
from ..search.investigation import TimeLimit, investigate
from ..tools.command_line import say
from ..tools.opening import Bundle
from .model import Model, cut_row, has_dropout, logits_of, response_log_probs
from .model import forward as forward_row
from .replaying import log_prob_distance

# How many probes count as one pass, at most: those of a recorded spike, for which fewer take less time, and of others.
_WIDTH_OF_CONVERTED, _WIDTH = 8, 64
# The suggested τ is this part of the largest norm.
_UNDER = 0.8
# A search makes hundreds of short passes: one line in this many seconds.
SECONDS = 5.0
_MEDIANS = ("median_advantage", "median_weight")


@dataclass(frozen=True)
class Searched:
    """What a search gave; all but `found` is the same on every rank."""

    # As `build_event` returned it, on rank 0 with the ranks and micro-batches of the bundle; None if nothing is over
    # its threshold.
    found: dict[str, Any] | None
    largest: MicroBatchName | None  # that with the largest norm, in that case; None if no token has a gradient
    norm: float  # its norm/sqrt(Σw²), which is compared with τ
    log_probs: dict[str, Any]  # what `log_prob_distance` returned
    passes: int  # how many forward and backward passes this process has made

    @property
    def lower_threshold(self) -> str:
        """A τ with which the largest micro-batch is searched."""
        return f"{_UNDER * self.norm:.2g}"


class _Ordinary(OrdinaryGradient):
    """What the event says of ordinary tokens."""

    def __init__(self, layer_norms: Mapping[str, Any] | None) -> None:
        super().__init__()
        self._layer_norms = None if layer_norms is None else {name: float(n) for name, n in layer_norms.items()}
        norm = math.hypot(*(self._layer_norms or {}).values())
        self.token_norm = norm if 0 < norm < math.inf else None

    def layer_norms(self, by_rank: object, layers: object) -> dict[str, float] | None:
        return self._layer_norms


def search(bundle: Bundle, model: Model, forward: Forward, threshold: float, budget: int) -> Searched:
    """Searches a bundle. A collective call.

    Args:
        bundle (Bundle): The same on every rank.
        forward (Forward): What `build_forward` or `shard_model` returned.
        threshold (float): τ.
        budget (int): At most so many passes.

    Raises:
        RankFailedError: A pass failed on some rank.
    """
    started = time.perf_counter()
    event = bundle.event
    scale = model.loss_scale
    names = list(bundle.micro_batches)
    ranks = collectives.world_size()
    own = [_micro_batch(bundle, name, model.device, scale) for name in names[collectives.rank() :: ranks]]
    own = own or [_without_tokens(_micro_batch(bundle, names[0], model.device, scale))]
    # By the name in the search: ranks and micro-batches are those of the processes there.
    recorded = {(rank, index): name for rank in range(ranks) for index, name in enumerate(names[rank::ranks])}

    outputs = _LastOutputs(forward)
    watched = WatchedModel(model.module, outputs.forward, model.device)
    watched.meter.close()
    watched.meter = _WideMeter(model.module, model.device, _width(event))
    with closing(watched.meter):
        passes = Passes(watched, own, scale)
        differences = _measure_wholes(watched, passes, own, recorded, outputs)
        log_probs = log_prob_distance(torch.cat(collectives.exchange(lambda: torch.cat(differences))))
        # The reduced norm of training is that of all ranks, which a bundle has not.
        none, norm = torch.zeros(0, dtype=torch.float64, device=model.device), float(event["global_norm"])
        mini_batch = MiniBatch(watched, own, scale, global_norm=norm).gather("unit", none)
        config = GradLocConfig(
            grad_norm_threshold=threshold,
            bisect_budget_steps=budget,
            bisect_budget_seconds=None,
            bisect_until=event["until"],
        )
        ordinary = _Ordinary(event["ordinary_layer_norms"])
        findings = investigate(mini_batch, threshold, config, ordinary.token_norm, TimeLimit(None))
        if findings.error is not None:
            raise collectives.RankFailedError(findings.error)
        if not findings.groups:
            figures = findings.figures
            name = max(figures, key=lambda name: figures[name].token_equivalent)
            norm = figures[name].token_equivalent
            return Searched(None, recorded[name] if norm else None, norm, log_probs, outputs.count)
        where: Any = {name: event[name] for name in ("global_step", "epoch", "mini_batch")}
        medians = {name: event[name] and float(event[name]) for name in _MEDIANS}
        # Older releases had no identities.
        of_run: Any = event if "identities" in event else told_by_bundle(bundle).answer()
        of_action = event["action"], Done(event["applied"]), started, event.get("steps_since_resume")
        found = judged(build_event(mini_batch, findings, ordinary, where, *of_action, lambda: of_run, medians))
    if collectives.rank() == 0:
        found = _with_names(found, recorded)
    return Searched(found, None, 0.0, log_probs, outputs.count)


class _WideMeter(LocalMeter):
    """Measures up to `width` probes in what counts as a pass: more than there are processes one after the other."""

    def __init__(self, module: nn.Module, device: torch.device, width: int) -> None:
        super().__init__(module, device)
        self.width = width

    def measure(self, passes: Passes, probes: Sequence[MakeProbe]) -> Tensor:
        count, ranks = passes.count, collectives.world_size()
        parts = [probes[start : start + ranks] for start in range(0, len(probes), ranks)]
        squares = torch.cat([super(_WideMeter, self).measure(passes, part) for part in parts])
        passes.count = count + 1
        return squares


def _width(event: Mapping[str, Any]) -> int:
    """How many probes count as one pass: with the reduced gradient, training measured one."""
    if event["search"] == "reduced":
        return 1
    return int(min(event["world_size"], _WIDTH_OF_CONVERTED if event["search"] == "converted" else _WIDTH))


class _LastOutputs:
    """Keeps the log-probs of the last pass, and counts the passes."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._said = time.monotonic()
        self.count = 0
        self.rows: list[int] = []
        self.log_prob = torch.zeros(0, 0)

    def forward(self, inputs: dict[str, Any], rows: list[int], length: int) -> tuple[Tensor | None, Tensor]:
        entropy, log_prob = self._forward(inputs, rows, length)
        self.count += 1
        if time.monotonic() - self._said >= SECONDS:
            self._said = time.monotonic()
            say(f"searching: {self.count} forwards and backwards so far")
        self.rows, self.log_prob = rows, log_prob.detach()
        return entropy, log_prob

    def differences(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """How far they are from those recorded, for the tokens of a response, shape (tokens,)."""
        length = self.log_prob.shape[1]
        mask = tokens["response_mask"][self.rows, :length].bool()
        recorded = tokens["log_prob"][self.rows, :length].double()
        return (self.log_prob.double().cpu() - recorded)[mask].abs()


def _micro_batch(bundle: Bundle, name: MicroBatchName, device: torch.device, scale: float) -> MicroBatch:
    """A bundle's micro-batch as a pass of training would have left it, with the loss scale."""
    saved = bundle.micro_batches[name]
    tokens = dict(saved.tokens)
    for coefficient in ("coefficient", "entropy_coefficient"):
        tokens[coefficient] = tokens[coefficient] * scale
        # The loss scale made it overflow in half precision, for which `broken` does not count it.
        if scale != 1 and "broken" in tokens and (tokens[coefficient].isinf() & ~tokens["broken"]).any():
            tokens[coefficient] = tokens[coefficient].half()
    inputs = {"rows": saved.rows, "entropy": bool((saved.tokens["entropy_coefficient"] != 0).any())}
    # Nothing is random in evaluation mode, so the random state is not needed.
    return MicroBatch(inputs, bundle.rows[name], get_rng_state(device), tokens)


def _without_tokens(micro_batch: MicroBatch) -> MicroBatch:
    """Its first row without a token of the response, for a process that has no micro-batch: a mini-batch has one."""
    tokens = {name: torch.zeros_like(values[:1]) for name, values in micro_batch.tokens.items()}
    return MicroBatch(micro_batch.inputs, micro_batch.rows[:1], micro_batch.rng_state, tokens)


def _measure_wholes(
    model: WatchedModel,
    passes: Passes,
    own: Sequence[MicroBatch],
    names: Collection[MicroBatchName],
    outputs: _LastOutputs,
) -> list[Tensor]:
    """Sets the squared norms of this rank's micro-batches. A collective call.

    Args:
        names (Collection[MicroBatchName]): All that are of the bundle, by their names in the search.

    Returns:
        list[Tensor]: How far the log-probs of each are from those recorded, each of shape (tokens,).
    """
    differences = [torch.zeros(0, dtype=torch.float64)]
    for micro_batch in own:
        micro_batch.squares = torch.zeros(len(model.meter.layers), dtype=torch.float64)
    for index, whole in enumerate(passes.whole_micro_batches(names)):
        squares = passes.measure(whole, model.meter.stop, model.meter.reduces)
        if (model.rank, index) in names:
            own[index].squares = squares
            differences.append(outputs.differences(own[index].tokens))
    return differences


def _with_names(found: dict[str, Any], recorded: Mapping[MicroBatchName, MicroBatchName]) -> dict[str, Any]:
    """What was found, with the ranks and micro-batches of the bundle."""

    def named(each: Mapping[str, Any]) -> dict[str, Any]:
        rank, micro_batch = recorded[each["rank"], each["micro_batch"]]
        return {**each, "rank": rank, "micro_batch": micro_batch}

    lists = {key: [named(each) for each in found[key]] for key in ("units", "culprits", "diffuse", "open_segments")}
    without = found["without_tokens"]
    return {**found, **lists, "without_tokens": without and named(without)}


# Log-probs and entropies of a row's response.
_Outputs = tuple[Tensor, Tensor | None]
# Computes them again in the backward.
_again_in_backward: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def build_forward(model: Model) -> Forward:
    """The forward of a model in one process: one row after the other, without padding, as a replay computes them.

    Of several rows, one at a time is computed again in the backward, so that they take the memory of one.

    Its inputs are `rows`, the `Row`s of a micro-batch, and `entropy`, whether the loss has entropies.
    """

    def forward(inputs: Mapping[str, Any], rows: Sequence[int], response_length: int) -> tuple[Tensor | None, Tensor]:
        of_row = partial(_again_in_backward, forward_row) if len(rows) > 1 else forward_row
        cut = [cut_row(inputs["rows"][index], response_length) for index in rows]
        return _stacked([of_row(model, row, inputs["entropy"]) for row in cut], response_length)

    return forward


def shard_model(model: Model, device: torch.device, mesh: DeviceMesh) -> tuple[Model, Forward]:
    """Shards a model on the CPU by FSDP2 over a mesh; decoder layers compute again in the backward.

    Its forward computes all rows at once, padded on the right: FSDP would reduce the gradient of each row alone.

    Args:
        model (Model): The model, whose parameters are replaced.
        device (torch.device): Where it computes from now on.

    Returns:
        tuple[Model, Forward]: The sharded model, and its forward with the inputs of `build_forward`.
    """
    module: Any = model.module
    if hasattr(module, "gradient_checkpointing_enable") and not has_dropout(module):
        module.gradient_checkpointing_enable({"use_reentrant": False})
        for child in module.modules():
            if getattr(child, "gradient_checkpointing", False):
                child.training = True  # alone: without it, transformers does not compute the layer again
    shard(module, model.dtype, mesh)
    sharded = replace(model, device=device, layer_of={})

    def forward(inputs: Mapping[str, Any], rows: Sequence[int], response_length: int) -> tuple[Tensor | None, Tensor]:
        cut = [cut_row(inputs["rows"][index], response_length) for index in rows]
        found = [
            _again_in_backward(response_log_probs, *part, row, inputs["entropy"])
            for part, row in zip(logits_of(sharded, cut), cut, strict=True)
        ]
        return _stacked(found, response_length)

    return sharded, forward


def _stacked(found: Sequence[_Outputs], length: int) -> tuple[Tensor | None, Tensor]:
    """Entropies, if there are any, and log-probs of rows, each with zeros up to a length: (rows, length)."""

    def stack(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([nn.functional.pad(each, (0, length - len(each))) for each in values])

    entropies = [entropy for _, entropy in found if entropy is not None]
    return stack(entropies) if entropies else None, stack([log_prob[:length] for log_prob, _ in found])


def shard(model: nn.Module, dtype: torch.dtype, mesh: DeviceMesh) -> None:
    """Shards a model by FSDP2, layer by layer, so that no more than a layer is whole in float32.

    Args:
        model (nn.Module): One of transformers, on the CPU or on the device.
        dtype (torch.dtype): What it computes in. Its parameters are float32, as in verl, or float64 with that.
    """
    # torch before 2.6 does not have FSDP2
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    kept = torch.float64 if dtype == torch.float64 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=kept, cast_forward_inputs=False)
    whole = set(getattr(model, "_no_split_modules", None) or ())
    for module in [child for child in model.modules() if type(child).__name__ in whole] + [model]:
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(kept)
        fully_shard(module, mesh=mesh, mp_policy=policy)
