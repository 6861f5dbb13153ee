# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Lets verl train on a machine without a GPU. verl loads it when VERL_USE_EXTERNAL_MODULES names it.

verl expects the functions of torch.cuda in its device's module, and creates process groups with NCCL. This package
adds the missing functions to torch.cpu, replaces NCCL by gloo, registers the `hf` rollout (rollout.py), and writes the
metrics where follow.py reads them. For verl 0.9, cpu_platform.py adds the platform, and v1_trainer.py makes runs of its
V1 trainer repeatable. verl's own files stay as they are.
"""

import functools
import importlib
import importlib.util
import json
import os
from collections.abc import Callable
from numbers import Real
from typing import Any

import psutil
import torch
import torch.distributed


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Puts a function around a function or method of a module or class: it gets that one before its arguments."""

    def decorate(function: Callable[..., Any]) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return function(inner, *args, **kwargs)

        setattr(owner, name, replaced)

    return decorate


def _memory_used(*_args, **_kwargs) -> int:
    return psutil.Process().memory_info().rss


def _mem_get_info(*_args, **_kwargs) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _do_nothing(*_args, **_kwargs) -> None:
    pass


# On a CPU, torch itself has the random numbers, and the process the memory.
_SUBSTITUTES = {
    "get_rng_state": lambda *_args: torch.get_rng_state(),
    "set_rng_state": lambda state, *_args: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "empty_cache": _do_nothing,
    "ipc_collect": _do_nothing,
    "set_device": _do_nothing,
    "reset_peak_memory_stats": _do_nothing,
    "set_per_process_memory_fraction": _do_nothing,
    "memory_allocated": _memory_used,
    "memory_reserved": _memory_used,
    "max_memory_allocated": _memory_used,
    "max_memory_reserved": _memory_used,
    "mem_get_info": _mem_get_info,
    "get_device_name": lambda *_args: "cpu",
}
for _name, _substitute in _SUBSTITUTES.items():
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, _substitute)

# FSDP2 keeps the reference model's weights in pinned memory, which a machine without an accelerator does not have.
torch.Tensor.pin_memory = lambda tensor, *_args, **_kwargs: tensor  # type: ignore[method-assign]  # on purpose


@around(torch.distributed, "init_process_group")
def _init_with_gloo(init: Any, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
    return init("gloo" if backend else None, *args, **kwargs)


def _register_rollout() -> None:
    # Imported here, because these modules ask for verl's platform.
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    _ROLLOUT_REGISTRY[("hf", "async")] = "embedded.rollout.HFRollout"
    RolloutReplicaRegistry.register("hf", lambda: importlib.import_module("embedded.rollout").HFReplica)


def _write_metrics() -> None:
    """Writes the metrics of each step to a file, because Ray breaks long lines of the log."""
    from verl.utils.tracking import Tracking

    @around(Tracking, "log")
    def log_and_write(log: Any, self: Any, data: dict[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
        log(self, data, step, *args, **kwargs)
        metrics = {name: float(value) for name, value in data.items() if isinstance(value, Real)}
        with open(os.environ["EMBEDDED_METRICS"], "a") as file:
            file.write(json.dumps([step, metrics]) + "\n")


if importlib.util.find_spec("verl.plugin") is not None:
    importlib.import_module("embedded.cpu_platform")
_register_rollout()
if "EMBEDDED_METRICS" in os.environ:
    _write_metrics()
