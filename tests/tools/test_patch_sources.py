"""What the real package.patch holds, and lines without an end."""

from __future__ import annotations

import apply_patch
import trees
from tools.patching import parts


def test_the_package_is_the_new_files_of_the_sources() -> None:
    found = {change.path: change for change in apply_patch.load_part(apply_patch.PACKAGE)}
    wanted = set()
    for source in parts.SOURCES:
        folder = trees.ROOT / source.folder
        wanted |= {f"{source.place}/{path.relative_to(folder)}" for path in folder.rglob(f"*{source.suffix}")}
    assert set(found) == wanted and all(change.old is None for change in found.values())
    ours = found["verl/utils/reward_score/ps_grpo.py"].result(None)
    assert ours == (trees.ROOT / "rewards/ps_grpo.py").read_bytes()


def test_a_line_without_an_end_is_found() -> None:
    added = b"+++ b/verl/a.py\n@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n"
    assert parts.unfinished_line(b"+++ b/verl/b.py\n@@ -1 +1 @@\n-a\n+b\n" + added) == "verl/a.py"
    assert parts.unfinished_line(added.replace(b"+b\n\\ No newline at end of file\n", b"+b\n")) is None
    assert parts.unfinished_line(b"-a\n\\ No newline at end of file\n+a\n") is None
