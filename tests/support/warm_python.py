"""An interpreter that starts in milliseconds what would import torch and transformers for seven seconds.

A run of the trainer starts seven such processes, and the tests start dozens of runs. A server imports the libraries
once, and forks for each process; also verl with Ray, if it is asked to. Otherwise nothing of verl or of this project is
imported before the fork, nor is Ray, whose library reads variables when it is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

CLIENT = Path(__file__).with_name("warm_client.py")
LIBRARIES = """
    torch torch._dynamo torch.distributed.fsdp torch.distributed.checkpoint torch.utils.tensorboard tensordict datasets
    pandas transformers transformers.modeling_utils transformers.models.auto transformers.models.llama.modeling_llama
    transformers.integrations accelerate peft hydra hydra.main fastapi uvicorn aiohttp openai
    google.protobuf.descriptor grpc jsonschema sympy.parsing.latex zmq math_verify rich.table
""".split()
OF_VERL = """
    ray._private.workers.default_worker verl verl.trainer.constants_ppo verl.trainer.ppo.ray_trainer
    verl.workers.fsdp_workers verl.workers.engine_workers verl.workers.critic verl.experimental.agent_loop
    verl.experimental.reward_loop verl.trainer.ppo.v1 verl.utils.dataset.rl_dataset embedded.rollout
""".split()
# Ray's library would read these when a process begins. The first job of each Ray has this number.
FOR_RAY = {"RAY_AUTH_MODE": "disabled", "RAY_JOB_ID": "01000000"}
PR_SET_PDEATHSIG = 1
HIGH = 500  # files that a process is given wait above the numbers that they will have there


@contextlib.contextmanager
def warm_python(
    folder: Path, environment: Mapping[str, str], verl: bool = False, python: str | Path = sys.executable
) -> Iterator[Path]:
    """The path of the interpreter, which can be used within the block.

    Args:
        folder (Path): An empty one, with a short name: it holds a socket.
        environment (Mapping[str, str]): What the libraries find when they are imported.
        verl (bool): Whether they include the verl on its PYTHONPATH, which then is that of all programs.
        python (str | Path): The Python that has them.
    """
    address, executable = folder / "socket", folder / "python"
    serve = f"warm_python.serve({str(address)!r}, {environment['PYTHONPATH'] if verl else ''!r})"
    code = f"import sys; sys.path[0] = {str(CLIENT.parent)!r}; import warm_python; {serve}()"
    environment = {**environment, **FOR_RAY, "PYTHONPATH": "", "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen([python, "-c", code], env=environment, stdin=subprocess.DEVNULL)
    executable.write_text(f'#!/bin/sh\nexec "{python}" -IS "{CLIENT}" "{python}" "{address}" "$0" "$@"\n')
    executable.chmod(0o755)
    try:
        while not address.exists():
            if server.poll() is not None:
                raise RuntimeError("the server of warm_python has ended")
            time.sleep(0.1)
        yield executable
    finally:
        server.terminate()
        server.wait()


def serve(address: str, search_path: str) -> Callable[[], None]:
    """Serves until it is ended. In each process that it starts it returns what that process has to run.

    Args:
        address (str): That of its socket.
        search_path (str): Where it finds verl; empty where verl is not to be imported.
    """
    _end_with_parent()
    base, before = sys.path[1:], set(os.environ)
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())  # a worker ends with that process
    sys.path[1:1] = search_path.split(os.pathsep) if search_path else []
    if search_path:
        _keep_ray_from_drawing()
    for name in [*LIBRARIES, *(OF_VERL if search_path else [])]:
        with contextlib.suppress(ImportError):  # not every verl needs or has each of them
            importlib.import_module(name)
    set_by_imports = {name: os.environ[name] for name in os.environ.keys() - before - {"RAY_RAYLET_PID"}}
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch over a process
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            request = _started(connection)
            return lambda: request.run(base, set_by_imports)
        connection.close()


def _keep_ray_from_drawing() -> None:
    """Imports Ray, without the ids that it draws for classes of actors: once its generator has drawn in this process,
    all forked ones draw the same, and objects of two workers have one id.
    """
    ray, actor = importlib.import_module("ray"), importlib.import_module("ray.actor")
    draw = staticmethod(lambda: ray.ActorClassID(os.urandom(ray.ActorClassID.size())))
    actor.ActorClassID = type("ActorClassID", (), {"from_random": draw})  # type: ignore[attr-defined]


def _started(connection: socket.socket) -> Request:
    """Forks the process that a client asks for, and returns in it. The other one tells the client how it ends.

    Where the client ends first, all that its process has started ends.
    """
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = Request.read(connection)
    child = os.fork()
    if not child:
        connection.close()
        return request
    for file in request.files.values():
        os.close(file)
    with contextlib.suppress(OSError):
        connection.sendall(child.to_bytes(8, "little"))
    ended = os.pidfd_open(child)
    if ended not in select.select([connection, ended], [], [])[0]:
        _end_session(child)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(status.to_bytes(8, "little", signed=True))
    os._exit(0)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _raised(file: int) -> int:
    raised = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.close(file)
    return raised


def _reopened(file: int, stream: TextIO) -> TextIO:
    """A standard stream anew, unbuffered: the server's may have been a file where this one is a pipe."""
    raw: Any = io.FileIO(file, "r" if file == 0 else "w", closefd=False)
    source = io.BufferedReader(raw) if file == 0 else raw
    return io.TextIOWrapper(source, stream.encoding, stream.errors, write_through=file != 0)


