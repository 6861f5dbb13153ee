"""What a failed pass leaves in memory, and what is tried before the other ranks are given up."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock, call

import pytest
import torch
import torch.distributed as dist
from notation import Patch

from gradloc.fsdp import failed_pass
from gradloc.fsdp.collectives import RankLostError
from gradloc.fsdp.failed_pass import RecordedCollectives
from gradloc.fsdp.state import _release_in_flight
from gradloc.guarded import release_frames


@pytest.fixture
def one_of_two(monkeypatch: Patch) -> Iterator[None]:
    """A process group of this process alone, which is taken for one of two ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(failed_pass, "world_size", lambda: 2)
    yield
    dist.destroy_process_group()


def interrupted() -> tuple[RecordedCollectives, Exception]:
    """Recorded calls, and the error that interrupted the second of two."""
    recorded, tensor = RecordedCollectives(), torch.ones(3)
    with recorded.recording():
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    try:
        with recorded.recording():
            dist.all_reduce(tensor)
            raise torch.OutOfMemoryError("CUDA out of memory.")
    except torch.OutOfMemoryError as error:
        return recorded, error
    raise AssertionError


@pytest.mark.parametrize("failures", [0, 2, 4, 5])
def test_an_allocation_for_the_replay_is_tried_again(one_of_two: None, monkeypatch: Patch, failures: int) -> None:
    recorded, error = interrupted()
    interrupted_call = recorded._recorded_calls[1]
    all_reduce = Mock(wraps=interrupted_call.function)
    zeros = Mock(wraps=torch.zeros, side_effect=[torch.OutOfMemoryError()] * failures + [DEFAULT])
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(failed_pass, "_PAUSE", 0.0)
    object.__setattr__(interrupted_call, "function", all_reduce)
    if failures == 5:
        with pytest.raises(RankLostError, match="OutOfMemoryError"):
            recorded.complete(error)
    else:
        recorded.complete(error)
    assert zeros.call_count == min(failures + 1, 5) and all_reduce.call_count == (failures < 5)


def test_a_collective_call_that_fails_is_not_made_again(one_of_two: None) -> None:
    recorded, error = interrupted()
    lost = Mock(side_effect=RuntimeError("connection closed by peer"))
    object.__setattr__(recorded._recorded_calls[1], "function", lost)
    with pytest.raises(RankLostError, match="connection closed"):
        recorded.complete(error)
    assert lost.call_count == 1


@pytest.mark.parametrize("explicit", [False, True])
def test_errors_behind_an_error_let_go_of_their_tensors(explicit: bool) -> None:
    def use(tensor: torch.Tensor) -> None:
        held.append(weakref.ref(activation := tensor * 2))
        raise ValueError(activation.shape)

    def run_out_of_memory(tensor: torch.Tensor) -> None:
        try:
            use(tensor)
        except ValueError as error:
            raise torch.OutOfMemoryError from error if explicit else None

    held: list[weakref.ref[torch.Tensor]] = []
    gc.disable()
    try:
        try:
            run_out_of_memory(torch.ones(3))
        except torch.OutOfMemoryError as caught:
            error = caught
        assert held[0]() is not None
        error.__context__.__context__ = error  # errors may form a cycle
        release_frames(error)
        assert held[0]() is None
    finally:
        gc.enable()


def test_buffers_are_let_go_after_their_events() -> None:
    """What an interrupted pass leaves in FSDP2 before torch 2.12, with the attributes of torch 2.9's classes."""
    stream = Mock()
    context = SimpleNamespace(
        all_gather_state=SimpleNamespace(all_gather_result=object(), event="gathered"),
        reduce_scatter_state=SimpleNamespace(reduce_scatter_input=object(), event="scattered"),
        post_forward_order=[1],
    )
    group = SimpleNamespace(
        _all_gather_result=SimpleNamespace(all_gather_output=object(), all_gather_event=None),
        _all_reduce_state=SimpleNamespace(all_reduce_input=object(), event="reduced"),
        _partial_reduce_output=object(),
        _post_reduce_event="post-reduced",
        _reshard_after_forward_event=None,
    )
    for holder in (context, group):
        _release_in_flight(holder, stream)
    waited = ["gathered", "scattered", "reduced", "post-reduced"]
    assert stream.wait_event.call_args_list == [call(event) for event in waited]
    assert vars(context) == {"all_gather_state": None, "reduce_scatter_state": None, "post_forward_order": [1]}
    assert set(vars(group).values()) == {None}
