# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter for the FSDP engine of verl 0.9: a mixin over the class of engine that trains the actor."""

# The types are checked against verl 0.7, which lacks some of these names.
# mypy: disable-error-code="attr-defined"

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.utils.padding import no_padding_2_padding

from ..fsdp import collectives
from ..gradloc import GradLoc
from ..layers.layer_clip import LayerClip
from .actor_config import SpikeConfig
from .engine_data import ROW, MiniBatchPlaces, as_metric, bound_config, loss_scale, rewards_of_rows, sample_of_row
from .ragged import OUTPUTS, ResponseCutter, inputs_of, padded, read_tokens, sequences
from .replay_bundles import ragged_rows
from .saved_state import read_state
from .update_evidence import UpdateEvidence
from .watch import Watch

logger = logging.getLogger(__name__)


class WatchedEngine:
    """Watches the training passes of an FSDP engine, which comes behind it in the order of bases.

    It acts only within `train_batch`, and only if the actor configuration that the loss is bound to turns it on. Each
    `train_batch` makes one optimizer step. verl calls it once for each mini-batch of an update, and says in the data
    which one it is; one that says nothing is an update of its own. Several updates may make up a step, as in verl's
    asynchronous trainer with separate rollouts: then the mini-batches count on. With the step's last mini-batch, its
    metrics are in the output, and rank 0 writes its evidence.

    Attributes:
        watch (Watch | None): GradLoc, LayerClip and TokenClip; None before the first `train_batch`.
    """

    watch: Watch | None = None
    _settings: Any = None
    # Reads the state of a checkpoint that was loaded before there was a watch.
    _read_state: Callable[[], dict[str, Any]] | None = None
    _watching = False

    @property
    def gradloc(self) -> GradLoc | None:
        """None where it is off. Its `events` are those of the last `train_batch`.

        A culprit's `row` is its row in the data given to that.
        """
        return None if self.watch is None else self.watch.gradloc

    @property
    def layer_clip(self) -> LayerClip | None:
        """None where it is off."""
        return None if self.watch is None else self.watch.layer_clip

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> dict[str, Any]:
        config = bound_config(loss_function, SpikeConfig)
        if config is not None and self._settings is None:
            self._build(config)
        if self.watch is None:
            return super().train_batch(data, loss_function)  # type: ignore[misc]
        self._where, last = self._places.next(data)
        step = tu.get(data, "training_step")
        if self.watch.watches_passes:
            self._start(step)
            data[ROW] = torch.arange(len(data))
        self._watching = True
        try:
            outputs = super().train_batch(data, loss_function)  # type: ignore[misc]
        finally:
            self._watching = False
            self.watch.aggregation.stop()
            data.pop(ROW, None)
        metrics = self.watch.metrics() if last else {}
        if self.watch.watches_passes:
            self._evidence.add(
                self.watch.lines(),
                lambda _, culprit: sample_of_row(data, culprit["row"]),
                lambda _: rewards_of_rows(data),
            )
            if last:
                self._evidence.write(step, metrics, self.watch.warnings)
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"].update({name: as_metric(value) for name, value in metrics.items()})
        return outputs

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> Any:
        watch = self.watch
        if watch is None or not watch.watches_passes or not self._watching or forward_only:
            return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]
        # Before the engine moves it to the device, where reading lengths would wait for the device.
        inputs = inputs_of(micro_batch)
        watch.begin_pass(inputs, micro_batch[ROW].tolist(), partial(sequences, inputs))
        return super().forward_step(  # type: ignore[misc]
            micro_batch, partial(self._observed, loss_function, inputs), forward_only
        )

    def optimizer_step(self) -> float:
        if not self._watching:
            return super().optimizer_step()  # type: ignore[misc]
        assert self.watch is not None
        return self.watch.step(*self._where, super().optimizer_step)  # type: ignore[misc]

    def save_checkpoint(self, local_path: str, *arguments: Any, **options: Any) -> None:
        super().save_checkpoint(local_path, *arguments, **options)  # type: ignore[misc]
        if self.watch is not None and getattr(self.checkpoint_manager, "should_save_extra", True):
            self.watch.save(local_path)

    def load_checkpoint(self, local_path: str, *arguments: Any, **options: Any) -> None:
        super().load_checkpoint(local_path, *arguments, **options)  # type: ignore[misc]
        extra = getattr(self.checkpoint_manager, "should_load_extra", True)
        read = partial(read_state, local_path if extra else None)
        if self.watch is not None:
            self.watch.load(read)
        else:  # read in the first update, if that turns anything on: no collective call without it
            self._read_state = read

    def _build(self, config: Any) -> None:
        self._settings, self._places = config, MiniBatchPlaces()
        if not (config.searches_in_training or config.layer_clip.enable or config.token_clip.enable):
            return
        group_size: int = self.ulysses_sequence_parallel_size
        self.watch = Watch(
            self.module,
            config,
            partial(_forward_rows, self),
            ragged_rows,
            loss_scale=partial(loss_scale, self),
            sequence_parallel_size=group_size,
            dtype=getattr(self, "_autocast_dtype", torch.bfloat16),
            grad_clip=self.optimizer_config.clip_grad,
            learning_rate=lambda: self.optimizer.param_groups[0]["lr"],
        )
        tokenizer = getattr(self.model_config, "tokenizer", None)
        self._evidence = UpdateEvidence(config.bisect_dump_dir, tokenizer, group_size)
        if self._read_state is not None:
            self.watch.load(self._read_state)

    def _start(self, training_step: int | None) -> None:
        """Begins a mini-batch; the first one begins a step."""
        assert self.watch is not None
        if self._where == (0, 0):
            if training_step is None and collectives.rank() == 0:
                logger.warning("the trainer passes no step number: global_step is null in the evidence")
            self.watch.start_update(training_step)
        else:
            self.watch.start_mini_batch()

    def _observed(
        self,
        loss_function: Callable[..., Any] | None,
        inputs: Mapping[str, Any],
        model_output: dict[str, Tensor],
        data: TensorDict,
        dp_group: Any = None,
    ) -> Any:
        """The loss, with the tokens that it is computed from observed."""
        assert self.watch is not None
        assert loss_function is not None  # the engine's loss is only left out without a backward
        # The loss takes flat values, too, and only a tensor that it was given itself sees its gradient.
        flat = {name: model_output[name].values() for name in OUTPUTS if name in model_output}
        self.watch.start_loss(lambda: padded(data["response_mask"]), lambda: self._settings.global_batch_info)
        try:
            loss = loss_function(model_output={**model_output, **flat}, data=data, dp_group=dp_group)
        finally:
            self.watch.aggregation.stop()
        as_response = ResponseCutter(inputs, data["response_mask"])
        without_graph = {key: values.detach() for key, values in flat.items()}
        loss_inputs = {OUTPUTS[key].coefficient: (values, as_response) for key, values in flat.items()}
        read = partial(read_tokens, data, without_graph, as_response)
        self.watch.observe(loss_inputs, read, as_response.shape, **self._settings.global_batch_info)
        return loss


