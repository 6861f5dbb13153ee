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
from pathlib import Path
from typing import Any

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
HIGH = 500  # files that a process is given wait above the numbers that they will have there


@contextlib.contextmanager
def warm_python(folder: Path, environment: Mapping[str, str], verl: bool = False) -> Iterator[Path]:
    """The path of the interpreter, which can be used within the block.

    Its libraries find this environment when they are imported. They include the verl on its PYTHONPATH, if that is
    wanted, which then is that of all programs. The folder is an empty one, with a short name: it holds a socket.
    """
    address, executable = folder / "socket", folder / "python"
    arguments = str(address), str(executable), environment["PYTHONPATH"] if verl else ""
    command = [sys.executable, "-c", f"__import__('warm_python').serve{arguments}()"]
    environment = {**environment, **FOR_RAY, "PYTHONPATH": "", "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, cwd=CLIENT.parent, env=environment, stdin=subprocess.DEVNULL)
    executable.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{CLIENT}" "{sys.executable}" "{address}" "$@"\n')
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


def serve(address: str, executable: str, search_path: str) -> Callable[[], None]:
    """Serves at a socket until it is ended. In each process that it starts it returns what that process has to run.

    Those believe to be run by the executable. verl is imported if there is a path on which to search for it.
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
    sys.executable = executable
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
            command = _started(connection, set_by_imports)
            return lambda: _run(command, base)
        connection.close()


def _keep_ray_from_drawing() -> None:
    """Imports Ray, without the ids that it draws for classes of actors: once its generator has drawn in this process,
    all forked ones draw the same, and objects of two workers have one id.
    """
    ray, actor = importlib.import_module("ray"), importlib.import_module("ray.actor")
    draw = staticmethod(lambda: ray.ActorClassID(os.urandom(ray.ActorClassID.size())))
    actor.ActorClassID = type("ActorClassID", (), {"from_random": draw})  # type: ignore[attr-defined]


def _started(connection: socket.socket, set_by_imports: dict[str, str]) -> list[str]:
    """Forks the process that a client asks for, and returns its command in it. The other one tells the client how it
    ends; where the client ends first, its process does.
    """
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(connection, 8, 250)
    with connection.makefile("rb") as stream:
        message = stream.read(int.from_bytes(size, "little"))
    directory, numbers, count, *texts = message.decode(errors="surrogateescape").split("\0")
    raised = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH) for file in files]
    for file in files:
        os.close(file)
    child = os.fork()
    if not child:
        connection.close()
        os.setsid()
        _end_with_parent()
        for number, file in zip(map(int, numbers.split(",")), raised, strict=True):
            os.dup2(file, number)
            os.close(file)
        for number, name in ((1, "stdout"), (2, "stderr")):  # the server's may have been files where these are pipes
            raw: Any = io.FileIO(number, "w", closefd=False)
            stream = io.TextIOWrapper(raw, errors=getattr(sys, name).errors, write_through=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        os.environ.clear()
        os.environ.update(set_by_imports | dict(line.split("=", 1) for line in texts[int(count) :]))
        os.chdir(directory)
        return texts[: int(count)]
    for file in raised:
        os.close(file)
    ended = os.pidfd_open(child)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall((status if status >= 0 else 128 - status).to_bytes(8, "little"))
    os._exit(0)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(command: list[str], base: list[str]) -> None:
    """Runs a command in this process, as an interpreter does that looks for modules in `base` after PYTHONPATH."""
    sys.modules["numpy"].random.seed()
    sys.path_importer_cache.clear()
    option, *arguments = command
    first = {"-c": "", "-m": os.getcwd()}.get(option, os.path.dirname(os.path.abspath(option)))
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *base]
    if "verl" in sys.modules and re.match(r"-m verl\.|\S*/default_worker\.py", " ".join(command[:2])):
        # As verl does when it is imported.
        for module in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
            importlib.import_module(module)
    main = sys.modules["__main__"].__dict__
    if option == "-m":
        sys.argv[:] = arguments
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]  # that is what `python -m` calls
    elif option == "-c":
        sys.argv[:] = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), main)
    else:
        sys.argv[:] = command
        main["__file__"] = option
        exec(compile(Path(option).read_bytes(), option, "exec"), main)
