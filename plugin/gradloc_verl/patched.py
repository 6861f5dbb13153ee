# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether this verl has the package of the patch, and which modules it has.

Without importing verl: it may be in the middle of being imported.
"""

import importlib.util
import os


def is_patched() -> bool:
    """Whether verl has the package of the patch."""
    return any(os.path.isdir(os.path.join(folder, "utils", "gradloc")) for folder in _folders())


def has_module(name: str) -> bool:
    """Whether verl has a file for a module, `verl.…`."""
    paths = [os.path.join(folder, *name.split(".")[1:]) for folder in _folders()]
    return any(os.path.isfile(f"{path}.py") or os.path.isfile(os.path.join(path, "__init__.py")) for path in paths)


def _folders() -> list[str]:
    spec = importlib.util.find_spec("verl")
    return list(spec.submodule_search_locations or []) if spec is not None else []
