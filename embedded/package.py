# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Where training finds GradLoc: in a patched verl, or as a package beside it, which the plugin uses."""

import functools
import importlib
import importlib.util
from typing import Any


@functools.cache
def adapter(name: str) -> Any:
    """The module of gradloc.adapters that training uses. A checkout has it, too, but as another module."""
    patched = importlib.util.find_spec("verl.utils.gradloc") is not None
    return importlib.import_module(f"{'verl.utils.gradloc' if patched else 'gradloc'}.adapters.{name}")
