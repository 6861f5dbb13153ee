# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The faults that --fault plants in the embedded profile; embedded/faults.py is what plants them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import Refused


@dataclass(frozen=True)
class Fault:
    """A fault that a run can be given on purpose.

    Args:
        meaning: What goes wrong, for people.
        settings: Defaults that are other ones with this fault.
        overrides: Hydra overrides that the fault needs.
    """

    meaning: str
    settings: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


# A reference, with a KL loss that hardly counts: old weights of the rollout are told by it soonest.
_REFERENCE = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=1e-5")

FAULTS = {
    "unsampled": Fault(
        "the rollout appends an EOS token to truncated responses, and training does not mask it",
        {"TOTAL_STEPS": "2", "GRAD_NORM_THRESHOLD": "120.0"},
    ),
    "advantage": Fault(
        "in step 2 one response gets a reward of 100 instead of 1, and advantages are not divided by their deviation",
        {"TOTAL_STEPS": "2"},
        ("algorithm.adv_estimator=planted_reward", "algorithm.norm_adv_by_std_in_grpo=False"),
    ),
    "bitflip": Fault(
        "in step 2 one exponent bit of one weight of the training model flips",
        {"TOTAL_STEPS": "2"},
    ),
    "stale": Fault(
        "the rollout uses the weights of three steps ago",
        {"TOTAL_STEPS": "5", "LR": "1e-4"},
    ),
    "never_synced": Fault(
        "the rollout keeps the weights of step 1",
        {"TOTAL_STEPS": "5", "LR": "1e-4"},
        _REFERENCE,
    ),
    "adapter": Fault(
        "training trains a LoRA adapter, which the rollout never gets",
        {"TOTAL_STEPS": "5", "LR": "1e-3"},
        (*_REFERENCE, "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"),
    ),
    "one_worker": Fault(
        "one of two rollout workers keeps the weights of step 1",
        {"TOTAL_STEPS": "5", "LR": "1e-4"},
        (*_REFERENCE, "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
    ),
    "temperature": Fault(
        "the rollout reports its log-probs at a temperature of 0.6, and samples at 1",
        {"TOTAL_STEPS": "4"},
    ),
    "nan": Fault(
        "in step 2 the advantage of one token is NaN",
        {"TOTAL_STEPS": "2"},
        ("algorithm.adv_estimator=planted_nan",),
    ),
    "retokenized": Fault(
        "responses have two turns, and the second is decoded and encoded again, into other tokens than sampled",
        {"TOTAL_STEPS": "2"},
        ("data.max_response_length=64", "actor_rollout_ref.rollout.agent.default_agent_loop=retokenized"),
    ),
    "misfire": Fault(
        "responses with a line break get a reward of 5, and advantages are not divided by their deviation",
        {"TOTAL_STEPS": "1"},
        (
            "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "algorithm.norm_adv_by_std_in_grpo=False",
            # A reward is told by culprits in several prompts, which a search that ends diffuse does not look for.
            "actor_rollout_ref.actor.bisect_until=exhaustive",
            "actor_rollout_ref.actor.bisect_budget_steps=300",
            "actor_rollout_ref.actor.bisect_budget_seconds=null",
        ),
    ),
    "auxiliary": Fault(
        "in step 2 a large auxiliary loss is attached to layer 1, whose gradient comes from no token",
        {"TOTAL_STEPS": "2"},
    ),
    "loss_scale": Fault(
        "the loss is multiplied by the number of micro-batches",
        {"TOTAL_STEPS": "3"},
    ),
    "kernel": Fault(
        "the backward of the RMSNorm before layer 1's MLP takes a sum where a mean is right",
        {"TOTAL_STEPS": "1"},
    ),
    "resume": Fault(
        "in step 3, after its responses, training loads the checkpoint of step 2, with the last norm 10 times as large",
        {"TOTAL_STEPS": "3"},
        ("trainer.save_freq=2",),
    ),
}


def find(name: str) -> Fault:
    """The fault of that name; raises Refused if there is none."""
    if name not in FAULTS:
        raise Refused(f"unknown fault {name}: give {', '.join([*FAULTS][:-1])} or {[*FAULTS][-1]}")
    return FAULTS[name]
