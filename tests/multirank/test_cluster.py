"""The processes that the other tests here run: a hang ends with stacks, and slowness is none."""

import time
from collections.abc import Iterator

import cluster
import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, RankFailed

pytestmark = pytest.mark.slow


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(cluster, "IDLE_SECONDS", 2.0)
    monkeypatch.setattr(cluster, "IDLE_SECONDS_AFTER_FAILURE", 2.0)
    started = Cluster(2)
    yield started
    started.stop()


def work(seconds: float) -> None:
    """Uses a processor for so many seconds."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def wait_for_the_others() -> None:
    dist.all_reduce(torch.ones(1))


def make_a_call_too_many() -> int:
    if dist.get_rank() == 0:
        wait_for_the_others()
    return dist.get_rank()


def work_while_the_other_waits(seconds: float) -> int:
    if dist.get_rank() == 1:
        work(seconds)
    wait_for_the_others()
    return dist.get_rank()


def fail_later(seconds: float) -> None:
    work(seconds * (1 - dist.get_rank()))
    raise ValueError(f"of rank {dist.get_rank()}")


def test_a_hang_ends_with_the_stacks(two: Cluster) -> None:
    with pytest.raises(RankFailed) as failure:
        two.run(make_a_call_too_many)
    message = str(failure.value)
    assert message.startswith("rank 0: no answer; idle for 2 s\n") and "rank 1" not in message
    assert "in wait_for_the_others" in message and "in make_a_call_too_many" in message
    assert two.run(work_while_the_other_waits, 0.0) == [0, 1]  # in new processes


def test_after_a_failure_the_others_may_fail_slowly(two: Cluster) -> None:
    with pytest.raises(RankFailed, match="rank 0: Traceback(.|\n)*of rank 0(.|\n)*rank 1: Traceback(.|\n)*of rank 1"):
        two.run(fail_later, 3.0)
