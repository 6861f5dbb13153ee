# Copyright 2026 The GradLoc Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What verl's files call for spikes of the gradient norm: names of the package gradloc, which is found here.

Without the package, or with one for other calls, each call does nothing, and a run that turns something of it on is
refused.
"""

import functools
import importlib
import sys
from contextlib import nullcontext, suppress
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Raised with each change of what is called below, or of its arguments; the package has this number, too.
HOOKS = 1
# What is called, by the package's module that has it.
CALLS = {
    "gradloc.adapters.actor_config": ("CriticSpikeConfig", "LayerClipConfig", "SpikeConfig", "TokenClipConfig"),
    "gradloc.adapters.dp_actor": ("load_state", "save_state", "watched", "write_evidence"),
    "gradloc.adapters.engines": ("watch_engines",),
    "gradloc.adapters.spike_log": ("add_spike_log",),
    "gradloc.adapters.spike_stop": ("exit_at_repeated_spikes", "start_spike_stop"),
    "gradloc.adapters.trainer_checks": ("why_unsupported",),
    "gradloc.rewards": ("score",),
}
# The data sources that the package has scorers for.
SCORERS = ("math_verify", "ps_grpo")
_VERL = Path(__file__).resolve().parents[1]


@functools.cache
def why_off() -> str | None:
    """Why the calls do nothing, in a sentence; None where they do something."""
    # A package in verl's own folder counts where none is installed.
    if (vendored := _VERL / "_vendored").is_dir() and str(vendored) not in sys.path:
        sys.path.append(str(vendored))
    try:
        package = importlib.import_module("gradloc")
    except Exception as error:  # whatever is wrong with it, verl is as released
        return f"GradLoc is not installed in {sys.executable} ({error}): run pip install there, in GradLoc's checkout."
    number = getattr(package, "HOOKS", 0)
    if number == HOOKS:
        return None
    change = "install the package again" if number < HOOKS else "patch verl again"
    older, newer = ("package", "patch") if number < HOOKS else ("patch", "package")
    place = Path(str(package.__file__)).parent
    return (
        f"GradLoc's {newer} is newer than its {older} (the package in {place} is for hooks {number}, the patch in "
        f"{_VERL} has {HOOKS}): {change}, with apply_patch.py of one checkout."
    )


def refuse_bad_keys(config: Any) -> None:
    """Ends the process with one sentence if the run's configuration cannot work; called before Ray starts."""
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_critic
    from verl.utils.config import omega_conf_to_dataclass

    # First: the classes of other engines' actors do not know the keys.
    if (why := __getattr__("why_unsupported")(config)) is not None:
        sys.exit(why)
    for section in [config.actor_rollout_ref.actor, *([config.critic] if need_critic(config) else [])]:
        try:
            omega_conf_to_dataclass(section)
        except InstantiationException as error:  # from the error of the class that Hydra builds
            if not isinstance(error.__cause__, ValueError):
                raise
            sys.exit(str(error.__cause__))
    if (why := why_off()) is not None and (names := sorted(_data_sources(config).intersection(SCORERS))):
        sys.exit(f"The data are scored by {' and '.join(names)}. {why}")


def __getattr__(name: str) -> Any:
    module = next((module for module, names in CALLS.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name) if why_off() is None else _off(name)


@functools.cache
def _off(name: str) -> Any:
    """What stands for a name of the package where that is off."""
    if name.endswith("Config"):
        return _keys(name)
    stop = SimpleNamespace(is_due=_do_nothing, end_if_due=_do_nothing)
    others = {"watched": lambda trained: trained, "exit_at_repeated_spikes": nullcontext, "score": _refuse}
    return {**others, "start_spike_stop": lambda *_: stop}.get(name, _do_nothing)


def _do_nothing(*_: Any) -> None:
    pass


def _refuse(*_: Any, **__: Any) -> None:
    raise ValueError(why_off())


def _keys(name: str) -> type:
    """A configuration with the keys of the yaml, which refuses what turns something on."""
    from omegaconf import OmegaConf
    from verl.base_config import BaseConfig

    keys = OmegaConf.load(_VERL / f"trainer/config/gradloc/{'critic' if name.startswith('Critic') else 'actor'}.yaml")
    switch = "spike_detection"
    if group := {"LayerClipConfig": "layer_clip", "TokenClipConfig": "token_clip"}.get(name):
        keys, switch = keys[group], "enable"

    def post_init(self: Any) -> None:
        if callable(check := getattr(super(made, self), "__post_init__", None)):
            check()
        if getattr(self, switch):
            raise ValueError(f"{group or switch} is on. {why_off()}")

    fields = [(key, Any, None) for key in keys if key != "_target_"]
    made = make_dataclass(name, fields, bases=(BaseConfig,), namespace={"__post_init__": post_init})
    made.__module__ = __name__
    return made


def _data_sources(config: Any) -> set[str]:
    """The data sources in those of the run's files that are Parquet on this machine."""
    found: set[str] = set()
    for files in (config.data.get("train_files"), config.data.get("val_files")):
        for file in [files] if isinstance(files, str) else files or []:
            if str(file).endswith(".parquet") and Path(str(file)).is_file():
                key = config.data.get("reward_fn_key", "data_source")
                with suppress(Exception):  # verl itself says what is wrong with a file
                    from pyarrow.parquet import read_table

                    found.update(read_table(file, columns=[key])[key].unique().to_pylist())
    return found
