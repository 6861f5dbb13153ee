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
be used from any thread, asyncio executor or Ray actor. Workers are forked from a process that has imported Math-Verify
and nothing else, so that a killed one is replaced at once.

Every setting is a keyword argument (custom_reward_function.reward_kwargs) or else an environment variable, such as
VERL_MATH_VERIFY_TIMEOUT; docs/reference/rewards.md lists them. Of a worker's memory, an answer finds half free.
"""

import contextlib
import importlib.util
import itertools
import logging
import math
import numbers
import os
import queue
import re
import reprlib
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from multiprocessing import connection
from typing import Any, NoReturn

INSTALL = "`pip install 'math-verify>=0.8'`"
# Attempts for one answer whose worker is lost over it, for instance to the kernel's OOM killer.
ATTEMPTS = 3
# Seconds to wait before a call that gets no worker tries again, repeatedly, since the cause may pass: a lack of memory
# or of file descriptors, say. Then seconds after which it gives up.
BACKOFF = 0, 0.2, 1, 5, 15
GIVE_UP = 60
# Seconds that starting a worker may take, on top of the time limit, before the pool counts as broken.
START_GRACE = 120
# Seconds between two looks of the server at its workers.
TICK = 0.02
# The longest time limit in seconds. Timers take no arbitrarily large numbers.
DAY = 86400
# How many times its limit of CPU time an answer may take by the clock, in case it sleeps. On a busy machine an answer
# waits for the CPU, too, and must not be ended for that.
WALL_FACTOR = 10

TARGETS = ("latex", "expr", "string")

# Not part of an answer: Markdown around it (2**3 and 2 *3* 4 have none), and boxes quoted from the task.
EMPHASIS = re.compile(
    r"(?<![\w)\]}^\\])(?<!\*)((?<!\b\w )\*(?!\*)|\*{2,3}(?!\*)|_{1,3}(?!_))(?=[^\s})\].,;:?!])"
    r"((?:(?!\s\1\S|\n\s*\n).)*?[^\s({\[^\\])\1(?![\w*({\[\\^+/=-]| \d)",
    re.DOTALL,
)
EMPTY_BOX = re.compile(r"(\$+|\\[(\[])?\s*\\(?:boxed|fbox)\s*\{\s*\}\s*(?(1)(?:\$+|\\[)\]]))")
# Math-Verify drops these, although they change the answer: text behind a number, as a unit, and dots in a list.
HEDGE = re.compile(
    r"\\(?:text\w*|mbox|mathrm)\s*\{(?!\s*or\s*\})[^{}]*"
    r"(?:\bor\b|(?:\b(?:and|maybe|perhaps|possibly)\b|[,;?])\W*\d|\d\s*\?)[^{}]*\}"
)
# Several numbers, of which Math-Verify reads one: `42 or 43`, `is 42, 43.` and `42? 43?`.
VALUE = r"(?:-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?(?:\s?\\?%)?|\\[dt]?frac\{\d+\}\{\d+\})"
_GLUE = r"(?:[\s.,;:?()$~{}\[\]]|\\[()\[\]]|\\boxed|[a-z]\w?\s*=){0,9}"
_MAYBE = rf"(?:{_GLUE}\b(?:maybe|perhaps|possibly|about|approximately)\b)?"
_OR = rf"{_GLUE}\b(?:or|maybe|perhaps|alternatively)\b{_MAYBE}{_GLUE}"
_COMMA = r"(?:(?:[ \t]?[,;?&]|[ \t](?:and|to)\b)[ \t]+|[ \t]?–[ \t]?|[ \t]+(?!\d{3}\b|\\))"
OTHERS = re.compile(
    rf"(?<![\w.,/^]){VALUE}(?P<unit>\s?[a-z]+)?(?:{_OR}{VALUE}(?(unit)(?P=unit))"
    r"(?!\w|[.,/]\d|\s*(?:[-+*/^×=]|times|\\(?:times|cdot|frac|sqrt|pi))))+"
    rf"|(?:\b(?:is|are|be|between)\b|:|(?<![\w}}])[(\[{{])[\s:$]*{VALUE}(?:{_COMMA}{VALUE})+"
    rf"(?=\s*(?:[.,;?!)}}\]$]|\\[)\]]|or\b|and\b|$))|{VALUE}(?:\?\s*{VALUE})+\?",
    re.IGNORECASE,
)
DOTS = re.compile(r",\s*(?:\\[lc]?dots|\.\.\.|…)(?=\s*(?:,|\\?[})\]$]|\\right|$))")
# Around a number that is the answer although the LaTeX cannot be read, there may be no more than this.
BARE = re.compile(r"(?:\s*\\approx|.*(?<!\\not)=)?\s*-?[\d.,]*\d\s*(?:\.|\\?%)?\s*")
APPROX = re.compile(r"\\approx(?:eq)?(?![a-zA-Z])")
NUMBER = re.compile(r"\d*\.\d+|\d+")
BASE_10 = re.compile(r"(?<=\d)\s*_\s*\{?\(?10\)?\}?(?!\d)")
# Letters that Math-Verify takes for units behind a number, although they are variables.
VARIABLES = "[a-zA-Z]s?|ab|bc|lt|mp|mt|st"
# Text that is a unit, with no number between its parts.
TEXT_UNITS = re.compile(r"\\(?:text|mbox){(?!.*}[^{}^]*\d).*?}(\^\d|\{\^\d\})?$")
# May come along in `default_compute_score`, and are for others.
FOREIGN_OPTIONS = ("gamma", "rho", "min_steps", "reward_router_address", "reward_model_tokenizer")

_lock = threading.Lock()
_pool: "_Pool | None" = None


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
        ImportError: If math-verify is not installed, or too old.
        RuntimeError: If the workers cannot be kept alive, for a minute.
        TypeError: If an option is not known, the response not text, or the ground truth neither text nor a number.
        ValueError: If an option has a bad value, or asks for another pool than the process has.
    """
    return compute_score_batch([], [model_output], [ground_truth], timeout_score=timeout_score, **options)[0]


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
    text = ""
    if isinstance(truth, str):
        # A worker could not load the class of a subclass of str.
        text = str.__str__(truth)
    elif isinstance(truth, numbers.Real) and not isinstance(truth, bool):
        # str() refuses an integer of more than 4,300 digits; and in LaTeX, e is a number.
        text = f"{Decimal(int(truth)):f}" if isinstance(truth, numbers.Integral) else str(truth)
        text = f"{Decimal(text):f}" if "e" in text else text
    # A missing cell of a table is NaN.
    if text.strip().lower() in ("", "nan", "inf", "-inf"):
        raise TypeError(
            f"A ground truth of the math_verify reward must be a string or a number, got {reprlib.repr(truth)}; blank "
            "text, NaN and inf are none (infinity is \\infty)."
        )
    return str.__str__(answer), text


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
    waiting = iter(enumerate(answers))  # shared by the threads
    failures: list[BaseException] = []  # any of them ends all threads

    def work() -> None:
        try:
            for index, answer in waiting:
                scores[index] = _score_one(answer, timeout_score, settings, failures)
        except Exception as error:
            failures.append(error)

    # Daemons: for others the interpreter would wait at its end.
    others = [threading.Thread(target=work, daemon=True) for _ in range(min(len(answers), settings.workers) - 1)]
    try:
        for thread in others:
            thread.start()
        work()
        for thread in others:
            thread.join()
    except BaseException as error:
        # An interrupt can come at any moment, with a worker in hand or at work: the next call starts afresh.
        failures.append(error)
        _discard(_pool)
        raise
    if failures:
        raise failures[0]
    return scores