def _forward_rows(
    engine: WatchedEngine, inputs: dict[str, Any], rows: list[int], response_length: int
) -> tuple[Tensor | None, Tensor]:
    """The engine's forward of some rows of a micro-batch: `forward` as `GradLoc` takes it."""
    settings = dict(inputs["settings"])
    images = settings.pop("multi_modal_inputs", None)
    device = get_device_id()
    ids, positions, responses, prompts = [], [], [], []
    for row in rows:
        # Images in a response, which tools may give, cannot be cut off.
        length = inputs["response_lengths"][row]
        kept = length if images is not None else min(length, response_length)
        sequence = inputs["input_ids"][row]
        prompt = len(sequence) - length
        sequence = sequence[: prompt + kept].to(device)
        ids.append(sequence)
        positions.append(inputs["position_ids"][row][..., : prompt + kept].to(device))
        prompts.append(sequence[:prompt])
        responses.append(sequence[prompt:])
    columns: dict[str, Any] = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
        for name, values in (("input_ids", ids), ("prompts", prompts), ("responses", responses))
    }
    columns["position_ids"] = tu.nested_tensor_from_tensor_list(positions)
    if images is not None:
        columns["multi_modal_inputs"] = [images[row] for row in rows]
    if isinstance(settings.get("temperature"), Tensor):
        columns["temperature"] = settings.pop("temperature")[rows].to(device)
    settings["max_response_len"] = response_length
    settings["calculate_entropy"] = engine._settings.entropy_coeff != 0
    captured: dict[str, Tensor] = {}

    def capture(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict]:
        for name in OUTPUTS:
            if name in model_output:
                captured[name] = no_padding_2_padding(model_output[name], data)
        return torch.zeros((), device=device), {}

    batch = tu.get_tensordict(columns, settings)
    unwatched = super(WatchedEngine, engine).forward_step  # type: ignore[misc]
    unwatched(batch, capture, False)
    return captured.get("entropy"), captured["log_probs"]
