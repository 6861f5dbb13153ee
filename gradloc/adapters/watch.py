# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""GradLoc, LayerClip and TokenClip of an actor, and the watch over a critic: what all adapters share."""

import functools
import io
import logging
import os
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from verl.utils.device import get_device_name

from ..bundles.bundle_writer import BundleWriter
from ..bundles.layout import Row
from ..config import GradLocConfig
from ..critic_watch import CriticWatch
from ..evidence.writer import now
from ..facts import TrainedRow
from ..fsdp import collectives
from ..gradloc import GradLoc, Located
from ..guarded import PatientThread, guarded
from ..layers.layer_clip import LayerClip
from ..lines import SCHEMA, Answer, Where
from ..measure.pass_recorder import LossInputs, ReadTokens
from ..measure.passes import Forward
from ..token_clip.token_clip import TokenClip, row_weights
from ..token_clip.watched_pass import Positions
from .loss_weights import AggregationCall, aggregation_mode, policy_weights, recorded_aggregation, with_derived

logger = logging.getLogger(__name__)

# The file beside a checkpoint that has what was learned of the run.
STATE_FILE = "gradloc_state.pt"

# To be raised where a part saves other fields than it can read. Files of the first form do not say theirs.
FORM = 3
# No model has so much to be learned of it.
_STATE_BYTES = 64 * 2**20
# The gradient norm that an optimizer step returns: a tensor or a number.
Norm = TypeVar("Norm")


