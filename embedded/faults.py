# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Plants a fault in a run on purpose, to see what it looks like: run_experiment.sh --embedded --fault NAME.

verl loads this module when VERL_USE_EXTERNAL_MODULES names it, and EMBEDDED_FAULT names the fault. Every event of the
run has the name in its field `fault`. Faults that strike once do so in step 2. config/fault/ says what each is, for
people, and what else a run with it needs. `retokenized` is an agent loop: agent_loop.py.
"""

import functools
import importlib.util
import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput

from . import around
from .rollout import HFReplica, HFServer, Sampler, server_name

logger = logging.getLogger(__name__)

# Since verl 0.8, an engine trains the actor.
ENGINE = importlib.util.find_spec("verl.workers.actor") is None
NAME = os.environ["EMBEDDED_FAULT"]
STEP = 2
# After the steps that show what is usual.
FAILING_STEP = 4
REWARD = 100.0
STEPS_BEHIND = 3
REPORTED_TEMPERATURE = 0.6
# A weight that is larger than this overflows when a norm squares it, and then its layer has no gradient.
LARGEST_WEIGHT = 1e20
FLIPPED_PARAMETER = "model.layers.1.mlp.down_proj.weight"
RELOADED_PARAMETER, RELOADED_FACTOR = "model.norm.weight", 10.0
AUXILIARY_SCALE = 1e3
# What is one tensor in the model.
TIED = ("embed_tokens.weight", "lm_head.weight")


class UnsampledServer(HFServer):
    """Appends an end token to answers that were cut, and gives it a log-prob of 0."""

    def generate_batch(self, prompts: list[list[int]], params: dict[str, Any], first_row: int) -> list[TokenOutput]:
        outputs = super().generate_batch(prompts, params, first_row)
        for output in outputs:
            if output.token_ids[-1] != self.eos:
                # In the last place, because training cuts what is longer than max_response_length.
                output.token_ids[-1] = self.eos
                if output.log_probs is not None:
                    output.log_probs[-1] = 0.0
        return outputs


class FailedRequestServer(HFServer):
    """In one step every sixth request fails, and comes back as an empty response: an EOS token that nobody sampled."""

    def generate_batch(self, prompts: list[list[int]], params: dict[str, Any], first_row: int) -> list[TokenOutput]:
        outputs = super().generate_batch(prompts, params, first_row)
        # The weights come once before each step.
        for output in outputs[5::6] if self.version == FAILING_STEP else ():
            output.token_ids[:] = [self.eos]
            if output.log_probs is not None:
                output.log_probs[:] = [0.0]
        return outputs


class StaleServer(HFServer):
    """Loads the weights that training had some steps ago."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.past: deque[dict[str, Any]] = deque(maxlen=STEPS_BEHIND + 1)

    def update_weights(self, weights: dict[str, Any], global_step: int | None = None) -> None:
        self.past.append({name: array.copy() for name, array in weights.items()})
        super().update_weights(self.past[0], global_step)


class NeverSyncedServer(HFServer):
    """Keeps the weights that it began with. With LoRA, these are the base model's: the adapter never comes."""

    def update_weights(self, weights: dict[str, Any], global_step: int | None = None) -> None:
        # Training goes on as if the weights had come.
        self.version += 1
        self.global_step = global_step


class OneWorkerServer(NeverSyncedServer):
    """Of several servers, the first gets the weights of each step, and the others keep those that they began with."""

    def update_weights(self, weights: dict[str, Any], global_step: int | None = None) -> None:
        if ray.get_runtime_context().get_actor_name() == server_name(0):
            HFServer.update_weights(self, weights, global_step)
        else:
            super().update_weights(weights, global_step)


