# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Imports the types of sharded modules and tensors, whose place differs between torch versions.

verl's configuration imports this package for every user, even if their torch cannot run GradLoc or LayerClip.
"""

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch before 2.5
    from torch.distributed._tensor import DTensor

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # torch before 2.6
    try:
        from torch.distributed._composable.fsdp import FSDPModule
    except ImportError:  # torch before 2.4

        class FSDPModule:  # type: ignore[no-redef]  # stands in for what this torch lacks
            """A placeholder where torch has no FSDP2: no module is an instance of it."""


__all__ = ["DTensor", "FSDPModule"]
