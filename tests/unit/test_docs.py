"""The documentation: its links lead somewhere, and it names what the evidence and the code have."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from notation import Capsys

import apply_patch
from gradloc import __version__, lines
from gradloc.convert.command import main as convert
from gradloc.judge.rules import SOURCES
from gradloc.replay.command import main as replay
from gradloc.report.command import main as report
from gradloc.selftest.command import main as selftest
from gradloc.tools import schema
from tools import field_tables

ROOT = Path(__file__).parents[2]
TOP_LEVEL = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*TOP_LEVEL, *DOCS]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short_and_its_links_lead_somewhere(page: Path) -> None:
    assert page not in DOCS or len(page.read_text().split()) <= 2050
    assert re.findall(r"^[A-Z_]{4,}$", page.read_text(), re.M) == []  # no placeholder is left
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    r"apply_patch\.py": apply_patch.main,
    r"gradloc[. ]convert": convert,
    r"gradloc[. ]replay": replay,
    r"gradloc[. ]report": report,
    r"gradloc[. ]selftest": selftest,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_options_that_pages_give_it(name: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit):
        COMMANDS[name](["--help"])
    known = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out))
    text = "\n".join(page.read_text().replace("\\\n", " ") for page in PAGES[:2] + PAGES[3:])  # not what has changed
    commands = re.findall(rf"{name}\b([^`#|\n]*)", text)
    written = {option for command in commands for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", command)}
    assert written and written <= known


def fields(form: Any) -> set[str]:
    """The names of all fields in a JSON Schema, at any depth."""
    if isinstance(form, list):
        return set().union(*map(fields, form))
    if not isinstance(form, dict):
        return set()
    return set(form.get("properties", ())) | fields(list(form.values()))


def in_backticks(text: str) -> set[str]:
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", text))))


EVIDENCE = (ROOT / "docs/reference/evidence.md").read_text()


def test_the_tables_of_fields_are_those_of_the_code() -> None:
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs/reference").glob("*.md")))
    assert sorted(re.findall(r"<!-- fields: (\w+) -->", pages)) == sorted(field_tables.TABLES)
    assert field_tables.main(["--check"]) == 0
    for name, table in field_tables.tables().items():
        named = re.findall(r"`(\w+)`", " ".join(re.findall(r"^(`.*?) \|", table, re.M)))
        assert sorted(named) == sorted(get_type_hints(getattr(lines, field_tables.TABLES[name])))
    assert fields(schema.EVENT) | fields(schema.NOTE) <= in_backticks(EVIDENCE)


def test_the_way_of_a_spike_leads_through_files_that_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## The way of a spike")[1].split("\n## ")[0]
    package, folder, files = ROOT / "gradloc", "", []
    for name in re.findall(r"`([\w/]+\.py)`", section):  # a bare name is in the folder of the one before it
        folder = name.rpartition("/")[0] if "/" in name or (package / name).is_file() else folder
        files.append(package / folder / Path(name).name)
    assert len(files) == len(set(files)) == 26 and all(file.is_file() for file in files)


def test_the_table_of_sources_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|$", EVIDENCE.split("## What looks wrong with a culprit")[1], re.M)
    expected = [(rule.name, rule.meaning) for rule in SOURCES.values()]
    assert rows[: len(expected)] == expected
    # Every source has known causes.
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/reference/causes.md").read_text(), re.M)
    named = {name for heading in headings for name in heading.split(" and ")}
    assert SOURCES.keys() - {"other"} <= named


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    # The changelog has the version.
    name = "Unreleased" if ".dev" in __version__ else __version__
    assert re.search(rf"^## \[{re.escape(name)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
