"""What an interrupted pass leaves in FSDP2 before torch 2.12, by stand-ins: the tests run on a newer torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gradloc.fsdp.state import _release_in_flight


class Stream:
    """Notes the events that it waits for."""

    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


def test_buffers_are_let_go_after_their_events() -> None:
    """With the attributes of torch 2.9's FSDPCommContext and FSDPParamGroup."""
    stream = Stream()
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
    assert stream.waited == ["gathered", "scattered", "reduced", "post-reduced"]
    assert vars(context) == {"all_gather_state": None, "reduce_scatter_state": None, "post_forward_order": [1]}
    assert set(vars(group).values()) == {None}
