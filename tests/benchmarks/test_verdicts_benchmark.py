"""The benchmark of verdicts: its shares against plain counting, and that it runs."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

if importlib.util.find_spec("verl.workers.actor") is None:
    pytest.skip("these train with the actor of verl 0.7", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import simulated_nulls  # noqa: E402
from rule_shares import LIMITS, culprit_shares, null_cell  # noqa: E402
from verl.utils.gradloc.evidence.sources import RULES  # noqa: E402
from verl.utils.gradloc.evidence.verdict import COMMON  # noqa: E402

pytestmark = pytest.mark.slow
NONE = dict.fromkeys([rule.name for rule in RULES], 0.0)


def test_the_null_distribution_counts_tokens_and_not_mini_batches() -> None:
    found = [{"ordinary": {"a": 0.1, "b": None}, "tokens": 30}, {"ordinary": {"a": COMMON, "b": None}, "tokens": 10}]
    assert null_cell("a", found) == "14% · 25% [1]" and null_cell("b", found) == "–"
    assert null_cell("a", found[:1]) == "10% · 10%"


def test_the_shares_of_culprits_are_those_of_all_events() -> None:
    first = {"culprits": [["token", "unlikely"], ["layer"]], "ordinary": NONE | {"unlikely": 0.1}, "tokens": 30}
    second = {"culprits": [["token"]], "ordinary": NONE | {"unlikely": 0.5, "layer": None}, "tokens": 10}
    bare = [{"culprits": found, "ordinary": NONE, "tokens": 99} for found in (None, [])]
    shares = culprit_shares([first, *bare, second])
    assert shares == {"token": (2 / 3, 0.0), "unlikely": (1 / 3, pytest.approx(0.2)), "layer": (1 / 3, None)}
    assert culprit_shares(bare) == {}


def test_the_limits_are_those_of_rules() -> None:
    assert LIMITS.keys() <= {rule.name for rule in RULES}


def test_rules_that_are_simulated() -> None:
    """Culprits by chance name no reward; a mismatch of most tokens now and then begins at a turn."""
    assert all(simulated_nulls.misfires(way, 30, 0) == 0 for way in simulated_nulls.WAYS)
    assert simulated_nulls.retokenized(0.01, 2000, 0) == 0 < simulated_nulls.retokenized(0.5, 2000, 0) < 20
    rows = simulated_nulls.mini_batch(random.Random(1))
    drawn = simulated_nulls.culprits("the largest wrong ones", rows, random.Random(1))
    assert 3 <= len(drawn) == len(set(drawn)) and all(rows[i].advantage > 0 for i in drawn)


def test_natural_runs(keep_start: Callable[[Path], None], tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    keep_start(results)
    program = [sys.executable, str(BENCHMARKS / "verdicts.py"), "--quick", "--seeds", "0", "--results", str(results)]
    done = subprocess.run([*program, "--rows", "natural", "spiking"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = json.loads(results.read_text())["runs"]
    assert all(one["verdict"] is None and one["culprits"] is None for one in runs["0 | natural"])
    # GRPO: each token of a response has its advantage, and few have over 2.5 medians of all.
    shares = [one["ordinary"]["advantage"] for one in runs["0 | natural"]]
    assert 0 < max(shares) < 0.5 and all(one["ordinary"]["layer"] is None for one in runs["0 | natural"])
    # The largest ordinary gradients are over a smaller threshold; what is named are the tokens', not a fault.
    spikes = [one for one in runs["0 | spiking"] if one["culprits"]]
    assert spikes and all(norm > 1 for one in spikes for norm in one["norms"])
    assert {one["verdict"] for one in spikes} <= {"no known cause", "advantage", "unlikely"}
    assert all(len(one["layer_odds"]) == len(one["culprits"]) for one in spikes if one["layer_odds"])
    assert "| `advantage` | over 2.5 medians | " in done.stdout and "| odds of the largest layer" in done.stdout
    again = subprocess.run([*program, "--rows", "natural", "spiking"], capture_output=True, text=True)
    assert again.stdout.startswith("Seeds: 1.") and done.stdout.endswith(again.stdout) and "of 2" not in again.stderr
    unknown = subprocess.run([*program, "--rows", "gremlins"], capture_output=True, text=True)
    assert unknown.returncode == 1 and "unknown rows ['gremlins']" in unknown.stderr
