"""patches/README.md: every place in verl's files that hooks and fixes change has its reason, and no other has one."""

import re
from typing import NamedTuple

import pytest

import apply_patch
import trees
from apply_patch import Target

TARGETS = apply_patch.read_targets()
COLUMNS = {"Hooks": 4, "Fixes": 6}


class Place(NamedTuple):
    """A place that has an entry."""

    kind: str  # Hooks or Fixes
    path: str
    code: str  # part of what is added there
    releases: str  # 0.7 for all that begin so; "all"


def entries() -> list[Place]:
    found = []
    kind = path = ""
    for line in (trees.ROOT / "patches/README.md").read_text().splitlines():
        if match := re.fullmatch(r"## (.+)", line):
            kind, path = match[1], ""
        elif match := re.match(r"\| (?:\*\*(.+?)\*\* )?`([^`]+)` \| ([\d.]+|all) \|", line):
            path = match[1] or path
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == COLUMNS[kind] and all(cells), line
            found.append(Place(kind, path, match[2], match[3]))
    return found


ENTRIES = entries()


def hunks(target: Target, kind: str) -> list[tuple[str, str]]:
    """Path and added text of every hunk that does more than import."""
    found = []
    for change in apply_patch.load_part({"Hooks": target.hooks, "Fixes": target.fixes}[kind]):
        for hunk in [hunk for part in change.parts for hunk in part]:
            added = [line.decode() for line in hunk.new if line not in hunk.old]
            if not all(re.match(r"(from|import) |$", line.rstrip("\n")) for line in added):
                found.append((change.path, "".join(added)))
    return found


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.version)
def test_every_changed_place_has_its_reason(target: Target, kind: str) -> None:
    releases = ("all", target.version.rpartition(".")[0], target.version)
    places = [place for place in ENTRIES if place.kind == kind and place.releases in releases]
    changed = hunks(target, kind)
    assert changed
    for path, added in changed:
        assert any(place.path == path and place.code in added for place in places), (
            f"{path} adds, without entry:\n{added}"
        )
    for place in places:
        assert any(place.path == path and place.code in added for path, added in changed), f"nothing adds {place}"


def test_the_page_for_maintainers_counts_what_the_patches_change() -> None:
    page = (trees.ROOT / "docs/use/for-verl-maintainers.md").read_text()
    rows = re.findall(r"^\| ([\d.]+): (\w+) \| (\d+) \| \+(\d+) −(\d+) \| \+?(\d+) \|$", page, re.M)
    counted = []
    for target in TARGETS:
        for kind in ("hooks", "fixes"):
            patch = f"patches/{target.version}/{kind}.patch"
            files = [line.split() for line in trees.git(trees.ROOT, "apply", "--numstat", patch).splitlines()]
            added = {is_yaml: 0 for is_yaml in (False, True)}
            for lines, _, path in files:
                added[path.endswith(".yaml")] += int(lines)
            removed = sum(int(lines) for _, lines, path in files if not path.endswith(".yaml"))
            counted.append((target.version, kind, *map(str, (len(files), added[False], removed, added[True]))))
    assert rows and set(rows) <= set(counted)
