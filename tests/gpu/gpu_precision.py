"""bf16, fp16 with its gradient scaler, and flash attention where it is installed, against brute force."""

from __future__ import annotations

import importlib.util

import pytest
import test_actions
import test_actor
import test_drill
from actors import Case
from gpu_search import ONE, THREE, cases
from test_actor import Launch
from test_configurations import HALF_PRECISION

FLASH = "flash_attention_2"
needs_flash_attention = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="flash attention is not installed"
)


@cases(
    *[
        Case(wrap, precision=precision, loss_scale=scale, planted=THREE)
        for precision, scale in HALF_PRECISION
        for wrap in ("fsdp2", "fsdp1", "fsdp1-orig")
    ]
)
def test_planted_tokens_are_found(launch: Launch, case: Case) -> None:
    test_actor.check_planted_tokens(launch, 1, case)


@cases(
    *[
        Case(wrap, precision=precision, loss_scale=scale, optimizer="adamw", planted=THREE)
        for precision, scale in HALF_PRECISION
        for wrap in ("fsdp2", "fsdp1")
    ]
)
def test_training_is_bit_identical_after_a_search(launch: Launch, case: Case) -> None:
    test_actor.check_bit_identity(launch, 1, case)


@cases(*[Case(precision=precision, loss_scale=scale, planted=ONE) for precision, scale in HALF_PRECISION])
def test_drop_takes_the_culprits_out(launch: Launch, case: Case) -> None:
    test_actions.test_drop_takes_the_culprits_out(launch, 1, case)


@cases(Case("fsdp1", precision="float16", loss_scale=2.0**14), Case(precision="bfloat16"))
def test_a_drill_finds_its_token(launch: Launch, case: Case) -> None:
    test_drill.test_a_drill_finds_its_token_and_leaves_training_bit_identical(launch, 1, case, {})


@needs_flash_attention
@cases(
    *[
        Case(wrap, precision=precision, loss_scale=scale, attention=FLASH, packed=packed, planted=THREE)
        for precision, scale in HALF_PRECISION
        for wrap in ("fsdp2", "fsdp1")
        for packed in (False, True)
    ]
)
def test_planted_tokens_are_found_with_flash_attention(launch: Launch, case: Case) -> None:
    test_actor.check_planted_tokens(launch, 1, case)


@needs_flash_attention
@cases(Case(precision="bfloat16", attention=FLASH, packed=True, optimizer="adamw", planted=THREE))
def test_training_is_bit_identical_with_flash_attention(launch: Launch, case: Case) -> None:
    test_actor.check_bit_identity(launch, 1, case)
