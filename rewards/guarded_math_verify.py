# Copyright 2024 Bytedance Ltd. and/or its affiliates
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

"""Math-Verify as a reward that cannot hang: answers are scored in worker processes and killed when they take too long.

Sympy may compute for hours on an answer such as 9^(9^9), inside C code that no signal handler, thread or asyncio
timeout can interrupt. So a pool of persistent worker processes, one pool per calling process, does the work. It may
be used from any thread, asyncio executor or Ray actor. Workers are forked from a clean process of their own that has
imported Math-Verify and nothing else, so that a killed one is replaced at once.

Every setting is a keyword argument (custom_reward_function.reward_kwargs) or else an environment variable:

    timeout, VERL_MATH_VERIFY_TIMEOUT: seconds of CPU time that one answer may take, at most a day; 10. An answer that
        takes none, because it sleeps, ends after ten times as long.
    workers, VERL_MATH_VERIFY_WORKERS: worker processes per calling process; 4.
    memory_mb, VERL_MATH_VERIFY_MEMORY_MB: MiB of address space that a worker may have, of which an answer finds at
        least half free; 1024. What does not fit counts as unparsable.
    precision, VERL_MATH_VERIFY_PRECISION: decimal places to which floating-point numbers are compared; 6. Where these
        leave a truth less than half as many significant digits, so many digits are compared.
    gold_extraction_target, VERL_MATH_VERIFY_GOLD_TARGET: what the ground truth is, a list or comma-separated: latex,
        expr (plain numbers and arithmetic), string (a letter from A to D); latex.
    pred_extraction_target, VERL_MATH_VERIFY_PRED_TARGET: what is looked for in a response; expr,latex.
"""

import concurrent.futures
import contextlib
import ctypes
import importlib.util
import io
import itertools
import logging
import math
import numbers
import os
import pkgutil
import queue
import re
import reprlib
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from multiprocessing import connection, context, forkserver, popen_forkserver, reduction, spawn, util
from multiprocessing.process import BaseProcess
from typing import Any, cast

try:
    import pebble
except ImportError:
    pebble = None  # type: ignore[assignment]  # reported when the first answer is scored

WORKER_NAME = "math_verify_worker"
# Of Linux's prctl: the signal that a process gets when its parent ends.
PR_SET_PDEATHSIG = 1
INSTALL = "`pip install 'math-verify>=0.8' pebble`"
# Attempts for one answer whose worker is lost over it, for instance to the kernel's OOM killer.
ATTEMPTS = 3
# Seconds to wait before a broken pool is restarted, repeatedly, since the cause may pass: a lack of memory or
# of file descriptors, say. Then seconds after which a call gives up, if no answer has been scored since.
BACKOFF = 0.2, 1, 5, 15
GIVE_UP = 60
# Seconds that starting a worker may take, on top of the time limit, before the pool counts as broken.
START_GRACE = 120
# Answers of a batch that a worker gets at once, as handing one over costs a good part of what scoring a short one does.
CHUNK = 16
# Seconds within which pebble reports the end of a worker, unless it overlooks it.
REPORT = 3
# The longest time limit in seconds. Timers take no arbitrarily large numbers.
DAY = 86400
# How many times its limit of CPU time an answer may take by the clock, in case it sleeps. On a busy machine an answer
# waits for the CPU, too, and must not be ended for that.
WALL_FACTOR = 10
# A worker's exit code when it makes room for a fresh one: what it holds in caches would be missing for the next answer.
RETIRED = 75

TARGETS = ("latex", "expr", "string")
# Bytes that the path of a Unix socket may have, the least of all systems.
SOCKET_PATH = 103