def _score_one(
    answer: tuple[str, str], timeout_score: float, settings: _Settings, failures: list[BaseException]
) -> float:
    """The score of a response with its truth; it gives up where another of the batch has failed."""
    # A worker needs a multiple of an answer's length only to receive it.
    if sum(map(len, answer)) > settings.memory_mb * 2**20 // 64:
        return 0.0
    attempts, breaks, broken_since = 0, 0, math.inf
    while not failures:
        pool: _Pool | None = None
        try:
            pool = _get_pool(settings)
            kind, value = pool.ask(answer, settings)
        except (EOFError, OSError) as error:
            _discard(pool)
            broken_since = min(broken_since, time.monotonic())
            if time.monotonic() - broken_since > GIVE_UP:
                message = f"The math_verify workers cannot be kept alive; their own error is in the log ({error!r})."
                raise RuntimeError(message) from error
            time.sleep(BACKOFF[min(breaks, len(BACKOFF) - 1)])
            breaks += 1
            continue
        if kind == "fault":
            needs = f"The math_verify reward needs math-verify>=0.8: {INSTALL}; of what is installed, {value}."
            raise ImportError(needs)
        if kind != "ended":
            return value
        attempts += 1
        if value in (-signal.SIGPROF, -signal.SIGALRM) or attempts == ATTEMPTS:
            return timeout_score
    return math.nan


