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
# The engines whose spikes are only recorded.
RECORDED = (
    ("megatron", "McoreActorConfig"),
    ("veomni", "VeOmniActorConfig"),
    ("torchtitan", "TorchTitanActorConfig"),
)


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


def written(group: str, target: str, patch: str, engine: str = "dp") -> str:
    """The text of a group's yaml, for an engine."""
    own = f"{engine}_{group}"
    source = f"{own}.yaml"
    keys = "\n".join(added_lines(patch, f"verl/trainer/config/{group}/{source}")).strip()
    if not keys:
        raise ValueError(f"the patch adds no keys to {source}")
    return f"""# Written by tools/plugin_config.py from what the patch adds to {source}.
# {group}@...=gradloc_{own} is verl's {own} with GradLoc's keys.
defaults:

  - {own}

  - _self_

# Target class for this configuration
_target_: gradloc_verl.config.{target}

{keys.replace("verl.workers.config.", "gradloc_verl.config.")}
"""


def main() -> int:
    stale = []
    patch = HOOKS.read_text()
    texts = {CONF / group / f"gradloc_dp_{group}.yaml": written(group, target, patch) for group, target in GROUPS}
    for engine, target in RECORDED:
        texts[CONF / f"actor/gradloc_{engine}_actor.yaml"] = written("actor", target, patch, engine)
    for file, text in texts.items():
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
