"""Kernels and model code with a planted bug: the table of a replay's switches points to it."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from notation import Capsys, Patch, cases
from small_bundles import PROMPT, RESPONSE, ROWS, printed, random_ids, small_model, spike, writer_of
from transformers.models.llama import modeling_llama

from gradloc.replay import memory, replaying, switches
from gradloc.replay.command import main
from gradloc.replay.measuring import measure
from gradloc.replay.memory import needed_memory
from gradloc.replay.model import Variant, load
from gradloc.replay.switches import AS_REPLAYED, Switch, find_switches
from gradloc.replay.verdict import CHANGE, switches_in_words
from gradloc.tools.opening import open_bundle
from gradloc.tools.results import RESULT
from gradloc.tools.schema import conforms

FAINT = 3  # the token whose embedding is small


def recorded(directory: Path, dtype: str = "float32") -> list[str]:
    """The arguments to replay a spike; τ is 0.6 of its norm."""
    model = small_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[FAINT] *= 0.5
    model.save_pretrained(directory / "model")

    torch.manual_seed(3)
    ids = random_ids(FAINT + 1)
    ids[1, PROMPT + 1] = FAINT
    threshold = 1e-9
    for writer in (None, writer_of(model, directory, dtype=dtype)):
        event = spike(model, writer, threshold, 1, [ids], [torch.ones(ROWS, RESPONSE)], dtype=dtype)
        threshold = 0.6 * event["units"][0]["token_equivalent"]
    return [str(directory / event["replay"]), "--model", str(directory / "model"), "--only", "--switches", "--json"]


def rough_norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """RMSNorm whose variance is kept in steps of 0.04: 0 where the hidden state is small."""
    variance = hidden.float().square().mean(-1, keepdim=True)
    variance = variance + ((variance / 0.04).floor() * 0.04 - variance).detach()
    return (self.weight * hidden.float() * torch.rsqrt(variance + self.variance_epsilon)).to(hidden.dtype)


def with_wrong_backward(values: torch.Tensor) -> torch.Tensor:
    """The values as they are; their gradient is 50 times what it should be."""
    if values.requires_grad:
        values.register_hook(lambda gradient: 50 * gradient)
    return values


def rough_rotation(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any) -> Any:
    return tuple(map(with_wrong_backward, rotation(q, k, cos, sin)))


def rough_attention(*arguments: Any, **options: Any) -> torch.Tensor:
    return with_wrong_backward(attend(*arguments, **options))


LLAMA, FUNCTIONAL = modeling_llama.__name__, torch.nn.functional.__name__
attend, rotation = torch.nn.functional.scaled_dot_product_attention, modeling_llama.apply_rotary_pos_emb


@pytest.mark.target(version="0.9.1")
@cases(
    "where bug switch look",
    (f"{LLAMA}.LlamaRMSNorm.forward", rough_norm, "RMSNorm in float32", "how RMSNorm is computed"),
    (f"{LLAMA}.apply_rotary_pos_emb", rough_rotation, "rotary embedding in float32", "rotary embedding is computed"),
    (f"{FUNCTIONAL}.scaled_dot_product_attention", rough_attention, "attention: eager", "implementation of attention"),
)
def test_the_table_points_to_a_bug(
    tmp_path: Path, monkeypatch: Patch, capsys: Capsys, where: str, bug: Callable[..., Any], switch: str, look: str
) -> None:
    monkeypatch.setattr(where, bug)
    arguments = recorded(tmp_path)
    result = printed(arguments, capsys)
    assert result["sentences"][0].startswith("The spike comes back")
    rows = {row["name"]: row for row in result["switches"]}
    threshold, norm = result["units"][0]["threshold"], result["units"][0]["replayed"]
    assert rows[AS_REPLAYED] == {**rows[AS_REPLAYED], "norm": norm, "log_probs": 0.0}
    assert {name for name, row in rows.items() if row["norm"] < threshold} == {switch}
    assert (rows[switch]["log_probs"] > 0.01) == (bug is rough_norm)
    (sentence,) = [text for text in result["sentences"] if text.startswith("Switched alone")]
    assert sentence.startswith(f"Switched alone, '{switch}' takes the spike away") and sentence.endswith(f"{look}.")
    # The switch makes it the model without the bug.
    monkeypatch.undo()
    opened = open_bundle(arguments[0])
    healthy = load(opened, arguments[2], Variant("float32", "sdpa"), "cpu", None, False)
    (expected,) = measure(opened, healthy, [], names=[opened.first]).units.values()
    assert rows[switch]["norm"] == pytest.approx(expected.norm, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_bug_no_switch_changes_much(tmp_path: Path, capsys: Capsys, dtype: str) -> None:
    result = printed(recorded(tmp_path, dtype), capsys)
    names = [row["name"] for row in result["switches"]]
    precisions = {"float32", "bfloat16", "float64"} - {dtype}
    assert names[:3] == [AS_REPLAYED, "RMSNorm in float32", "rotary embedding in float32"]
    assert {"attention: sdpa, math", "attention: eager", *(f"precision: {name}" for name in precisions)} <= {*names}
    norms = [row["norm"] for row in result["switches"]]
    assert max(norms) < CHANGE * min(norms)
    if dtype == "float32":
        same = [row["norm"] for row in result["switches"] if row["name"] != "precision: bfloat16"]
        assert same == pytest.approx([norms[0]] * len(same), rel=1e-4)
    assert any(sentence.startswith("No switch changes the norm") for sentence in result["sentences"])


def test_a_model_is_left_as_it_was(tmp_path: Path) -> None:
    arguments = recorded(tmp_path)
    model = load(open_bundle(arguments[0]), arguments[2], Variant("float32", "sdpa"), "cpu", None, False)
    before = {id(child): dict(vars(child)) for child in model.module.modules()}
    in_place = [switch for switch in find_switches(Variant("float32", "sdpa"), "cpu") if switch.variant is None]
    assert len(in_place) == 4
    for switch in in_place:
        with pytest.raises(ValueError), switch.on(model):
            raise ValueError
    assert all(vars(child) == before[id(child)] for child in model.module.modules())
    assert modeling_llama.apply_rotary_pos_emb is rotation


def test_what_cannot_be_switched_is_noted(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    errors = (TypeError, AttributeError, ValueError)
    failing = [Switch(error.__name__, Mock(side_effect=error("it cannot be"))) for error in errors]
    monkeypatch.setattr(switches, "_NORMS", "NoSuchNorm")
    monkeypatch.setattr(switches, "_ROTATE", "no_such_function")
    monkeypatch.setattr(replaying, "find_switches", lambda *of: [*find_switches(*of), *failing])
    notes = printed(recorded(tmp_path), capsys)["notes"]
    assert "Not switched to 'RMSNorm in float32': the model has no RMSNorm." in notes
    assert "Not switched to 'rotary embedding in float32': the model's rotary embedding is not known." in notes
    assert {f"Not switched to '{error.__name__}': it cannot be." for error in errors} <= {*notes}


def test_the_result_is_on_disk_before_each_switch(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    """The system ends a process that takes too much memory by SIGKILL, without an error."""
    arguments = [argument for argument in recorded(tmp_path) if argument != "--only"]
    path = Path(f"{arguments[0]}.result.json")
    before: list[str] = []

    def measured(*of: Any, **options: Any) -> Any:
        before.append(path.read_text() if path.exists() else "")
        return measure(*of, **options)

    monkeypatch.setattr(replaying, "measure", measured)
    assert main(arguments) == 0 and f"The result: {path}\n" in capsys.readouterr().err
    of_replay, _, after_norms, *_ = before
    found = json.loads(after_norms)
    assert of_replay == "" and conforms(found, RESULT) and found["sentences"][0].startswith("The spike comes back")
    assert [row["name"] for row in found["switches"]] == [AS_REPLAYED, "RMSNorm in float32"]
    for note in ("compared with float32, eager", "switched to 'precision: float64'"):
        assert f"Not {note}: the replay ended before." in found["notes"]


def test_a_model_that_cannot_fit_is_not_loaded_for_a_switch(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    arguments = recorded(tmp_path)
    opened, path = open_bundle(arguments[0]), arguments[2]
    module = load(opened, path, Variant("float32", "sdpa"), "cpu", None, False).module
    free = needed_memory(opened, module, torch.float64, "sdpa", is_loaded=False) - 1
    variants: list[str] = []
    modules: list[weakref.ref[torch.nn.Module]] = []
    del module

    def loaded(*of: Any) -> Any:
        assert all(module() is None for module in modules), "the model before it is still in memory"
        model = load(*of)
        variants.append(str(of[2]))
        modules.append(weakref.ref(model.module))
        return model

    monkeypatch.setattr(replaying, "load", loaded)
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    result = printed(arguments, capsys)
    assert variants == ["float32, sdpa", "float32, eager", "bfloat16, sdpa"]
    (note,) = [note for note in result["notes"] if "Not switched" in note]
    assert note.startswith("Not switched to 'precision: float64': it takes more memory than there is: at least ")


@pytest.mark.target(version="0.9.1")
def test_kernels_are_switched_where_they_are_installed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(switches, "find_spec", lambda name: name in ("liger_kernel", "flash_attn") or None)
    found = find_switches(Variant("bfloat16", "sdpa"), "cuda")
    names = ["attention: eager", "attention: flash_attention_2", "fused kernels: Liger"]
    names += ["precision: float32", "precision: float64"]
    assert [switch.name for switch in found if switch.variant is not None] == names
    of_flash = find_switches(Variant("bfloat16", "flash_attention_2"), "cuda")
    assert Switch("precision: float32", variant=Variant("float32", "sdpa")) in of_flash


UNIT = {"replayed": 50.0, "threshold": 10.0, "norm": 50.0}


def rows(**norms: float) -> list[dict[str, Any]]:
    known = {"log_probs": 0.0, "culprit": None}
    return [{"name": name.replace("_", " "), "norm": norm, **known} for name, norm in norms.items()]


@cases(
    "replayed norms said look",
    (50.0, {"RMSNorm": 4.0, "attention": 49.0, "precision": 3.0}, "takes the spike away", "how RMSNorm is computed."),
    (5.0, {"RMSNorm": 4.0, "precision": 49.0}, "makes a spike", "the precision of the whole model."),
    (50.0, {"fused": 20.0, "RMSNorm": 48.0}, "'fused' changes the norm to 20 from 50", "the fused kernels."),
    (50.0, {"RMSNorm": 45.0}, "No switch changes the norm by more than a factor of 1.5", ""),
)
def test_the_specific_switch_is_said(replayed: float, norms: dict[str, float], said: str, look: str) -> None:
    """The most specific of those that change as much, with the norm."""
    facts = {"variant": "float32, sdpa", "dtype": "float32", "recorded_dtype": "float32"}
    (found,) = switches_in_words({**UNIT, "replayed": replayed}, {**facts, "switches": rows(**norms)})
    assert said in found and (not look or f": look at {look}" in found)
    assert said != "takes the spike away" or "a norm of 4 instead of 50 (so do 'precision')" in found
    for none in ([], rows(as_replayed=50.0)):
        assert switches_in_words(UNIT, {**facts, "switches": none}) == []
