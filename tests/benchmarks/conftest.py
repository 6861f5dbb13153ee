import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

if TYPE_CHECKING:
    from grpo_run import Usual

Start = tuple[dict[str, torch.Tensor], "Usual"]


@pytest.fixture(scope="session")
def learned() -> Start:
    """The start weights and usual norms of the benchmarks' quick settings, which take longer than many a test."""
    from grpo_run import measure_usual
    from stability import QUICK
    from sums_task import learn_from_examples

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weights = learn_from_examples(0, QUICK.skill)
        return weights, measure_usual(QUICK, weights, 0)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def keep_start(learned: Start) -> Callable[[Path, int], None]:
    """Puts the start where a benchmark with this file of results looks for that of a seed."""

    def keep(results: Path, seed: int = 0) -> None:
        folder = results.with_suffix(".starts")
        folder.mkdir()
        torch.save((learned[0], dataclasses.asdict(learned[1])), folder / f"{seed}.pt")

    return keep
