"""The processes that the other tests here run: a hang ends with stacks, and after a failure the others may fail."""

import time
from collections.abc import Iterator

import cluster
import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, RankFailed

pytestmark = pytest.mark.slow


@pytest.fixture
def two() -> Iterator[Cluster]:
    started = Cluster(2)
    assert started.run(dist.get_rank) == [0, 1]
    yield started
    started.stop()


def wait_for_the_others() -> None:
    dist.all_reduce(torch.ones(1))


def make_a_call_too_many() -> None:
    if dist.get_rank() == 0:
        wait_for_the_others()


def fail_later() -> None:
    time.sleep(1 - dist.get_rank())
    raise ValueError(f"of rank {dist.get_rank()}")


def test_a_hang_ends_with_the_stacks(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(RankFailed) as failure:
        patch.setattr(cluster, "SECONDS", 2.0)
        two.run(make_a_call_too_many)
    message = str(failure.value)
    assert message.startswith("rank 0: no answer for 2 s\n") and "rank 1" not in message
    assert "in wait_for_the_others" in message and "in make_a_call_too_many" in message
    assert two.run(dist.get_rank) == [0, 1]  # in new processes


def test_after_a_failure_the_others_may_fail(two: Cluster) -> None:
    with pytest.raises(RankFailed, match="rank 0: Traceback(.|\n)*of rank 0(.|\n)*rank 1: Traceback(.|\n)*of rank 1"):
        two.run(fail_later)
