# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a model's folder without trusting it.

transformers and peft do what a folder tells them: they import Python files of it, ask a hub for a model that it names,
and unpickle weights. So they are given another folder, which has a copy of the configuration without such keys, and
links to the safetensors files. All else is left out.
"""

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CONFIG, _INDEX, _WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_JSON_BYTES = 64 * 2**20

# Keys at any depth that name code, kernels, models or files to load.
_LEFT_OUT = {
    "auto_map",
    "configuration_files",
    "transformers_weights",
    "name_or_path",
    "_name_or_path",
    "_commit_hash",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "fusion_config",
    # of an adapter
    "auto_mapping",
    "base_model_name_or_path",
    "megatron_config",
    "megatron_core",
}
# They need packages or kernels of their own, and a replay does not imitate them.
_QUANTIZED = {"quantization_config", "compression_config"}


@contextmanager
def safe_model(path: str) -> Iterator[str]:
    """A temporary folder from which the model can be loaded.

    Args:
        path (str): A folder, or a name on the hub. A folder never leads to the hub.

    Raises:
        ValueError: It is no model with safetensors; the message completes the sentence "it cannot be loaded: ...".
        OSError: It cannot be read, or the hub does not have it.
    """
    config = _json(path, _CONFIG)
    if _has_any(config, _QUANTIZED):
        raise ValueError("its weights are quantized, and a replay needs those that were trained")
    files, names = {_CONFIG: config}, [_WEIGHTS]
    if (weights := _weight_map(path)) is not None:
        files[_INDEX] = {"metadata": {}, "weight_map": weights}
        names = sorted(set(weights.values()))
    with _folder(path, files, names) as folder:
        yield folder


@contextmanager
def safe_adapter(path: str) -> Iterator[str]:
    """A temporary folder from which the LoRA adapter of a folder can be loaded.

    Raises:
        ValueError: It is no such folder; the message completes the sentence "it cannot be loaded: ...".
        OSError: It cannot be read.
    """
    if not Path(path).is_dir():
        raise ValueError("there is no such folder")
    config = _json(path, _ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"its peft_type is {config.get('peft_type')!r}, and a replay loads LORA")
    with _folder(path, {_ADAPTER_CONFIG: config}, [_ADAPTER_WEIGHTS]) as folder:
        yield folder


def is_whole(path: str) -> bool:
    """Whether a folder has a configuration and all weights, as safetensors: a download may have been cut off."""
    try:
        weights = _weight_map(path) or {"all": _WEIGHTS}
    except ValueError:
        return False
    return all(_find(path, name) is not None for name in (_CONFIG, *weights.values()))


def unread(path: str) -> list[str]:
    """The names of files in a model's folder that could change the model and are left out."""
    folder = Path(path)
    names = [file.name for file in folder.glob("*.py")] if folder.is_dir() else []
    return sorted(names + [_ADAPTER_CONFIG] * (folder / _ADAPTER_CONFIG).exists())


@contextmanager
def _folder(path: str, files: dict[str, Any], weights: list[str]) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gradloc-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_text(json.dumps(content), encoding="utf-8")
        for name in weights:
            if not re.fullmatch(r"[\w.-]+\.safetensors", name):
                raise ValueError(f"{name!r} is not the name of a safetensors file")
            found = _find(path, name)
            if found is None:
                raise ValueError(f"it has no {name}")
            (Path(folder) / name).symlink_to(found.resolve())
        yield folder


def _weight_map(path: str) -> dict[str, str] | None:
    """The file of each weight; None where one file has all."""
    if _find(path, _WEIGHTS) is not None or _find(path, _INDEX) is None:
        return None
    weights = _json(path, _INDEX).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise ValueError(f"{_INDEX} has no weight_map")
    return weights


def _find(path: str, name: str) -> Path | None:
    """A model's file; None if it is missing, or no ordinary file."""
    if Path(path).is_dir():
        found = Path(path) / name
        return found if found.is_file() else None
    from transformers.utils import cached_file

    on_hub = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if on_hub is None else Path(on_hub)


def _json(path: str, name: str) -> dict[str, Any]:
    """What a file has, without the keys that are left out."""
    found = _find(path, name)
    if found is None:
        raise ValueError(f"it has no {name}")
    if found.stat().st_size > _JSON_BYTES:
        raise ValueError(f"{name} is larger than {_JSON_BYTES:,} bytes")
    try:
        content = _cleaned(json.loads(found.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON, or nests too deep") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} is not an object")
    return content


def _cleaned(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _cleaned(value) for name, value in content.items() if name not in _LEFT_OUT}
    return [_cleaned(value) for value in content] if isinstance(content, list) else content


def _has_any(content: Any, names: set[str]) -> bool:
    """Whether one of the names has a value, at any depth."""
    if isinstance(content, dict):
        return any((name in names and value) or _has_any(value, names) for name, value in content.items())
    return isinstance(content, list) and any(_has_any(value, names) for value in content)