class _Pool:
    """A server, which is a process that has imported Math-Verify and nothing else, and the workers that it forks."""

    def __init__(self, settings: _Settings) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError(f"The math_verify reward needs math-verify, which is not installed: {INSTALL}.")
        self.size = settings.workers, settings.memory_mb
        # For each worker that there may be: the connection to it while it is idle, or None where there is none yet.
        self.places: queue.SimpleQueue[connection.Connection | None] = queue.SimpleQueue()
        for _ in range(settings.workers):
            self.places.put(None)
        # Threads take turns to wait. Otherwise one that gives a place back takes it again before another wakes up.
        self.turn = threading.Lock()
        # This file alone, as the main module: by its name, it would come with verl.
        path = [str(folder) for folder in sys.path]
        # The path is set before anything is imported, which would be looked for in the working directory first.
        code = f"import sys; sys.path[:] = {path!r}; import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
        self.control, end = socket.socketpair()
        with end:
            arguments = end.fileno(), os.getpid(), settings.memory_mb * 2**20
            self.server = subprocess.Popen(
                [sys.executable, "-c", code, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                pass_fds=[end.fileno()],
                start_new_session=True,
            )

    def ask(self, answer: tuple[str, str], settings: _Settings) -> tuple[str, Any]:
        """Has a worker score an answer, once one is idle.

        Returns:
            tuple[str, Any]: "score" or "last score" and the score; "fault" and what is wrong with Math-Verify; or
                "ended" and the exit code of a worker that has ended over this answer.

        Raises:
            EOFError, OSError: There is no worker, or it is lost, but not over this answer.
        """
        kind, has_begun = "", False
        with self.turn:
            pipe = self.places.get()
        try:
            # An idle worker says nothing, unless it has ended.
            if pipe is None or pipe.poll():
                ours, end = socket.socketpair()
                # A long question, or half a reply, must not wait for ever for a process that is stopped.
                for option in socket.SO_SNDTIMEO, socket.SO_RCVTIMEO:
                    ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", START_GRACE, 0))
                pipe = connection.Connection(ours.detach())
                with end:
                    socket.send_fds(self.control, [b"+"], [end.fileno()])
            targets = settings.gold_extraction_target, settings.pred_extraction_target
            pipe.send((*answer, settings.timeout, settings.precision, *targets))
            # The worker's own timers come first.
            while pipe.poll(WALL_FACTOR * settings.timeout + START_GRACE):
                kind, value = pipe.recv()
                if kind == "ended" and not has_begun:
                    raise ChildProcessError(f"A worker ended with exit code {value}.")
                if kind != "begun":
                    return kind, value
                has_begun = True
            raise TimeoutError("A worker does not answer.")
        finally:
            self.places.put(pipe if kind == "score" else None)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()
        self.control.close()
        # An interrupted call may have kept places that others wait for. These find the pool closed.
        for _ in range(self.size[0]):
            self.places.put(None)


def _get_pool(settings: _Settings) -> _Pool:
    global _pool
    with _lock:
        if _pool is None:
            _pool = _Pool(settings)
        if _pool.size != (settings.workers, settings.memory_mb):
            workers, memory_mb = _pool.size
            raise ValueError(
                f"The math_verify pool of this process has {workers} workers of {memory_mb} MiB; "
                f"ask for the same in every call, not for {settings.workers} of {settings.memory_mb} MiB."
            )
        return _pool


def _discard(pool: _Pool | None) -> None:
    global _pool
    with _lock:
        if pool is not None and _pool is pool:
            _pool = None
            pool.close()


def _after_fork() -> None:
    # The server and its workers stay with the parent.
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)


def _serve(control: socket.socket, caller: int, memory: int) -> None:
    """Runs in the server: forks a worker for each connection that it gets, and tells there how the worker ended.

    When the calling process has ended, however it did, it ends the workers.
    """
    signals = signal.SIGCHLD, signal.SIGPROF, signal.SIGALRM
    for number in signals:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    fault = _prepare()
    pipes: dict[int, connection.Connection] = {}
    while os.getppid() == caller:
        if connection.wait([control], TICK):
            _, ends, *_ = socket.recv_fds(control, 1, 1)
            if not ends:
                break
            pipe = connection.Connection(ends[0])
            worker = os.fork()
            if not worker:
                control.close()
                for other in pipes.values():
                    other.close()
                _work(pipe, memory, fault)
            pipes[worker] = pipe
        while pipes and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with pipes.pop(ended[0]) as pipe, contextlib.suppress(OSError):
                pipe.send(("ended", os.waitstatus_to_exitcode(ended[1])))
    os.killpg(0, signal.SIGKILL)


