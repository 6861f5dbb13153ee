"""benchmarks/scoring.py, with small numbers: what it prints, and that the numbers fit together."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import trees

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scoring.py"
POOL = ["pool, as a batch", "pool, one by one from 16 threads"]
FRESH = ["a fresh process, spawned", "a fresh process, forked"]


def run(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *options], text=True, capture_output=True)


def tables(text: str) -> list[dict[str, list[str]]]:
    """The rows of each table by their first cell, without the heads."""
    found = []
    for block in re.split(r"\n[|-]+\n", text)[1:]:
        rows = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("| ")]
        found.append({name: cells for name, *cells in rows if name != "scored by"})
    return found


def test_the_benchmark() -> None:
    # Of 51 answers, one hangs.
    result = run("--answers", "51", "--rounds", "1", "--workers", "2", "--limit", "5", "--fresh", "1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("51 ordinary answers, 2 workers, ")
    speeds, public, forms, hangs = tables(result.stdout)
    assert list(speeds) == ["plain calls in this process", *POOL, *FRESH]
    assert speeds["plain calls in this process"][1::2] == ["100.0%", "100.0%"]
    assert all(float(cell.strip("%")) > 0 for cells in speeds.values() for cell in cells)
    for name in FRESH:
        assert result.stdout.count(f"times as fast as {name}, at 1/") == 1

    plain = "plain calls in this process"
    # What the pool adds to Math-Verify costs no right answer of the public pairs, and none of them is rewarded wrongly.
    (right, wrong), (right_of_plain, wrong_of_plain) = public[POOL[1]], public[plain]
    assert right == right_of_plain and wrong != wrong_of_plain
    assert len(set(wrong.split(" of "))) == 1
    assert list(forms) == [plain, POOL[1]]

    assert "With 1 answers that hang, limit 5 s" in result.stdout
    assert list(hangs) == POOL
    for seconds, bound, without, rest, over in (map(float, cells) for cells in hangs.values()):
        # Numbers are rounded to a tenth.
        assert bound == 2.5 and seconds >= 5 - 0.1 and over >= 0
        assert rest == pytest.approx(seconds - bound - without, abs=0.21)


@pytest.mark.target(version="0.9.1")
def test_the_comparison_with_upstream(base_tree: Path) -> None:
    options = ["--answers", "24", "--rounds", "1", "--workers", "4", "--limit", "5", "--fresh", "0"]
    result = run(*options, "--base-tree", str(base_tree))
    if trees.TARGET.startswith("0.7."):
        assert result.returncode == 2 and "has no pool: it is not that of verl 0.9" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    speeds, public, forms, hangs = tables(result.stdout)
    upstream = "verl's own pool of 4, one by one from 16 threads"
    assert list(speeds) == ["plain calls in this process", *POOL, upstream]
    assert "One by one, the pool is " in result.stdout
    # Both ask Math-Verify, with the same options; ours repairs some of what it gets wrong.
    assert list(public) == list(forms) == ["plain calls in this process", POOL[1], upstream]
    ours, theirs = ([int(cell.split()[0]) for cell in forms[name]] for name in (POOL[1], upstream))
    assert all(our > their > 0 for our, their in zip(ours, theirs, strict=True))
    assert list(hangs) == [*POOL, upstream]


def test_bad_numbers() -> None:
    assert "must be greater than 0" in run("--answers", "0").stderr