def _end_session(leader: int) -> None:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                os.kill(int(stat.parent.name), signal.SIGKILL)


@dataclass
class Request:
    """A process to start.

    Args:
        executable: The interpreter that it believes to be run by.
        directory: The one that it works in.
        umask: Its file mode mask.
        files: By their numbers there, its open files.
        command: Its arguments.
        environment: Its variables.
    """

    executable: str
    directory: str
    umask: int
    files: dict[int, int]
    command: list[str]
    environment: dict[str, str]

    @classmethod
    def read(cls, connection: socket.socket) -> Request:
        size, files, _, _ = socket.recv_fds(connection, 8, 250)
        with connection.makefile("rb") as stream:
            message = stream.read(int.from_bytes(size, "little"))
        executable, directory, umask, numbers, count, *rest = message.decode(errors="surrogateescape").split("\0")
        environment = dict(line.split("=", 1) for line in rest[int(count) :])
        received = dict(zip(map(int, numbers.split(",")), map(_raised, files), strict=True))
        return cls(executable, directory, int(umask), received, rest[: int(count)], environment)

    def run(self, base: list[str], set_by_imports: dict[str, str]) -> None:
        """Runs the command in this process, as an interpreter does.

        Args:
            base (list[str]): Where an interpreter looks for modules after PYTHONPATH.
            set_by_imports (dict[str, str]): Variables of the environment that modules have set when they were imported.
        """
        os.setsid()
        _end_with_parent()
        for number, file in self.files.items():
            os.dup2(file, number)
            os.close(file)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            setattr(sys, name, _reopened(number, getattr(sys, name)))
            setattr(sys, f"__{name}__", getattr(sys, name))
        os.environ.clear()
        os.environ.update(set_by_imports | self.environment)
        os.chdir(self.directory)
        os.umask(self.umask)
        sys.executable = self.executable
        sys.modules["numpy"].random.seed()
        for name in ("warm_python", "runpy"):
            sys.modules.pop(name)
        sys.path_importer_cache.clear()
        main = sys.modules["__main__"].__dict__
        for name in set(main) - {"__name__", "__builtins__", "__doc__", "__package__", "__loader__", "__spec__"}:
            del main[name]
        search_path = [path for path in self.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        option = self.command[0]
        if "verl" in sys.modules and re.match(r"-m verl\.|\S*/default_worker\.py", " ".join(self.command[:2])):
            # As verl does when it is imported.
            for module in filter(None, self.environment.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
                sys.path[:] = ["", *search_path, *base]
                importlib.import_module(module)
        if option == "-c":
            sys.path[:] = ["", *search_path, *base]
            sys.argv[:] = ["-c", *self.command[2:]]
            exec(compile(self.command[1], "<string>", "exec"), main)
            return
        if option == "-m":
            sys.path[:] = [os.getcwd(), *search_path, *base]
            sys.argv[:] = self.command[1:]
            runpy._run_module_as_main(self.command[1])  # type: ignore[attr-defined]  # that is what `python -m` calls
            return
        script = os.path.abspath(self.command[0])
        sys.path[:] = [os.path.dirname(script), *search_path, *base]
        sys.argv[:] = self.command
        main["__file__"] = self.command[0]
        exec(compile(Path(script).read_bytes(), self.command[0], "exec"), main)