def _prepare() -> str | None:
    """Runs in the server: what is wrong with Math-Verify, if it does not score as it should."""
    # One warning for every answer without an expression, and for the timeouts that are off on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Otherwise no number of more than 4,300 digits is read. Python 3.10 has the limit since 3.10.7.
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    try:
        # Below 0.8, Math-Verify fails without timeouts of its own and calls every answer wrong. A wrong answer goes the
        # longest way, down to sympy's simplification.
        for truth, expected in ("\\frac{1}{2}", 1.0), ("\\frac{1}{3}", 0.0):
            if _score("\\boxed{\\frac{1}{2}}", truth, 6, ("latex",), ("expr", "latex")) != expected:
                return f"it does not score \\frac{{1}}{{2}} as {expected:g} where {truth} is right"
        from latex2sympy2_extended import math_normalization
        from math_verify import grader

        units = math_normalization.units_regex.pattern
        math_normalization.units_regex = re.compile(rf"(?!.\s*(?:{VARIABLES})\s*$){units}")
        math_normalization.unit_superscript_regex = TEXT_UNITS
        grader.sympy_numeric_eq = partial(_numeric_eq, grader.sympy_numeric_eq)
    except Exception as error:
        return f"it fails with {error!r}"
    return None


def _work(pipe: connection.Connection, memory: int, fault: str | None) -> NoReturn:
    """Runs in a worker: scores answers until the connection is closed."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, ConnectionError):
        kind = "score"
        while kind == "score":
            answer, truth, timeout, *settings = pipe.recv()
            pipe.send(("begun", None))
            if fault:
                pipe.send(("fault", fault))
                break
            # Nobody handles their signals: the kernel ends the process, whatever it computes.
            signal.setitimer(signal.ITIMER_PROF, timeout)
            signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * timeout)
            score = _score(answer, truth, *settings)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            # In KiB. An answer that took much memory leaves some of it in sympy's caches.
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > memory // 2:
                kind = "last score"
            pipe.send((kind, score))
    os._exit(0)


def _score(
    model_output: str, ground_truth: str, precision: int, gold_targets: tuple[str, ...], pred_targets: tuple[str, ...]
) -> float:
    """Runs in a worker."""
    from math_verify import verify
    from sympy import Eq, Expr, FiniteSet

    try:
        text = EMPTY_BOX.sub(" ", model_output.rpartition("</think>")[2])
        for _ in range(3):  # it nests
            text = EMPHASIS.sub(r"\2", text)
        # Parses and compares like math_verify.metric.math_metric, without its timeouts.
        gold = _parse("\\boxed{" + ground_truth + "}" if "latex" in gold_targets else ground_truth, gold_targets)
        is_infinite = any(map(_is_infinite, gold))

        def is_right(text: str, places: int) -> bool:
            answer = [found for found in _parse(text, pred_targets) if is_infinite or not _is_infinite(found)]
            right = verify(gold, answer, float_rounding=places, timeout_seconds=None)
            return right and not _says_more(answer, gold)

        def if_same(others: re.Match[str]) -> str:
            """No numbers instead of the values, unless all are the truth, to as many decimal places as they have."""
            values = re.findall(VALUE, others.group())
            same = all(is_right(value, len(value.partition(".")[2]) or precision) for value in values)
            return others.group() if same else re.sub(VALUE, "1/0", others.group())

        if HEDGE.search(ground_truth):
            return float(is_right(text, precision))
        text = HEDGE.sub(", hedge", text)
        if not is_right(text, precision):
            return 0.0
        if not isinstance(gold[0], Expr | Eq) or gold[0].has(FiniteSet):
            return 1.0
        alone = OTHERS.sub(if_same, text)
        return float(alone == text or is_right(alone, precision))
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
    values = [value for side in sides for value in _parse(f"\\boxed{{{side}}}", ("latex",))[:1]]
    equal = [(answer[0].evalf(), value.evalf()) for value in values if not isinstance(value, str)]
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
    from sympy import Eq, Number

    left = left.rhs if isinstance(left, Eq) else left
    if not isinstance(left, Number) or not isinstance(right, Number):
        return False
    return bool(left != right and abs(left - right) >= min(1, abs(left) / 20))


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


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), *map(int, sys.argv[2:]))
