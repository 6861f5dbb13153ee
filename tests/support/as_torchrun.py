"""Starts the command `gradloc` as users do with torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import trees

# A native thread that wants the interpreter's lock while the interpreter ends aborts one run of thousands; this does in
# every rank of each run.
_ABORTS_AT_THE_END = """
import atexit, os
if "RANK" in os.environ:
    atexit.register(os.abort)
"""


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in two processes, with a file in a folder that would abort them while their interpreters end."""
    (folder / "sitecustomize.py").write_text(_ABORTS_AT_THE_END)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return trees.run(*command, "-m", "gradloc", *arguments, OMP_NUM_THREADS="1", PYTHONPATH=path)
