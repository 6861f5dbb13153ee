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
from typing import Any, cast, overload

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

# What Math-Verify does not read, in responses and truths, and what it reads.
SIGNS = {ord(minus): "-" for minus in "\N{MINUS SIGN}\N{SMALL HYPHEN-MINUS}\N{FULLWIDTH HYPHEN-MINUS}"} | {
    ord(invisible): None
    for invisible in "\N{SOFT HYPHEN}\N{ZERO WIDTH SPACE}\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
    "\N{WORD JOINER}\N{ZERO WIDTH NO-BREAK SPACE}"
}
SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # A dash as the sign of a number
        (r"(?<![\w.)\]}])[‐‑‒–](?=[\d.\\])", "-"),
        (r"\\boxed\s+\{", r"\\boxed{"),
        # The full stop of a sentence, within the box or the dollars, but not before dollars that open
        (r"(?<!\.)(?<!\\left)(?<!\\right)[.。](?=\s*\}|\$\$|\$(?:[\s.,;:)]|$)|\\\)|\\\])", ""),
        # Dots in a list are left out as if nothing followed, or are not understood: now they are an element.
        (r",\s*(?:\\[lc]?dots|\.\.\.|…)(?=\s*(?:,|\\?[})\]$]|\\right|$))", ",dots"),
    )
]
# Thin spaces between the thousands of a number
THOUSANDS = re.compile(r"(?<![\w.^\\])\d{1,3}(?:(?:\\[,;: ]|~|[\u00a0\u2009\u202f])\d{3})+(?!\d)")
# Text behind an answer is dropped as a unit.
HEDGE = re.compile(r"(\\(?:text\w*|mbox|mathrm)\s*\{)[\s,;(]*(or\b|and\b(?=\s+\d))\s*(?=[^\s}])")

