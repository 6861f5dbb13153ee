"""Runs whose spikes are only recorded, beside the search in training and beside the unpatched engine."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from actor_cases import compare_runs, stock_run, train
from actors import IDENTITY_THRESHOLD, Case, dp_actor, stock_dp_actor
from torch.utils._python_dispatch import TorchDispatchMode


def recorded_and_searched(case: Case, directory: str, **options: Any) -> tuple[dict[str, bool], list[dict[str, Any]]]:
    """A run whose spikes are only recorded, against the unpatched actor, after the same run with the search."""
    detection = {"spike_detection": True, "grad_norm_threshold": IDENTITY_THRESHOLD, "spike_replay": 4, **options}
    searched = train(case, bisect_dump_dir=f"{directory}/searched", **detection)
    dist.barrier()
    recorded = train(case, bisect_dump_dir=f"{directory}/recorded", spike_search="replay", **detection)
    dist.barrier()
    return compare_runs(recorded, stock_run(case)), searched.metrics, recorded.metrics


def collective_calls(case: Case, directory: str) -> dict[str, list[str]]:
    """The collective calls of runs whose spikes are recorded and searched, and of one without any of our own."""

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            if function.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
                self.calls.append(str(function))
            return function(*arguments, **(options or {}))

    found = {}
    for name, module, options in (
        ("recorded", dp_actor, {"spike_detection": True, "spike_search": "replay", "spike_replay": 4}),
        ("searched", dp_actor, {"spike_detection": True}),
        ("stock", stock_dp_actor(), {}),
    ):
        counted = Counted()
        with counted:
            train(
                case, module, bisect_dump_dir=f"{directory}/{name}", grad_norm_threshold=IDENTITY_THRESHOLD, **options
            )
        found[name] = counted.calls
    return found


def with_layer_clip(case: Case, directory: str) -> tuple[bool, int]:
    """Whether LayerClip measured layers in a run whose spikes are recorded, and how many there were."""
    from verl.workers.config import LayerClipConfig

    options = {"spike_detection": True, "grad_norm_threshold": IDENTITY_THRESHOLD, "spike_search": "replay"}
    run = train(case, bisect_dump_dir=directory, layer_clip=LayerClipConfig(enable=True), **options)
    (metrics,) = run.metrics
    return any("layer_clip" in name for name in metrics), int(metrics["actor/gradloc/triggered"])
