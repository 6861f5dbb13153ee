# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""TokenClip: cuts a token's backward signal where it is far over the usual largest one."""

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ..config import is_finite_number, is_positive_integer, require
from ..fsdp import collectives
from ..guarded import guarded, warn_once
from ..layers.layer_clip import saved_statistics
from ..layers.reduced_norms import layer_name
from ..lines import Clipped
from ..saved import checked
from .watched_pass import LOG_PROBS, VALUES, Counts, Positions, WatchedPass, cut, is_over, largest_tokens, own_tokens

logger = logging.getLogger(__name__)

ACTIONS = ("log", "drop", "smooth")


@dataclass
class TokenClipConfig:
    """When a token's backward signal is cut.

    Args:
        enable (bool): Whether to compare each token's backward signal with the usual largest one.
        action (str): What happens to the signal of a token over the bound. Options: 'log' (nothing; it is only written
            down), 'drop' (multiplied by 0), 'smooth' (multiplied by a factor that falls from 1 at the bound to 0 at
            twice the bound).
        factor (float): The bound, as a multiple of the usual largest signal.
        beta (float): Decay of the usual largest signal, a moving average, per optimizer step.
        warmup_steps (int): Number of optimizer steps before tokens are compared.
        max_share (float): Maximum share of a rank's tokens of a mini-batch that are cut at a boundary. A micro-batch
            with which there would be more of them is left as it is.

    Raises:
        ValueError: A value is out of range.
    """

    enable: bool = False
    action: str = "drop"
    factor: float = 4.0
    beta: float = 0.98
    warmup_steps: int = 20
    max_share: float = 0.1

    def __post_init__(self) -> None:
        self._check("enable", isinstance(self.enable, bool), "True or False")
        self._check("action", self.action in ACTIONS, f"one of {list(ACTIONS)}")
        self._check("factor", is_finite_number(self.factor) and self.factor > 1, "a number over 1")
        self._check("beta", is_finite_number(self.beta) and 0 < self.beta < 1, "a number between 0 and 1")
        self._check("warmup_steps", is_positive_integer(self.warmup_steps), "an integer over 0")
        self._check("max_share", is_finite_number(self.max_share) and 0 < self.max_share <= 1, "over 0 and at most 1")

    def _check(self, name: str, good: bool, wanted: str) -> None:
        require(good, f"token_clip.{name}", getattr(self, name), wanted)


# The usual signal is at least half of the 90th percentile of the last mini-batches' largest signals. So where many of
# them have hardly any signal, as with sparse rewards, the others are still usual.
_FLOOR, _PERCENTILE, _WINDOW = 0.5, 0.9, 64


@dataclass
class UsualSignal:
    """A moving average of the largest signal of an optimizer step, for one boundary.

    It starts from the median of the warm-up. After that, the t-th value has the weight (1 - beta) / (1 - beta^t), as in
    a bias-corrected moving average (Adam's), so that the start weighs as much as the values it was computed from.
    """

    recent: list[float] = field(default_factory=list)  # the last values, not clipped; at most 64
    count: int = 0  # the number of values so far
    average: float = 0.0  # the moving average of the values, clipped to the bound; 0 during the warm-up

    @property
    def value(self) -> float:
        """The usual largest signal; 0 during the warm-up."""
        if self.average == 0 or not self.recent:
            return 0.0
        return max(self.average, _FLOOR * sorted(self.recent)[int(_PERCENTILE * (len(self.recent) - 1))])

    def take_in(self, largest: float, config: TokenClipConfig) -> None:
        """Adds a step's largest signal, at most the bound to the average; zeros and non-finite values are ignored."""
        if largest == 0 or not math.isfinite(largest):
            return
        clipped = min(largest, config.factor * self.value)
        self.count += 1
        self.recent = [*self.recent, largest][-_WINDOW:]
        if self.average == 0:
            if self.count >= config.warmup_steps:
                self.average = median(self.recent)
            return
        self.average += (1 - config.beta) / (1 - config.beta**self.count) * (clipped - self.average)


# Encoders of other modalities, whose hidden states are not those of the tokens.
_OTHER_MODALITY = re.compile(r"visual|vision|image|audio|speech")


