# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether this verl has the package of the patch."""

import importlib.util
import os


def is_patched() -> bool:
    """Without importing verl: it may be in the middle of being imported."""
    spec = importlib.util.find_spec("verl")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return any(os.path.isdir(os.path.join(folder, "utils", "gradloc")) for folder in folders)
