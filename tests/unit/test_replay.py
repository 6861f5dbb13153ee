"""Bundles from the keeping to the replay: what is refused, and what a replay says. In one process, without verl."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from evidence import replay_result
from notation import Caplog, Capsys, Patch, cases
from small_bundles import VOCABULARY, bundle, kept, replayed, resave, resign, resign_tensors, spikes, tensors_of

from gradloc.bundles import bundle_writer, limits
from gradloc.bundles.layout import NotReplayableError
from gradloc.replay import memory, replaying
from gradloc.replay.command import main
from gradloc.replay.measuring import measure
from gradloc.replay.model import Variant, default_variant, load, other_variants
from gradloc.replay.verdict import sentences
from gradloc.search.findings import Alone
from gradloc.tools.opening import open_bundle

__all__ = ["bundle", "kept"]


def flip(bundle: Path) -> None:
    data = bytearray(tensors_of(bundle).read_bytes())
    data[-1] ^= 1
    tensors_of(bundle).write_bytes(data)


def link(bundle: Path) -> None:
    path = tensors_of(bundle)
    path.rename(bundle.parent / "elsewhere")
    path.symlink_to(bundle.parent / "elsewhere")


def pickled(bundle: Path) -> None:
    torch.save({"a": 1}, tensors_of(bundle))
    resign_tensors(bundle)


def append(path: Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


# Damages to a bundle's files, and to its manifest and tensors with checksums that fit again.
OF_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut off": (lambda b: tensors_of(b).write_bytes(tensors_of(b).read_bytes()[:500]), "is cut off: it has"),
    "changed": (flip, "does not match its checksum: it was changed."),
    "a link": (link, "is not an ordinary file."),
    "pickled": (pickled, "rank0-micro_batch0.safetensors is damaged"),
    "manifest gone": (lambda b: (b / limits.MANIFEST).unlink(), "is not a replay bundle"),
    "manifest changed": (lambda b: append(b / limits.MANIFEST, b" "), "manifest.json does not match its checksum"),
}
MICRO_BATCHES = "its field 'micro_batches' is missing or malformed"
Manifest = dict[str, Any]


def of_entry(**changes: Any) -> Callable[[Manifest], Any]:
    """Changes of the micro-batch."""
    return lambda m: m["micro_batches"][0].update(changes)


def manifest(**changes: Any) -> Callable[[Manifest], Any]:
    return lambda m: m.update(changes)


CLIPS = "its field 'clips' is missing or malformed"
CLIP = {"action": "os.system", "factor": 4.0, "usual": {}, "limit": 1}
OF_MANIFEST: dict[str, tuple[Callable[[Manifest], Any], str]] = {
    "a path": (of_entry(file="../../secret"), "'../../secret' is not the name of the file of its micro-batch"),
    "later format": (manifest(format=9), "has format 9"),
    "deep": (lambda m: m["versions"].update(a=json.loads("[" * 450 + "]" * 450)), "parsed: it nests too deep."),
    "full of lists": (lambda m: m["versions"].update(a=[[]] * 1_000_001), "it has over 1,000,000 lists and objects."),
    "many tokens": (lambda m: m["measured"].extend(m["measured"][:1] * 2048), "measured tokens, and 2,048 are the lim"),
    "a tiny scale": (lambda m: m["event"].update(loss_scale=1e-200), "which no gradient scaler has"),
    "huge": (of_entry(bytes=10**15), "which is too much"),
    "endless norm": (of_entry(norm=10**400), MICRO_BATCHES),
    "other layers": (manifest(layers=["a"]), "are not those of the model"),
    "far token": (lambda m: m["event"]["culprits"][0].update(position=99), "names a token that its micro-batch does"),
    "one clip": (manifest(clips={"token_clip": None}), CLIPS),
    "another action": (manifest(clips={"layer_clip": None, "token_clip": CLIP}), CLIPS),
}
WEIGHT = "tokens.weight"
OF_TENSORS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another dtype": (lambda t: t.update({WEIGHT: t[WEIGHT].double()}), f"{WEIGHT} must be torch.float32 of shape (2,"),
    "negative ids": (lambda t: t["input_ids"].neg_(), "must not be negative"),
    "wrong lengths": (lambda t: t["row_lengths"].add_(1), "do not add up"),
    "no temperature": (lambda t: t["temperature"].zero_(), "temperature must be positive"),
    "stowaway": (lambda t: t.update(more=torch.ones(1)), "'more' is not a tensor of a bundle"),
    "no coefficient": (lambda t: t.pop("tokens.coefficient"), "tokens.coefficient is missing"),
}
DAMAGES = OF_FILES | {
    name: (lambda b, change=change, write=write: write(b, change), message)
    for write, table in ((resign, OF_MANIFEST), (resave, OF_TENSORS))
    for name, (change, message) in table.items()
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_bundle_is_refused_in_one_sentence(bundle: Path, kept: Path, capsys: Capsys, damage: str) -> None:
    change, message = DAMAGES[damage]
    open_bundle(bundle)  # it is whole
    change(bundle)
    for options in ([], ["--search"]):
        assert main([str(bundle), "--model", str(kept / "model"), *options]) == 2
        out, error = capsys.readouterr()
        assert out == "" and error.count("\n") == 1 and message in error, error


def test_figures_of_a_manifest_are_no_reason_to_fail(bundle: Path, kept: Path, capsys: Capsys) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["event"] |= {"global_norm": math.nan, "seconds": 1e308}
        for entry in [*manifest["micro_batches"], *manifest["measured"], *manifest["event"]["culprits"]]:
            entry["layer_norms"] = dict.fromkeys(entry["layer_norms"], 1e200)

    resign(bundle, change)
    assert "carries" in " ".join(replayed(bundle, kept / "model", capsys)["sentences"])


@pytest.mark.target(version="0.9.1")
@cases(
    "options message",
    ([], "The bundle's model is None, which is no folder of this machine: give it with --model."),
    (["--model", "a/b/c"], "There is no such folder: --model a/b/c\n"),
    (["--model", "wider"], "its hidden_size is 20, and 16 was trained."),
    (["--model", "deeper"], "is not the bundle's: its layers differ in layers.2."),
    (["--model", "model", "--adapter", "x"], "was recorded without a LoRA adapter"),
    (["--model", "model"], f"has the token {VOCABULARY}, and the model's vocabulary ends at {VOCABULARY - 1}."),
)
def test_a_wrong_model_is_refused(bundle: Path, kept: Path, capsys: Capsys, options: list[str], message: str) -> None:
    if "vocabulary" in message:
        resave(bundle, lambda tensors: tensors["input_ids"].fill_(VOCABULARY))
    options = [str(kept / option) if (kept / option).is_dir() else option for option in options]
    assert main([str(bundle), *options]) == 2
    *progress, error = capsys.readouterr().err.splitlines(keepends=True)
    assert message in error and all("min  loading the model " in line for line in progress), progress


@pytest.mark.target(version="0.9.1")
def test_buffers_keep_their_precision(kept: Path) -> None:
    opened = open_bundle(kept / "replay" / "step1-epoch0-mini_batch0")
    model = load(opened, str(kept / "model"), Variant("bfloat16", "sdpa"), "cpu", None, False)
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.module.buffers()} == {torch.float32}


FLASH = "flash_attention_2"


@pytest.mark.target(version="0.9.1")
@cases(
    "recorded asked device variants",
    ("float32, sdpa", ", ", "cpu", ["float32, sdpa", "float32, eager"]),
    (f"bfloat16, {FLASH}", ", ", "cpu", ["bfloat16, sdpa", "float32, sdpa", "bfloat16, eager"]),
    ("bfloat16, sdpa", f", {FLASH}", "cuda", [f"bfloat16, {FLASH}", "float32, sdpa", "bfloat16, eager"]),
    ("int4, sdpa", ", ", "cpu", ["float32, sdpa", "float32, eager"]),
)
def test_a_replay_computes_as_asked(bundle: Path, recorded: str, asked: str, device: str, variants: list[str]) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["dtype"], manifest["model"]["attention"] = recorded.split(", ")

    resign(bundle, change)
    chosen = default_variant(open_bundle(bundle), *(each or None for each in asked.split(", ")), device)
    assert [str(variant) for variant in (chosen, *other_variants(chosen))] == variants


def test_a_comparison_without_enough_memory_is_left_out(
    bundle: Path, kept: Path, monkeypatch: Patch, capsys: Capsys
) -> None:
    def measured(opened: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        if model.module.config._attn_implementation == full:
            torch.empty(2**60)
        return measure(opened, model, *arguments, **options)

    monkeypatch.setattr(replaying, "measure", measured)
    full = "eager"
    found = replayed(bundle, kept / "model", capsys)
    assert found["notes"] == ["Not compared with float32, eager: it takes more memory than there is."]
    assert found["variants"] == []
    full = "sdpa"
    assert main([str(bundle), "--model", str(kept / "model")]) == 2
    said = "float32, sdpa takes more memory than there is. Take another --device, --dtype or --attention, or a machine "
    assert said in capsys.readouterr().err


def test_the_memory_of_a_container_counts(tmp_path: Path, monkeypatch: Patch) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    monkeypatch.setattr(memory, "_PROC", proc)
    monkeypatch.setattr(memory, "_CGROUPS", groups)
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 500 kB\nSwapFree: 20 kB\n")
    assert memory.free_memory("cpu") == 520 * 1024
    (proc / "self" / "cgroup").write_text("0::/pod/worker\n")
    for group, limit in ((groups / "pod" / "worker", "max"), (groups / "pod", "300000")):
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.current").write_text("200000\n")
        (group / "memory.stat").write_text("anon 150000\nfile 50000\n")
    assert memory.free_memory("cpu") == 150000


def test_a_resumed_run_keeps_both_bundles_of_a_step(tmp_path: Path) -> None:
    first = [event["replay"] for event in spikes(tmp_path, count=1)]
    second = [event["replay"] for event in spikes(tmp_path, count=2, most=2)]
    assert first == ["replay/step1-epoch0-mini_batch0"]
    assert second == ["replay/step1-epoch0-mini_batch0-2", None]
    open_bundle(tmp_path / second[0])


def test_a_manifest_has_the_largest_of_the_tokens_measured(monkeypatch: Patch) -> None:
    name = (0, 0)
    alone = [Alone(0.5, norm, torch.zeros(0)) for norm in (3.0, math.nan, 4.0)]
    alone.append(Alone(0.25, 2.0, torch.zeros(0)))
    measured = {(name, 0, i): each for i, each in enumerate(alone)}
    found: Any = SimpleNamespace(measured=measured, row=lambda token: 7, layer_norms=lambda token: {})
    monkeypatch.setattr(limits, "MEASURED_TOKENS", 3)
    listed = bundle_writer.measured_tokens(found, {name: None})
    assert [token["position"] for token in listed] == [1, 2, 3]
    assert [token["grad_norm"] for token in listed[1:]] == [8.0, 8.0] and listed[1]["row"] == 7


def test_what_cannot_be_replayed_is_said_once(tmp_path: Path, caplog: Caplog, monkeypatch: Patch) -> None:
    refuse = Mock(side_effect=NotReplayableError("inputs with images cannot be replayed"))
    assert [event["replay"] for event in spikes(tmp_path, count=2, rows=refuse)] == [None, None]
    assert caplog.text.count("inputs with images cannot be replayed") == 1

    # A write that fails leaves nothing behind.
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(28, "No space left on device")))
    assert [event["replay"] for event in spikes(tmp_path)] == [None]
    assert list((tmp_path / "replay").iterdir()) == [] and "No space left on device" in caplog.text


@cases(
    "limit value are_kept said",
    ("ROWS", 1, [False, False], "are the limits"),
    ("BUNDLE_BYTES", 1000, [False, False], "1,000 are the limit"),
    ("TOTAL_BYTES", 1000, [True, False], "no more replay bundles are kept"),
    ("MANIFEST_BYTES", 100, [False, False], "its manifest would take"),
)
def test_a_bundle_over_a_limit_is_not_written_and_that_said_once(
    tmp_path: Path, monkeypatch: Patch, caplog: Any, limit: str, value: int, are_kept: list[bool], said: str
) -> None:
    monkeypatch.setattr(limits, limit, value)
    assert [event["replay"] is not None for event in spikes(tmp_path, count=2)] == are_kept
    assert caplog.text.count(said) == 1 and len([*tmp_path.rglob("*.safetensors")]) == sum(are_kept)


CULPRITS = [{"culprit": True, "replayed": norm} for norm in (50.0, 20.0, 9.0)]
APART = {"tokens": 4, "nonfinite": 0, "mean": 0.5, "max": 1.0}


def result(**changes: Any) -> dict[str, Any]:
    """A result of one micro-batch over its threshold, for the sentences that are made from it."""
    unit = {"rank": 0, "micro_batch": 1, "norm": 50.0, "threshold": 10.0, "replayed": 50.0, "others": [50.0]}
    facts: dict[str, Any] = {"tokens": [], "culprits": 3, "layers": [], "threshold": 10.0, "scale": None}
    facts |= {"dtype": "float32", "variant": "float32, sdpa", "variants": ["float32, eager"], "temperature": None}
    facts |= {"recorded_dtype": "float32", "checkpoint": "/runs/global_step_2/actor"}
    return replay_result(3, units=[{**unit, **changes.pop("unit", {})}], **(facts | changes))


@cases(
    "changes part",
    ({}, "The spike comes back: rank 0, micro-batch 1 has a gradient norm of 50, and had 50 in training."),
    ({"unit": {"replayed": 50.5}}, "The spike comes back with another size"),
    ({"unit": {"replayed": math.inf, "norm": "NaN"}}, "The spike comes back: "),
    ({"unit": {"replayed": 9.0}}, "The spike does not come back"),
    ({"unit": {"replayed": 9.0, "norm": "NaN"}}, "The spike does not come back"),
    ({"unit": {"norm": None}}, "over its threshold: 50 of 10; no norm of it was recorded."),
    ({"unit": {"others": [4.0]}}, "It vanishes with float32, eager: the norm is 4 there, so float32, sdpa makes"),
    ({}, "these are the weights of training."),
    ({"log_probs": APART}, "The bundle is of step 3; the last checkpoint before it was /runs/global_step_2/actor."),
    ({"tokens": CULPRITS}, "2 of 3 culprits are over τ = 10 again."),
    ({"tokens": CULPRITS, "culprits": 40}, "2 of the 3 largest culprits, of 40 in all, are over τ = 10 again."),
    ({"layers": [{"layer": "a", "norm": 1.0, "replayed": 3.0, "others": []}]}, "a carries 100% of the squared norm"),
)
def test_sentences_of_a_replay_follow_its_figures(changes: dict[str, Any], part: str) -> None:
    assert any(part in sentence for sentence in sentences(result(**changes)))