# In LaTeX, what is dropped, although it makes another answer of it: a sign before it, and a base behind the number.
DROPPED_SIGN = re.compile(r"\s*(\\(?:neg|lnot|not(?:in)?|neq?|[lg]eq?|[lg]t|[lg]eqslant)(?![a-zA-Z])|[<>≠≤≥¬])")
BASE = re.compile(r"\d\s*_\s*\{?\s*\(?\s*(\w+)")
INTERVAL = re.compile(r"\[[^\[\]]*,[^\[\]]*\]\s*$")
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
        RuntimeError: If the workers cannot be kept alive, for a minute.
        TypeError: If an option is not known, the response is no text, or the ground truth neither text nor a number.
        ValueError: If a setting has a bad value, or asks for another pool than the process has.
    """
    return _score_all([_texts(model_output, ground_truth)], float(timeout_score), _Settings.read(options))[0]


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
    return _score_all(answers, float(timeout_score), _Settings.read(options))


def _texts(answer: Any, truth: Any) -> tuple[str, str]:
    # Anything else, as text, would be an answer that nothing matches: every reward would be 0 without a word.
    if not isinstance(answer, str):
        raise TypeError(f"A response for the math_verify reward must be a string, got {reprlib.repr(answer)}.")
    if not isinstance(truth, str | numbers.Real) or isinstance(truth, bool):
        raise TypeError(
            f"A ground truth of the math_verify reward must be a string or a number, got {reprlib.repr(truth)}."
        )
    text = str(truth)
    # In LaTeX, e is a number.
    return answer, f"{Decimal(text):f}" if isinstance(truth, numbers.Real) and "e" in text else text


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


@overload
def _number(name: str, value: Any, what: str) -> float: ...


@overload
def _number(name: str, value: Any, what: str, least: int) -> int: ...


def _number(name: str, value: Any, what: str, least: int | None = None) -> float:
    """A whole number if it has a least value, otherwise a positive number of seconds."""
    try:
        # As text, because True is no number.
        number = float(str(value)) if least is None else int(str(value))
    except ValueError:
        number = math.nan
    if not (0 < number <= DAY if least is None else least <= number):
        raise ValueError(f"{name} must be {what}, but is {value!r}.")
    return number


def _targets(name: str, value: str | Iterable[str]) -> tuple[str, ...]:
    targets = tuple(item.strip() for item in (value.split(",") if isinstance(value, str) else map(str, value)))
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
                    message = "The math_verify workers cannot be kept alive; their own error is in the log."
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
        # Workers write scores here, so that those of a chunk survive its worker.
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
        from math_verify import grader

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
    from math_verify import parse, verify

    try:
        model_output = _readable(model_output)
        if not HEDGE.search(ground_truth):
            model_output = HEDGE.sub(r"\\text{ \2 }\1", model_output)
        # What is parsed and compared here is what math_verify.metric.math_metric does, without its own timeouts.
        answer = parse(model_output, _extraction(pred_targets), parsing_timeout=None)
        truth = "\\boxed{" + ground_truth + "}" if "latex" in gold_targets else ground_truth
        gold = parse(_readable(truth), _extraction(gold_targets), parsing_timeout=None)
        if not any(map(_is_infinite, gold)):
            answer = [found for found in answer if not _is_infinite(found)]
        answer = [_in_order(found, gold) for found in answer]
        right = verify(gold, answer, float_rounding=precision, timeout_seconds=None)
        return float(right and not _says_something_else(answer, gold))
    except Exception:
        # Math-Verify catches what it can raise, but not what comes while it does so, above all a MemoryError. What that
        # can be depends on the answer; that the installation works has been seen at the start.
        return 0.0


def _readable(text: str) -> str:
    """The text in the spellings that Math-Verify reads. Runs in a worker."""
    if not text.isascii():
        text = text.translate(SIGNS)
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    return THOUSANDS.sub(lambda number: re.sub(r"\D", "", number.group()), text)


def _in_order(answer: Any, gold: list[Any]) -> Any:
    """The values of y=1, x=2 or of (y, x) = (1, 2) in the order of the names, where the truth is a tuple.

    Only where the names follow one another, as x and y or x_1 and x_2 do; else their order is not known. Runs in a
    worker.
    """
    from sympy import Eq, FiniteSet, Interval, Tuple

    if not gold or not isinstance(gold[0], Tuple | Interval):
        return answer
    if isinstance(answer, FiniteSet):
        equations = getattr(answer, "_unsorted_args", answer.args)
        if not all(isinstance(equation, Eq) for equation in equations):
            return answer
        names, values = zip(*(equation.args for equation in equations), strict=True)
    elif isinstance(answer, Eq) and isinstance(answer.lhs, Tuple):
        names, values = answer.lhs.args, answer.rhs.args[: len(answer.lhs.args)]
    else:
        return answer
    if len(names) != len(values):
        return answer
    pairs = sorted(zip(map(str, names), values, strict=True), key=lambda pair: pair[0])
    ordered = [name for name, _ in pairs]
    follow = all(a[:-1] == b[:-1] and ord(b[-1]) - ord(a[-1]) == 1 for a, b in itertools.pairwise(ordered))
    return Tuple(*(value for _, value in pairs)) if follow and ordered != list(map(str, names)) else answer


def _says_something_else(answer: list[Any], gold: list[Any]) -> bool:
    """Whether an answer is right only because of what Math-Verify drops from its LaTeX. Runs in a worker."""
    from sympy import Eq, Expr

    text, truth = (next((found for found in reversed(side) if isinstance(found, str)), "") for side in (answer, gold))
    if text.strip() == truth.strip():
        return False
    signs = [
        match and match[1].replace("slant", "").replace("q", "") for match in map(DROPPED_SIGN.match, (text, truth))
    ]
    value = gold[0].rhs if isinstance(gold[0], Eq) else gold[0]
    # Of a chain of equations, the last side is the answer.
    bases = set(BASE.findall(text.rpartition("=")[2])) - {"10"}
    return bool(
        signs[0] != signs[1]
        or (bases and bases != set(BASE.findall(truth)))
        or (isinstance(value, Expr) and INTERVAL.search(text))
        or ("\\circ" not in text and not BASE.search(text) and _contradicts_itself(answer[0]))
    )


def _contradicts_itself(answer: Any) -> bool:
    """Whether it says that two numbers are equal which are not, even if they may be rounded. Runs in a worker."""
    from sympy import And, Eq, Float, Number

    def differ(left: Any, right: Any) -> bool:
        if not isinstance(left, Number) or not isinstance(right, Number):
            return False
        gap = abs(left - right)
        rounded = isinstance(left, Float) or isinstance(right, Float)
        return bool(gap > 0 and gap >= (min(1, abs(left) / 20) if rounded else 1))

    return isinstance(answer, Eq | And) and any(differ(*equation.args) for equation in answer.atoms(Eq))


def _numeric_eq(original: Callable[..., bool], gold: Any, answer: Any, rounding: int, *rest: Any) -> bool:
    """Math-Verify's comparison to decimal places, with half as many significant digits where that is more.

    Otherwise 0.0 would be right wherever the truth is tiny. Runs in a worker.
    """
    from sympy import Add, Expr, Float, Integer, Mul, floor, log

    digits = (rounding + 1) // 2
    if digits and isinstance(gold, Expr) and isinstance(answer, Expr):
        # Of a number, or of the coefficients of an expression
        sizes = [
            math.prod((abs(factor.evalf(2)) for factor in Mul.make_args(term) if factor.is_number), start=Integer(1))
            for term in ([gold.evalf(2)] if gold.is_number else Add.make_args(gold))
        ]
        small = [size for size in sizes if isinstance(size, Float) and 0 < size < Float(10) ** (digits - rounding - 1)]
        if small:
            scale = Integer(10) ** -floor(log(min(small), 10).evalf())
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
