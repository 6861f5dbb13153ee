# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The fault `resume`: each checkpoint is loaded as soon as it is saved, and brings another learning rate with it."""

import functools
import logging
from typing import Any

from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

logger = logging.getLogger(__name__)

# An optimizer's checkpoint has its learning rate, which comes before that of the configuration.
FACTOR = 1000.0


def load_each_checkpoint(engine: bool) -> None:
    """Makes each training worker load what it has saved, by verl's own way, as after a restart.

    Args:
        engine (bool): Whether an engine trains the actor, as since verl 0.8.
    """
    worker: Any
    if engine:
        from verl.utils.gradloc.adapters.fsdp_engine import WatchedEngine as worker
    else:
        from verl.workers.fsdp_workers import ActorRolloutRefWorker as worker
    save = worker.save_checkpoint

    @functools.wraps(save)
    def saving(self: Any, local_path: str, *args: Any, **kwargs: Any) -> Any:
        saved = save(self, local_path, *args, **kwargs)
        self.load_checkpoint(local_path, del_local_after_load=False)
        return saved

    worker.save_checkpoint = saving
    load = FSDPCheckpointManager.load_checkpoint

    @functools.wraps(load)
    def loading(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        if getattr(self, "brought_a_rate", False):  # it is in the later checkpoints
            return
        self.brought_a_rate = True
        for group in self.optimizer.param_groups:
            group["lr"] *= FACTOR
        self.lr_scheduler.base_lrs = [rate * FACTOR for rate in self.lr_scheduler.base_lrs]
        rate = self.optimizer.param_groups[0]["lr"]
        logger.warning("Fault 'resume', planted on purpose: a learning rate of %g comes with the checkpoint", rate)

    FSDPCheckpointManager.load_checkpoint = loading  # type: ignore[method-assign]  # on purpose
