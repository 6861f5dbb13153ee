"""The interpreter that runs of the trainer are started with behaves like any other."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm")]
FORK = ["-X", "fork"]  # the interpreter itself ignores this option


def both(*command: str | Path, **options: object) -> list[subprocess.CompletedProcess[str]]:
    """A command by this interpreter and by the warm one."""
    return [
        subprocess.run([python, *FORK, *command], capture_output=True, text=True, **options)
        for python in (sys.executable, runs.warm_interpreter)
    ]


def test_a_program_finds_what_it_would_find(tmp_path: Path) -> None:
    names = ("argv", "path", "flags.isolated", "stdin.read()", "stdout.encoding", "stdout.isatty()")
    looks = "import json, os, sys\nprint(json.dumps([" + ", ".join(f"sys.{name}" for name in names)
    looks += ", os.getcwd(), os.environ.get('COLOUR'), __name__, sorted(os.listdir('/proc/self/fd'))[:3]]))\n"
    (tmp_path / "looks.py").write_text(looks)
    environment = os.environ | {"COLOUR": "red", "PYTHONPATH": str(tmp_path)}
    for command in (["-c", looks, "a b"], [tmp_path / "looks.py", "a b"], ["-m", "looks", "a b"]):
        plain, warm = both(*command, cwd=tmp_path, env=environment, input="so\n")
        assert (warm.returncode, warm.stderr) == (plain.returncode, plain.stderr) == (0, "")
        assert json.loads(warm.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_interpreter_ends_its_program(tmp_path: Path, number: signal.Signals) -> None:
    code = "import os, subprocess, time; child = subprocess.Popen(['sleep', '600'])\n"
    code += "print(os.getpid(), child.pid, flush=True); time.sleep(600)"
    command = [runs.warm_interpreter, *FORK, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        program, child = map(int, process.stdout.readline().split())
        process.send_signal(number)
        assert process.wait() == -number
        while Path(f"/proc/{program}").exists():  # pytest's own limit ends this if need be
            time.sleep(0.05)
        if number == signal.SIGTERM:  # an interpreter would leave it, too
            os.kill(child, signal.SIGKILL)
        while Path(f"/proc/{child}").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
            time.sleep(0.05)
