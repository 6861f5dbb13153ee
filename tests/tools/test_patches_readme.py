"""patches/README.md: every place in verl's files that hooks and fixes change has its reason, and no other has one."""

import re

import pytest

import apply_patch
import trees
from apply_patch import Target

README = (trees.ROOT / "patches/README.md").read_text()


def places_of(releases: tuple[str, ...], kind: str) -> list[tuple[str, str]]:
    """The path, and a part of what is added there, of each entry for these releases."""
    found = []
    path = ""
    section = README.partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
    for name, code, release in re.findall(r"^\| (?:\*\*(.+?)\*\* )?`([^`]+)` \| ([\d.]+|all) \|", section, re.M):
        path = name or path
        if release in releases:
            found.append((path, code))
    return found


def hunks(target: Target, kind: str) -> list[tuple[str, str]]:
    """Path and added text of every hunk that does more than import."""
    found = []
    for change in apply_patch.load_part({"Hooks": target.hooks, "Fixes": target.fixes}[kind]):
        for _, old, _, new in [hunk for part in change.parts for hunk in part]:
            added = [line.decode() for line in new if line not in old]
            if not all(re.match(r"(from|import) |$", line.rstrip("\n")) for line in added):
                found.append((change.path, "".join(added)))
    return found


@pytest.mark.parametrize("kind", ["Hooks", "Fixes"])
@pytest.mark.parametrize("target", apply_patch.read_targets(), ids=lambda target: target.version)
def test_every_changed_place_has_its_reason(target: Target, kind: str) -> None:
    places = places_of(("all", target.version.rpartition(".")[0], target.version), kind)
    changed = hunks(target, kind)
    assert changed
    for path, added in changed:
        assert any(place == path and code in added for place, code in places), f"{path} adds, without entry:\n{added}"
    for place, code in places:
        assert any(place == path and code in added for path, added in changed), f"nothing adds {code} to {place}"


def test_the_page_for_maintainers_counts_what_the_patches_change() -> None:
    page = (trees.ROOT / "docs/use/for-verl-maintainers.md").read_text()
    rows = re.findall(r"^\| ([\d.]+): (\w+) \| (\d+) \| \+(\d+) −(\d+) \| \+?(\d+) \|$", page, re.M)
    counted = []
    for target in apply_patch.read_targets():
        for kind in ("hooks", "fixes"):
            patch = f"patches/{target.version}/{kind}.patch"
            files = [line.split() for line in trees.git(trees.ROOT, "apply", "--numstat", patch).splitlines()]
            added = {is_yaml: 0 for is_yaml in (False, True)}
            for lines, _, path in files:
                added[path.endswith(".yaml")] += int(lines)
            removed = sum(int(lines) for _, lines, path in files if not path.endswith(".yaml"))
            counted.append((target.version, kind, *map(str, (len(files), added[False], removed, added[True]))))
    assert rows and set(rows) <= set(counted)
