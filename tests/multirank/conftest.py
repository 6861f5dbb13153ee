"""The ranks of all tests here, and what they need before verl is imported."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from cluster import DEVICE, Cluster

import trees

if DEVICE == "cuda":
    # A look for GPUs must not start CUDA, because the ranks' server forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
elif trees.TARGET and not trees.TARGET.startswith("0.7."):
    # verl 0.9 takes a CPU for one of its devices if the embedded profile's module says so, in the ranks as well.
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "embedded")

CLUSTERS: dict[int, Cluster] = {}


@pytest.fixture
def launch() -> Callable[..., list[Any]]:
    """Runs a function in so many ranks, which are kept for the next test of the file."""

    def run(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return CLUSTERS.setdefault(world_size, Cluster(world_size)).run(function, *arguments)

    return run


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the ranks with the last test of a file: each group that they have left has threads, which wake up often."""
    if nextitem is None or nextitem.path != item.path:
        for cluster in CLUSTERS.values():
            cluster.stop()