@dataclass
class Watch:
    """What watches a model that is trained: each of its parts may be off. `watch_actor` and `watch_critic` make one."""

    config: Any  # verl's configuration of the actor or critic
    loss_scale: Callable[[], float]  # returns that of the backward passes
    sequence_parallel_size: int  # how many neighbouring ranks work on the same data
    eos_tokens: Collection[int] = ()  # where a rollout stops
    gradloc: GradLoc | None = None
    # If it is off and bundles are kept, it learns its bounds all the same: they tell what it would have left of a
    # spike.
    layer_clip: LayerClip | None = None
    token_clip: TokenClip | None = None
    # TokenClip's lines of the evidence since `start_update` or `start_mini_batch`; the same on every rank.
    clips: list[dict[str, Any]] = field(default_factory=list)
    _scale: float | None = None
    _global_step: int | None = None
    _pass_open: bool = False
    _said: set[str] = field(default_factory=set)
    _calls: list[AggregationCall] = field(default_factory=list)  # how the last loss weighs its tokens: one, or none
    _row_weights: Tensor | None = None

    @property
    def watches_passes(self) -> bool:
        """Whether the training passes are watched, for which `begin_pass`, `observe` and `end_pass` are called."""
        return self.gradloc is not None or self.token_clip is not None

    def answer(self, rows: Sequence[TrainedRow]) -> Answer | None:
        """See `RunFacts.answer`, of the update so far; nothing without `spike_detection`."""
        return None if self.gradloc is None else self.gradloc.answer(rows)

    def start_update(self, global_step: int | None, rollout_is_current: bool = False) -> None:
        """Begins an update, and its first mini-batch; see `GradLoc.start_update`."""
        self.start_mini_batch()
        self._global_step = global_step
        if self.gradloc is not None:
            self.gradloc.start_update(global_step, rollout_is_current)

    def start_mini_batch(self) -> None:
        """Begins another mini-batch, whose events are to be told apart."""
        self.clips, self._pass_open = [], False
        if self.gradloc is not None:
            self.gradloc.start_mini_batch()
        if self.token_clip is not None:
            self.token_clip.discard()

    def begin_pass(
        self,
        inputs: dict[str, Any],
        rows: Sequence[int],
        sequences: Callable[[], tuple[Tensor, Sequence[int]]] | None = None,
    ) -> None:
        """Called before a micro-batch's forward. Ends the pass before it.

        Args:
            inputs (dict): The inputs of `forward`; see `GradLoc.begin_pass`.
            rows (Sequence[int]): The micro-batch's rows in this rank's mini-batch.
            sequences (Callable, optional): Returns where its padded sequences have a token, bool of shape (rows,
                length), and the column of each response's first token. TokenClip needs it.
        """
        self.end_pass()
        self._pass_open = True
        if self.gradloc is not None:
            self.gradloc.begin_pass(inputs, rows)
        if self.token_clip is not None:
            assert sequences is not None
            part = collectives.rank() % self.sequence_parallel_size
            self.token_clip.begin_pass(Positions(*sequences(), part), rows)

    def end_pass(self) -> None:
        """Called after a micro-batch's backward, unless the next pass or step is to end it."""
        if not self._pass_open:
            return
        self._pass_open = False
        if self.gradloc is not None:
            self.gradloc.end_pass()
        if self.token_clip is not None:
            self.token_clip.end_pass()

    @contextmanager
    def loss(self, read_mask: Callable[[], Tensor], options: Callable[[], Mapping[str, Any]] = dict) -> Iterator[None]:
        """Around a micro-batch's loss, with what returns its response mask, and the options of `observe`.

        TokenClip's weights are computed within it: until a loss waits for the device, the host has time.
        """

        def weigh(call: AggregationCall | None) -> None:
            with guarded("TokenClip leaves micro-batches alone whose weights cannot be read", self._said):
                self._row_weights = row_weights(policy_weights(call, self.config, read_mask(), **options()))

        self._row_weights = None
        with recorded_aggregation(None if self.token_clip is None else weigh) as self._calls:
            yield
        if self.token_clip is not None and not self._calls:
            weigh(None)

    def observe(
        self,
        loss_inputs: LossInputs,
        read_tokens: ReadTokens,
        shape: Callable[[], Sequence[int]],
        factor: float = 1.0,
        **options: Any,
    ) -> None:
        """Notes the tokens of a micro-batch; called between its loss and its backward.

        The device is idle there, so only what the backward needs is computed, and the rest in `end_pass`. If the tokens
        cannot be read, see `PassRecorder`.

        Args:
            loss_inputs (Mapping): See `LossInputs`.
            read_tokens (Callable): Returns what is known of the tokens, by the evidence's names, each of shape (rows,
                response length): `log_prob`, `entropy` where the loss has it; with a KL loss, `ref_log_prob`; of a
                critic `value`.
            shape (Callable): Returns (rows, response length).
            factor (float): The micro-batch's part in the mini-batch's loss.
            options (Any): More arguments with which verl aggregates the terms of KL and entropy.
        """
        call = next(iter(self._calls), None)
        self._calls = []  # it has tensors of the micro-batch

        @functools.cache
        def read() -> dict[str, Tensor]:
            return with_derived(read_tokens(), call, self.config, self.eos_tokens, factor, options)

        if self.token_clip is not None:  # first: GradLoc then sees the coefficients that are left
            if self._scale is None:
                self._scale = self.loss_scale()
            if self._row_weights is not None:
                log_prob, _ = loss_inputs["coefficient"]
                self.token_clip.observe(log_prob, self._row_weights * abs(factor), self._scale, read)
        if self.gradloc is not None:
            self.gradloc.observe(read, loss_inputs, aggregation_mode(call, self.config, shape()))

    def step(self, epoch: int, mini_batch: int, optimizer_step: Callable[[], Norm]) -> Norm | float:
        """Looks for a spike, clips, and takes the step unless `spike_action` leaves it out. A collective call.

        Args:
            mini_batch (int): The mini-batch's index in the update.
            optimizer_step (Callable): Takes the step, and returns the norm of its gradient.

        Returns:
            Norm | float: The norm of the gradient before any clipping.
        """
        self.end_pass()
        where: Where = {"global_step": self._global_step, "epoch": epoch, "mini_batch": mini_batch}
        located = Located(take_step=True)
        if self.gradloc is not None:
            located = self.gradloc.locate(epoch, mini_batch)
        take_step, squared_norms, norm_before = located
        norm = None if take_step else norm_before
        if self.layer_clip is not None and take_step:
            clips, unlearned = self.layer_clip.is_on, "LayerClip has learned no bounds of a step"
            with nullcontext() if clips else collectives.guarded_on_all_ranks(unlearned):
                if squared_norms is None:
                    squared_norms = self.layer_clip.squared_norms() / self.loss_scale() ** 2
                if clips:
                    # It scales the gradient as it is: with fp16, that is still multiplied by the loss scale.
                    norm = float(self.layer_clip.clip(squared_norms))
                else:
                    self.layer_clip.take_in(self.layer_clip.preview(squared_norms))
        if self.token_clip is not None:
            self._scale = None
            if found := self.token_clip.end_mini_batch():
                self.clips.append({"schema": SCHEMA, "time": now(), **where, "token_clip": found})
        stepped = optimizer_step() if take_step else None
        before_clipping = stepped if norm is None else norm
        assert before_clipping is not None  # a step that is left out has a norm
        return before_clipping

    def lines(self) -> list[dict[str, Any]]:
        """The events of GradLoc and the clip lines since `start_update` or `start_mini_batch`, in their order."""
        events = [] if self.gradloc is None else self.gradloc.events
        return sorted([*events, *self.clips], key=lambda line: (line["epoch"], line["mini_batch"]))

    def metrics(self) -> dict[str, Any]:
        """The update's metrics for the training log."""
        return {name: value for part in self._parts().values() for name, value in part.metrics().items()}

    def save(self, folder: str) -> None:
        """Writes what has been learned of the run to a checkpoint's folder, on rank 0. No collective call.

        An error, or a disk that does not answer in time, is a warning.
        """
        parts = self._parts()
        if collectives.rank() == 0 and parts:
            with guarded(f"{STATE_FILE} is not saved, and a run that resumes from here warms up again"):
                write_state(folder, {name: part.state_dict() for name, part in parts.items()})

    def load(self, read: Callable[[], Mapping[str, Any] | str]) -> None:
        """Restores a state, which `read` gives on rank 0: see `read_state`. A collective call.

        A part whose state is missing, or is no good on one rank, starts over on all of them, with a warning.
        """
        parts = self._parts()
        if parts:
            # Rank 0 wrote it, perhaps to a folder that the other nodes do not share.
            _restore(parts, collectives.broadcast(read, 0))

    def _parts(self) -> dict[str, Any]:
        """By the name of its state. LayerClip that only learns has no metrics."""
        parts = {"gradloc": self.gradloc, "layer_clip": self.layer_clip, "token_clip": self.token_clip}
        return {name: part for name, part in parts.items() if part is not None}


