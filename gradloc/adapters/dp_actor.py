# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter for the actor and the critic of verl 0.7.0 and 0.7.1, which the patch decorates, and their workers."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.utils import hf_tokenizer
from verl.utils.device import get_device_id

from ..config import is_on
from ..fsdp import collectives
from ..gradloc import GradLoc
from ..guarded import PatientThread, guarded, warn_once
from ..layers.layer_clip import LayerClip
from ..measure.pass_recorder import LossInputs, ReadTokens, unchanged
from .loss_weights import eos_tokens, replaced
from .replay_bundles import context_of, padded_rows
from .update_evidence import EVIDENCE_KEYS, VALUE_KEYS, TrainedData, UpdateEvidence
from .watch import Watch, read_state, watch_actor, watch_critic

if TYPE_CHECKING:
    from verl import DataProto
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

# The class of verl that a mixin comes before.
_Behind: Any = object
# The columns of a micro-batch that a forward needs: its tokens, and images.
_TOKENS = ("responses", "input_ids", "attention_mask", "position_ids")
_IMAGES = "multi_modal_inputs"
# Warnings that this process has given.
_said: set[str] = set()


def watched(trained: type) -> type:
    """Decorates verl's actor or critic: watches its updates where its configuration turns that on."""
    mixin = WatchedActor if hasattr(trained, "update_policy") else WatchedCritic
    names = {"__module__": trained.__module__, "__doc__": trained.__doc__, "_verls": sys.modules[trained.__module__]}
    return type(trained.__name__, (mixin, trained), names)


