"""A few processes in one gloo group that run functions together and cannot hang the tests."""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

# Ranks that still wait for a failed one get this long to fail too, so that its peers' state can be seen.
AFTER_FAILURE = 5

# What the ranks import first; what a version of verl lacks is left out.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "peft",
    "pytest",
    "verl.workers.config",
    "verl.workers.actor.dp_actor",
    "verl.workers.engine_workers",
]


class RankFailed(Exception):
    """At least one rank raised, died or ran out of time."""


class Cluster:
    """Starts its processes on first use, keeps them for the next, and starts new ones after a failure."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.processes: list[multiprocessing.Process] = []
        self.pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        """Calls the function in every process and returns what each rank returned.

        The function must be importable: it is sent by name. Raises RankFailed with every rank's traceback.
        """
        if not all(process.is_alive() for process in self.processes):
            self.stop()
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, arguments, timeout)))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while waiting := [rank for rank in range(self.world_size) if rank not in results and rank not in failures]:
            ready = wait([self.pipes[rank] for rank in waiting], max(0, deadline - time.monotonic()))
            if not ready:
                failures.update((rank, f"no answer within {timeout} s\n") for rank in waiting)
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    succeeded, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(AFTER_FAILURE)
                    succeeded, value = False, f"died with exit code {self.processes[rank].exitcode}\n"
                (results if succeeded else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE)
        if failures:
            for rank, process in enumerate(self.processes):
                if rank not in results and "no answer" in failures[rank] and process.is_alive():
                    os.kill(process.pid, signal.SIGUSR1)  # says where it is
            time.sleep(0.5)
            self.stop()
            raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(self.world_size)]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def _start(self) -> None:
        # Its server imports what takes long once, for all processes of all clusters.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        store = tempfile.NamedTemporaryFile(prefix="gloo_", delete=False)
        store.close()
        os.unlink(store.name)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments, timeout = pickle.loads(message)
            reply = pickle.dumps((True, function(*arguments)))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(reply)