# What Math-Verify drops, although it makes another answer of it: text behind a number, as a unit, and dots in a list.
HEDGE = re.compile(r"\\(?:text\w*|mbox|mathrm)\s*\{[^{}]*\b(?:or\b(?!\s*\})|and\s+\d)[^{}]*\}")
DOTS = re.compile(r",\s*(?:\\[lc]?dots|\.\.\.|…)(?=\s*(?:,|\\?[})\]$]|\\right|$))")
# Around a number that is the answer although the LaTeX cannot be read, there may be no more than this.
BARE = re.compile(r"(?:\s*\\approx|.*(?<!\\not)=)?\s*-?[\d.,]*\d\s*(?:\.|\\?%)?\s*")
APPROX = re.compile(r"\\approx(?:eq)?(?![a-zA-Z])")
NUMBER = re.compile(r"\d*\.\d+|\d+")
BASE_10 = re.compile(r"(?<=\d)\s*_\s*\{?\(?10\)?\}?(?!\d)")
# Letters that Math-Verify takes for units behind a number, although they are variables.
VARIABLES = "[a-zA-Z]s?|ab|bc|lt|mp|mt|st"
# May come along in `default_compute_score`, and are for others.
FOREIGN_OPTIONS = ("gamma", "rho", "min_steps", "reward_router_address", "reward_model_tokenizer")

_lock = threading.Lock()
_pool: "_Pool | None" = None
_server: forkserver.ForkServer | None = None
_exiting = False

# Of a worker, set by `_warm_up`: the arrays of the pool, its address space in bytes, whether it has scored an answer,
# and what is wrong with Math-Verify.
_scores: Any
_owners: Any
_memory: int
_used: bool
_fault: str | None


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0, **options: Any) -> float:
    """Score an answer against the ground truth with Math-Verify.

    Args:
        model_output (str): The response, which holds the answer as LaTeX or as a plain expression.
        ground_truth (str): The expected answer, without `\\boxed`.
        timeout_score (float): The score of an answer that exceeds the time limit, or whose workers die over it.
        **options: The module's settings.

    Returns:
        float: 1.0 if the answer is right, 0.0 if it is wrong or cannot be parsed.

    Raises:
        ImportError: If math-verify or pebble is not installed, or math-verify is too old.
        RuntimeError: If the workers cannot be kept alive, for a minute, or TMPDIR is too long for their socket.
        TypeError: If an option is not known, the response not text, or the ground truth neither text nor a number.
        ValueError: If an option has a bad value, or asks for another pool than the process has.
    """
    settings = _Settings.read(options)
    return _score_all([_texts(model_output, ground_truth)], _timeout_score(timeout_score), settings)[0]


