# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""How much memory a replay takes at least, and how much there is."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..measure.micro_batch import movable
from ..tools.opening import Bundle

# Parts of the messages of PyTorch's and the system's allocators.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory", "bad_alloc")
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no more memory. The allocator of the CPU raises a plain RuntimeError."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(part in str(error).lower() for part in _OUT_OF_MEMORY)


def needed_memory(bundle: Bundle, module: nn.Module, dtype: torch.dtype, attention: str, is_loaded: bool = True) -> int:
    """The bytes that the gradients of a bundle take at least, and the model if it is not loaded: a bound from below.

    It has the parameters' gradients, and of the largest row what backward keeps of attention, if that is `eager`, and
    of the logits.

    Args:
        module (nn.Module): The model; its weights may have another dtype.
        dtype (torch.dtype): What is computed in.
    """
    gradients = sum(p.numel() for p in module.parameters() if p.requires_grad)
    weights = 0 if is_loaded else sum(p.numel() for p in module.parameters())
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads, layers, vocabulary = (
        getattr(config, name, None) or 0 for name in ("num_attention_heads", "num_hidden_layers", "vocab_size")
    )
    # In a hybrid model, some layers have no attention over all pairs of tokens.
    layers = min(layers, sum(type(child).__name__.endswith("Attention") for child in module.modules()))
    # The softmax, in float32 at least, is kept by each layer, in half precision with its rounded copy.
    kept = max(4, dtype.itemsize) + (dtype.itemsize if dtype.itemsize < 4 else 0)
    most = 0
    for saved in bundle.micro_batches.values():
        for row, moves in zip(saved.rows, movable(saved.tokens).any(-1).tolist(), strict=True):
            length, response = len(row.input_ids), row.response_length
            pairs = heads * length**2 * kept * (layers if moves else 1) if attention == "eager" else 0
            scores = vocabulary * (length * dtype.itemsize + response * max(4, dtype.itemsize))
            most = max(most, pairs + scores)
    return (weights + gradients) * dtype.itemsize + most


def free_memory(device: str) -> int | None:
    """The bytes that a process can still get on a device; None where the system does not say."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    found = [free for free in (_of_system(), _of_cgroup()) if free is not None]
    return min(found, default=None)


def check_memory(size: int, device: str) -> None:
    """Refuses what cannot fit: the system may end a process that takes too much, without an error.

    Raises:
        MemoryError: There are not so many bytes.
    """
    free = free_memory(device)
    if free is not None and size > free:
        raise MemoryError(f"at least {size / 2**30:.1f} GiB are needed, and {free / 2**30:.1f} are free")


def _of_system() -> int | None:
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
        sizes = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
        return sizes["MemAvailable"] + sizes["SwapFree"]
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _of_cgroup() -> int | None:
    """What the limits of a container (cgroup v2) leave; the page cache counts as free."""
    try:
        (own,) = (line[3:] for line in (_PROC / "self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, ValueError):
        return None
    found = []
    folder = _CGROUPS / own.strip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(_CGROUPS):
            break
        try:
            limit = int((group / "memory.max").read_text())
            cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["file"]
            found.append(limit - int((group / "memory.current").read_text()) + int(cache))
        except (OSError, ValueError, KeyError):
            continue  # the root has no such files, and "max" is no limit
    return min(found, default=None)
