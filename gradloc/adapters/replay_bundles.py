# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a bundle has of verl: the samples of a micro-batch, the model's path, the settings and the last checkpoint."""

import dataclasses
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import verl
from torch import Tensor

from ..bundles.layout import NotReplayableError, Row
from ..evidence.writer import jsonable


def padded_rows(inputs: Mapping[str, Any]) -> list[Row]:
    """The samples of a micro-batch of verl 0.7: its inputs are padded on both sides."""
    _refuse_images(inputs.get("multi_modal_inputs"), inputs["position_ids"].dim() > 2)
    prompt_width = inputs["input_ids"].shape[1] - inputs["responses"].shape[1]
    return [
        _unpadded(*row, prompt_width, float(inputs["temperature"]))
        for row in zip(inputs["input_ids"], inputs["position_ids"], inputs["attention_mask"].bool(), strict=True)
    ]


def ragged_rows(inputs: Mapping[str, Any]) -> list[Row]:
    """The samples of a micro-batch of verl 0.9's engine: its inputs have no padding."""
    settings = inputs["settings"]
    _refuse_images(settings.get("multi_modal_inputs"), any(ids.dim() > 1 for ids in inputs["position_ids"]))
    temperature = float(settings.get("temperature", 1.0))
    rows = zip(inputs["input_ids"], inputs["position_ids"], inputs["response_lengths"], strict=True)
    # Clones: a pickled view takes its whole storage along.
    return [Row(ids.cpu().clone(), positions.cpu().clone(), length, temperature) for ids, positions, length in rows]


def last_checkpoint(dump_dir: str) -> str | None:
    """The newest checkpoint of the actor in the run's folder, in which `bisect_dump_dir` lies by default."""
    found = Path(dump_dir).absolute().parent.glob("global_step_*/actor")
    steps = {path.parent.name.removeprefix("global_step_"): str(path) for path in found}
    newest = max((step for step in steps if step.isdecimal()), key=int, default=None)
    return None if newest is None else steps[newest]


def _unpadded(input_ids: Tensor, position_ids: Tensor, valid: Tensor, prompt_width: int, temperature: float) -> Row:
    places = valid.nonzero().flatten().tolist()
    start, stop = (places[0], places[-1] + 1) if places else (0, 0)
    if stop - start != len(places) or start > prompt_width:
        raise NotReplayableError("an attention mask has a hole, which a replay without padding cannot compute")
    return Row(input_ids[valid].cpu(), position_ids[valid].cpu(), max(stop - prompt_width, 0), temperature)


def _refuse_images(images: Any, wide_positions: bool) -> None:
    if wide_positions or (images is not None and any(images)):
        raise NotReplayableError("inputs with images cannot be replayed")


def engine_context(engine: Any, config: Any) -> dict[str, Any]:
    """What a bundle has of an FSDP engine of verl 0.9."""
    dtype = getattr(engine, "_autocast_dtype", torch.bfloat16)
    return context_of(engine.module, config, dtype, engine.optimizer_config.clip_grad)


def context_of(module: Any, config: Any, dtype: Any, grad_clip: float | None) -> dict[str, Any]:
    """What a bundle has of a run: the model (`module` need only have its `config`), the actor's settings and so on."""
    return {
        "model": _model_facts(module),
        "dtype": str(dtype).removeprefix("torch."),
        "grad_clip": grad_clip,
        "checkpoint": last_checkpoint(config.bisect_dump_dir),
        "actor": jsonable(dataclasses.asdict(config)),
        # verl may run from a checkout that is not installed, which importlib does not know.
        "versions": {"verl": verl.__version__, "transformers": importlib.metadata.version("transformers")},
    }


def _model_facts(module: Any) -> dict[str, Any]:
    config, adapters = getattr(module, "config", None), getattr(module, "peft_config", None) or {}
    names = ("model_type", "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
    path = getattr(config, "name_or_path", None) or None
    return {
        # A replay takes no relative path.
        "path": os.path.abspath(path) if path and os.path.isdir(path) else path,
        "attention": getattr(config, "_attn_implementation", None),
        **{name: getattr(config, name, None) for name in names},
        "adapter": next(map(_adapter_facts, adapters.values()), None),
    }


def _adapter_facts(adapter: Any) -> dict[str, Any]:
    modules = adapter.target_modules
    listed = sorted(modules) if isinstance(modules, (set, frozenset)) else modules
    return {"r": adapter.r, "alpha": adapter.lora_alpha, "target_modules": jsonable(listed)}
