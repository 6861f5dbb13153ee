# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The command that trains: its Hydra overrides, its environment, and how a shell would be told."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import faults
from .hydra import quoted, quoted_list
from .settings import ACTOR, ROLLOUT, SETTINGS, Setting
from .targets import number, translated
from .values import Text

# A shell takes each of these for itself, and a backslash before it takes that away.
_SPECIAL = re.compile(r"([^A-Za-z0-9_@%+=:,./-])")


def for_hydra(setting: Setting, value: str) -> str:
    """The value as the right side of a Hydra override."""
    if setting.allowed is Text.LIST:
        return quoted_list(value)
    return quoted(value) if isinstance(setting.allowed, Text) else value


def overrides(
    profile: str, values: Mapping[str, str], ray_directory: str, root: Path, target: str, fault: str | None = None
) -> list[str]:
    """The Hydra overrides of a run with verl `target`, without those that the user gives."""
    named_as_first = _overrides(profile, values, ray_directory, root, target, fault)
    return [translated(override, target) for override in named_as_first]


def _overrides(
    profile: str, values: Mapping[str, str], ray_directory: str, root: Path, target: str, fault: str | None
) -> list[str]:
    """The overrides with the names that verl 0.7.0 has for them."""
    output = values["OUTPUT_DIR"]
    result = [
        f"hydra.run.dir={quoted(f'{output}/hydra')}",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR={quoted(f'{output}/tensorboard')}",
        "algorithm.adv_estimator=grpo",
        "data.filter_overlong_prompts=True",
        "data.truncation=error",
        # The evidence shows where training's probabilities differ from the rollout's.
        f"{ROLLOUT}.calculate_log_probs=True",
    ]
    for setting in SETTINGS:
        if setting.name not in values:
            continue
        value = values[setting.name]
        if setting.is_off(value):
            result += setting.off_arguments
        else:
            result += setting.on_arguments
            result += [f"{key}={for_hydra(setting, value)}" for key in setting.keys]
    if profile == "cluster":
        return result + _for_cluster()
    planted = faults.find(fault).overrides if fault else ()
    result += _for_embedded(values, ray_directory, root, target) + list(planted)
    return result + (_for_v1_trainer() if number(target) >= number("0.9") else [])


def _for_cluster() -> list[str]:
    return [
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ROLLOUT}.name=vllm",
        "trainer.max_actor_ckpt_to_keep=3",
    ]


def _log_prob_rows(values: Mapping[str, str], target: str) -> int:
    """The responses in a micro-batch of log-probs, which have to divide a rank's responses evenly for verl 0.9."""
    mini_batch = int(values["MINI_BATCH_SIZE"]) * int(values["ROLLOUT_N"]) // int(values["GPUS_PER_NODE"])
    return max(rows for rows in range(1, 9) if number(target) < number("0.9") or mini_batch % rows == 0)


def _for_embedded(values: Mapping[str, str], ray_directory: str, root: Path, target: str) -> list[str]:
    workers = int(values["GPUS_PER_NODE"])
    rows = _log_prob_rows(values, target)
    return [
        "trainer.device=cpu",
        "+ray_kwargs.ray_init.address=local",
        f"+ray_kwargs.ray_init._temp_dir={ray_directory}",
        "+ray_kwargs.ray_init.include_dashboard=False",
        # The numbers of CPUs and GPUs tell Ray how much may run at once; nothing is reserved.
        f"ray_kwargs.ray_init.num_cpus={3 * workers + 6}",
        f"+ray_kwargs.ray_init.num_gpus={workers}",
        f"+ray_kwargs.ray_init.resources.cpu={workers}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{ACTOR}.fsdp_config.dtype=float32",
        # Every gathering of the weights takes a second, and there is memory for all of them.
        f"{ACTOR}.fsdp_config.reshard_after_forward=False",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={rows}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={rows}",
        f"{ACTOR}.use_torch_compile=False",
        "actor_rollout_ref.ref.use_torch_compile=False",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.load_format=safetensors",
        f"{ROLLOUT}.agent.num_workers=1",
        f"{ROLLOUT}.agent.agent_loop_config_path={quoted(str(root / 'embedded/agent_loop.yaml'))}",
        f"{ROLLOUT}.agent.default_agent_loop=whole_batch",
        "reward_model.num_workers=1",
        "data.dataloader_num_workers=0",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
    ]


def _for_v1_trainer() -> list[str]:
    """The trainer that verl 0.9 has by default; without effect with trainer.use_v1=False."""
    sampler = "trainer.v1.sampler.custom_sampler"
    return [
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"+{ROLLOUT}.agent.agent_loop_manager_class=embedded.v1_trainer.OrderedAgentLoopManager",
        f"{sampler}.path=pkg://embedded.v1_trainer",
        f"{sampler}.name=OrderedReplayBuffer",
    ]


def added_environment(
    profile: str, values: Mapping[str, str], environment: Mapping[str, str], root: Path, fault: str | None = None
) -> dict[str, str]:
    """The variables that a run gets on top of the given environment; on a cluster none."""
    if profile == "cluster":
        return {}
    workers = int(values["GPUS_PER_NODE"])

    def before(first: str, separator: str, name: str) -> str:
        return separator.join(filter(None, [first, environment.get(name)]))

    planted = {} if fault is None else {"EMBEDDED_FAULT": fault}
    modules = "embedded" if fault is None else "embedded,embedded.faults"
    return planted | {
        "VERL_USE_EXTERNAL_MODULES": before(modules, ",", "VERL_USE_EXTERNAL_MODULES"),
        "PYTHONPATH": before(str(root), ":", "PYTHONPATH"),
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // workers)),
        # Freed tensors go back to the system, which saves a third of the memory; huge pages make that cheap.
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_MMAP_THRESHOLD_": "4000000",
        "MALLOC_TRIM_THRESHOLD_": "64000000",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        # Answers that are late on a busy machine are not wrong.
        "VERL_MATH_VERIFY_TIMEOUT": environment.get("VERL_MATH_VERIFY_TIMEOUT") or "100",
        "RAY_DEDUP_LOGS": "0",  # Ray would drop the log lines of fast steps as duplicates
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(["-1"] * workers),  # as many as Ray is told of, and none that CUDA would find
    }


def for_shell(words: Sequence[str]) -> str:
    """The words as a line for a shell, with backslashes where they suffice."""
    return " ".join(_word_for_shell(word) for word in words)


def _word_for_shell(word: str) -> str:
    if word and word.isascii() and word.isprintable():
        return _SPECIAL.sub(r"\\\1", word)
    return shlex.quote(word)


def printed(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The command as --dry-run prints it: one override a line."""
    start = list(command[:3])
    if environment:
        start = ["env", *(f"{name}={value}" for name, value in environment.items()), *start]
    return " \\\n    ".join([for_shell(start), *(for_shell([word]) for word in command[3:])])
