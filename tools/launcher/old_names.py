# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Names that were settings once: what to write instead."""

import re
import shlex
from collections.abc import Mapping

from .errors import Refused
from .hydra import quoted
from .log import say
from .settings import ACTOR, ROLLOUT

# The Hydra key that takes the value, and overrides that go with it.
KEYS: dict[str, tuple[str, ...]] = {
    "EXPERIMENT": ("trainer.experiment_name",),
    "PROJECT": ("trainer.project_name",),
    "TRAIN_BATCH_SIZE": ("data.train_batch_size",),
    "MINI_BATCH_SIZE": (f"{ACTOR}.ppo_mini_batch_size",),
    "MICRO_BATCH_SIZE": (f"{ACTOR}.ppo_micro_batch_size_per_gpu",),
    "MAX_TOKENS_PER_GPU": (f"{ACTOR}.ppo_max_token_len_per_gpu",),
    "ROLLOUT_N": (f"{ROLLOUT}.n",),
    "MAX_PROMPT_LENGTH": ("data.max_prompt_length",),
    "MAX_RESPONSE_LENGTH": ("data.max_response_length",),
    "TEMPERATURE": (f"{ROLLOUT}.temperature",),
    "TENSOR_PARALLEL": (f"{ROLLOUT}.tensor_model_parallel_size",),
    "GPU_MEMORY_UTILIZATION": (f"{ROLLOUT}.gpu_memory_utilization",),
    "STRATEGY": (f"{ACTOR}.strategy",),
    "OFFLOAD": (f"{ACTOR}.fsdp_config.param_offload", f"{ACTOR}.fsdp_config.optimizer_offload"),
    "CLIP_RATIO_LOW": (f"{ACTOR}.clip_ratio_low",),
    "CLIP_RATIO_HIGH": (f"{ACTOR}.clip_ratio_high",),
    "LOSS_AGG_MODE": (f"{ACTOR}.loss_agg_mode",),
    "KL_LOSS_COEF": (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef"),
    "ENTROPY_COEFF": (f"{ACTOR}.entropy_coeff",),
    "TOTAL_EPOCHS": ("trainer.total_epochs",),
    "TEST_FREQ": ("trainer.test_freq",),
    "SAVE_FREQ": ("trainer.save_freq",),
    "SEED": ("data.seed",),
    "SPIKE_DETECTION": (f"{ACTOR}.spike_detection",),
    "BISECT_BUDGET_STEPS": (f"{ACTOR}.bisect_budget_steps",),
    "SPIKE_TRIGGER": (f"{ACTOR}.spike_trigger",),
    "BISECT_UNTIL": (f"{ACTOR}.bisect_until",),
    "SPIKE_STOP_AFTER": (f"{ACTOR}.spike_stop_after",),
}

# The setting that has another name now.
SETTINGS = {"TOKEN_CLIP": "TIS", "SEQUENCE_CLIP": "SEQUENCE_MASK"}


def refuse(given: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Raises Refused for the first of these names among the arguments, and says so of those in the environment."""
    for name in (*KEYS, *SETTINGS):
        if name in given:
            raise Refused(f"{name} is no longer a setting: write {_written(name, given[name])}")
        if value := environment.get(name):  # it may well be meant for something else
            say(f"the variable {name} has no effect here; if it is meant for this run, write {_written(name, value)}")


def _written(name: str, value: str) -> str:
    """The setting or the Hydra overrides, as a shell takes them."""
    if name in SETTINGS:
        return shlex.quote(f"{SETTINGS[name]}={value}")
    right = value if re.fullmatch(r"[\w.+-]+", value, re.ASCII) else quoted(value)
    return " ".join(_for_shell(key if "=" in key else f"{key}={right}") for key in KEYS[name])


def _for_shell(word: str) -> str:
    """The word in double quotes where these suffice: it may have Hydra's single quotes in it."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)
