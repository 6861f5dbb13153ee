# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the plugin does after which import. patches/README.md says why each is needed."""

import functools
import importlib.util
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from ..config import is_on
from . import status
from .loading import AfterImport, around
from .status import Unfit, expect

logger = logging.getLogger(__name__)


def extend_engines(module: ModuleType) -> None:
    """Puts the package's mixins over the registered engines.

    Not a registration with a vendor of its own: that would need an environment variable on every node, and would take
    the place that a user may have given to another vendor's engine.
    """
    from verl.workers.engine.fsdp import transformer_impl

    expect(expect(module, "EngineRegistry"), "_engines")
    for name in ("FSDPEngineWithLMHead", "FSDPEngineWithValueHead"):
        engine = expect(transformer_impl, name)
        expect(engine, "train_batch", "self", "data", "loss_function")
        expect(engine, "forward_step", "self", "micro_batch", "loss_function", "forward_only")
        expect(engine, "optimizer_step", "self")
        expect(engine, "save_checkpoint", "self", "local_path")
        expect(engine, "load_checkpoint", "self", "local_path")
        expect(engine, "is_mp_src_rank_with_outputs", "self")

    from ..adapters.engines import WatchedEngine, watch_engines

    watch_engines()
    _need_the_step(WatchedEngine)
    of_actors = module.EngineRegistry._engines["language_model"]
    if not any(issubclass(each, WatchedEngine) for name in ("fsdp", "fsdp2") for each in of_actors[name].values()):
        raise Unfit("verl.workers.engine registers no FSDPEngineWithLMHead as fsdp or fsdp2")


def _need_the_step(engine: type) -> None:
    """With a trainer that is not watched, its checks, its stop and its spikes' steps would be missing."""

    @around(engine, "_start")
    def start_with_step(start: Callable[..., None], self: Any, training_step: int | None, *told: Any) -> None:
        if training_step is None:
            raise RuntimeError(
                "GradLoc's plugin watches this engine, but not the trainer, which passes no step number: let verl load "
                "the plugin in the trainer's process, and use a trainer that it knows."
            )
        start(self, training_step, *told)


def name_mini_batches(module: ModuleType) -> None:
    """Lets each mini-batch of an update say its epoch and its number, as `epoch_and_mini_batch`."""
    assign = expect(module, "assign_non_tensor")

    @around(module, "make_iterator", "tensordict", "mini_batch_size", "epochs")
    def make_named_iterator(
        make_iterator: Any, tensordict: Any, mini_batch_size: int, *args: Any, **kwargs: Any
    ) -> Iterator[Any]:
        of_epoch = len(tensordict) // mini_batch_size
        for number, mini_batch in enumerate(make_iterator(tensordict, mini_batch_size, *args, **kwargs)):
            assign(mini_batch, epoch_and_mini_batch=divmod(number, of_epoch))
            yield mini_batch


def extend_v1_trainers(module: ModuleType) -> None:
    """Puts a mixin over each V1 trainer, under the name that it is registered with: verl compares that with others."""
    from .trainer import check_trainer_class, with_spikes

    expect(module, "get_trainer_cls", "name")
    trainer = expect(module, "PPOTrainer")
    try:
        check_trainer_class(trainer)
    except Unfit:
        _refuse_in(trainer, lambda _: status.require())
        raise

    @around(module, "get_trainer_cls")
    def get_extended(get_trainer_cls: Callable[[str], type], name: str) -> type:
        return with_spikes(get_trainer_cls(name))


def refuse_v0(module: ModuleType) -> None:
    """Makes the older trainer, and those derived from it, refuse runs that would need the patch."""
    trainer = expect(module, "RayPPOTrainer")
    expect(trainer, "__init__", "self", "config")

    def init_subclass(cls: Any, **kwargs: Any) -> None:
        super(trainer, cls).__init_subclass__(**kwargs)
        _refuse_in(cls, _refuse_older)

    trainer.__init_subclass__ = classmethod(init_subclass)
    there = [trainer]
    for each in there:
        there += each.__subclasses__()
        _refuse_in(each, _refuse_older)


