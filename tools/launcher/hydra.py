# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Hydra overrides: texts and lists as values, and which key has which value."""

import re
from collections.abc import Iterable


def quoted(text: str) -> str:
    """The text as a quoted value of Hydra, in which backslashes count only before a quote."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"


def split_list(text: str) -> list[str]:
    """The items of `a,b`; a comma at the end adds none."""
    return text.removesuffix(",").split(",")


def quoted_list(text: str) -> str:
    """`a,b` as a list of quoted values of Hydra."""
    return "[" + ",".join(map(quoted, split_list(text))) + "]"


def by_key(overrides: Iterable[str]) -> dict[str, str]:
    """The value that overrides give to each key, as it is written; the last one wins."""
    return {key.lstrip("+~"): value for key, _, value in (override.partition("=") for override in overrides)}
