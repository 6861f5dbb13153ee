"""`gradloc selftest`, on a CPU: its figures of time and memory are those of a GPU only there."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from as_torchrun import torchrun
from notation import Capsys, Patch, cases
from small_bundles import small_model

from gradloc import GradLoc
from gradloc_tools.selftest import measuring
from gradloc_tools.selftest.command import main, sentence

SHORT = ["--prompt", "4", "--response", "12", "--seconds", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    small_model().save_pretrained(folder)
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
