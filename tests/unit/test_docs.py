"""The documentation: its links lead somewhere, and it names what the evidence and the code have."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from notation import Capsys

import apply_patch
from gradloc import __main__, __version__, levels, lines
from gradloc.judge import forms
from gradloc.judge.identities import IDENTITIES
from gradloc.judge.records import MOST_RECORDS
from gradloc.judge.rules import SOURCES
from gradloc.tools import schema
from tools import field_tables

ROOT = Path(__file__).parents[2]
TOP_LEVEL = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "changelog.d/README.md")]
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
    **{rf"gradloc[. ]{name}": __main__.module_of(name).main for name in __main__._NEEDS},
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


EVIDENCE, VERDICT, CAUSES = (
    (ROOT / f"docs/reference/{name}.md").read_text() for name in ("evidence", "verdict", "causes")
)


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
    assert len(files) == len(set(files)) == 33 and all(file.is_file() for file in files)


def test_the_table_of_sources_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|$", EVIDENCE.split("## What looks wrong with a culprit")[1], re.M)
    expected = [(name, rule.meaning) for name, rule in SOURCES.items()]
    assert rows[: len(expected)] == expected
    assert SOURCES.keys() - {"other"} <= in_backticks_or_headings(CAUSES)


def in_backticks_or_headings(text: str) -> set[str]:
    headings = re.findall(r"^##+ (.*)$", text, re.M)
    return in_backticks(text) | {name for heading in headings for name in heading.split(" and ")}


# Texts of gradloc/judge/forms.py whose key does not begin with a residual of their identity.
OF_LOG_PROBS = ("old_log_probs", "rollout_log_probs", "reference")
PLACES = {
    **dict.fromkeys(("moved", "repeated", "unrelated"), OF_LOG_PROBS),
    **dict.fromkeys(("other", "stale", "partly_stale", "adapter_scale", "rollout"), ["rollout_log_probs"]),
    "old": ["old_log_probs"],
}


def closed_forms() -> dict[str, set[str]]:
    """By identity, the names that gradloc/judge/forms.py may give it."""
    found: dict[str, set[str]] = {}
    for key, name in forms._NAMES.items():
        stage = key.partition(".")[0]
        for identity in ["finite"] if key.endswith(".broken") else PLACES.get(stage, [stage]):
            if name != identity:
                found.setdefault(identity, set()).add(name)
    return found


def test_the_tables_of_identities_and_of_their_names_are_those_of_the_code() -> None:
    section = VERDICT.split("\n## Identities")[1].split("\n## ")[0]
    rows = re.findall(r"^`(\w+)` \| (.*?) \| .+ \| .+$", section, re.M)
    assert rows == [(each.name, each.holds) for each in IDENTITIES]
    section = VERDICT.split("\n## Warnings")[1].split("\n## ")[0]
    table: dict[str, set[str]] = {}
    for cells in re.findall(r"^(`.*?) \| (`.*?) \| .+$", section, re.M):
        names, identities = (re.findall(r"`(\w+)`", cell) for cell in cells)
        for identity in identities:
            table.setdefault(identity, set()).update(names)
    assert table == closed_forms()
    assert {each.name for each in IDENTITIES}.union(*table.values()) <= in_backticks_or_headings(CAUSES)


def test_the_counts_that_pages_state_are_those_of_the_code() -> None:
    tree = ast.parse((ROOT / "benchmarks/blind_faults.py").read_text())
    values = {
        target.id: each.value
        for each in tree.body
        if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None
        for target in (each.targets if isinstance(each, ast.Assign) else [each.target])
        if isinstance(target, ast.Name)
    }
    kinds = len(ast.literal_eval(values["TABLE"]).strip().splitlines())
    recipes = 0
    for key, value in zip(values["HEALTHY"].keys, values["HEALTHY"].values, strict=True):
        recipes += 1 if key else len(ast.literal_eval(value.generators[0].iter))  # a comprehension over names
    pages = {page.name: page.read_text() for page in [ROOT / "README.md", *DOCS]}
    assert f"plants {kinds} kinds of faults" in pages["README.md"] and f"**: {kinds} kinds" in pages["blind.md"]
    assert f"trains {recipes} healthy recipes" in pages["README.md"] and f"**: {recipes}, " in pages["blind.md"]
    assert f"the {recipes} healthy recipes" in pages["identities.md"]
    level, at_once = levels.LEVEL, levels.LEVEL**levels.LASTS
    verdict = " ".join(VERDICT.split())
    assert f"{at_once:g} times at once, {level:g} times in three updates" in verdict and levels.LASTS == 3
    assert f"The last {MOST_RECORDS} updates" in VERDICT


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_the_changelog_has_the_version_and_fragments_have_a_kind() -> None:
    assert f"\n## [{__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
    for fragment in (ROOT / "changelog.d").iterdir():
        assert fragment.name == "README.md" or re.fullmatch(r"[\w-]+\.(added|changed|fixed)\.md", fragment.name)
        assert fragment.name == "README.md" or fragment.read_text().startswith("- ")
