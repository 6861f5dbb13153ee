"""A few processes in one group that run functions together and cannot hang the tests."""

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

# If no rank answers for so long, half of what pytest gives a test, they wait for each other without end: that ends the
# run, with the stacks of their threads. Functions take seconds, also where other programs keep processors busy.
SECONDS = 600.0
# Likewise where a rank has failed. Until then the others may fail too, so that their state can be seen.
SECONDS_AFTER_FAILURE = 60.0
# A rank that waits for torch's store looks at a file again and again. It fails by itself after this time.
GLOO_SECONDS = 900

# The ranks' device: "cpu", with gloo, or "cuda", with NCCL, or with gloo if there are fewer GPUs than ranks.
DEVICE = os.environ.get("GRADLOC_TEST_DEVICE") or "cpu"
if DEVICE not in ("cpu", "cuda"):
    raise ValueError(f"GRADLOC_TEST_DEVICE is {DEVICE!r}: it must be cpu or cuda")

# Modules that the ranks import first; those that a version of verl lacks are left out.
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
    "verl.workers.fsdp_workers",
]


class RankFailed(Exception):
    """At least one rank raised, died or waited for ever."""


def end_after_this_call() -> None:
    """For functions that run in the ranks: nothing else can be run in these processes, whose modules are changed."""
    global _changed
    _changed = True


_changed = False


class Cluster:
    """Starts its processes on first use and keeps them for the next call.

    It starts new ones after a failure, and after a function that called `end_after_this_call`.
    """

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.processes: list[multiprocessing.Process] = []
        self.pipes: list[Connection] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls the function in every process and returns what each rank returned.

        It is sent by name or, from within a test, with the values that it refers to. Raises RankFailed with every
        rank's traceback, or its stacks if it waits for ever.
        """
        if not all(process.is_alive() for process in self.processes):
            self.stop()
        if not self.processes:
            self._start()
        message = cloudpickle.dumps((function, arguments))
        for pipe in self.pipes:
            pipe.send_bytes(message)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        changed = False
        try:
            while waiting := [rank for rank in range(self.world_size) if rank not in results and rank not in failures]:
                seconds = SECONDS_AFTER_FAILURE if failures else SECONDS
                ready = wait([self.pipes[rank] for rank in waiting], seconds)
                if not ready:
                    stacks = self._end_with_stacks(waiting)
                    failures |= {rank: f"no answer for {seconds:g} s\n{stacks[rank]}" for rank in waiting}
                for pipe in ready:
                    rank = self.pipes.index(pipe)
                    try:
                        succeeded, value, of_rank = pickle.loads(pipe.recv_bytes())
                        changed |= of_rank
                    except (EOFError, ConnectionResetError):
                        self.processes[rank].join()
                        exit_code, stacks = self.processes[rank].exitcode, self._stacks(rank).read_text()
                        succeeded, value = False, f"died with exit code {exit_code}\n{stacks}"
                    (results if succeeded else failures)[rank] = value
        except BaseException:  # the test's time is over, or somebody ends it
            for rank, text in self._end_with_stacks(waiting).items():
                print(f"rank {rank}:\n{text}", file=sys.stderr)
            self.stop()
            raise
        if failures:
            self.stop()
            raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        if changed:
            self.stop()
        return [results[rank] for rank in range(self.world_size)]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        if self.folder is not None:
            self.folder.cleanup()
        self.processes, self.pipes, self.folder = [], [], None

    def _end_with_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Ends processes, and returns where the threads of each one were."""
        for rank in ranks:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        for rank in ranks:
            self.processes[rank].join()
        return {rank: self._stacks(rank).read_text() for rank in ranks}

    def _stacks(self, rank: int) -> Path:
        return Path(self.folder.name, f"stacks_{rank}")

    def _start(self) -> None:
        # Its server imports what takes long once, for all processes of all clusters.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.folder = tempfile.TemporaryDirectory(prefix="gloo_")
        store = f"{self.folder.name}/store"
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            self._stacks(rank).touch()
            arguments = (rank, self.world_size, store, str(self._stacks(rank)), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)


def _serve(rank: int, world_size: int, store: str, stacks: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    # The signal's own action, which ends the process, comes after the stacks.
    file = open(stacks, "w")
    faulthandler.register(signal.SIGUSR1, file=file, chain=True)
    faulthandler.enable(file)
    torch.set_num_threads(1)
    backend = "gloo"
    if DEVICE == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        backend = "cpu:gloo,cuda:nccl" if world_size <= gpus else "gloo"
        _compute_alike_each_time()
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=GLOO_SECONDS),
    )
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments = pickle.loads(message)
            reply = pickle.dumps((True, function(*arguments), _changed))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc(), _changed))
        pipe.send_bytes(reply)


def _compute_alike_each_time() -> None:
    """Leaves out kernels that add up in an order that changes: no two runs could be compared bit for bit with them."""
    import torch
    from verl.utils import torch_functional

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.allow_tf32 = False
    # Some operations have no other kernel: cumsum, for one, adds up whole numbers here.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # as in training
    # Its backward overwrites what a second backward through the same graph needs, and brute force runs many.
    torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = False
