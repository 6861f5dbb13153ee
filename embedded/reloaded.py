# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The fault `resume`: training loads a checkpoint, and one of its weights is not what was saved."""

import functools
import logging
from typing import Any

import torch
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from . import of_gradloc

logger = logging.getLogger(__name__)

PARAMETER = "model.norm.weight"
FACTOR = 10.0


def load_a_checkpoint(engine: bool) -> None:
    """Makes each training worker load the first checkpoint that it has saved, by verl's own way, as after a restart.

    It does so before it computes the next log-probs: then the rollout still has the right weights.

    Args:
        engine (bool): Whether an engine trains the actor, as since verl 0.8.
    """
    worker: Any
    computing: Any
    if engine:
        from verl.workers.engine import FSDPEngineWithLMHead

        worker = of_gradloc("adapters.fsdp_engine").WatchedEngine
        computing, name = FSDPEngineWithLMHead, "infer_batch"
    else:
        from verl.workers.fsdp_workers import ActorRolloutRefWorker

        worker, computing, name = ActorRolloutRefWorker, ActorRolloutRefWorker, "compute_log_prob"
    save, log_probs = worker.save_checkpoint, getattr(computing, name)

    @functools.wraps(save)
    def saving(self: Any, local_path: str, *args: Any, **kwargs: Any) -> Any:
        saved = save(self, local_path, *args, **kwargs)
        self.to_load = [local_path] if not hasattr(self, "to_load") else []
        return saved

    @functools.wraps(log_probs)
    def with_a_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        while getattr(self, "to_load", []):
            self.load_checkpoint(self.to_load.pop(), del_local_after_load=False)
        return log_probs(self, *args, **kwargs)

    worker.save_checkpoint = saving
    setattr(computing, name, with_a_load)
    load = FSDPCheckpointManager.load_checkpoint

    @functools.wraps(load)
    def loading(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        ((found, parameter),) = [each for each in self.model.named_parameters() if each[0].endswith(PARAMETER)]
        with torch.no_grad():
            parameter.mul_(FACTOR)
        logger.warning("Fault 'resume', planted on purpose: %s is loaded %g times as large", found, FACTOR)

    FSDPCheckpointManager.load_checkpoint = loading  # type: ignore[method-assign]  # on purpose
