# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Files of a web page as a module and back, exact to the byte; nothing is executed, and nothing unfit is taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.patching import page_files

TEXTS = {
    "page.html": b"<!doctype html>\n<p title=\"''\">\\n &amp; \\</p>\n",
    "page.css": b'a::before { content: "\\201c\'"; }\n',
    "page.js": '\'use strict\';\n\n// τ """ {x}\n\\\n'.encode(),
}


def test_the_module() -> None:
    module = page_files.join(TEXTS)
    assert module == page_files.join(dict(reversed(TEXTS.items())))
    assert module.splitlines()[2].endswith(b"from page.css, page.html, page.js: in the sources, edit those.")
    assert b"    \"page.css\": r'''a::before {" in module
    namespace: dict[str, dict[str, str]] = {}
    exec(module, namespace)  # as Python reads it in a patched verl
    assert {name: text.encode() for name, text in namespace["FILES"].items()} == TEXTS
    assert list(namespace["FILES"]) == sorted(TEXTS)


def test_there_and_back() -> None:
    assert page_files.split(page_files.join(TEXTS)) == TEXTS


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("'\"\\\n\r\0{}rN#")))
def test_any_text_comes_back_or_is_refused(text: str) -> None:
    content = f"{text}\n".encode()
    unfit = any(part in text for part in ("'''", "\r", "\0"))
    try:
        module = page_files.join({"page.js": content})
    except page_files.Unfit:
        assert unfit
    else:
        assert not unfit and page_files.split(module) == {"page.js": content}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a = '''b'''\n", "contains '''"),
        (b"a\\", "backslash"),
        (b"a", "newline at its end"),
        (b"", "newline at its end"),
        (b"a\r\n", "carriage return"),
        (b"a\0\n", "null"),
        (b"\xff\n", "UTF-8"),
    ],
)
def test_texts_that_are_refused(content: bytes, words: str) -> None:
    with pytest.raises(page_files.Unfit, match="^page.js .*" + words):
        page_files.join({"page.css": b"\n", "page.js": content})


def test_an_edited_module() -> None:
    """By hand or by a formatter: only the texts count."""
    module = b"""# comment
FILES: dict = {
    "page.js": "1\\n", 'page.css': r\"\"\"x \\d
\"\"\", "page.html": ("two "
    "parts\\n")}
"""
    wanted = {"page.js": b"1\n", "page.css": b"x \\d\n", "page.html": b"two parts\n"}
    assert page_files.split(module) == wanted
    assert page_files.split(page_files.join(wanted)) == wanted


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("FILES: dict = {", "no Python module"),
        ("FILES: dict = {}", "empty"),
        ("", "other things"),
        ("FILES = {'a.js': '\\n'}", "other things"),
        ("OTHER: dict = {'a.js': '\\n'}", "other things"),
        ("import os\nFILES: dict = {'a.js': '\\n'}", "other things"),
        ("FILES: dict = {'a.js': '\\n'}\nFILES.clear()", "other things"),
        ("FILES: dict = dict(a='b')", "not a plain dict"),
        ("FILES: dict", "not a plain dict"),
        ("FILES: dict = {**{'a.js': '\\n'}}", "not a plain dict"),
        ("FILES: dict = {'a.js': open('x').read()}", "plain string"),
        ("FILES: dict = {'a.js': f'{1}\\n'}", "plain string"),
        ("FILES: dict = {'a.js': {[]: 1}}", "plain string"),
        ("FILES: dict = {1: '\\n'}", "plain string"),
        ("FILES: dict = {'a.js': b'\\n'}", "plain string"),
        ("FILES: dict = {'../a.js': '\\n'}", "'../a.js'"),
        ("FILES: dict = {'a.py': '\\n'}", "'a.py'"),
        ("FILES: dict = {'a.js': '\\n', 'a.js': '1\\n'}", "a.js twice"),
        ("FILES: dict = {'a.js': '\\ud800\\n'}", "UTF-8"),
        ("FILES: dict = {'a.js': \"'''\\n\"}", "contains '''"),
    ],
)
def test_modules_that_are_refused(module: str, words: str) -> None:
    with pytest.raises(page_files.Unfit, match=words):
        page_files.split(module.encode())


def test_nothing_is_executed(tmp_path: Path) -> None:
    trap = f"FILES: dict = {{'a.js': __import__('os').mkdir({str(tmp_path / 'trap')!r})}}"
    with pytest.raises(page_files.Unfit):
        page_files.split(trap.encode())
    assert os.listdir(tmp_path) == []