def watch_critic(module: nn.Module, config: Any, loss_scale: Callable[[], float], sequence_parallel_size: int) -> Watch:
    """The watch over a critic whose configuration turns it on."""
    watch = Watch(config, loss_scale, sequence_parallel_size)
    settings = GradLocConfig(grad_norm_threshold=config.grad_norm_threshold)
    size, meter = sequence_parallel_size, meter_kind(module)
    forward: Any = None  # nothing is computed again
    watch.gradloc = CriticWatch(module, settings, forward, get_device_name(), loss_scale, size, meter)
    return watch


def watch_actor(
    module: nn.Module,
    config: Any,
    forward: Forward,
    rows_of: Callable[[Mapping[str, Any]], list[Row]],
    context: Callable[[], Mapping[str, Any]],
    loss_scale: Callable[[], float],
    sequence_parallel_size: int,
    learning_rate: Callable[[], float | Tensor],
    eos_tokens: Collection[int],
) -> Watch:
    """GradLoc, LayerClip and TokenClip of an actor, as far as its configuration turns them on.

    See `Watch`, `GradLoc`, and for `rows_of` and `context` `BundleWriter`.
    """
    watch = Watch(config, loss_scale, sequence_parallel_size, eos_tokens)
    device = get_device_name()
    if config.token_clip.enable:
        watch.token_clip = TokenClip(module, config.token_clip, device, sequence_parallel_size)
    if config.layer_clip.enable or (config.spike_detection and config.spike_replay):
        try:
            with collectives.raised_on_all_ranks(torch.device(device)):
                layer_clip = LayerClip(module, config.layer_clip, device=device)
            watch.layer_clip = layer_clip
        except collectives.RankFailedError as error:
            if config.layer_clip.enable:  # else GradLoc cannot measure the model either, and says so
                raise RuntimeError(
                    "actor_rollout_ref.actor.layer_clip.enable: LayerClip cannot be built with torch "
                    f"{torch.__version__} ({error}); take a torch that docs/use/support.md lists, or set it to False"
                ) from error
    if config.spike_detection:
        bundle_writer = None
        if config.spike_replay:
            directory, most = config.bisect_dump_dir, config.spike_replay
            bundle_writer = BundleWriter(directory, most, rows_of, context, watch.layer_clip, watch.token_clip)
        watch.gradloc = GradLoc(
            module,
            config,
            forward=forward,
            device=device,
            loss_scale=loss_scale,
            sequence_parallel_size=sequence_parallel_size,
            meter=meter_kind(module),
            recover=getattr(module, "reset_activation_offloading", None),
            token_clip=watch.token_clip,
            bundle_writer=bundle_writer,
            layer_clip=watch.layer_clip,
            learning_rate=learning_rate,
        )
    return watch


