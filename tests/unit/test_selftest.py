"""`gradloc selftest`, on a CPU: its figures of time and memory are those of a GPU only there."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from as_torchrun import torchrun
from notation import Capsys, Patch, cases
from transformers import LlamaConfig, LlamaForCausalLM

from gradloc import GradLoc
from gradloc_tools.selftest import measuring
from gradloc_tools.selftest.command import failures, main, sentence

SHORT = ["--prompt", "4", "--response", "12", "--seconds", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = str(tmp_path_factory.mktemp("model"))
    LlamaForCausalLM(LlamaConfig(vocab_size=61, initializer_range=0.1, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: Patch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def test_a_process_finds_what_it_plants(model: str, tmp_path: Path, capsys: Capsys) -> None:
    assert main(["--model", model, *SHORT, "--output", str(tmp_path / "figures.json")]) == 0
    result, told = json.loads((tmp_path / "figures.json").read_text()), capsys.readouterr().out.strip()
    assert told == sentence(result) and told.startswith("GradLoc works here: ")
    assert all(result[name]["found"] and result[name]["passes"] > 0 for name in ("search", "drop", "drill"))
    assert result["search"]["same_gradient"] and result["drop"]["difference"] < 1e-5
    assert result["steps"] == 3 and not result["drop"]["same_gradient"] and not torch.distributed.is_initialized()


@pytest.mark.slow
def test_two_ranks_find_it(model: str, tmp_path: Path) -> None:
    done = torchrun(tmp_path, "selftest", "--model", model, *SHORT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("GradLoc works here: ") and done.stdout.count("GradLoc") == 1


def test_a_search_that_breaks_something_is_told(model: str, capsys: Capsys, monkeypatch: Patch) -> None:
    class Careless(GradLoc):
        def locate(self, epoch: int, mini_batch: int) -> Any:
            located = super().locate(epoch, mini_batch)
            for event in self.events:
                event["culprits"] = []
            if self.events:
                next(self._model.module.parameters()).grad.mul_(-1)
            return located

    monkeypatch.setattr(measuring, "GradLoc", Careless)
    assert main(["--model", model, *SHORT]) == 1
    told = capsys.readouterr().out
    assert told.startswith("GradLoc does NOT work here: search: the planted token was not found")
    assert "the search has changed the gradient" in told


@cases(
    "error told",
    (torch.OutOfMemoryError("too much"), "smaller --rows or --response may fit. too much"),
    (None, "is inf with this"),
)
def test_what_fails_is_told(model: str, capsys: Capsys, monkeypatch: Patch, error: Exception | None, told: str) -> None:
    def step(self: Any, *_: Any) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(measuring.SelfTest, "_step", step)
    monkeypatch.setattr(GradLoc, "metrics", lambda self: {"actor/gradloc/token_norm_max": math.inf})
    assert main(["--model", model, *SHORT]) == 3
    assert told in capsys.readouterr().err


def test_memory_is_told_where_it_is_known() -> None:
    part = {"found": True, "passes": 4, "error": None, "seconds": 2.0, "same_gradient": True, "peak": 5 * 2**30}
    result = {"detection": 0.003, "steps": 12, "step_seconds": 1.0}
    result |= {"peak": {"off": 2**30, "detection": 2**30}, "search": part}
    result |= {"drop": {**part, "same_gradient": False, "difference": 0.01}, "drill": part}
    assert not failures(result)
    wrong = failures({**result, "drop": {**part, "difference": math.nan}})
    assert wrong == ["what spike_action=drop leaves differs by nan% from the gradient without the token"]
    assert sentence(result) == (
        "GradLoc works here: detection +0.3% (median of 12 pairs of steps); a search of 4 passes takes 2.0 steps; GiB "
        "more than training at the peak: detection 0.0, search 4.0, drop 4.0, drill 4.0."
    )
