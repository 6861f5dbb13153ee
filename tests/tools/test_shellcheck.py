"""All shell scripts of the project, checked by ShellCheck."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
FOLDERS = (".", ".ci", "embedded", "examples", "tests")


def test_no_script_has_a_finding() -> None:
    scripts = sorted(script for folder in FOLDERS for script in (ROOT / folder).glob("*.sh"))
    assert {"run_experiment.sh", "slurm.sh", "ray_job.sh", "run.sh"} <= {script.name for script in scripts}
    done = subprocess.run([SHELLCHECK, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
