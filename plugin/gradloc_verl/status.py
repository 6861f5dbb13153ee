# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What of the plugin failed in this process. A run that needs it is refused, and does not go on half watched."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

# What the plugin could not do, and why, in the order in which it was tried.
failures: dict[str, str] = {}
# The same for what runs can do without.
lost: dict[str, str] = {}
# Whether this process acts after verl's imports, and whether it leaves that to a patched verl.
installed = False
left_to_patch = False


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


class Unfit(Exception):
    """verl does not have what a hook relies on; the message says what."""


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
            f"set VERL_USE_EXTERNAL_MODULES=gradloc_verl on every node{leave_out}."
        )
