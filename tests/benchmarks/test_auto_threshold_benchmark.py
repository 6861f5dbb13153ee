"""The benchmark of grad_norm_threshold=auto on a tiny random model, and how it judges what it recorded."""

from __future__ import annotations

import json
import math
import random
import string
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from auto_threshold import (  # noqa: E402
    FAULTS,
    Replayed,
    in_place,
    norms_of,
    replay,
    replays,
    schedule,
    upper_bound,
)

pytestmark = pytest.mark.slow

# A random model is never right: here its characters decide. One process, as imports take longest.
MAIN = """
import json, sys
import auto_threshold
auto_threshold.reward = lambda answer, truth: float(sum(map(ord, answer)) % 2)
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    auto_threshold.main()
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What embedded/prepare.py makes, with a smaller vocabulary: single characters."""
    folder = tmp_path_factory.mktemp("prepared")
    tokens = ["<pad>", "<end>", *string.digits, *string.ascii_letters, *" -+:?\n"]
    backend = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<pad>"))
    backend.pre_tokenizer = Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(1)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), **size)).save_pretrained(folder / "model")
    question = "State the final answer to the following arithmetic problem: {} + 1 ="
    rows = [
        {"prompt": [{"content": question.format(i)}], "reward_model": {"ground_truth": str(i + 1)}} for i in range(9)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    return folder


def test_a_run_and_the_same_run_judged_again(prepared: Path, tmp_path: Path) -> None:
    folder = ["--folder", str(tmp_path / "run")]
    size = ["--prepared", str(prepared), "--steps", "6", "--faults", "1", "--first-fault", "25"]
    runs = [[*folder, *size, "--json", str(tmp_path / "run.json")], folder]
    command = [sys.executable, "-c", MAIN, json.dumps(runs)]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert lines.count("| steps | 6 |") == 2 and lines[: len(lines) // 2] == lines[len(lines) // 2 :]
    records = [json.loads(line) for line in (tmp_path / "run/records.jsonl").open()]
    assert [record["number"] for record in records] == list(range(48))
    assert all(record["threshold"] is None for record in records[:20])

    found = json.loads((tmp_path / "run.json").read_text())
    faults = {fault["name"]: fault for fault in found["faults"]}
    assert set(faults) == set(FAULTS) and all(fault["number"] >= 25 for fault in faults.values())
    assert faults["nan"]["verdict"] == "caught" and faults["nan"]["sources"] == ["nonfinite"]
    assert faults["sequence ×100"]["verdict"] == "caught" and faults["sequence ×100"]["over_threshold"] > 1
    assert all(fault["norm"] > 0 for name, fault in faults.items() if name not in ("nan", "bit"))
    # The rule comes to the recorded alarms again.
    run_figures = {name: found["run"][name] for name in Replayed.__dataclass_fields__}
    assert found["replays"]["in its order"] == run_figures


def test_each_fault_comes_as_often_and_is_spaced() -> None:
    planned = schedule(40, 1100, 4, seed=1)
    names = [name for _, name in planned]
    assert sorted(names) == sorted(list(FAULTS) * 4)
    places = [place for place, _ in planned]
    assert places[0] == 40 and min(b - a for a, b in zip(places, places[1:], strict=False)) >= 29


def test_what_counts_as_a_spike_and_as_a_false_alarm() -> None:
    norms = [(1.0 + i % 3, False) for i in range(30)]
    norms += [(2.9, True), (3.1, True), (math.inf, True), (1000.0, False), (0.0, False), (999.0, True), (1e6, True)]
    assert [batch.is_spike for batch in in_place(norms)[30:]] == [False, True, True, False, False, False, True]
    # The rule misses 3.1, and 1000 is a false alarm. 20 of warm-up, one of norm zero.
    assert replay(norms) == Replayed(checked=11, false_alarms=1, faults=5, spikes=3, caught=2)
    never = replay(norms, [False] * len(norms))
    assert (never.false_alarms, never.caught) == (0, 0)


def test_replays_keep_what_they_count() -> None:
    chance = random.Random(1)
    records = [{"norm": math.exp(chance.gauss(0, 0.3)), "fault": None} for _ in range(400)]
    for number in range(50, 400, 50):
        records[number] = {"norm": "nan", "fault": {"name": "nan"}}
    found = replays(norms_of(records))
    assert found["in its order"] == Replayed(checked=373, faults=7, spikes=7, caught=7)
    assert found["shuffled, 20 seeds"].checked == 20 * found["in its order"].checked == 20 * 373
    assert found["largest of 4"].checked == 100 - 7 - 20


@pytest.mark.parametrize(("count", "total", "bound"), [(0, 1000, 0.0029912), (1, 1000, 0.0047348), (5, 10, 0.7776)])
def test_the_bound_of_a_rate(count: int, total: int, bound: float) -> None:
    """Against scipy.stats.beta.ppf(0.95, count + 1, total - count)."""
    assert upper_bound(count, total) == pytest.approx(bound, rel=1e-3)
