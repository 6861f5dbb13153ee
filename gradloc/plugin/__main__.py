# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Says which hooks of the plugin fit the verl of this Python: python -m gradloc.plugin

Nothing is trained. The exit code is 1 if runs with GradLoc would be refused or not be watched, or if verl is patched.
"""

import importlib
import sys

from . import status
from .hooks import HOOKS


def main() -> int:
    try:
        import verl  # after the plugin, or as what loads it
    except ImportError as error:
        print(f"{sys.executable} has no verl that can be imported ({error}): install verl 0.9 there", file=sys.stderr)
        return 1

    print(f"verl {verl.__version__} in {verl.__path__[0]}")
    if status.left_to_patch:
        print("It is patched with GradLoc: the patch alone acts.")
        return 1
    missing = partly = False
    for name, hook in HOOKS.items():
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing |= hook.needed
            partly = True
            print(f"  {name}: cannot be imported ({error}), it cannot do {hook.what}")
            continue
        reason = status.failures.get(hook.what) or status.lost.get(hook.what)
        print(f"  {name}: {'fits' if reason is None else f'does not fit, it cannot do {hook.what} ({reason})'}")
    if status.failures or missing:
        print("The plugin does not fit: a run with GradLoc on would be refused, or not be watched.")
        return 1
    print(f"The plugin fits{', except for what is named above' if partly or status.lost else ''}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
