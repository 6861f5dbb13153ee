"""Lets verl train on a machine without a GPU. verl loads it when VERL_USE_EXTERNAL_MODULES names it.

verl calls its accelerator's module by torch.cuda's names, and its process groups ask for NCCL. Here torch.cpu gets the
missing names, NCCL becomes gloo, and the `hf` rollout (rollout.py) is registered. Nothing in verl is changed.
"""

import functools

import psutil
import torch
import torch.distributed
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry


def _memory_used(*_args, **_kwargs) -> int:
    return psutil.Process().memory_info().rss


def _mem_get_info(*_args, **_kwargs) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _nothing(*_args, **_kwargs) -> None:
    pass


# torch.cpu has no device of its own: its random numbers are torch's, its memory is the process's.
_STAND_INS = {
    "get_rng_state": lambda *_args: torch.get_rng_state(),
    "set_rng_state": lambda state, *_args: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "empty_cache": _nothing,
    "ipc_collect": _nothing,
    "set_device": _nothing,
    "reset_peak_memory_stats": _nothing,
    "set_per_process_memory_fraction": _nothing,
    "memory_allocated": _memory_used,
    "memory_reserved": _memory_used,
    "max_memory_allocated": _memory_used,
    "max_memory_reserved": _memory_used,
    "mem_get_info": _mem_get_info,
    "get_device_name": lambda *_args: "cpu",
}
for _name, _stand_in in _STAND_INS.items():
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, _stand_in)

_init_process_group = torch.distributed.init_process_group


@functools.wraps(_init_process_group)
def _init_with_gloo(backend: str | None = None, *args, **kwargs):
    return _init_process_group("gloo" if backend and "nccl" in backend else backend, *args, **kwargs)


torch.distributed.init_process_group = _init_with_gloo


def _load_replica() -> type:
    from embedded.rollout import HFReplica

    return HFReplica


_ROLLOUT_REGISTRY[("hf", "async")] = "embedded.rollout.HFRollout"
RolloutReplicaRegistry.register("hf", _load_replica)
