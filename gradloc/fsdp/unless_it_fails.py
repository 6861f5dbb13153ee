# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A diagnostic must not end the training run, nor let it hang."""

import logging
from collections.abc import Callable
from typing import TypeVar

from . import collectives
from .failed_pass import RankLostError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def is_known_on_all_ranks(error: Exception) -> bool:
    """Whether all ranks have met this error, so that training can go on without one waiting for another."""
    return collectives.world_size() == 1 or isinstance(error, collectives.RankFailedError)


def unless_it_fails(run: Callable[[], Result], otherwise: Result, what: str) -> Result:
    """Calls `run`, which makes collective calls; if it fails on all ranks, logs that and returns `otherwise`.

    Args:
        run (Callable): The diagnostic; called on all ranks.
        otherwise (Result): The result if it fails.
        what (str): Its name, the start of a sentence.

    Raises:
        RankLostError: It failed on this rank alone, and the other ranks may wait for it: the run is aborted instead of
            deadlocked.
    """
    try:
        return run()
    except RankLostError:
        raise
    except Exception as error:
        if not is_known_on_all_ranks(error):
            raise RankLostError(
                f"{what} failed on this rank ({type(error).__name__}: {error}), which cannot be propagated to the "
                "other ranks"
            ) from error
        logger.warning("%s failed; training continues", what, exc_info=True)
        return otherwise
