"""Bundles of a small model's spikes, in one process without verl, and what may be wrong with them."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from notation import Capsys
from plain_passes import Loop
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gradloc import record_events
from gradloc.bundles import limits
from gradloc.bundles.bundle_writer import BundleWriter
from gradloc.bundles.layout import Row
from gradloc.replay.command import main
from gradloc.tools.results import RESULT
from gradloc.tools.schema import EVENT, conforms

ROWS, PROMPT, RESPONSE, VOCABULARY = 2, 3, 5, 23
THRESHOLD = 1e3
# The row and position of the token with a huge advantage.
BAD = (1, 2)
NAME = "step1-epoch0-mini_batch0"


def small_model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.3, attn_implementation="sdpa", **sizes)
    config.update(changes)
    return LlamaForCausalLM(config)


def save_other_weights(folder: Path) -> str:
    """Saves a small model whose weights are not those of training."""
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def rows_of(inputs: dict[str, Any]) -> list[Row]:
    return [Row(ids, torch.arange(len(ids)), RESPONSE, 1.0) for ids in inputs["input_ids"]]


def writer_of(
    model: LlamaForCausalLM,
    directory: Path,
    most: int = 4,
    rows: Callable[[Any], list[Row]] = rows_of,
    **changes: Any,
) -> BundleWriter:
    """What keeps the bundles of a model's spikes; the changes are those of what it knows of the run."""
    facts = {name: getattr(model.config, name) for name in ("model_type", "vocab_size", "hidden_size")}
    context: dict[str, Any] = {"model": {**facts, "path": None, "attention": "sdpa"}, "dtype": "float32"}
    context |= {"grad_clip": 1.0, "checkpoint": None, "actor": {}, **changes}
    return BundleWriter(str(directory), most, rows, lambda: context)


def random_ids(first: int = 0) -> Tensor:
    return torch.randint(first, VOCABULARY, (ROWS, PROMPT + RESPONSE))


def spike(
    model: LlamaForCausalLM,
    writer: BundleWriter | None,
    threshold: float,
    step: int,
    ids: Sequence[Tensor],
    advantages: Sequence[Tensor],
    of_loss: float = 1.0,
    of_reduced: float = 1.0,
    old: bool = False,
    dtype: str = "float32",
) -> dict[str, Any]:
    """The event of a step in this dtype, of micro-batches with these ids and advantages; `old` log-probs may be known.

    The loss is `of_loss` times what it should be, and the gradient is then multiplied by `of_reduced`.
    """

    def logits(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=getattr(torch, dtype), enabled=dtype != "float32"):
            return model(input_ids=ids, use_cache=False).logits.float()

    parts = {"bundle_writer": writer}
    loop = Loop(model, torch.stack([*ids]), PROMPT, logits, parts=parts, grad_norm_threshold=threshold)
    with closing(loop.gradloc):
        loop.gradloc.start_update(step)
        for index, advantage in enumerate(advantages):
            known = (lambda log_prob: {"old_log_prob": log_prob}) if old else (lambda _: {})
            loop.run_pass(index, advantage, factor=of_loss, facts_of=known)
        for parameter in model.parameters():
            parameter.grad *= of_reduced
        loop.gradloc.locate(0, 0)
    model.zero_grad()
    (event,) = loop.gradloc.events
    return event


def spikes(directory: Path, count: int = 1, rows: Callable[[Any], list[Row]] = rows_of, most: int = 4) -> list[Any]:
    """The events of steps whose spike is kept."""
    model = small_model()
    writer = writer_of(model, directory, most, rows)
    ids, advantages = random_ids(), torch.ones(ROWS, RESPONSE)
    advantages[BAD] = 1e5
    return [spike(model, writer, THRESHOLD, step, [ids], [advantages]) for step in range(1, count + 1)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and with the evidence and the bundle of one spike."""
    folder = tmp_path_factory.mktemp("kept")
    small_model().save_pretrained(folder / "model")
    small_model(hidden_size=20).save_pretrained(folder / "wider")
    small_model(num_hidden_layers=3).save_pretrained(folder / "deeper")
    (event,) = spikes(folder)
    assert [(culprit["row"], culprit["position"]) for culprit in event["culprits"]] == [BAD]
    record_events(str(folder), [event])
    return folder


@pytest.fixture
def bundle(kept: Path, tmp_path: Path) -> Path:
    """A copy of the bundle that may be damaged."""
    copy = tmp_path / "replay" / "step1"
    shutil.copytree(kept / "replay" / NAME, copy)
    return copy


def printed(arguments: Sequence[str | Path], capsys: Capsys) -> dict[str, Any]:
    """What the command prints as JSON: the result of a replay, or the event of a search."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert conforms(found, RESULT) or conforms(found, EVENT)
    return found


def replayed(bundle: Path, model: Path, capsys: Capsys, *options: str) -> dict[str, Any]:
    return printed([bundle, "--model", model, "--json", *options], capsys)


@pytest.fixture
def replay(bundle: Path, kept: Path, capsys: Capsys) -> Callable[..., dict[str, Any]]:
    """Gives the result of a replay of the bundle without comparisons, with more options."""
    return partial(replayed, bundle, kept / "model", capsys, "--only")


def tensors_of(bundle: Path) -> Path:
    (path,) = bundle.glob("*.safetensors")
    return path


class Pickled:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def resign(bundle: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifest, with a checksum that fits again, as somebody with bad intentions would."""
    manifest = json.loads((bundle / limits.MANIFEST).read_text())
    change(manifest)
    text = json.dumps(manifest).encode()
    (bundle / limits.MANIFEST).write_bytes(text)
    (bundle / limits.CHECKSUM).write_text(f"{hashlib.sha256(text).hexdigest()}  {limits.MANIFEST}\n")


def resign_tensors(bundle: Path) -> None:
    """Gives the manifest a checksum that fits the tensors again."""
    data = tensors_of(bundle).read_bytes()
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    resign(bundle, lambda manifest: manifest["micro_batches"][0].update(facts))


def resave(bundle: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Changes the tensors, with checksums that fit again."""
    path = tensors_of(bundle)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    resign_tensors(bundle)
