# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The types of sharded modules and tensors, from where the installed torch has them.

verl's configuration imports this package for every user, also where GradLoc and LayerClip cannot be turned on.
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

        class FSDPModule:
            """FSDP2 is not there: no module is one of its."""


__all__ = ["DTensor", "FSDPModule"]