class WatchedUpdates(_Behind):
    """Watches the updates of an actor or critic, which comes behind it in the order of bases.

    Attributes:
        watch (Watch | None): None where nothing is on, or where the model is not trained.
    """

    config: Any
    watch: Watch | None = None
    _verls: Any  # the module of verl's class
    _watching = False  # whether passes are those of training

    @contextmanager
    def _update(self, data: "DataProto", owner: Any, name: str, observed: Callable[[Any], Any]) -> Iterator[None]:
        """Within it, passes are those of training on these data, and verl calls what is `observed` of a function.

        Args:
            owner (Any): What has the function by this name. Its calls lead to the loss.
        """
        assert self.watch is not None
        told = data.meta_info
        self.watch.start_update(told.get("global_steps"), told.get("rollout_is_current", False))
        self._data, self._mini_batches = data, -(-len(data) // self.config.ppo_mini_batch_size)
        self._steps = self._next_row = 0
        self._rows: list[list[int]] = []  # of verl's dynamic micro-batches
        # A pass whose loss is not computed yet: its tokens' values, and its outputs.
        self._passed: tuple[Any, ...] | None = None
        verls, prepare = self._verls, self._verls.prepare_dynamic_batch

        @functools.wraps(prepare)
        def noting(*arguments: Any, **options: Any) -> Any:
            micro_batches, rows = prepare(*arguments, **options)
            self._rows = [[int(row) for row in of_micro_batch] for of_micro_batch in rows]
            return micro_batches, rows

        with replaced(verls, "prepare_dynamic_batch", noting), replaced(owner, name, observed(getattr(owner, name))):
            self._watching = True
            try:
                yield
            finally:
                self._watching, self._passed = False, None
                del self._data

    def _forward_micro_batch(self, micro_batch: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
        forward, watch = super()._forward_micro_batch, self.watch if self._watching else None
        # A loss may take several forwards: the pass begins with the first.
        if watch is None or not watch.watches_passes or self._passed is not None:
            return forward(micro_batch, *arguments, **options)
        first = self._next_row
        self._next_row += len(micro_batch["responses"])
        rows = self._rows.pop(0) if self._rows else [*range(first, self._next_row)]
        start = self._steps % self._mini_batches * self.config.ppo_mini_batch_size
        of_data = [start + row for row in rows]
        watch.begin_pass(self._inputs(of_data), rows, partial(_sequences, micro_batch))
        columns = self._columns(micro_batch, of_data)
        outputs = forward(micro_batch, *arguments, **options)
        self._passed = columns, outputs
        return outputs

    def _observed(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss function, observed; verl gives its arguments by name."""
        watch = self.watch
        assert watch is not None

        @functools.wraps(loss)
        def observed(**given: Any) -> Any:
            mask = given["response_mask"]
            with watch.loss(lambda: mask):
                result = loss(**given)
            passed, self._passed = self._passed, None
            if passed is None:  # another loss of a pass that has been observed
                return result
            dynamic = self.config.use_dynamic_bsz
            factor = len(mask) / self.config.ppo_mini_batch_size if dynamic else 1 / self.gradient_accumulation
            loss_inputs, read_tokens = self._seen(given, *passed)
            watch.observe(loss_inputs, read_tokens, lambda: mask.shape, factor)
            return result

        return observed

    def _optimizer_step(self) -> Tensor:
        if not self._watching or self.watch is None:
            if self.watch is not None and collectives.rank() == 0:
                warn_once(
                    _said,
                    f"{type(self).__name__} takes optimizer steps outside of verl's own update, where neither GradLoc "
                    "nor a clip acts: its update has to call super()'s",
                )
            return super()._optimizer_step()
        epoch, mini_batch = divmod(self._steps, self._mini_batches)
        self._watching = False  # a search makes passes of its own
        norm = self.watch.step(epoch, mini_batch, super()._optimizer_step)
        self._watching, self._steps, self._next_row = True, self._steps + 1, 0
        return norm if isinstance(norm, Tensor) else torch.tensor(norm, dtype=torch.float64)


class WatchedActor(WatchedUpdates):
    """verl's actor, watched; arguments as in verl.

    Attributes:
        gradloc (GradLoc | None), layer_clip (LayerClip | None): The watch's, None where they are off.
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.gradloc: GradLoc | None = None
        self.layer_clip: LayerClip | None = None
        if self.actor_optimizer is None or not is_on(config):
            return
        self.watch = watch_actor(
            self.actor_module,
            config,
            partial(forward_rows, self),
            padded_rows,
            partial(context_of, self.actor_module, config, self.param_dtype, config.grad_clip),
            loss_scale=lambda: 1.0 if self.scaler is None else self.scaler.get_scale(),
            sequence_parallel_size=self.ulysses_sequence_parallel_size,
            learning_rate=lambda: self.actor_optimizer.param_groups[0]["lr"],
            eos_tokens=eos_tokens(self.actor_module),
        )
        self.gradloc, self.layer_clip = self.watch.gradloc, self.watch.layer_clip if config.layer_clip.enable else None

    def update_policy(self, data: "DataProto") -> dict[str, Any]:
        if self.watch is None:
            return super().update_policy(data)
        with self._update(data, self._verls, "get_policy_loss_fn", lambda get: lambda mode: self._observed(get(mode))):
            metrics = super().update_policy(data)
        return {**metrics, **self.watch.metrics()}

    def _inputs(self, rows: list[int]) -> dict[str, Any]:
        """What a search needs of these rows of the data, which stay on the host."""
        columns = {**self._data.batch, **self._data.non_tensor_batch}
        inputs = {key: columns[key][rows] for key in (*_TOKENS, _IMAGES) if key in columns}
        return inputs | {"temperature": self._data.meta_info["temperature"]}

    def _columns(self, micro_batch: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
        tokens = {name: micro_batch[key] for name, key in EVIDENCE_KEYS.items() if key in micro_batch}
        # With a KL penalty and no KL loss, verl leaves it on the host. A copy waits for what the device was
        # given before: now for nothing, as verl has just copied the micro-batch; later for the forward or backward.
        reference = self._data.batch.get("ref_log_prob")
        if reference is not None and "ref_log_prob" not in tokens:
            tokens["ref_log_prob"] = reference[rows].to(micro_batch["responses"].device)
        return tokens

    def _seen(self, given: Mapping[str, Any], columns: dict[str, Any], outputs: Any) -> tuple[LossInputs, ReadTokens]:
        entropy, log_prob = _parts(outputs)[0], given["log_prob"]
        # These may be the forward's instead of the data's. They are kept without a graph.
        tokens = columns | {"log_prob": log_prob.detach(), "old_log_prob": given["old_log_prob"].detach()}
        loss_inputs: dict[str, Any] = {"coefficient": (log_prob, unchanged)}
        if entropy is not None:
            tokens["entropy"] = entropy.detach()
            loss_inputs["entropy_coefficient"] = entropy, unchanged
        return loss_inputs, lambda: tokens


class WatchedCritic(WatchedUpdates):
    """verl's critic, watched; arguments as in verl."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        if self.critic_optimizer is not None and config.get("spike_detection", False):
            self.watch = watch_critic(self.critic_module, config, lambda: 1.0, self.ulysses_sequence_parallel_size)

    def update_critic(self, data: "DataProto") -> dict[str, Any]:
        if self.watch is None:
            return super().update_critic(data)
        with self._update(data, core_algos, "compute_value_loss", self._observed):
            metrics = super().update_critic(data)
        own = self.watch.metrics()
        write_evidence(self, data, self._tokenizer if self.watch.lines() else None, own)
        return {**metrics, **{f"critic/{name}": value for name, value in own.items()}}

    def _inputs(self, rows: list[int]) -> dict[str, Any]:
        """Nothing: no pass is computed again."""
        return {}

    def _columns(self, *_: Any) -> dict[str, Any]:
        """Nothing: the loss is given all of them."""
        return {}

    def _seen(self, given: Mapping[str, Any], *_: Any) -> tuple[LossInputs, ReadTokens]:
        tokens = {name: given[key] for name, key in VALUE_KEYS.items()} | {"value": given["vpreds"].detach()}
        return {"coefficient": (given["vpreds"], unchanged)}, lambda: tokens

    @functools.cached_property
    def _tokenizer(self) -> Any:
        """The critic's tokenizer, read when there is a spike, as verl keeps it elsewhere; None if that fails."""
        model = self.config.model
        with guarded("values of a critic's spike are written without their texts"):
            is_trusted = model.get("trust_remote_code", False)
            read = partial(hf_tokenizer, model.tokenizer_path, trust_remote_code=is_trusted)
            return PatientThread(model.tokenizer_path).run(read)
        return None


def forward_rows(
    actor: WatchedActor, inputs: dict[str, Any], rows: list[int], response_length: int
) -> tuple[Tensor | None, Tensor]:
    """The actor's forward of some rows of a micro-batch: `forward` as `GradLoc` takes it."""
    # Images in a response, which tools may give, cannot be cut off.
    cut = 0 if _IMAGES in inputs else inputs["responses"].size(-1) - response_length
    of_rows = {key: inputs[key][rows] for key in _TOKENS}
    selected = {key: of[..., : of.size(-1) - cut].to(get_device_id()) for key, of in of_rows.items()}
    if _IMAGES in inputs:
        selected[_IMAGES] = inputs[_IMAGES][rows]
    outputs = actor._forward_micro_batch(
        selected, temperature=inputs["temperature"], calculate_entropy=actor.config.entropy_coeff != 0
    )
    entropy, log_prob = _parts(outputs)
    return None if entropy is None else entropy[:, :response_length], log_prob[:, :response_length]


def _parts(outputs: Any) -> tuple[Tensor | None, Tensor]:
    """Entropy and log-probs of an actor's forward: verl 0.7.1 gives by name what 0.7.0 gives in this order."""
    return (outputs.get("entropys"), outputs["log_probs"]) if isinstance(outputs, dict) else outputs


def write_evidence(trained: Any, data: "DataProto", tokenizer: Any, metrics: Mapping[str, Any]) -> None:
    """Writes the evidence of an update, which `data` went into and `metrics` came out of. A collective call.

    Args:
        trained (WatchedActor | WatchedCritic): What was trained.
    """
    config, watch = trained.config, trained.watch
    if watch is not None and watch.watches_passes:
        evidence = UpdateEvidence(config.bisect_dump_dir, tokenizer, watch.sequence_parallel_size)
        trained_data = TrainedData({**data.batch, **data.non_tensor_batch}, config.ppo_mini_batch_size)
        evidence.add(watch.lines(), trained_data)
        evidence.take_in_rows(trained_data)
        with guarded("the evidence of a step is not written"):
            evidence.write(data.meta_info.get("global_steps"), metrics, watch.answer)


def save_state(actor: WatchedActor, manager: "BaseCheckpointManager", folder: str | None) -> None:
    """Called after a checkpoint was saved."""
    if actor.watch is not None and manager.should_save_extra and folder is not None:
        actor.watch.save(folder)


def load_state(actor: WatchedActor, manager: "BaseCheckpointManager", folder: str | None) -> None:
    """Called after a checkpoint was loaded. A collective call."""
    if actor.watch is not None:
        actor.watch.load(lambda: read_state(folder if manager.should_load_extra else None))


def _sequences(model_inputs: Mapping[str, Any]) -> tuple[Tensor, list[int]]:
    """Where a micro-batch has tokens, and the column of each response's first one."""
    mask = model_inputs["attention_mask"].bool()
    return mask, [mask.shape[1] - model_inputs["responses"].shape[1]] * len(mask)
