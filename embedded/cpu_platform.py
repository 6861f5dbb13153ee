# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A CPU as one of the platforms that verl 0.9 runs on. Importing this module makes it the current one."""

import contextlib
import os
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform


class CPUPlatform(PlatformBase):
    """Every process has one device, the CPU. To Ray it is a GPU; run_experiment.sh tells Ray how many there are."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module: ModuleType = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # a number would mean a GPU to torch

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def _do_nothing(self, *_args: Any) -> None:
        pass

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _do_nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


set_platform(CPUPlatform())
# verl looks its engines up by the device. Those for CUDA do nothing that a CPU could not.
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