def _refuse_older(trainer: Any) -> None:
    raise ValueError(
        f"GradLoc's plugin does not know {type(trainer).__name__}, one of verl's older trainers: set "
        "trainer.use_v1=True where verl has it, or patch verl (apply_patch.py), or set "
        "actor_rollout_ref.actor.spike_detection=False and turn layer_clip and token_clip off."
    )


def _refuse_in(trainer: Any, refuse: Callable[[Any], None]) -> None:
    """Calls `refuse` before a trainer of this class is built for a run that uses GradLoc."""
    signature = inspect.signature(trainer.__init__)

    @around(trainer, "__init__")
    def refuse_or_build(build: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        config = signature.bind_partial(self, *args, **kwargs).arguments.get("config")
        if config is not None and is_on(config.actor_rollout_ref.actor):
            refuse(self)
        build(self, *args, **kwargs)


def add_spike_log_to_trackers(module: ModuleType) -> None:
    """Gives the spikes to the loggers of a run, as one more logger."""
    tracking = expect(module, "Tracking")

    @around(tracking, "__init__", "self", "project_name", "experiment_name", "default_backend", "config")
    def build_with_spike_log(
        build: Any,
        self: Any,
        project_name: Any,
        experiment_name: Any,
        default_backend: Any = "console",
        config: Any = None,
    ) -> None:
        from ..adapters.spike_log import add_spike_log

        build(self, project_name, experiment_name, default_backend, config)
        add_spike_log(self.logger, config)


def end_with_exit_code(module: ModuleType) -> None:
    """Gives runs that `spike_action=stop` ends an exit code of their own.

    main_ppo, which alone imports this module, waits for the trainer with ray.get. Its own functions cannot be reached
    before they run, if it is run by `python -m`; and Hydra turns every error that leaves it into exit code 1.
    """
    import ray

    from ..adapters.spike_stop import exit_at_repeated_spikes

    @around(ray, "get")
    def get_until_spikes(get: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with exit_at_repeated_spikes():
            return get(*args, **kwargs)


def mark_tiled_mlps(module: ModuleType) -> None:
    """Marks the classes whose backward pass runs in pieces."""

    @around(module, "_patch_mlp_class", "mlp_class", "forward_fn", "num_shards")
    def patch_and_mark(patch: Any, mlp_class: Any, *args: Any, **kwargs: Any) -> None:
        patch(mlp_class, *args, **kwargs)
        mlp_class.is_tiled_mlp = True


def survive_empty_micro_batches(module: ModuleType) -> None:
    """Rejection sampling may leave no token of a micro-batch, and padding has none; the fixes in fixes.patch."""
    from .fixes import with_a_token

    @around(module, "compute_offpolicy_metrics", "old_log_prob", "rollout_log_prob", "response_mask")
    def compute_or_none(
        compute: Any, old_log_prob: Any, rollout_log_prob: Any, response_mask: Any, *args: Any, **kw: Any
    ) -> Any:
        return compute(*with_a_token(old_log_prob, rollout_log_prob, response_mask), *args, **kw)

    name = "compute_rollout_correction_and_rejection_mask"

    @around(module, name, "old_log_prob", "rollout_log_prob", "response_mask")
    def correct_or_not(
        correct: Any, old_log_prob: Any, rollout_log_prob: Any, response_mask: Any, *args: Any, **kw: Any
    ) -> Any:
        given = with_a_token(old_log_prob, rollout_log_prob, response_mask)
        weights, kept, metrics = correct(*given, *args, **kw)
        return weights, kept * response_mask, metrics


def reset_activation_offloading(module: ModuleType) -> None:
    """Lets the package make the handler forget a pass that was broken off; the fix in fixes.patch."""
    made: list[Any] = []

    @around(expect(module, "ActivationHandler"), "__init__")
    def build_and_note(build: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        made.append(self)

    @around(module, "enable_activation_offloading", "model")
    def enable_with_reset(enable: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        from .fixes import forget_broken_pass

        made.clear()
        enable(model, *args, **kwargs)
        if made:  # not for a model with few layers
            model.reset_activation_offloading = functools.partial(forget_broken_pass, made.pop())


def add_scorers(module: ModuleType) -> None:
    """Adds the data sources `math_verify` and `ps_grpo`."""

    @around(module, "default_compute_score", "data_source", "solution_str", "ground_truth", "extra_info")
    def compute_score(
        default: Any,
        data_source: str,
        solution_str: str,
        ground_truth: str,
        extra_info: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        from ..rewards import SCORERS, score

        if data_source not in SCORERS:
            return default(data_source, solution_str, ground_truth, extra_info, *args, **kwargs)
        for name in ("sandbox_fusion_url", "concurrent_semaphore", "memory_limit_mb"):
            kwargs.pop(name, None)
        return score(data_source, solution_str, ground_truth, extra_info, **kwargs)


def name_config_groups(module: ModuleType) -> None:
    """Says beside Hydra's error which config groups give verl GradLoc's keys."""

    @around(expect(module, "ConfigLoaderImpl"), "_apply_overrides_to_config", "overrides", "cfg")
    def apply_overrides(apply: Callable[..., None], overrides: Any, cfg: Any) -> None:
        try:
            apply(overrides, cfg)
        except module.ConfigCompositionException as error:
            key = _OF_GRADLOC.search(str(error))
            if key is None or "gradloc.plugin." in str(module.OmegaConf.select(cfg, key[1])):
                raise
            raise type(error)(
                f"{error}\nGradLoc's keys need its config groups: add actor@actor_rollout_ref.actor=gradloc_dp_actor "
                "critic=gradloc_dp_critic. For other engines, see docs/use/plugin.md."
            ) from error.__cause__


# A key of the actor or critic that is GradLoc's.
_OF_GRADLOC = re.compile(
    r"'(actor_rollout_ref\.actor|critic)\.(spike_|bisect_|grad_norm_threshold|(layer|token)_clip)\S*'"
)


class Hook(NamedTuple):
    """What is done after an import.

    Args:
        act: Takes the module; raises Unfit if that is not as expected.
        what: What is lost without it.
        needed: Whether runs are refused without it.
    """

    act: Callable[[ModuleType], None]
    what: str
    needed: bool = True

    def run(self, module: ModuleType) -> None:
        status.guard(self.what, functools.partial(self.act, module), self.needed)


HOOKS = {
    "verl.workers.engine": Hook(extend_engines, "the search in the FSDP engines"),
    "verl.utils.tensordict_utils": Hook(name_mini_batches, "the mini-batch's number in the evidence"),
    "verl.trainer.ppo.v1.trainer_base": Hook(extend_v1_trainers, "the step's number, spike_action=stop and the checks"),
    "verl.trainer.ppo.ray_trainer": Hook(refuse_v0, "the refusal of older trainers"),
    "verl.utils.tracking": Hook(add_spike_log_to_trackers, "spike_log"),
    "verl.models.transformers.tiled_mlp": Hook(mark_tiled_mlps, "the measurement of a tiled MLP"),
    "verl.trainer.constants_ppo": Hook(end_with_exit_code, "the exit code of spike_action=stop", needed=False),
    "verl.trainer.ppo.rollout_corr_helper": Hook(
        survive_empty_micro_batches, "the repair of micro-batches without tokens", needed=False
    ),
    "verl.utils.activation_offload": Hook(
        reset_activation_offloading, "the repair of activation offloading", needed=False
    ),
    "hydra._internal.config_loader_impl": Hook(name_config_groups, "the hint at the config groups", needed=False),
    "verl.utils.reward_score": Hook(add_scorers, "the scorers math_verify and ps_grpo", needed=False),
}


def install() -> None:
    """Makes this process act after verl's imports, unless verl is patched, or is there already: then it is too late."""
    if status.installed or status.left_to_patch:
        return
    if status.is_patched():
        status.left_to_patch = True
        logger.info("verl is patched with GradLoc, so GradLoc's plugin does nothing: the patch alone acts")
        return
    verl = sys.modules.get("verl")
    if verl is None and importlib.util.find_spec("verl") is None:
        return  # a scorer is used without verl
    if verl is not None and not getattr(verl.__spec__, "_initializing", False):
        # Something else has imported this package. Parts of verl that hold names of others cannot be reached any more.
        return
    for name, hook in HOOKS.items():
        if hook.needed:  # one whose module is not there never acts, and so never fails
            status.guard(hook.what, functools.partial(status.check_module, name))
    AfterImport({name: hook.run for name, hook in HOOKS.items()}).install()
    status.installed = True
