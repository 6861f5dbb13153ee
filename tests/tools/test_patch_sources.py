# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What belongs to a source, how its two places come together, and which part of a patch is hooks: without git."""

from __future__ import annotations

import hashlib
import itertools

import pytest

import trees
from tools.patching import page_files, patch_text, sources
from tools.patching.sources import SOURCES, File, Files, Misplaced, Source

SOURCE = Source("ours", "verl/place")
YAML = Source("keys", "verl/keys", ".yaml")


def files(**blobs: str) -> Files:
    """Files by name (__ for a slash, _ before the suffix for a dot)."""
    return {name.replace("__", "/").replace("_py", ".py"): File("100644", blob) for name, blob in blobs.items()}


BASE = files(verl__place__own_py="0", verl__other_py="0")


def test_what_is_carried() -> None:
    edited = BASE | files(verl__place__new_py="1", verl__place__own_py="1", verl__placed_py="1", verl__new_py="1")
    assert sources.carried(edited, BASE, SOURCE) == files(new_py="1")
    edited |= files(verl__place__deep__a_py="2")
    assert sources.carried(edited, BASE, SOURCE) == files(new_py="1", deep__a_py="2")


def test_put_is_the_inverse() -> None:
    edited = BASE | files(verl__place__new_py="1", verl__place__own_py="1")
    assert sources.put(edited, BASE, SOURCE, sources.carried(edited, BASE, SOURCE)) == edited
    content = files(other_py="2")
    changed = sources.put(edited, BASE, SOURCE, content)
    assert sources.carried(changed, BASE, SOURCE) == content
    assert changed["verl/place/own.py"].blob == "1", "a hook stays"
    assert sources.put(edited, BASE, SOURCE, {}) == BASE | files(verl__place__own_py="1")


@pytest.mark.parametrize(("old", "their", "our"), [*itertools.product([None, "0", "1", "2"], repeat=3)])
def test_merge_by_the_side_that_changed(old: str | None, their: str | None, our: str | None) -> None:
    def side(blob: str | None) -> Files:
        return {} if blob is None else files(a_py=blob)

    merged, conflicts = sources.merge(side(old), side(their), side(our))
    assert conflicts == (["a.py"] if len({old, their, our}) == 3 else [])
    if not conflicts:
        assert merged == side(our if their == old else their)


def test_a_file_where_the_other_side_has_a_folder_is_a_conflict() -> None:
    merged, conflicts = sources.merge({}, {"a.py": File("100644", "1")}, {"a.py/b.py": File("100644", "1")})
    assert conflicts == ["a.py/b.py"]


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("notes.txt", "100644", "Python files only"),
        ("link.py", "120000", "Python files only"),
        ("nested", "160000", "Python files only"),
        ("deep/page_files.py", "100644", "generates"),
        ("own.py", "100644", "verl's own"),
    ],
)
def test_what_the_project_may_not_hold(name: str, mode: str, words: str) -> None:
    fine = files(a_py="1") | {"deep/page.css": File("100644", "1")}
    sources.check_ours(fine, BASE, SOURCE)
    with pytest.raises(Misplaced, match=f"^ours/{name} .*{words}"):
        sources.check_ours(fine | {name: File(mode, "1")}, BASE, SOURCE)


@pytest.mark.parametrize(("name", "mode"), [("a.py", "100644"), ("page.css", "100644"), ("link.yaml", "120000")])
def test_what_a_source_of_yaml_may_not_hold(name: str, mode: str) -> None:
    fine = {"a.yaml": File("100644", "1")}
    for check, place in (
        (lambda files: sources.check_ours(files, BASE, YAML), "keys"),
        (lambda files: sources.check_theirs(files, YAML), "verl/keys"),
    ):
        check(fine)
        with pytest.raises(Misplaced, match=f"^{place}/{name} .*[.]yaml files only( there)?; move it away"):
            check(fine | {name: File(mode, "1")})


@pytest.mark.parametrize(("name", "mode"), [("notes.txt", "100644"), ("page.css", "100644"), ("link.py", "120000")])
def test_what_a_checkout_may_not_hold(name: str, mode: str) -> None:
    sources.check_theirs(files(a_py="1", page_files_py="1"), SOURCE)
    with pytest.raises(Misplaced, match=f"^verl/place/{name} .*Python files only"):
        sources.check_theirs({name: File(mode, "1")}, SOURCE)


class Blobs(dict[str, bytes]):
    def write(self, content: bytes) -> str:
        name = hashlib.sha1(content).hexdigest()
        self[name] = content
        return name


def test_pages_there_and_back() -> None:
    blobs = Blobs()
    texts = {"a.css": b"a\n", "b.js": b"b\n", "deep/a.css": b"c\n", "a.py": b"x = 1\n", "deep/tool.py": b"y\n"}
    ours = {name: File("100755" if "tool" in name else "100644", blobs.write(text)) for name, text in texts.items()}
    in_verl = sources.join_pages(ours, blobs.__getitem__, blobs.write)
    assert set(in_verl) == {"page_files.py", "deep/page_files.py", "a.py", "deep/tool.py"}
    assert page_files.split(blobs[in_verl["page_files.py"].blob]) == {"a.css": b"a\n", "b.js": b"b\n"}
    assert sources.split_pages(in_verl, blobs.__getitem__, blobs.write) == ours
    ours["deep/bad.js"] = File("100644", blobs.write(b"no end"))
    with pytest.raises(Misplaced, match="^deep/bad.js lacks the newline"):
        sources.join_pages(ours, blobs.__getitem__, blobs.write)
    in_verl["deep/page_files.py"] = File("100644", blobs.write(b"FILES = 1\n"))
    with pytest.raises(Misplaced, match="^deep/page_files.py: it holds other things"):
        sources.split_pages(in_verl, blobs.__getitem__, blobs.write)


def test_the_package_is_the_new_files_of_the_sources() -> None:
    blobs = Blobs()
    found = patch_text.new_files((trees.ROOT / "patches/package.patch").read_bytes(), blobs.write)
    wanted = set()
    for source in SOURCES:
        folder = trees.ROOT / source.folder
        pages = {path.with_name(page_files.MODULE) for path in folder.rglob("*") if page_files.is_page_file(path.name)}
        ours = {*folder.rglob(f"*{source.suffix}"), *pages}
        wanted |= {f"{source.place}/{path.relative_to(folder)}" for path in ours}
    assert set(found) == wanted
    assert blobs[found["verl/utils/reward_score/ps_grpo.py"].blob] == (trees.ROOT / "rewards/ps_grpo.py").read_bytes()


def test_a_line_without_an_end_is_found() -> None:
    added = b"+++ b/verl/a.py\n@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n"
    assert patch_text.unfinished_line(added) == "verl/a.py"
    assert patch_text.unfinished_line(added.replace(b"+b\n\\ No newline at end of file\n", b"+b\n")) is None
    assert patch_text.unfinished_line(b"-a\n\\ No newline at end of file\n+a\n") is None
