# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether the plugin fits this verl, and what failed. A run that needs it is refused, and does not go on half watched.

Whether verl is patched, and has a module, is asked of its files: it may be in the middle of being imported.
"""

import importlib.util
import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# Failed parts of the plugin with the reasons, in the order in which they were tried.
failures: dict[str, str] = {}
# The same for what runs can do without.
lost: dict[str, str] = {}
# Whether this process acts after verl's imports, and whether it leaves that to a patched verl.
installed = False
left_to_patch = False


class Unfit(Exception):
    """verl does not have what a hook relies on; the message says what."""


def is_patched() -> bool:
    """Whether verl has the patch's hooks. Its new files alone may be what pip left when it installed verl again."""
    mains = [os.path.join(folder, "trainer", "main_ppo.py") for folder in _folders()]
    return any("from verl.utils.spikes import " in Path(main).read_text() for main in mains if os.path.isfile(main))


def check_module(name: str) -> None:
    """Raises Unfit if verl has no file for a module, `verl.…`."""
    paths = [os.path.join(folder, *name.split(".")[1:]) for folder in _folders()]
    if not any(os.path.isfile(f"{path}.py") or os.path.isfile(os.path.join(path, "__init__.py")) for path in paths):
        raise Unfit(f"there is no {name}")


def _folders() -> list[str]:
    spec = importlib.util.find_spec("verl")
    return list(spec.submodule_search_locations or []) if spec is not None else []


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


def guard(what: str, act: Callable[[], None], needed: bool = True) -> None:
    """Acts; logs an error and notes it. It is not raised, because verl drops errors of plugins and works without them.

    Args:
        what (str): What is lost without it, for the log.
        act (Callable): Raises for whatever does not fit.
        needed (bool): Whether runs that turn something of GradLoc on are refused without it.
    """
    try:
        act()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, Unfit) else str(error)
        logger.error("GradLoc's plugin does not fit this verl, it cannot do %s: %s", what, reason)
        (failures if needed else lost)[what] = reason


def require(actor: str = "actor_rollout_ref.actor") -> None:
    """Raises RuntimeError, with one sentence, if this process cannot watch a run. Called where a run needs that.

    Args:
        actor (str): The configuration whose keys turn GradLoc on.
    """
    leave_out = f"; without GradLoc, set {actor}.spike_detection=False and turn layer_clip and token_clip off"
    if failures:
        listed = "; ".join(f"{what} ({reason})" for what, reason in failures.items())
        raise RuntimeError(f"GradLoc's plugin does not fit this verl, it cannot do {listed}{leave_out}.")
    if not (installed or left_to_patch):
        raise RuntimeError(
            "GradLoc's plugin is not loaded in this process: let VERL_USE_EXTERNAL_PLUGINS be auto or name gradloc, or "
            f"set VERL_USE_EXTERNAL_MODULES=gradloc.plugin on every node{leave_out}."
        )
