"""The documentation: its links lead somewhere, and it names every field of the evidence."""

import re
from pathlib import Path
from typing import Any

import pytest

from gradloc import __version__
from gradloc.evidence import schema
from gradloc.evidence.sources import SOURCES

ROOT = Path(__file__).parents[2]
TOP_LEVEL = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*TOP_LEVEL, *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_placeholder_is_left(page: Path) -> None:
    assert re.findall(r"^[A-Z_]{4,}$", page.read_text(), re.M) == []


def test_the_changelog_has_the_version() -> None:
    name = "Unreleased" if ".dev" in __version__ else __version__
    assert re.search(rf"^## \[{re.escape(name)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M)


def fields(form: Any) -> set[str]:
    """The names of all fields in a JSON Schema, at any depth."""
    if isinstance(form, list):
        return set().union(*map(fields, form))
    if not isinstance(form, dict):
        return set()
    return set(form.get("properties", ())) | fields(list(form.values()))


def in_backticks(text: str) -> set[str]:
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", text))))


EVIDENCE = (ROOT / "docs/evidence.md").read_text()
EVENT, NOTE, STEP = schema.EVENT["properties"], schema.NOTE["properties"], schema.STEP["properties"]


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("The event", set(EVENT)),
        ("Units", set(EVENT["units"]["items"]["properties"])),
        ("Culprits", set(EVENT["culprits"]["items"]["properties"])),
        ("Steps", set(STEP)),
        ("Limits of the file", {*NOTE, *NOTE["note"]["enum"]}),
    ],
)
def test_each_part_of_the_evidence_has_its_fields_explained(section: str, names: set[str]) -> None:
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", EVIDENCE, re.M | re.S)
    rows = in_backticks(" ".join(re.findall(r"^\| (.*?) \|", text, re.M)))
    assert rows <= names, "no such field"
    assert names <= rows | in_backticks(re.sub(r"^\|.*", "", text, flags=re.M))


@pytest.mark.parametrize("form", [schema.EVENT, schema.NOTE], ids=["event", "note"])
def test_every_field_of_the_evidence_is_named(form: dict[str, Any]) -> None:
    assert fields(form) <= in_backticks(EVIDENCE)


def test_the_table_of_sources_is_that_of_the_code() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", EVIDENCE.split("## What looks wrong with a culprit")[1], re.M
    )
    expected = [(rule.name, rule.meaning, rule.advice) for rule in SOURCES.values()]
    assert rows[: len(expected)] == expected


def test_every_source_has_known_causes() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/causes.md").read_text(), re.M)
    named = {name for heading in headings for name in heading.split(" and ")}
    assert SOURCES.keys() - {"other"} <= named
