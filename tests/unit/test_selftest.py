"""`gradloc selftest`, on a CPU: its figures of time and memory are those of a GPU only there."""

import json
import math
import shutil
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from as_torchrun import torchrun
from huggingface_hub import HfApi, constants, errors
from notation import Capsys, Patch, cases
from small_bundles import small_model

from gradloc import GradLoc
from gradloc.replay.model import find_model
from gradloc.selftest import command, measuring
from gradloc.selftest.command import main, sentence

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
    assert result["exchange_seconds"] is None and "exchange" not in told
    assert result["steps"] == 3 and not result["drop"]["same_gradient"] and not torch.distributed.is_initialized()


UNKNOWN = errors.RepositoryNotFoundError("404", response=Mock())
MIRROR = errors.HfHubHTTPError("403", response=Mock())


@cases(
    "name error told",
    ("./modle", None, "There is no such folder: --model ./modle\n"),
    ("modle", UNKNOWN, "There is no such folder: --model modle. Nor has the hub a model of this name.\n"),
    ("modle", ConnectionError(), "folder: --model modle. Nor can the hub be asked for it (ConnectionError).\n"),
)
def test_a_model_that_is_nowhere_is_asked_for_once(
    capsys: Capsys, monkeypatch: Patch, name: str, error: Exception | None, told: str
) -> None:
    ask = Mock(side_effect=error)
    monkeypatch.setattr(HfApi, "model_info", ask)
    monkeypatch.setattr(socket, "getaddrinfo", pytest.fail)
    assert main(["--model", name]) == 2
    assert capsys.readouterr().err.endswith(told) and ask.call_count == (error is not None)


def test_the_hubs_copy_on_this_machine_comes_first(model: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = tmp_path / "models--a--b"
    copy = shutil.copytree(model, folder / "snapshots" / "1")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1")
    ask = Mock(side_effect=[None, MIRROR, ConnectionError()])
    monkeypatch.setattr(HfApi, "model_info", ask)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert find_model("a/b") == str(copy) and not ask.called
    (copy / "model.safetensors").unlink()  # as in a download that was cut off
    assert [find_model("a/b") for _ in range(3)] == ["a/b", "a/b", str(copy)] and ask.call_count == 3


def test_figures_that_cannot_be_written_are_told_after_the_sentence(
    model: str, tmp_path: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(command, "write_output", Mock(side_effect=OSError(28, "No space left on device", "a.json")))
    assert main(["--model", model, *SHORT, "--output", str(tmp_path / "a.json")]) == 2
    out, error = capsys.readouterr()
    assert out.startswith("GradLoc works here: ") and error == "selftest: No space left on device: a.json\n"


def test_a_folder_without_a_model_is_told_in_a_sentence(tmp_path: Path, capsys: Capsys) -> None:
    assert main(["--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"selftest: {tmp_path} cannot be loaded: " in error and error.count("\n") == 1 and len(error) < 600


@pytest.mark.slow
def test_two_ranks_find_it(model: str, tmp_path: Path) -> None:
    done = torchrun(tmp_path, "selftest", "--model", model, *SHORT, "--output", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    seconds = json.loads((tmp_path / "figures.json").read_text())["exchange_seconds"]
    assert seconds > 0 and f"the ranks exchange 8 MiB of objects in {seconds:.2g} s" in done.stdout
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
