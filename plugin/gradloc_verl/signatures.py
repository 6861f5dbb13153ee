# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether verl still has what a hook relies on. Asked of the code and not of a version number."""

import inspect
from typing import Any

from .status import Unfit


def expect(owner: Any, name: str, *parameters: str) -> Any:
    """The attribute of a module or class; raises Unfit if it is missing, or lacks one of these parameters."""
    of = getattr(owner, "__name__", str(owner))
    found = getattr(owner, name, None)
    if found is None:
        raise Unfit(f"{of} has no {name}")
    if parameters:
        has = list(inspect.signature(found).parameters)
        # In this order, because verl may pass them by position; more may follow.
        if has[: len(parameters)] != list(parameters):
            raise Unfit(f"{of}.{name} takes ({', '.join(has)}), not ({', '.join(parameters)}, …)")
    return found