def find_boundaries(module: nn.Module) -> dict[str, nn.Module]:
    """The modules whose outputs are hidden states, the embedding and the decoder layers, in the order of the forward.

    They are given by name: "embed_tokens", "layers.0", …; there are none if the model has no list of decoder layers.
    """
    # The decoder layers are the longest list of modules that is in no other list, nor in another encoder.
    lists = [
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList)
        and len(child)
        and not any(part.isdigit() for part in name.split("."))
        and not _OTHER_MODALITY.search(name)
    ]
    if not lists:
        return {}
    found = []
    find_embedding: Callable[[], nn.Module | None] | None = getattr(module, "get_input_embeddings", None)
    if find_embedding is not None and (embedding := find_embedding()) is not None:
        found = [(name, owner) for name, owner in module.named_modules() if owner is embedding]
    list_name, layers = max(lists, key=lambda each: len(each[1]))
    found += [(f"{list_name}.{i}", layer) for i, layer in enumerate(layers)]
    return {layer_name(f"{name}.weight"): owner for name, owner in found}


class TokenClip:
    """Watches the backward signals of a (sharded) model's tokens, and cuts those over their bounds.

    A token's backward signal is the norm of the loss's gradient with respect to its hidden state, at the output of the
    embedding and of every decoder layer, and |∂L/∂log p| at the log-probs. Divided by the token's weight in the loss,
    it is compared with `factor` times the usual largest one of that boundary. Where it is over, or no finite number,
    the hidden state's gradient is replaced before the layers below see it. The bounds are those of the last optimizer
    step, so a backward communicates nothing and never waits for the device.

    At the log-probs a position's signal is that of its own token. Below, the losses of later tokens reach a position
    through attention as well.

    For each micro-batch the trainer calls `begin_pass`, runs the forward, calls `observe`, runs the backward, and calls
    `end_pass`. At the optimizer step it calls `end_mini_batch`. All ranks make the same calls. Outside of a pass
    nothing is watched.
    """

    def __init__(
        self,
        module: nn.Module,
        config: TokenClipConfig,
        device: str | torch.device = "cpu",
        sequence_parallel_size: int = 1,
    ) -> None:
        self._config = config
        self._device = torch.device(device)
        self._sequence_parallel_size = sequence_parallel_size
        self._rank, self._part = divmod(collectives.rank(), sequence_parallel_size)
        modules = find_boundaries(module)
        if not modules:
            raise ValueError(
                f"token_clip finds no list of decoder layers in this model ({type(module).__name__}): set "
                "actor_rollout_ref.actor.token_clip.enable=False."
            )
        for boundary, owner in modules.items():
            owner.register_forward_hook(partial(self._watch_output, boundary))
        self.boundaries = [*modules, LOG_PROBS]  # in the order of the forward
        self._usual = {boundary: UsualSignal() for boundary in self.boundaries}
        self._tokens = 0.0  # of all ranks in a mini-batch, those with a weight in the loss
        self._start_mini_batch()
        self._said: set[str] = set()
        self._current: WatchedPass | None = None
        self._passes: list[WatchedPass] = []
        self._steps: list[dict[str, Any]] = []

    def discard(self) -> None:
        """Drops the passes since the last `end_mini_batch`: their mini-batch was thrown away, perhaps in a pass."""
        self._current, self._passes = None, []
        self._counts = Counts(len(self.boundaries), self._device)

    def begin_pass(self, positions: Positions, rows: Sequence[int]) -> None:
        """Starts watching a training pass; called before its forward."""
        self._current = WatchedPass(positions, [int(row) for row in rows])

    def observe(
        self, log_prob: Tensor, of_rows: Tensor, scale: float, read_tokens: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """Notes the weights of the current pass's tokens; called between its loss and its backward.

        Only what the backward needs is computed here.

        Args:
            log_prob (Tensor): The log-probs that the loss is computed from: shape (rows, response length), or flat for
                whole sequences without padding.
            of_rows (Tensor): The `row_weights` of the tokens' weights.
            read_tokens (Callable): Called in `end_pass`. Returns `weight`, and what to write down of tokens over the
                bound (`token_id` is among that), each of shape (rows, response length). If it raises, they are written
                down without these values.
        """
        current = self._current
        if current is None:
            raise RuntimeError("observe() belongs between begin_pass() and end_pass().")
        current.scaling = 1 / (scale * of_rows)
        current.scaled = scale != 1
        current.read_tokens = read_tokens
        self._watch(LOG_PROBS, log_prob)

    def end_pass(self) -> None:
        """Stops watching a training pass; called after its backward."""
        current, self._current = self._current, None
        if current is None:
            raise RuntimeError("end_pass() comes after begin_pass().")
        if list(current.signals) == [LOG_PROBS]:
            only = "TokenClip sees the log-probs only: the layers' hidden states are not in a form it knows."
            warn_once(self._said, only)
        noted: Mapping[str, Tensor] = {}
        with guarded("TokenClip cannot read the tokens of a micro-batch", self._said):
            noted = current.read_tokens()
        current.read_tokens = dict  # the other may hold the pass's tensors
        current.tokens = {
            name: noted[name].detach()
            for name in VALUES
            if name in noted and noted[name].shape == noted["weight"].shape
        }
        self._counts.take_in(current, self.boundaries, self._bounds)
        self._passes.append(current)

    @contextmanager
    def repeated(self, index: int, rows: Sequence[int], response_length: int) -> Iterator[None]:
        """Has an extra pass of this mini-batch cut as its training pass was, without counting its signals."""
        original = self._passes[index]
        assert original.scaling is not None
        self._current = WatchedPass(
            original.positions.select(rows, response_length),
            list(rows),
            recorded=False,
            scaled=original.scaled,
            scaling=original.scaling[list(rows)],
            refused=original.refused,
        )
        try:
            yield
        finally:
            self._current = None

    def marks(self) -> list[dict[str, Tensor]]:
        """What a search is to know of this rank's micro-batches: `outliers` and `cut_tokens`. A collective call."""
        own: list[dict[str, Tensor]] = []
        size = self._sequence_parallel_size

        def find() -> list[Tensor]:
            factor = self._config.factor
            own.extend({"outlier": each.outliers(factor), "cut": each.cut_tokens()} for each in self._passes)
            return [each["cut"].nonzero() for each in own] if size > 1 else []

        # Each rank of a group has a part of the positions.
        for of_part in collectives.exchange(find)[self._rank * size : (self._rank + 1) * size]:
            for each, places in zip(own, of_part, strict=False):
                each["cut"][tuple(places.T)] = True
        return own

    def end_mini_batch(self) -> Clipped | None:
        """Updates the bounds, and tells what was over them. A collective call.

        Returns:
            Clipped | None: The same on every rank; None if nothing was over its bound.
        """
        passes, self._passes, self._current = self._passes, [], None
        largest, over, cut, refused, tokens = self._counts.gather()
        # The ranks of a group have the same log-probs.
        for counts in (over, cut):
            for part in range(1, self._sequence_parallel_size):
                counts[part :: self._sequence_parallel_size, -1] = 0
        step: dict[str, Any] = {
            **self._compared_with(),
            "over": self._by_boundary(over.sum(0).long()),
            "cut": self._by_boundary(cut.sum(0).long()),
            "refused": [name for name, count in self._by_boundary(refused.sum(0)).items() if count],
            "largest": self._by_boundary(largest.amax(0)),
        }
        self._steps.append(step)
        evidence: Any = None
        if any(step["over"].values()):
            evidence = {**step, "tokens": self._gather_tokens(passes)}
        for boundary, value in step["largest"].items():
            self._usual[boundary].take_in(value, self._config)
        self._tokens = tokens[:: self._sequence_parallel_size, 0].sum().item() or self._tokens
        self._start_mini_batch()
        return evidence

    def metrics(self) -> dict[str, float]:
        """The metrics of docs/reference/clips.md since the last call, the same on every rank.

        `largest` and its `boundary`, an index in the order of the forward, are missing during the warm-up.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return {}
        metrics: dict[str, float] = {
            f"actor/token_clip/{name}": sum(sum(step[name].values()) for step in steps) for name in ("over", "cut")
        }
        multiples = [
            (step["largest"][boundary] / usual, i)
            for step in steps
            for i, (boundary, usual) in enumerate(step["usual"].items())
            if usual
        ]
        if multiples:
            metrics["actor/token_clip/largest"], metrics["actor/token_clip/boundary"] = max(multiples)
        return metrics

    def bounds_in_force(self) -> dict[str, Any]:
        """What this mini-batch's signals are compared with, the same on every rank; for a bundle.

        By boundary the `usual` signal, None in the warm-up; `limit` is how many signals of a rank may be cut at each.
        """
        return {**self._compared_with(), "limit": self._limit}

    def _compared_with(self) -> dict[str, Any]:
        usual = {name: usual.value or None for name, usual in self._usual.items()}
        return {"action": self._config.action, "factor": self._config.factor, "usual": usual}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank and for any number of ranks."""
        return {"boundaries": {name: asdict(usual) for name, usual in self._usual.items()}, "tokens": self._tokens}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state_dict`; see `saved_statistics`. After an error, nothing is changed."""
        if state is not None:
            checked(state, {"boundaries": {}, "tokens": 0.0}, "it")
        of_boundaries = None if state is None else state["boundaries"]
        self._usual = saved_statistics(of_boundaries, self.boundaries, UsualSignal, "TokenClip", "boundaries")
        self._tokens = 0.0 if state is None else state["tokens"]
        self._start_mini_batch()

    def _start_mini_batch(self) -> None:
        self._counts = Counts(len(self.boundaries), self._device)
        groups = collectives.world_size() // self._sequence_parallel_size
        # How many signals of a rank may be cut at a boundary in a mini-batch.
        self._limit = max(1, int(self._config.max_share * self._tokens / groups))
        bounds = [self._config.factor * usual.value or math.inf for usual in self._usual.values()]
        # Infinite in the warm-up. Pageable memory is copied at once, so the host need not wait until the device has it.
        self._bounds = torch.tensor(bounds, dtype=torch.float32).to(self._device, non_blocking=True)

    def _by_boundary(self, values: Tensor) -> dict[str, Any]:
        return dict(zip(self.boundaries, values.tolist(), strict=True))

    def _watch_output(self, boundary: str, _module: nn.Module, _inputs: object, output: object) -> None:
        """Watches the hidden states that a module returns.

        A forward that gradient checkpointing recomputes comes here as well. Gradients flow through the tensors of one
        of the two only: with reentrant checkpointing through the recomputed ones, otherwise through the first ones.
        """
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(hidden, Tensor) and torch.is_grad_enabled():
            self._watch(boundary, hidden)

    def _watch(self, boundary: str, values: Tensor) -> None:
        """Watches the gradient of hidden states or log-probs, if they are a pass's and have one."""
        current = self._current
        if current is not None and values.requires_grad:
            values.register_hook(lambda gradient: self._see(current, boundary, gradient))

    @torch.no_grad()
    def _see(self, current: WatchedPass, boundary: str, gradient: Tensor) -> Tensor | None:
        """What replaces a gradient at a boundary; None if it is to stay as it is. No host sync."""
        if current is not self._current or current.scaling is None:
            return None
        at_log_probs = boundary == LOG_PROBS
        # verl's gathering of a group's log-probs multiplies their gradient with the group's size.
        if at_log_probs:
            signal = gradient.abs().float()
        else:
            signal = torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32) / self._sequence_parallel_size
        scaling = current.scaling_of(signal.shape, at_log_probs)
        if scaling is None:
            return None  # these are not the text's hidden states, or not in this form
        signal = current.signals[boundary] = signal * scaling
        if self._usual[boundary].value == 0 or self._config.action == "log":
            return None
        i = self.boundaries.index(boundary)
        bound = self._bounds[i]
        over = is_over(signal, bound, current.scaled)
        if current.recorded:
            count, so_far = over.sum(), self._counts.cut[i]
            # Below the log-probs, each rank of a group has a part of the positions.
            limit = self._limit if at_log_probs else max(1, self._limit // self._sequence_parallel_size)
            current.refused[boundary] = so_far + count > limit
            self._counts.cut[i] += torch.where(current.refused[boundary], 0, count)
        elif boundary not in current.refused:
            return None  # training did not see it
        over = over & ~current.refused[boundary]
        if not at_log_probs:
            over, signal = over.unsqueeze(-1), signal.unsqueeze(-1)
        return cut(gradient, signal, bound, over, self._config.action)

    def _gather_tokens(self, passes: Sequence[WatchedPass]) -> list[dict[str, Any]]:
        """The `own_tokens` of all ranks, largest multiple first; none if that fails. A collective call."""
        try:
            of_ranks = collectives.exchange(lambda: own_tokens(passes, self._rank, self._part, self._config.factor))
        except collectives.RankFailedError:
            logger.warning("the tokens over TokenClip's bounds are not described", exc_info=True)
            return []
        return largest_tokens([token for of_rank in of_ranks for token in of_rank])


def row_weights(weight: Tensor) -> Tensor:
    """The weight of each row's tokens in the loss, 1 for a row without one; float32, shape (rows,).

    The tokens of a row have the same `weight`, shape (rows, response length); those that are not in the loss have none.
    """
    if not weight.shape[1]:
        return torch.ones(len(weight), device=weight.device)
    of_row = weight.detach().abs().float().amax(1)
    return torch.where(of_row > 0, of_row, 1.0)
