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
import selectors
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
# What Ray's library would read when a process begins. The first job of each Ray has this number.
FOR_RAY = {"RAY_AUTH_MODE": "disabled", "RAY_JOB_ID": "01000000"}
PR_SET_PDEATHSIG = 1
HIGH = 500  # the server's own files have higher numbers than those of a process that it starts


@contextlib.contextmanager
def warm_python(folder: Path, environment: Mapping[str, str], verl: bool = False) -> Iterator[Path]:
    """The path of the interpreter, which can be used within the block.

    Args:
        folder (Path): An empty one, with a short name: it holds a socket.
        environment (Mapping[str, str]): What the libraries find when they are imported.
        verl (bool): Whether they include the verl on its PYTHONPATH, which then is that of all programs.
    """
    address, executable = folder / "socket", folder / "python"
    serve = f"warm_python.serve({str(address)!r}, {environment['PYTHONPATH'] if verl else ''!r})"
    code = f"import sys; sys.path[0] = {str(CLIENT.parent)!r}; import warm_python; {serve}()"
    environment = {**environment, **FOR_RAY, "PYTHONPATH": "", "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=subprocess.DEVNULL)
    executable.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -IS "{CLIENT}" "{sys.executable}" "{address}" "$0" "$@"\n'
    )
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
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # where pytest is killed
    base, before = sys.path[1:], set(os.environ)
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())  # a worker ends with that process
    sys.path[1:1] = search_path.split(os.pathsep) if search_path else []
    for name in [*LIBRARIES, *(OF_VERL if search_path else [])]:
        with contextlib.suppress(ImportError):  # not every verl needs or has each of them
            importlib.import_module(name)
    set_by_imports = {name: os.environ[name] for name in os.environ.keys() - before - {"RAY_RAYLET_PID"}}
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener = socket.socket(fileno=_raised(listener.detach()))
    listener.bind(f"{address}.new")
    listener.listen(64)
    wakeup, woken = (socket.socket(fileno=_raised(end.detach())) for end in socket.socketpair())
    wakeup.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup.fileno())
    selector = selectors.SelectSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    os.rename(f"{address}.new", address)
    clients: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                connection = socket.socket(fileno=_raised(connection.detach()))
                try:
                    request = Request.read(connection)
                except EOFError:
                    connection.close()
                    continue
                child = os.fork()
                if not child:
                    selector.close()
                    for each in (listener, wakeup, woken, connection, *clients.values()):
                        each.close()
                    return lambda: request.run(base, set_by_imports)
                for file in request.files.values():
                    os.close(file)
                with contextlib.suppress(OSError):  # a client that is gone is seen below
                    connection.sendall(child.to_bytes(8, "little"))
                clients[child] = connection
                selector.register(connection, selectors.EVENT_READ, child)
            elif key.fileobj is woken:
                woken.recv(4096)
            elif key.data in clients:  # killed: what it started ends with it
                _end_session(key.data)
        for child, status in _ended():
            connection = clients.pop(child)
            selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(status.to_bytes(8, "little", signed=True))
            connection.close()


def _raised(file: int) -> int:
    raised = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.close(file)
    return raised


def _reopened(file: int, stream: TextIO) -> TextIO:
    """A standard stream anew, unbuffered: the server's may have been a file where this one is a pipe."""
    raw: Any = io.FileIO(file, "r" if file == 0 else "w", closefd=False)
    source = io.BufferedReader(raw) if file == 0 else raw
    return io.TextIOWrapper(source, stream.encoding, stream.errors, write_through=file != 0)


def _ended() -> Iterator[tuple[int, int]]:
    """The processes that have ended since, with their exit codes."""
    with contextlib.suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                break
            yield child, os.waitstatus_to_exitcode(status)


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
        if not size:
            raise EOFError("the client has asked for nothing")
        message, remaining = b"", int.from_bytes(size, "little")
        while len(message) < remaining:
            part = connection.recv(remaining - len(message))
            if not part:
                for file in files:
                    os.close(file)
                raise EOFError("the client has ended in the middle of its request")
            message += part
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
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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