def compute_score_batch(
    data_sources: Iterable[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Iterable[dict] | None = None,
    timeout_score: float = 0,
    **options: Any,
) -> list[float]:
    """Score the answers of a batch with Math-Verify; the reward function for verl's `BatchRewardManager`.

    Args:
        data_sources (Iterable[str]): Not used: all samples are scored the same way.
        solution_strs (Sequence[str]): The responses.
        ground_truths (Sequence[str]): The expected answers.
        extra_infos (Iterable[dict], optional): Not used.
        timeout_score (float): As in `compute_score`.
        **options: The module's settings.

    Returns:
        list[float]: The scores, in the order of the responses.

    Raises:
        ImportError, RuntimeError, TypeError: As `compute_score`.
        ValueError: As `compute_score`; also if there are not as many truths as responses.
    """
    answers = [_texts(answer, truth) for answer, truth in zip(solution_strs, ground_truths, strict=True)]
    return _score_all(answers, _timeout_score(timeout_score), _Settings.read(options))


def _texts(answer: Any, truth: Any) -> tuple[str, str]:
    # Anything else, as text, would be an answer that nothing matches: every reward would be 0 without a word.
    if not isinstance(answer, str):
        raise TypeError(f"A response for the math_verify reward must be a string, got {reprlib.repr(answer)}.")
    # A missing cell of a table is NaN, which is not equal to itself.
    if not isinstance(truth, str | numbers.Real) or isinstance(truth, bool) or truth != truth:
        raise TypeError(
            f"A ground truth of the math_verify reward must be a string or a number, got {reprlib.repr(truth)}."
        )
    # A worker could not load the class of a subclass of str.
    answer = str.__str__(answer)
    if isinstance(truth, str):
        return answer, str.__str__(truth)
    text = str(truth)
    # In LaTeX, e is a number.
    return answer, f"{Decimal(text):f}" if "e" in text else text


@dataclass(frozen=True)
class _Settings:
    timeout: float
    workers: int
    memory_mb: int
    precision: int
    gold_extraction_target: tuple[str, ...]
    pred_extraction_target: tuple[str, ...]

    @classmethod
    def read(cls, options: dict[str, Any]) -> "_Settings":
        """Options first, the environment second, defaults last."""
        fields = cls.__dataclass_fields__
        if unknown := options.keys() - fields.keys() - set(FOREIGN_OPTIONS):
            raise TypeError(f"math_verify has no option {sorted(unknown)[0]!r}; it has {', '.join(fields)}.")

        def value(name: str, variable: str, default: str) -> tuple[str, Any]:
            if options.get(name) is not None:
                return name, options[name]
            return f"VERL_MATH_VERIFY_{variable}", os.environ.get(f"VERL_MATH_VERIFY_{variable}", default)

        return cls(
            _number(*value("timeout", "TIMEOUT", "10"), f"a number of seconds greater than 0, at most {DAY}"),
            _number(*value("workers", "WORKERS", "4"), "a whole number of processes greater than 0", 1),
            # Sympy alone takes about 70 MiB.
            _number(*value("memory_mb", "MEMORY_MB", "1024"), "a whole number of MiB from 256", 256),
            _number(*value("precision", "PRECISION", "6"), "a whole number of decimal places from 0", 0),
            _targets(*value("gold_extraction_target", "GOLD_TARGET", "latex")),
            _targets(*value("pred_extraction_target", "PRED_TARGET", "expr,latex")),
        )


def _number(name: str, value: Any, what: str, least: int | None = None) -> Any:
    """A whole number if it has a least value, otherwise a positive number of seconds."""
    try:
        # As text, because True is not a number.
        number = float(str(value)) if least is None else int(str(value))
    except ValueError:
        number = math.nan
    if not (0 < number <= DAY if least is None else least <= number):
        raise ValueError(f"{name} must be {what}, but is {value!r}.")
    return number


def _timeout_score(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"timeout_score must be a finite number, but is {value!r}.")
    return float(value)


def _targets(name: str, value: Any) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, Iterable) else ()
    targets = tuple(str(item).strip() for item in items)
    if not targets or not set(targets) <= set(TARGETS):
        raise ValueError(f"{name} must be a list of {', '.join(TARGETS)}, but is {value!r}.")
    return targets


