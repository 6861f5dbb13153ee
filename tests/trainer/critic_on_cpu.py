"""An external module for verl: a critic without flash attention, which verl's loader asks for."""

from typing import Any

from transformers import AutoModelForTokenClassification

_original = AutoModelForTokenClassification.from_pretrained


def _with_sdpa(*arguments: Any, **options: Any) -> Any:
    return _original(*arguments, **{**options, "attn_implementation": "sdpa"})


AutoModelForTokenClassification.from_pretrained = _with_sdpa
