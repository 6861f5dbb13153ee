# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the plugin's config groups from what the patch adds to verl's, so that no key is written twice by hand.

    python tools/plugin_config.py [--check]

With --check, writes nothing; the exit code is 1 if a file is not as it would be written.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOOKS = ROOT / "patches/0.9.1/hooks.patch"
CONF = ROOT / "plugin/gradloc_verl/conf"
GROUPS = (("actor", "FSDPActorConfig"), ("critic", "FSDPCriticConfig"))


def added_lines(patch: str, file: str) -> list[str]:
    """The lines that a patch adds to a file."""
    lines: list[str] = []
    inside = False
    for line in patch.splitlines():
        if line.startswith("diff --git "):
            inside = line.endswith(f" b/{file}")
        elif inside and line.startswith("+") and not line.startswith("+++ "):
            lines.append(line[1:])
    return lines


def written(group: str, target: str, patch: str) -> str:
    """The text of a group's yaml."""
    keys = "\n".join(added_lines(patch, f"verl/trainer/config/{group}/dp_{group}.yaml")).strip()
    if not keys:
        raise ValueError(f"the patch adds no keys to dp_{group}.yaml")
    return f"""# Written by tools/plugin_config.py from what the patch adds to dp_{group}.yaml.
# {group}@...=gradloc_dp_{group} is verl's dp_{group} with GradLoc's keys.
defaults:

  - dp_{group}

  - _self_

# Target class for this configuration
_target_: gradloc_verl.config.{target}

{keys.replace("verl.workers.config.", "gradloc_verl.config.")}
"""


def main() -> int:
    stale = []
    for group, target in GROUPS:
        file = CONF / group / f"gradloc_dp_{group}.yaml"
        text = written(group, target, HOOKS.read_text())
        if not file.is_file() or file.read_text() != text:
            stale.append(file)
            if "--check" not in sys.argv[1:]:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
    for file in stale:
        print(file.relative_to(ROOT))
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