def meter_kind(module: nn.Module) -> str:
    """The `meter` of `GradLoc`: "reduced" for a model with verl's TiledMLP, otherwise "local".

    TiledMLP computes a weight's gradient in parts, which the local meter would take for several gradients.
    """
    return "reduced" if any(getattr(child, "is_tiled_mlp", False) for child in module.modules()) else "local"


def _restore(parts: Mapping[str, Any], state: Mapping[str, Any] | str) -> None:
    """Restores parts: see `Watch.load`. A collective call."""
    # After an error, a part goes back to this on all ranks: at a resume, it has learned nothing yet.
    before = {name: part.state_dict() for name, part in parts.items()}
    if isinstance(state, str):
        logger.warning("%s: all warm-ups start over", state)
        state = before
    for name, part in parts.items():
        if name in state or getattr(part, "is_on", True):
            try:
                collectives.exchange(partial(part.load_state_dict, state.get(name)))
            except (ValueError, collectives.RankFailedError) as error:
                logger.warning("%s in %s is not used, and its warm-up starts over: %s", name, STATE_FILE, error)
                part.load_state_dict(before[name])


def read_state(folder: str | None) -> dict[str, Any] | str:
    """What `Watch.save` wrote to a checkpoint's folder, empty without a file; or why it cannot be read."""
    path = os.path.join(folder, STATE_FILE) if folder else ""
    if not os.path.isfile(path):
        return {}
    try:
        if (size := os.path.getsize(path)) > _STATE_BYTES:
            raise ValueError(f"it has {size:,} bytes, and {_STATE_BYTES:,} are the limit")
        state = torch.load(path, map_location="cpu", weights_only=True)
        form = state.pop("form", 1) if isinstance(state, dict) else None
        if form != FORM:
            raise ValueError(f"its form is {reprlib.repr(form)}, and this release knows {FORM}")
        if not _is_plain(state):
            raise ValueError("it has values that no release has written")
        return state
    except Exception as error:
        # The rest of torch's message is advice for other files.
        reason = str(error).partition("\n")[0].partition(". ")[0]
        return f"{path} cannot be read ({type(error).__name__}: {reason})"


def _is_plain(value: Any, depth: int = 16) -> bool:
    """Whether it has numbers and texts alone, and nests no deeper: all of that can be sent to the other ranks."""
    if isinstance(value, dict):
        return _is_plain([*value, *value.values()], depth)
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))


def write_state(folder: str, state: Mapping[str, Any]) -> None:
    """Writes what `read_state` reads.

    Raises:
        OSError: The disk has an error, or does not answer in time.
        Exception: What has been learned cannot be saved.
    """
    data = io.BytesIO()
    torch.save({"form": FORM, **state}, data)
    path = Path(folder, STATE_FILE)
    PatientThread(path.parent).run(partial(_replace, path, data.getvalue()))


def _replace(path: Path, data: bytes) -> None:
    """Writes a file in a folder that is made if need be; if this is broken off, an older file stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
