# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The actor of the verl that is installed: 0.7's own, or 0.9's FSDP engine behind the same calls.

The engine's calls are those of tests/multirank/engine_actor.py, so that benchmarks measure what the tests test.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent


def _has_engine() -> bool:
    """Whether an engine trains the actor, as since verl 0.8; verl is not imported for that, which takes seconds."""
    verl = importlib.util.find_spec("verl")
    return verl is not None and verl.origin is not None and not (Path(verl.origin).parent / "workers/actor").is_dir()


ENGINE = _has_engine()

if ENGINE:
    sys.path.insert(0, str(ROOT / "tests/multirank"))


def actor_class() -> Any:
    """The patched actor; called with its configuration, a wrapped model and an optimizer."""
    if ENGINE:
        from engine_actor import EngineActor

        return EngineActor
    from verl.workers.actor.dp_actor import DataParallelPPOActor

    return DataParallelPPOActor


def stock_actor_class(base_tree: Path) -> Any:
    """The actor of the unpatched verl in `base_tree`, beside the patched one."""
    if ENGINE:
        os.environ["GRADLOC_BASE_TREE"] = str(base_tree)  # where engine_actor looks for it
        from engine_actor import StockEngineActor

        return StockEngineActor
    path = base_tree / "verl/workers/actor/dp_actor.py"
    spec = importlib.util.spec_from_file_location("stock_dp_actor", path)
    assert spec is not None and spec.loader is not None  # as of every path that ends with .py
    sys.modules["stock_dp_actor"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DataParallelPPOActor


def log_probs(actor: Any, tensors: dict[str, Tensor], temperature: float) -> Tensor:
    """The actor's own forward of a micro-batch, with its graph: log-probs of shape (rows, response length)."""
    if ENGINE:
        return actor.forward(tensors, temperature)[0]
    outputs = actor._forward_micro_batch(tensors, temperature=temperature)
    return outputs["log_probs"] if isinstance(outputs, dict) else outputs[1]  # by name since verl 0.7.1


def prepare_cpu() -> None:
    """Makes verl 0.9 take the CPU for one of its devices, here and in the processes started from here.

    Before verl is imported. verl 0.7 needs nothing.
    """
    if ENGINE:
        os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "embedded")
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
