"""LayerClip: its norms and factors under every wrapping, alone and with GradLoc."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import actors
import layer_clip_cases
import pytest
import test_layer_clip
from test_actor import Launch
from test_layer_clip import HALF

CONFIGURATIONS: list[tuple[dict[str, Any], bool]] = [
    ({"wrap": "fsdp2"}, True),
    *[({"wrap": wrap}, False) for wrap in ("fsdp2", "fsdp1", "fsdp1-orig")],
    *[({"wrap": wrap, "model": "lora"}, False) for wrap in ("fsdp1", "fsdp2")],
    *[({"wrap": wrap, **HALF}, with_gradloc) for wrap in ("fsdp1", "fsdp2") for with_gradloc in (False, True)],
    ({"wrap": "fsdp2", "precision": "bfloat16"}, True),
    ({"wrap": "fsdp2", "offload_policy": True}, False),
]


@pytest.mark.parametrize(
    ("case", "with_gradloc"),
    CONFIGURATIONS,
    ids=["-".join([actors.Case(**case).id, *["with_gradloc"] * both]) for case, both in CONFIGURATIONS],
)
def test_layers_are_clipped_in_every_configuration(launch: Launch, case: dict[str, Any], with_gradloc: bool) -> None:
    test_layer_clip.test_layers_are_clipped_in_every_configuration(launch, 1, case, with_gradloc)


@pytest.mark.parametrize("wrap", ["fsdp2", "fsdp1"])
def test_off_is_what_the_unpatched_actor_does(launch: Launch, wrap: str) -> None:
    (same,) = launch(1, layer_clip_cases.off_and_stock, wrap, False)
    assert all(same.values()), same


@pytest.mark.parametrize("wrap", ["fsdp2", "fsdp1"])
def test_resuming_from_a_checkpoint_is_like_never_stopping(launch: Launch, tmp_path: Path, wrap: str) -> None:
    test_layer_clip.test_resuming_from_a_checkpoint_is_like_never_stopping(launch, tmp_path, wrap)
