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

        class FSDPModule:  # type: ignore[no-redef]  # a stand-in for what this torch lacks
            """FSDP2 is not there: no module is one of its."""


__all__ = ["DTensor", "FSDPModule"]
