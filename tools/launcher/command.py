# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The command that trains: its Hydra overrides, its environment, and how a shell would be told."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import faults, profiles
from .hydra import by_key, quoted, quoted_list
from .renamed_keys import translated
from .resolve import run_name
from .settings import ACTOR, OFF, ROLLOUT, SETTINGS, Setting
from .targets import number
from .values import Text

# A shell takes each of these for itself, and a backslash before it takes that away.
_SPECIAL = re.compile(r"([^A-Za-z0-9_@%+=:,./-])")


def for_hydra(setting: Setting, value: str) -> str:
    """The value as the right side of a Hydra override."""
    if setting.allowed is Text.LIST:
        return quoted_list(value)
    return quoted(value) if isinstance(setting.allowed, Text) else value


def overrides(
    profile: str,
    values: Mapping[str, str],
    ray_directory: str,
    root: Path,
    target: str,
    *,
    tiny: bool = False,
    fault: str | None = None,
    plugin: bool = False,
    given: Sequence[str] = (),
) -> list[str]:
    """The Hydra overrides of a run with verl `target`; those that the user has given come last, so that they win."""
    output = values["OUTPUT_DIR"]
    own = [
        f"hydra.run.dir={quoted(f'{output}/hydra')}",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR={quoted(f'{output}/tensorboard')}",
        *(profiles.PLUGIN if plugin else ()),
        *profiles.ALL,
    ]
    if profile == "cluster":
        own += [*profiles.CLUSTER, f"trainer.experiment_name={quoted(run_name(values))}"]
    else:
        own += [*profiles.EMBEDDED, *(profiles.TINY if tiny else ())]
        own += profiles.V1_TRAINER if number(target) >= number("0.9") else ()
        own += _for_embedded(values, ray_directory, root)
    for setting in SETTINGS:
        value = values[setting.name]
        if setting.turned_on_by is not None:
            if value == OFF:
                continue
            own.append(setting.turned_on_by)
        own.append(f"{setting.key}={for_hydra(setting, value)}")
    own += faults.find(fault).overrides if fault else ()
    if profile == "embedded":
        rows = _log_prob_rows(by_key([*own, *given]), target)
        own += [f"{model}.log_prob_micro_batch_size_per_gpu={rows}" for model in (ROLLOUT, "actor_rollout_ref.ref")]
    return [*(translated(override, target) for override in own), *given]


def _for_embedded(values: Mapping[str, str], ray_directory: str, root: Path) -> list[str]:
    workers = int(values["GPUS_PER_NODE"])
    return [
        f"+ray_kwargs.ray_init._temp_dir={ray_directory}",
        # The numbers of CPUs and GPUs tell Ray how much may run at once; nothing is reserved.
        f"ray_kwargs.ray_init.num_cpus={3 * workers + 6}",
        f"+ray_kwargs.ray_init.num_gpus={workers}",
        f"+ray_kwargs.ray_init.resources.cpu={workers}",
        f"{ROLLOUT}.agent.agent_loop_config_path={quoted(str(root / 'embedded/agent_loop.yaml'))}",
    ]


def _log_prob_rows(values: Mapping[str, str], target: str) -> int:
    """The responses in a micro-batch of log-probs, which have to divide a rank's responses evenly since verl 0.8."""
    keys = (f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n", "trainer.n_gpus_per_node")
    numbers = [int(values[key]) for key in keys if re.fullmatch("[1-9][0-9]*", values[key])]
    # One divides them also where an override is no plain number.
    of_a_rank = numbers[0] * numbers[1] // numbers[2] if len(numbers) == len(keys) else 1
    return max(rows for rows in range(1, 9) if number(target) < number("0.8") or of_a_rank % rows == 0)


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
        # How long Ray waits for its own start: 30 s are not enough on a busy machine.
        "RAY_raylet_start_wait_time_s": environment.get("RAY_raylet_start_wait_time_s") or "600",
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
