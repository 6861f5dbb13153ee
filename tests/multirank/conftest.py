"""The ranks of all tests here, and what they need before verl is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster import Cluster

import trees

# verl 0.9 takes a CPU for one of its devices if the embedded profile's module says so, in the ranks as well.
if trees.TARGET and not trees.TARGET.startswith("0.7."):
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "embedded")


@pytest.fixture(scope="session")
def launch() -> Iterator[Callable[..., list[Any]]]:
    """Runs a function in so many ranks, which are kept for the next test."""
    clusters: dict[int, Cluster] = {}

    def run(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return clusters.setdefault(world_size, Cluster(world_size)).run(function, *arguments)

    yield run
    for cluster in clusters.values():
        cluster.stop()