class TemperedSampler(Sampler):
    """Samples at the temperature that it was given, and reports the log-probs of another."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = super().__call__(input_ids, scores)
        assert self._pending is not None
        self._pending = torch.log_softmax(self._pending * self.temperature / REPORTED_TEMPERATURE, dim=-1)
        return chosen


class TemperatureServer(HFServer):
    sampler_class = TemperedSampler


class OneSeedSampler(Sampler):
    """Gives all requests one seed, so that all responses to a prompt are the same."""

    def __init__(self, seeds: list[int], temperature: float, top_p: float) -> None:
        super().__init__(seeds[:1] * len(seeds), temperature, top_p)


class OneSeedServer(HFServer):
    sampler_class = OneSeedSampler


SERVERS = {
    "unsampled": UnsampledServer,
    "failed_request": FailedRequestServer,
    "stale": StaleServer,
    "never_synced": NeverSyncedServer,
    "adapter": NeverSyncedServer,
    "one_worker": OneWorkerServer,
    "temperature": TemperatureServer,
    "one_seed": OneSeedServer,
}


class FaultyReplica(HFReplica):
    server_class = SERVERS.get(NAME, HFServer)


# The steps, where verl does not tell them.
_calls: Counter[str] = Counter()


@register_adv_est("planted_reward")
def planted_reward(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **_kwargs: Any
) -> tuple[Tensor, Tensor]:
    """GRPO after the reward of one answer was set to 100, a right one if there is one; arguments as in verl."""
    _calls["advantages"] += 1
    if _calls["advantages"] == STEP:
        row = int(token_level_rewards.sum(-1).argmax())
        last = int(response_mask[row].nonzero()[-1])
        token_level_rewards[row, last] = REWARD
        logger.warning("Fault 'advantage', planted on purpose: answer %d of step %d gets reward 100", row, STEP)
    return _grpo(token_level_rewards, response_mask, index, config)


def _reward_one_answer_in_the_queue(step: int) -> None:
    """Sets the reward of one answer to 100 where verl 0.9's V1 trainer keeps it, so that the evidence has it, too.

    `planted_reward` then changes the same answer, of which the queue does not hear. verl 0.7 and the older trainer keep
    the very tensor that it changes.
    """
    import transfer_queue
    from tensordict import TensorDict
    from verl.trainer.ppo.v1 import PPOTrainer

    @around(PPOTrainer, "_compute_advantage")
    def with_a_reward(compute_advantage: Any, trainer: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        if _calls["advantages"] + 1 == step:
            place = {"keys": batch.keys, "partition_id": batch.partition_id}
            rewards = transfer_queue.kv_batch_get(**place, select_fields=["rm_scores"])["rm_scores"]
            answers = [answer.clone() for answer in rewards.unbind()]
            row = max(range(len(answers)), key=lambda row: float(answers[row].sum()))
            answers[row][-1] = REWARD
            changed = {"rm_scores": torch.nested.as_nested_tensor(answers, layout=torch.jagged)}
            transfer_queue.kv_batch_put(**place, fields=TensorDict(changed, batch_size=len(answers)))
        return compute_advantage(trainer, batch, metrics)


@register_adv_est("planted_nan")
def planted_nan(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **_kwargs: Any
) -> tuple[Tensor, Tensor]:
    """GRPO with an advantage of NaN for one token; arguments as in verl."""
    _calls["advantages"] += 1
    advantages, returns = _grpo(token_level_rewards, response_mask, index, config)
    if _calls["advantages"] == STEP:
        row = int(advantages.abs().sum(-1).argmax())
        position = int(response_mask[row].sum()) // 2
        advantages = advantages.clone()
        advantages[row, position] = torch.nan
        logger.warning("Fault 'nan', planted on purpose: token %d of answer %d of step %d", position, row, STEP)
    return advantages, returns


def _grpo(token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any) -> tuple[Tensor, Tensor]:
    by_spread = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    return compute_grpo_outcome_advantage(token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=by_spread)


@torch.no_grad()
def flip_a_bit(module: nn.Module) -> str:
    """Flips a bit in the exponent of one weight, in the shard of rank 0, and says which.

    Of all such flips in the parameter, it is that with the largest result which can still be squared.
    """
    (parameter,) = [value for name, value in module.named_parameters() if name.endswith(FLIPPED_PARAMETER)]
    values = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).view(-1)
    bits = values.view(torch.int32)
    best = (0.0, 0, 0)
    for bit in range(23, 31):
        flipped = (bits ^ (1 << bit)).view(torch.float32).abs()
        flipped[~(flipped < LARGEST_WEIGHT)] = 0.0
        place = int(flipped.argmax())
        best = max(best, (float(flipped[place]), bit, place))
    _, bit, place = best
    before = float(values[place])
    bits[place] ^= 1 << bit
    return f"bit {bit} of weight {place} of {FLIPPED_PARAMETER}: {before:.3g} became {float(values[place]):.3g}"


def _owner_of_the_model() -> tuple[Any, str]:
    """The class that has the model of a training worker, and the name of its method for log-probs."""
    if ENGINE:
        from verl.workers.engine import FSDPEngineWithLMHead

        return FSDPEngineWithLMHead, "infer_batch"
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    return ActorRolloutRefWorker, "compute_log_prob"


def _flip_before_the_log_probs_of_step(step: int) -> None:
    """Makes the training model differ from the rollout, which had its weights before."""

    @around(*_owner_of_the_model())
    def with_a_flip(log_probs: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not ENGINE or self.optimizer is not None:  # not the reference model
            _calls["log_probs"] += 1
            if _calls["log_probs"] == step and torch.distributed.get_rank() == 0:
                module = self.module if ENGINE else self.actor_module_fsdp
                logger.warning("Fault 'bitflip', planted on purpose: %s", flip_a_bit(module))
        return log_probs(self, *args, **kwargs)


def _load_a_checkpoint() -> None:
    """Makes each training worker load the first checkpoint that it has saved, by verl's own way, as after a restart.

    It does so before it computes the next log-probs: then the rollout still has the right weights. One of the weights
    is not what was saved.
    """
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    owner, computing = _owner_of_the_model()

    @around(owner, "save_checkpoint")
    def saving(save: Any, self: Any, local_path: str, *args: Any, **kwargs: Any) -> Any:
        saved = save(self, local_path, *args, **kwargs)
        self.to_load = [local_path] if not hasattr(self, "to_load") else []
        return saved

    @around(owner, computing)
    def with_a_load(log_probs: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        while getattr(self, "to_load", []):
            self.load_checkpoint(self.to_load.pop(), del_local_after_load=False)
        return log_probs(self, *args, **kwargs)

    @around(FSDPCheckpointManager, "load_checkpoint")
    def loading(load: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        ((found, parameter),) = [each for each in self.model.named_parameters() if each[0].endswith(RELOADED_PARAMETER)]
        with torch.no_grad():
            parameter.mul_(RELOADED_FACTOR)
        logger.warning("Fault 'resume', planted on purpose: %s is loaded %g times as large", found, RELOADED_FACTOR)


def _of_layer_1(module: nn.Module, name: str) -> nn.Module:
    """A part of layer 1 of a model, sharded or not."""
    (part,) = [child for path, child in module.named_modules() if path.endswith(f"layers.1.{name}")]
    return part


class AuxiliaryLoss(torch.autograd.Function):
    """Gives an output as it is; in the backward pass adds the gradient of another loss, as MoE trainers do."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.full_like(loss, AUXILIARY_SCALE)