def _score_all(answers: list[tuple[str, str]], timeout_score: float, settings: _Settings) -> list[float]:
    """Pairs of a response and its truth to scores, in order."""
    scores = [math.nan] * len(answers)
    attempts = [0] * len(answers)
    # A worker needs a multiple of an answer's length only to receive it.
    longest = settings.memory_mb * 2**20 // 64
    size = min(CHUNK, max(1, len(answers) // (4 * settings.workers)))
    chunks: deque[list[int]] = deque()
    room = 0
    for index, length in enumerate(len(answer) + len(truth) for answer, truth in answers):
        if length > longest:
            scores[index] = 0.0
            continue
        if not chunks or len(chunks[-1]) == size or length > room:
            chunks.append([])
            room = 2**20
        chunks[-1].append(index)
        room -= length
    running: dict[concurrent.futures.Future, _Task] = {}
    pool: _Pool | None = None
    # How often the pool broke since the last score, and when first
    breaks, broken_since = 0, 0.0

    def settle(task: "_Task", error: BaseException | None) -> BrokenProcessPool | None:
        """Takes over the scores that there are, and puts what is left of a chunk back in line."""
        nonlocal breaks
        done = task.scores()
        for index, score in zip(task.chunk, done, strict=False):
            scores[index] = score
        left = task.chunk[len(done) :]
        if done:
            breaks = 0
        if isinstance(error, BrokenProcessPool):
            _discard(task.pool)
        elif error and not isinstance(error, pebble.ProcessExpired | concurrent.futures.TimeoutError | MemoryError):
            # Not the answer's fault, and every other one would meet it as well.
            raise error
        elif left and not _exited(error, RETIRED):
            attempts[left[0]] += 1
            timed_out = isinstance(error, concurrent.futures.TimeoutError) or _exited(
                error, -signal.SIGPROF, -signal.SIGALRM
            )
            if timed_out or attempts[left[0]] == ATTEMPTS:
                scores[left[0]] = timeout_score
                left = left[1:]
        # One by one, because where one answer hangs, the next may hang as well, and another worker is free.
        chunks.extendleft([index] for index in reversed(left))
        task.release()
        return error if isinstance(error, BrokenProcessPool) else None

    try:
        while chunks or running:
            broken: Exception | None = None
            while chunks:
                try:
                    pool = _get_pool(settings)
                except OSError as error:
                    broken = error
                    break
                chunk = chunks.popleft()
                task = pool.submit([answers[index] for index in chunk], chunk, settings, wait=not running)
                if task is None:
                    chunks.appendleft(chunk)
                    if not running and not pool.pool.active:
                        # Another caller gave up on it, with its slots in hand.
                        _discard(pool)
                    break
                running[task.future] = task
            for future in concurrent.futures.wait(running, 1, concurrent.futures.FIRST_COMPLETED).done:
                broken = settle(running.pop(future), future.exception()) or broken
            for future, task in tuple(running.items()):
                if loss := task.lost():
                    broken = settle(running.pop(future), loss) or broken
            if broken:
                broken_since = broken_since if breaks else time.monotonic()
                if time.monotonic() - broken_since > GIVE_UP:
                    message = f"The math_verify workers cannot be kept alive; their own error is in the log ({broken})."
                    raise RuntimeError(message) from broken
                time.sleep(BACKOFF[min(breaks, len(BACKOFF) - 1)])
                breaks += 1
    except BaseException:
        # An interrupt can come at any moment, with slots in hand or answers on their way: the next call starts afresh.
        if pool is not None:
            _discard(pool)
        raise
    return scores


def _exited(error: BaseException | None, *codes: int) -> bool:
    return isinstance(error, pebble.ProcessExpired) and error.exitcode in codes


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        # Another user's process has the number of one of ours that is gone.
        return False
    return True


@dataclass
class _Task:
    """A chunk of answers on its way."""

    pool: "_Pool"
    slot: int
    chunk: list[int]
    future: concurrent.futures.Future
    deadline: float
    # When its worker was first seen to be dead
    bereft: float | None = None

    def scores(self) -> list[float]:
        """The scores that the worker has written so far."""
        first = CHUNK * self.slot
        scores = self.pool.scores[first : first + len(self.chunk)]
        return scores[: next((i for i, score in enumerate(scores) if math.isnan(score)), len(scores))]

    def lost(self) -> Exception | None:
        """Why there will be no result, if there will be none."""
        if self.future.done():
            return None
        now = time.monotonic()
        if not self.pool.pool.active or now > self.deadline:
            return BrokenProcessPool("The pool lost an answer.")
        # pebble overlooks the end of a worker if it has yet to hear that the worker took the chunk.
        pid = self.pool.owners[self.slot]
        if self.bereft is None and pid and not _exists(pid):
            self.bereft = now
        if self.bereft is not None and now - self.bereft > REPORT:
            return pebble.ProcessExpired("The pool overlooked the end of a worker.", pid=pid)
        return None

    def release(self) -> None:
        self.pool.slots.put(self.slot)


class _Pool:
    """A pebble pool that takes no more chunks than it has workers, so that a wait for an answer has a bound."""

    def __init__(self, settings: _Settings) -> None:
        for module, package in ("math_verify", "math-verify"), ("pebble", "pebble"):
            if importlib.util.find_spec(module) is None:
                raise ImportError(f"The math_verify reward needs {package}, which is not installed: {INSTALL}.")
        self.size = settings.workers, settings.memory_mb
        self.processes = _Context()
        # Workers write scores here, so that a chunk's scores survive its worker.
        self.scores = self.processes.RawArray("d", CHUNK * settings.workers)
        # The process that has taken the chunk of a slot
        self.owners = self.processes.RawArray("i", settings.workers)
        self.slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(settings.workers):
            self.slots.put(slot)
        self.pool = pebble.ProcessPool(
            settings.workers,
            initializer=_in_worker("_warm_up"),
            initargs=(self.scores, self.owners, settings.memory_mb * 2**20),
            context=self.processes,
        )

    def submit(self, answers: list[tuple[str, str]], chunk: list[int], settings: _Settings, wait: bool) -> _Task | None:
        """Hands a chunk to the pool, or returns nothing if no worker is free, now or for a second."""
        try:
            slot = self.slots.get(wait, timeout=1)
        except queue.Empty:
            return None
        first = CHUNK * slot
        self.scores[first : first + CHUNK] = [math.nan] * CHUNK
        self.owners[slot] = 0
        limit = len(answers) * WALL_FACTOR * settings.timeout + START_GRACE
        future: concurrent.futures.Future[None]
        try:
            future = self.pool.schedule(
                _in_worker("_score_chunk"),
                args=(
                    first,
                    answers,
                    settings.timeout,
                    settings.precision,
                    settings.gold_extraction_target,
                    settings.pred_extraction_target,
                ),
                # The worker's own timers come first.
                timeout=limit,
            )
        except (RuntimeError, OSError) as error:
            # A RuntimeError is pebble's word for a pool that is broken or stopped. The first call starts the workers.
            future = concurrent.futures.Future()
            future.set_exception(BrokenProcessPool(str(error)))
        return _Task(self, slot, chunk, future, time.monotonic() + limit)

    def close(self) -> None:
        self.pool.stop()
        self.pool.join()


class _Worker(context.ForkServerProcess):
    """A worker process whose main module is this file, loaded alone: no verl, torch or ray in it.

    A plain child would run the caller's main script again, and a script without a main guard would then start a pool
    in every worker. The name differs from pebble's, as pebble's own exit hook, in a forked child, would end the
    parent's workers by that name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "name": WORKER_NAME})

    def __reduce__(self) -> tuple:
        return object.__new__, (context.ForkServerProcess,), self.__dict__

    def terminate(self) -> None:
        # Python handles SIGTERM between bytecodes, so a worker in a long C call would go on.
        self.kill()

    @staticmethod
    def _Popen(process: BaseProcess) -> "_Popen":
        return _Popen(process)


class _Context(context.ForkServerContext):
    Process = _Worker

    def __init__(self) -> None:
        super().__init__()
        self.connections: list[connection.Connection] = []

    def Pipe(self, duplex: bool = True) -> tuple[connection.Connection, connection.Connection]:
        ends = super().Pipe(duplex)
        self.connections += ends
        return ends


class _Popen(popen_forkserver.Popen):
    """As its base class, but from a fork server and with a main module of our own."""

    def _launch(self, process: BaseProcess) -> None:
        preparation = spawn.get_preparation_data(process.name)
        preparation.pop("init_main_from_name", None)
        preparation["init_main_from_path"] = os.path.abspath(__file__)
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparation, data)
            reduction.dump(process, data)
        finally:
            context.set_spawning_popen(None)
        assert _server is not None  # a pool has one
        self.sentinel, pipe = _server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]  # private
        with open(pipe, "wb") as file:
            # The child takes the parent for dead once no write end is left.
            close = util.close_fds  # type: ignore[attr-defined]  # private
            self.finalizer = util.Finalize(self, close, (os.dup(pipe), self.sentinel))
            file.write(data.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _InWorker:
    """Pickles as a function of the worker's main module, because by its own name a worker would have to import verl."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple:
        return pkgutil.resolve_name, (f"__main__:{self.name}",)


def _in_worker(name: str) -> Callable[..., None]:
    return cast(Callable[..., None], _InWorker(name))


def _warm_up(scores: Any, owners: Any, memory: int) -> None:
    """Runs in a new worker, before its first answer's time begins."""
    global _scores, _owners, _memory, _used, _fault
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
    _scores, _owners, _memory, _used = scores, owners, memory, False
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for end in signal.SIGPROF, signal.SIGALRM:
        signal.signal(end, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [end])
    if sys.platform == "linux":
        # A pool whose fork server was killed may go on with another, and would never end this worker.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # One warning for every answer without an expression, and for the timeouts that are off on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Below 0.8, Math-Verify fails without timeouts of its own and calls every answer wrong. A wrong answer goes the
    # longest way, down to sympy's simplification.
    _fault = None
    try:
        for truth, expected in ("\\frac{1}{2}", 1.0), ("\\frac{1}{3}", 0.0):
            if _score("\\boxed{\\frac{1}{2}}", truth, 6, ("latex",), ("expr", "latex")) != expected:
                _fault = f"it does not score \\frac{{1}}{{2}} as {expected:g} where {truth} is right"
        from latex2sympy2_extended import math_normalization
        from math_verify import grader

        units = math_normalization.units_regex.pattern
        math_normalization.units_regex = re.compile(rf"(?!.\s*(?:{VARIABLES})\s*$){units}")
        grader.sympy_numeric_eq = partial(_numeric_eq, grader.sympy_numeric_eq)
    except Exception as error:
        _fault = f"it fails with {error!r}"


def _score_chunk(first: int, answers: list[tuple[str, str]], timeout: float, *settings: Any) -> None:
    """Runs in a worker."""
    global _used
    _owners[first // CHUNK] = os.getpid()
    if _fault:
        raise ImportError(f"The math_verify reward needs math-verify>=0.8: {INSTALL}; of what is installed, {_fault}.")
    for index, answer in enumerate(answers, first):
        # In KiB. An answer that took much memory leaves some of it in sympy's caches.
        if _used and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > _memory // 2:
            os._exit(RETIRED)
        _used = True
        # Nobody handles their signals: the kernel ends the process, whatever it computes, and even without a parent.
        signal.setitimer(signal.ITIMER_PROF, timeout)
        signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * timeout)
        score = _score(*answer, *settings)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _scores[index] = score


def _score(
    model_output: str, ground_truth: str, precision: int, gold_targets: tuple[str, ...], pred_targets: tuple[str, ...]
) -> float:
    """Runs in a worker."""
    from math_verify import verify

    try:
        if not HEDGE.search(ground_truth):
            model_output = HEDGE.sub(", hedge", model_output)
        # What is parsed and compared here is what math_verify.metric.math_metric does, without its own timeouts.
        answer = _parse(model_output, pred_targets)
        gold = _parse("\\boxed{" + ground_truth + "}" if "latex" in gold_targets else ground_truth, gold_targets)
        if not any(map(_is_infinite, gold)):
            answer = [found for found in answer if not _is_infinite(found)]
        right = verify(gold, answer, float_rounding=precision, timeout_seconds=None)
        return float(right and not _says_more(answer, gold))
    except Exception:
        # Math-Verify catches what it can raise, but not what comes while it does so, above all a MemoryError. What that
        # can be depends on the answer; that the installation works has been seen at the start.
        return 0.0


def _parse(text: str, targets: tuple[str, ...]) -> list[Any]:
    """What Math-Verify reads, and the text that it read first. Runs in a worker.

    Of a formula that it cannot read, it would take a number: 3 of x = 3k, k \\in \\mathbb{Z}, and 42 of \\neg 42.
    """
    from math_verify import parse

    read = partial(parse, DOTS.sub(",dots", text), _extraction(targets), parsing_timeout=None)
    first: list[Any] = read(extraction_mode="first_match")
    return read() if len(first) == 1 and isinstance(first[0], str) and BARE.fullmatch(first[0]) else first


def _says_more(answer: list[Any], gold: list[Any]) -> bool:
    """Whether an answer is right only because of what Math-Verify drops from its LaTeX. Runs in a worker."""
    from sympy import And, Eq, Interval, Tuple

    text, truth = (next((found for found in reversed(side) if isinstance(found, str)), "") for side in (answer, gold))
    if text.strip() == truth.strip():
        return False
    text, *sides = APPROX.split(text)
    dropped = _dropped(text, answer[0])
    if dropped and dropped != _dropped(truth, gold[0]):
        return True
    equal = [(answer[0], value) for side in sides for value in _parse(f"\\boxed{{{side}}}", ("latex",))[:1]]
    if isinstance(answer[0], Eq | And) and not re.search(r"\\circ|\d\s*_", text):
        equal += [equation.args for equation in answer[0].atoms(Eq)]
    return any(_differ(*pair) for pair in equal) or (
        isinstance(gold[0], Tuple | Interval) and _is_out_of_order(answer[0])
    )


def _is_out_of_order(answer: Any) -> bool:
    """Whether the answer is y=1, x=2 or (y, x) = (1, 2), which is not (1, 2). Runs in a worker.

    Only names that follow one another, as x and y or x_1 and x_2 do, have an order.
    """
    from sympy import Eq, FiniteSet, Tuple

    if isinstance(answer, Eq) and isinstance(answer.lhs, Tuple):
        names = [str(name) for name in answer.lhs]
    elif isinstance(answer, FiniteSet) and all(isinstance(equation, Eq) for equation in answer.args):
        names = [str(equation.lhs) for equation in getattr(answer, "_unsorted_args", answer.args)]
    else:
        return False
    follow = all(a[:-1] == b[:-1] and ord(b[-1]) - ord(a[-1]) == 1 for a, b in itertools.pairwise(sorted(names)))
    return follow and names != sorted(names)


def _dropped(text: str, found: Any) -> set[str]:
    """The numbers in the last side of a text that Math-Verify drops: 41 of 41 | 42, 8 of 42_8. Runs in a worker."""
    side = BASE_10.sub("", text.rpartition("=")[2])
    kept = set(NUMBER.findall(str(found)))
    missing = [match for match in NUMBER.finditer(side) if match.group() not in kept]
    if not missing:
        return set()
    # Most have become another number, as 2 and 4 of 2/4 do. One is dropped if it may be any other.
    value, *others = (
        _parse(f"\\boxed{{{other}}}", ("latex",))[:1]
        for other in (side, *(f"{side[: match.end()]}1{side[match.end() :]}" for match in missing))
    )
    return {match.group() for match, other in zip(missing, others, strict=True) if other == value}


def _differ(left: Any, right: Any) -> bool:
    """Whether they are numbers that are not equal, even if they may be rounded. Runs in a worker."""
    from sympy import Eq, Float, Number

    left = left.rhs if isinstance(left, Eq) else left
    if not isinstance(left, Number) or not isinstance(right, Number):
        return False
    gap = abs(left - right)
    rounded = isinstance(left, Float) or isinstance(right, Float)
    return bool(gap > 0 and gap >= (min(1, abs(left) / 20) if rounded else 1))


def _numeric_eq(original: Callable[..., bool], gold: Any, answer: Any, rounding: int, *rest: Any) -> bool:
    """Math-Verify's comparison, but relative to the truth where the truth is tiny. Runs in a worker.

    Decimals are compared to half as many significant digits as they have decimal places, where that is more, and
    exact values to twelve digits. Otherwise 0.0 would be right for 6.6e-34, and 1/101! for 1/100!.
    """
    from sympy import Expr, Float, Integer, floor, log

    if isinstance(gold, Expr) and isinstance(answer, Expr) and gold.is_number:
        size, digits = abs(gold.evalf()), (rounding + 1) // 2
        if not gold.has(Float) and not answer.has(Float):
            gap = abs((gold - answer).evalf())
            if isinstance(size, Float) and isinstance(gap, Float) and gap > size * Float("1e-12"):
                return False
        elif digits and isinstance(size, Float) and 0 < size < Float(10) ** (digits - rounding - 1):
            scale = Integer(10) ** -floor(log(size, 10).evalf())
            return original(gold * scale, answer * scale, digits - 1, *rest)
    return original(gold, answer, rounding, *rest)


def _is_infinite(expression: Any) -> bool:
    """Whether it is a number, or a list of some, with an infinity or NaN in it. Runs in a worker.

    Sympy may simplify the difference between a number and a long product of infinities to 0, in a few of a hundred
    processes: it depends on the hashes of its objects. Math-Verify calls such an answer right.
    """
    from sympy import Expr, FiniteSet, MatrixBase, Tuple, nan, oo, zoo

    return isinstance(expression, Expr | FiniteSet | MatrixBase | Tuple) and expression.has(oo, -oo, zoo, nan)


@lru_cache
def _extraction(targets: tuple[str, ...]) -> tuple:
    """Runs in a worker."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, StringExtractionConfig

    configs = {"latex": LatexExtractionConfig, "expr": ExprExtractionConfig, "string": StringExtractionConfig}
    return tuple(configs[target]() for target in targets)


def _get_pool(settings: _Settings) -> _Pool:
    global _pool, _server
    with _lock:
        if _exiting:
            raise RuntimeError("The interpreter is shutting down, no answer is scored any more.")
        if _pool is None:
            if _server is None:
                # Its socket is there. multiprocessing adds "/listener-" and eight characters.
                if len(os.fsencode(folder := util.get_temp_dir())) + 18 > SOCKET_PATH:
                    raise RuntimeError(
                        f"The path of the folder for temporary files, {folder}, is too long for a socket of the "
                        f"math_verify workers: set TMPDIR to a path of at most {SOCKET_PATH - 32} bytes, such as /tmp."
                    )
                _server = forkserver.ForkServer()
                _server.set_forkserver_preload(["math_verify", "pebble", "multiprocessing.sharedctypes"])
                # Unlike atexit, this also runs in processes that multiprocessing forked, before their children are
                # joined.
                util.Finalize(None, _shut_down, exitpriority=10)
            _pool = _Pool(settings)
        if _pool.size != (settings.workers, settings.memory_mb):
            workers, memory_mb = _pool.size
            raise ValueError(
                f"The math_verify pool of this process has {workers} workers of {memory_mb} MiB; "
                f"ask for the same in every call, not for {settings.workers} of {settings.memory_mb} MiB."
            )
        return _pool


def _discard(pool: _Pool) -> None:
    global _pool
    with _lock:
        if _pool is pool:
            _pool = None
            pool.close()


def _shut_down() -> None:
    global _pool, _exiting
    with _lock:
        _exiting = True
        if _pool is not None:
            _pool.close()
            _pool = None


def _after_fork() -> None:
    # The pool's threads, workers and fork server stay with the parent.
    global _lock, _pool, _server
    alive_fd = None if _server is None else _server._forkserver_alive_fd  # type: ignore[attr-defined]  # private
    if alive_fd is not None:
        os.close(alive_fd)
    # When the parent dies, its idle workers end only if nobody else could write to them.
    for end in _pool.processes.connections if _pool is not None else ():
        with contextlib.suppress(OSError):
            end.close()
    _lock, _pool, _server = threading.Lock(), None, None


os.register_at_fork(after_in_child=_after_fork)
