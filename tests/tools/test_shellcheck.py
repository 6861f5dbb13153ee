"""All shell scripts of the project, checked by ShellCheck."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
FOLDERS = (".", ".ci", "embedded", "examples", "tests")


def check(*scripts: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SHELLCHECK, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)


def test_no_script_has_a_finding() -> None:
    scripts = sorted(script for folder in FOLDERS for script in (ROOT / folder).glob("*.sh"))
    assert {"run_experiment.sh", "slurm.sh", "ray_job.sh", "run.sh"} <= {script.name for script in scripts}
    done = check(*scripts)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_finding_is_reported(tmp_path: Path) -> None:
    (tmp_path / "script.sh").write_text("#!/bin/bash\necho $1\n")
    done = check(tmp_path / "script.sh")
    assert done.returncode == 1 and "SC2086" in done.stdout
