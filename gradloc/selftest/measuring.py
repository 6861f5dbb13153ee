# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what GradLoc costs in steps of a loop, and whether it finds planted tokens there.

The loop has neither verl nor an optimizer, and its model is sharded as in verl.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ..config import GradLocConfig
from ..fsdp import collectives
from ..gradloc import GradLoc
from ..measure.pass_recorder import unchanged
from ..replay.model import loaded_in
from ..replay.search import shard


@dataclass(frozen=True)
class Sizes:
    """The data of a step on each rank."""

    micro_batches: int = 2
    rows: int = 2  # of each micro-batch
    prompt: int = 512  # the tokens of a prompt
    response: int = 3584  # the tokens of a response


class Loop:
    """A training loop without an optimizer: what a step of verl's actor does between two optimizer steps.

    Args:
        model (nn.Module): It returns an object with `logits` for `input_ids`.
        sizes (Sizes): Of a step.
        vocabulary (int): How many tokens there are.
    """

    def __init__(self, model: nn.Module, sizes: Sizes, vocabulary: int, device: torch.device) -> None:
        self.model, self.sizes, self.device = model, sizes, device
        # Those that an optimizer has: a forward without a backward leaves gathered ones in the place of FSDP2's.
        self._parameters = [*model.parameters()]
        generator = torch.Generator().manual_seed(collectives.rank())
        shape = (sizes.micro_batches, sizes.rows, sizes.prompt + sizes.response)
        self.ids = torch.randint(vocabulary, shape, generator=generator)
        self.advantages = torch.randn(*shape[:2], 1, generator=generator).expand(-1, -1, sizes.response).contiguous()

    def forward(self, inputs: Mapping[str, Tensor], rows: Sequence[int], response_length: int) -> tuple[None, Tensor]:
        """See `GradLoc`."""
        sizes = self.sizes
        ids = inputs["ids"][list(rows), : sizes.prompt + response_length].to(self.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[:, sizes.prompt - 1 : -1]
        # One row at a time, and again in the backward: in float32, the logits are the largest tensor by far.
        log_probs = [
            checkpoint(_log_probs, *pair, use_reentrant=False)
            for pair in zip(logits, ids[:, sizes.prompt :], strict=True)
        ]
        return None, torch.stack(log_probs)

    def step(self, gradloc: GradLoc | None, advantages: Tensor, global_step: int = 0) -> None:
        """The passes of a mini-batch, and what GradLoc does before its optimizer step."""
        sizes = self.sizes
        for parameter in self._parameters:
            parameter.grad = None
        weight = torch.full((sizes.rows, sizes.response), 1 / (sizes.micro_batches * sizes.rows * sizes.response))
        weight, mask = weight.to(self.device), torch.ones_like(weight, device=self.device)
        if gradloc is not None:
            gradloc.start_update(global_step)
        for index in range(sizes.micro_batches):
            inputs, advantage = {"ids": self.ids[index]}, advantages[index].to(self.device)
            if gradloc is not None:
                gradloc.begin_pass(inputs, range(index * sizes.rows, (index + 1) * sizes.rows))
            _, log_prob = self.forward(inputs, range(sizes.rows), sizes.response)
            loss = -(weight * advantage * torch.exp(log_prob - log_prob.detach())).sum()
            if gradloc is not None:
                ids = self.ids[index][:, sizes.prompt :].to(self.device)
                noted = {"log_prob": log_prob, "weight": weight, "response_mask": mask, "token_id": ids}
                noted |= {"advantage": advantage}
                noted |= {f"{kind}_log_prob": log_prob for kind in ("old", "ref", "rollout")}
                gradloc.observe(partial(dict, noted), {"coefficient": (log_prob, unchanged)})
            loss.backward()
            if gradloc is not None:
                gradloc.end_pass()


def _log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """The log-probs of the ids (length,) by the logits (length, vocabulary), in float32."""
    logits = logits.float()
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def build_model(name: str, random_weights: bool, attention: str, device: torch.device, trust: bool) -> Any:
    """A model as verl's actor trains it: sharded by FSDP2, float32 parameters, computing in bfloat16 on a GPU.

    Its type is transformers' own.

    Args:
        name (str): A folder, or a name on the hub.
        random_weights (bool): Whether to read the configuration alone.
        attention (str): transformers' name for an implementation of attention.
        trust (bool): Whether the model's own code may run.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    half = torch.bfloat16 if device.type != "cpu" else torch.float32
    options = {**loaded_in(half), "attn_implementation": attention, "trust_remote_code": trust}
    if random_weights:
        with device:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust)
            model: Any = AutoModelForCausalLM.from_config(config, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, **options)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    shard(model.train(), half, init_device_mesh(device.type, (dist.get_world_size(),)))
    return model


NEVER = 1e30
# The bytes of objects, those of all ranks, whose exchange is measured.
EXCHANGED = 8 * 2**20
# τ in ordinary tokens' norms, and what the planted token exceeds its micro-batch's threshold by, if it is ordinary.
_THRESHOLD, _SPIKE = 10.0, 30.0
_WARM_UP = 2
_LEAST_PAIRS = 3


class UnusableError(RuntimeError):
    """Why nothing can be measured, in one sentence."""


class SelfTest:
    """Measures the steps of a loop, on all ranks.

    Args:
        seconds (float): How long to measure what detection costs; at least three pairs of steps.
    """

    def __init__(self, loop: Loop, seconds: float) -> None:
        self._loop, self._seconds = loop, seconds
        self._ordinary = math.nan

    def run(self) -> dict[str, Any]:
        """All figures; the same on every rank but for memory and seconds, which are this rank's."""
        with self._watched(NEVER) as gradloc:
            for _ in range(_WARM_UP):
                self._step(gradloc)
            self._ordinary = gradloc.metrics()["actor/gradloc/token_norm_max"]
        if not 0 < self._ordinary < math.inf:
            raise UnusableError(
                f"The gradient norm of random tokens is {self._ordinary:g} with this model: give it other --rows, "
                "--prompt or --response, or its real weights."
            )
        result: dict[str, Any] = {"ordinary_token_norm": self._ordinary, **self._cost()}
        result["peak"] = {"off": self._peak(lambda: self._step(None))}
        with self._watched(NEVER) as gradloc:
            result["peak"]["detection"] = self._peak(lambda: self._step(gradloc))
        result["exchange_seconds"] = self._exchange()
        return {**result, "search": self.search("log"), "drop": self.search("drop"), "drill": self._drill()}

    def search(self, action: str) -> dict[str, Any]:
        """A step with a planted token, after a forward without gradients, as the old log-probs take.

        Args:
            action (str): `spike_action`.

        Returns:
            dict: Whether that token alone was `found`; `passes`; `error`; the `seconds` of the search; whether the
                gradient has the `same_gradient` after it; `peak`, the most bytes that were allocated, None on a CPU.
                For "drop" also `difference`: that to the gradient without the planted token, as a part of its norm.
        """
        place, advantages, without = self._planted()
        taken: dict[str, Any] = {}
        with self._watched(_THRESHOLD * self._ordinary, spike_action=action) as gradloc:

            def step() -> None:
                with torch.no_grad():
                    self._loop.forward({"ids": self._loop.ids[0]}, range(self._loop.sizes.rows), 1)
                self._loop.step(gradloc, advantages, 1)
                before = [gradient.to("cpu", copy=True) for gradient in _local_gradients(self._loop.model)]
                taken["seconds"] = self._timed(lambda: gradloc.locate(0, 0))
                pairs = zip(before, _local_gradients(self._loop.model), strict=True)
                taken["same"] = all(torch.equal(old, new.cpu()) for old, new in pairs)

            peak = self._peak(step)
        found = [{name: culprit[name] for name in place} for event in gradloc.events for culprit in event["culprits"]]
        result = {
            **_outcome(gradloc, found == [place], peak),
            "seconds": taken["seconds"],
            "same_gradient": all(collectives.gather_objects(taken["same"])),
        }
        return {**result, "difference": self._difference(without)} if action == "drop" else result

    def _difference(self, advantages: Tensor) -> float:
        """How far the gradient is from that of these advantages, as a part of the latter's norm; that of all ranks."""
        left = [gradient.cpu() for gradient in _local_gradients(self._loop.model)]
        self._loop.step(None, advantages)
        squares = torch.zeros(2, dtype=torch.float64)
        for ours, wanted in zip(left, _local_gradients(self._loop.model), strict=True):
            wanted = wanted.cpu().double()
            squares += torch.stack([(ours.double() - wanted).square().sum(), wanted.square().sum()])
        difference, norm = torch.stack(collectives.gather_objects(squares)).sum(0).sqrt().tolist()
        return difference / norm

    def _watched(self, threshold: float, **options: Any) -> closing[GradLoc]:
        """GradLoc, whose hooks are there within it."""
        config = GradLocConfig(grad_norm_threshold=threshold, **options)
        return closing(GradLoc(self._loop.model, config, self._loop.forward, self._loop.device))

    def _step(self, gradloc: GradLoc | None, global_step: int = 0) -> None:
        """A step, with the check before its optimizer step."""
        self._loop.step(gradloc, self._loop.advantages, global_step)
        if gradloc is not None:
            gradloc.locate(0, 0)

    def _timed(self, call: Callable[[], object]) -> float:
        """The seconds of a call."""
        _wait(self._loop.device)
        started = time.perf_counter()
        call()
        _wait(self._loop.device)
        return time.perf_counter() - started

    def _cost(self) -> dict[str, Any]:
        """Pairs of a step without and one with detection, in an order that is drawn anew."""
        pairs: list[dict[bool, float]] = []
        started = time.perf_counter()
        draw = random.Random(0)

        def more() -> bool:
            return len(pairs) < _LEAST_PAIRS or time.perf_counter() - started < self._seconds

        while collectives.broadcast(more, 0):  # the ranks have to take the same number of steps
            first = draw.random() < 0.5
            pairs.append({watched: self._seconds_of(watched) for watched in (first, not first)})
        return {
            "steps": len(pairs),
            "step_seconds": median(pair[False] for pair in pairs),
            "detection": median(pair[True] / pair[False] for pair in pairs) - 1,
        }

    def _seconds_of(self, watched: bool) -> float:
        """Of the second of two steps."""
        with self._watched(NEVER) if watched else nullcontext() as gradloc:
            self._step(gradloc)
            return self._timed(lambda: self._step(gradloc))

    def _exchange(self) -> float | None:
        """The seconds in which the ranks send each other what an event may have of all of them; None for one rank."""
        if (ranks := collectives.world_size()) == 1:
            return None
        # The first makes them begin the second together.
        _, seconds = (self._timed(lambda: collectives.gather_objects(bytes(EXCHANGED // ranks))) for _ in range(2))
        return seconds

    def _peak(self, call: Callable[[], None]) -> int | None:
        """The most bytes that are allocated during a call; None on a CPU."""
        if self._loop.device.type != "cuda":
            call()
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated()

    def _planted(self) -> tuple[dict[str, int], Tensor, Tensor]:
        """A token's place, the same on every rank, advantages in which its own is far too large, and without it."""
        sizes, draw = self._loop.sizes, random.Random(1)
        place = {
            "rank": draw.randrange(collectives.world_size()),
            "row": draw.randrange(sizes.micro_batches * sizes.rows),
            "position": draw.randrange(sizes.response),
        }
        advantages, without = self._loop.advantages.clone(), self._loop.advantages.clone()
        if place["rank"] == collectives.rank():
            # Against a unit's threshold, which is τ √(its tokens).
            factor = _SPIKE * _THRESHOLD * math.sqrt(sizes.rows * sizes.response)
            index = (*divmod(place["row"], sizes.rows), place["position"])
            advantages[index] = math.copysign(factor, float(advantages[index]))
            without[index] = 0.0
        return place, advantages, without

    def _drill(self) -> dict[str, Any]:
        """A step in which GradLoc plants a token itself."""
        with self._watched(_THRESHOLD * self._ordinary, spike_drill_step=1) as gradloc:
            peak = self._peak(lambda: self._step(gradloc, 1))
        return _outcome(gradloc, any(event["drill"]["found"] for event in gradloc.events), peak)


def _outcome(gradloc: GradLoc, found: bool, peak: int | None) -> dict[str, Any]:
    """Whether the planted token was `found`; and of the search `passes` and `error`."""
    events = gradloc.events
    error = events[0]["error"] if events else "no spike was seen, or the search failed as the log says"
    return {"found": found, "passes": sum(event["passes"] for event in events), "error": error, "peak": peak}


def _local_gradients(model: nn.Module) -> list[Tensor]:
    """This rank's part of each gradient."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [getattr(gradient, "_local_tensor", gradient).detach() for gradient in gradients]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
