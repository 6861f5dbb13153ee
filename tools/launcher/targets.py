# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Which verl a run is for, and what that verl calls the keys that others call otherwise: one table."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import Refused

_FIND_VERL = """
import importlib.util as util
spec = util.find_spec("verl")
print(spec.submodule_search_locations[0] if spec else "")
"""


@dataclass(frozen=True)
class Renamed:
    """Keys or values of verl 0.7.0 that a later verl has under another name.

    Args:
        since: The first release that has the new name.
        old: The start of an override: a key, a part of keys that ends in a dot, or a key with its value.
        new: What takes its place.
    """

    since: str
    old: str
    new: str


QUOTES = "'\""
_REJECTION = "algorithm.rollout_correction.rollout_rs"
RENAMED = (
    Renamed("0.7.1", f"{_REJECTION}=token", f"{_REJECTION}=token_k1"),
    Renamed("0.7.1", f"{_REJECTION}=sequence", f"{_REJECTION}=seq_sum_k1"),
    Renamed("0.7.1", f"{_REJECTION}=geometric", f"{_REJECTION}=seq_mean_k1"),
    # 0.7.1 takes the old names, too. 0.9.1 has them in its configuration, and does not read them.
    Renamed("0.7.1", "custom_reward_function.", "reward.custom_reward_function."),
    Renamed("0.7.1", "reward_model.num_workers", "reward.num_workers"),
    Renamed("0.7.1", "reward_model.reward_manager", "reward.reward_manager.name"),
    Renamed("0.7.1", "reward_model.sandbox_fusion.", "reward.sandbox_fusion."),
    Renamed("0.7.1", "reward_model.enable", "reward.reward_model.enable"),
    Renamed("0.7.1", "reward_model.enable_resource_pool", "reward.reward_model.enable_resource_pool"),
    Renamed("0.7.1", "reward_model.n_gpus_per_node", "reward.reward_model.n_gpus_per_node"),
    Renamed("0.7.1", "reward_model.nnodes", "reward.reward_model.nnodes"),
    Renamed("0.7.1", "reward_model.model.path", "reward.reward_model.model_path"),
    Renamed("0.7.1", "reward_model.rollout.", "reward.reward_model.rollout."),
    Renamed("0.7.1", "reward_manager.", "reward.reward_manager."),
    Renamed(
        "0.7.1",
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    ),
    Renamed("0.9.1", "critic.model.fsdp_config.", "critic.fsdp."),
    # These are still in 0.9.1's configuration, and its engine does not read them.
    *(
        Renamed("0.9.1", f"{model}.{old}", new.format(f"{model}.fsdp_config"))
        for model in ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
        for old, new in (
            ("fsdp_config.dtype", "++{}.mixed_precision.param_dtype"),
            ("use_torch_compile", "{}.use_torch_compile"),
        )
    ),
    Renamed("0.9.1", "actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad"),
    Renamed("0.9.1", "critic.grad_clip", "critic.optim.clip_grad"),
)


def number(version: str) -> tuple[int, ...]:
    """The version, for comparisons."""
    return tuple(map(int, re.findall(r"\d+", version)))


def translated(override: str, version: str) -> str:
    """An override as this verl takes it, given one for any of the supported ones."""
    prefix = re.match(r"[+~]*", override)
    assert prefix is not None
    rest = override[prefix.end() :]
    for entry in RENAMED:
        if number(version) >= number(entry.since) and (end := _matches(rest, entry.old)):
            new = entry.new + rest[end:]
            return new if new.startswith("+") else prefix[0] + new
    return override


def _matches(override: str, old: str) -> int:
    """The length of what the old name stands for at the start of the override; 0 if it does not."""
    key, _, value = override.partition("=")
    if "=" in old:
        return len(override) if f"{key}={value.strip(QUOTES)}" == old else 0
    return len(old) if key == old or (old.endswith(".") and key.startswith(old)) else 0


def supported(root: Path) -> list[str]:
    """The versions that there is a patch for, the oldest first."""
    return sorted((pin.parent.name for pin in root.glob("patches/*/PIN")), key=number)


def default_version(root: Path) -> str:
    """The version that is meant where nothing says which."""
    return (root / "patches/DEFAULT").read_text().strip()


def check(version: str, root: Path) -> None:
    """Raises Refused if there is no patch for this verl."""
    versions = supported(root)
    if version not in versions:
        raise Refused(f"there is no patch for verl {version}: give --target {one_of(versions)}")


def one_of(versions: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(versions[:-1]), versions[-1]]))


def choose(asked: str | None, python: str | None, root: Path, environment: Mapping[str, str]) -> str:
    """The version that is asked for, or that this Python would import, or the default one."""
    if asked is not None:
        return asked
    installed = None if python is None else release_of(find_verl(python, environment))
    return installed if installed in supported(root) else default_version(root)


def find_verl(python: str, environment: Mapping[str, str]) -> str | None:
    """The directory of the verl that this Python would import, "" if it has none, None if the Python does not run."""
    try:
        done = subprocess.run(
            [python, "-c", _FIND_VERL], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None
    return os.fsdecode(done.stdout).rstrip("\n") if done.returncode == 0 else None


def release_of(verl: str | None) -> str | None:
    """The version of the verl in this directory; None if that cannot be told."""
    try:
        return Path(verl, "version/version").read_text().strip() if verl else None
    except (OSError, ValueError):
        return None