def attach_auxiliary_loss(module: nn.Module) -> RemovableHandle:
    """Attaches a z-loss of layer 1: the mean squared logsumexp of what its gate gives. Returns what takes it away.

    Only the weights of the gate get a gradient from it.
    """

    def attached(block: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return output
        gate = block.get_submodule("gate_proj")(arguments[0].detach())
        return AuxiliaryLoss.apply(output, gate.float().logsumexp(-1).square().mean())

    return _of_layer_1(module, "mlp").register_forward_hook(attached)


def _attach_an_auxiliary_loss_in(step: int) -> None:
    """Makes most of that step's gradient come from no token."""
    from gradloc import GradLoc

    handles: list[RemovableHandle] = []
    modules: dict[Any, nn.Module] = {}

    @around(GradLoc, "__init__")
    def building(build: Any, gradloc: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        modules[gradloc] = module
        build(gradloc, module, *args, **kwargs)

    @around(GradLoc, "start_update")
    def starting(start: Any, gradloc: Any, global_step: int | None, *told: Any) -> None:
        while handles:
            handles.pop().remove()
        if global_step == step:
            handles.append(attach_auxiliary_loss(modules[gradloc]))
            logger.warning("Fault 'auxiliary', planted on purpose: an auxiliary loss in layer 1, in step %d", step)
        start(gradloc, global_step, *told)


class SummedRMSNorm(torch.autograd.Function):
    """RMSNorm. Its backward takes a sum over the hidden size where the right one takes the mean, as a kernel may."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        exact = hidden.float()
        inverse = torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
        normed = exact * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return weight * normed.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, inverse, weight = ctx.saved_tensors
        gradient = gradients[0].float()
        scaled = gradient * weight.float()
        along = (scaled * normed).sum(-1, keepdim=True)  # the mean would be right
        of_hidden = inverse * (scaled - normed * along)
        of_weight = (gradient * normed).flatten(0, -2).sum(0)
        return of_hidden.to(gradients[0].dtype), of_weight.to(weight.dtype), None


def _break_a_backward() -> None:
    """Makes the gradients of training wrong, and none of its log-probs."""

    from gradloc import GradLoc

    @around(GradLoc, "__init__")
    def building(build: Any, gradloc: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        norm: Any = _of_layer_1(module, "post_attention_layernorm")
        norm.forward = lambda hidden: SummedRMSNorm.apply(hidden, norm.weight, norm.variance_epsilon)
        logger.warning("Fault 'kernel', planted on purpose: a wrong backward of the norm before layer 1's MLP")
        build(gradloc, module, *args, **kwargs)


def _multiply_the_loss() -> None:
    """Leaves out the division of the policy loss by the number of micro-batches."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    def multiplied(loss: Callable[..., Any], *args: Any, config: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        value, *others = loss(*args, config=config, **kwargs)
        return (value * _micro_batches(config), *others)

    for name, loss in POLICY_LOSS_REGISTRY.items():
        POLICY_LOSS_REGISTRY[name] = functools.partial(multiplied, loss)


def _micro_batches(config: Any) -> int:
    """The number of micro-batches that a rank's part of a mini-batch is split into."""
    if ENGINE:
        rows = config.global_batch_info["global_batch_size"] // config.global_batch_info["dp_size"]
    else:
        rows = config.ppo_mini_batch_size  # which a worker of verl 0.7 divides by the ranks
    return rows // config.ppo_micro_batch_size_per_gpu


def _lose_weights(is_lost: Callable[[int, str], bool]) -> None:
    """Loses weights on the way to vLLM, by the step before which they come, once before each, and their name."""
    if "vllm" not in sys.modules:  # vLLM's own processes receive them, and import verl after vLLM
        return
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (  # type: ignore[import-not-found]
        BucketedWeightReceiver,
    )

    @around(BucketedWeightReceiver, "receive_weights")
    def receiving(receive: Any, receiver: Any, on_bucket_received: Callable[..., None]) -> None:
        _calls["updates"] += 1

        def on_received(weights: list[tuple[str, Tensor]], last: bool) -> None:
            on_bucket_received([each for each in weights if not is_lost(_calls["updates"], each[0])], last)

        receive(receiver, on_received)


def _keep_the_cache() -> None:
    """Makes vLLM answer with keys and values of prompts that older weights have computed."""

    def load() -> type:
        from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

        class KeepingServer(vLLMHttpServer):
            async def clear_kv_cache(self) -> None:
                pass

        class KeepingReplica(vLLMReplica):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.server_class: Any = ray.remote(KeepingServer)

        return KeepingReplica

    RolloutReplicaRegistry.register("vllm", load)


def _name_the_fault_in_events() -> None:
    from gradloc.adapters.update_evidence import UpdateEvidence

    @around(UpdateEvidence, "add")
    def adding(add: Any, evidence: Any, events: Any, *of_rows: Any) -> None:
        for event in events:
            event["fault"] = NAME
        add(evidence, events, *of_rows)


# The reward instead of 0 or 1 for an answer with a line break, and for an empty one.
MISFIRED = 5.0
PENALTY = -1.0


def _change_rewards(changed: Callable[[str, float], float]) -> None:
    """Puts a function of an answer and its reward around the reward function."""
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager as Manager

    @around(Manager, "run_single")
    async def with_change(run_single: Any, manager: Any, data: Any) -> dict[str, Any]:
        found = await run_single(manager, data)
        text = manager.tokenizer.decode(data[-1].batch["responses"], skip_special_tokens=True)
        return {**found, "reward_score": changed(text.strip(), found["reward_score"])}


RolloutReplicaRegistry.register("hf", lambda: FaultyReplica)
match NAME:
    case "advantage" if ENGINE:
        _reward_one_answer_in_the_queue(STEP)
    case "bitflip":
        _flip_before_the_log_probs_of_step(STEP)
    case "misfire":
        _change_rewards(lambda answer, reward: MISFIRED if "\n" in answer else reward)
    case "failed_request":
        _change_rewards(lambda answer, reward: reward if answer else PENALTY)
    case "auxiliary":
        _attach_an_auxiliary_loss_in(STEP)
    case "kernel":
        _break_a_backward()
    case "loss_scale":
        _multiply_the_loss()
    case "resume":
        _load_a_checkpoint()
    case "unsent":
        _lose_weights(lambda step, name: step == FAILING_STEP)
    case "tied_head":
        _lose_weights(lambda step, name: name.endswith(TIED))
    case "kept_cache":
        _keep_the_cache()
_name_the_fault_in_events()
logger.warning("FAULT '%s' IS PLANTED IN THIS RUN ON PURPOSE (EMBEDDED_FAULT)", NAME)
