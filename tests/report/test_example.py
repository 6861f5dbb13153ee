"""The evidence of a real run that README.md shows, as a user reads it after `pip install .`."""

import json
from pathlib import Path

import pytest

from gradloc.__main__ import main
from gradloc.tools.opening import open_bundle

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/spike"


def test_the_example_is_shown_as_in_the_readme(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(EXAMPLE), "--html", str(page)]) == 0
    out = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    readme = (ROOT / "README.md").read_text()
    table = readme.partition("```\n")[2].partition("```")[0].splitlines()
    assert len(table) == 3 and all(line in out for line in table)
    assert "gradloc report examples/spike" in readme and page.is_file()


def test_the_example_is_small_and_its_bundle_opens() -> None:
    files = [file for file in EXAMPLE.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 300_000
    (line,) = (EXAMPLE / "spikes.jsonl").read_text().splitlines()
    event = json.loads(line)
    bundle = open_bundle(EXAMPLE / event["replay"])
    assert len(bundle.micro_batches) == len({(each["rank"], each["micro_batch"]) for each in event["culprits"]}) == 2
