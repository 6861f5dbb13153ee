"""All shell scripts of the project, checked by ShellCheck."""

import sys
from pathlib import Path

import trees

SHELLCHECK = Path(sys.executable).parent / "shellcheck"
FOLDERS = (".", ".ci", "embedded", "examples", "tests")


def test_no_script_has_a_finding() -> None:
    scripts = sorted(script for folder in FOLDERS for script in (trees.ROOT / folder).glob("*.sh"))
    assert {"run_experiment.sh", "slurm.sh", "ray_job.sh", "run.sh"} <= {script.name for script in scripts}
    trees.ran(trees.run(SHELLCHECK, "-x", *scripts, cwd=trees.ROOT))
