"""The math_verify reward on answers of every form, right, wrong and hostile."""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Integer

from answer_forms import FORMS, QUIRKS, REPAIRED
from gradloc.rewards import guarded_math_verify
from hostile_answers import hostile_answers
from public_pairs import PAIRS

pytestmark = pytest.mark.slow
MEBIBYTE = 2**20
TIMED_OUT = 0.25
# No answer here is this number.
TRUTH = "\\frac{123457}{7}"


def new_pool(patch: pytest.MonkeyPatch, workers: int, timeout: float, memory_mb: int = 1024) -> None:
    guarded_math_verify._discard(guarded_math_verify._pool)
    patch.setenv("VERL_MATH_VERIFY_WORKERS", str(workers))
    patch.setenv("VERL_MATH_VERIFY_TIMEOUT", str(timeout))
    patch.setenv("VERL_MATH_VERIFY_MEMORY_MB", str(memory_mb))


@pytest.fixture(scope="module")
def ordinary_pool() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        new_pool(patch, workers=2, timeout=30)
        yield


@pytest.fixture(scope="module")
def hostile_pool() -> Iterator[None]:
    """More workers than cores, since most of their time is spent waiting for the limit."""
    with pytest.MonkeyPatch.context() as patch:
        new_pool(patch, workers=8, timeout=1, memory_mb=512)
        yield
        # The next pool is another one.
        new_pool(patch, workers=2, timeout=1)


def workers() -> list[psutil.Process]:
    return [worker for server in psutil.Process().children() for worker in server.children()]


def in_pool(pairs: list[tuple[str, str]]) -> list[float]:
    answers, truths = zip(*pairs, strict=True)
    return guarded_math_verify.compute_score_batch(["any"] * len(pairs), answers, truths, timeout_score=TIMED_OUT)


def in_process(answer: str, truth: str) -> float:
    """What Math-Verify says by itself."""
    latex = LatexExtractionConfig()
    gold = parse(f"\\boxed{{{truth}}}", (latex,), parsing_timeout=None)
    found = parse(answer, (ExprExtractionConfig(), latex), parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None))


def test_answer_forms_and_quirks_of_math_verify(ordinary_pool: None) -> None:
    """If a quirk fails, Math-Verify has changed: move the entry to the table."""
    entries = FORMS + REPAIRED + QUIRKS
    scores = in_pool([(answer, truth) for answer, truth, _ in entries])
    assert not [(*entry, score) for entry, score in zip(entries, scores, strict=True) if score != entry[-1]]


def test_public_pairs_are_scored_as_the_documentation_says(ordinary_pool: None) -> None:
    """And docs/reference/rewards.md has these figures."""
    pairs = [(f"\\boxed{{{answer}}}", truth) for answer, truth, *_ in PAIRS]
    due = [of_pair for *_, of_pair, _ in PAIRS]
    ours, alone = in_pool(pairs), [in_process(*pair) for pair in pairs]
    assert all(each >= other if right else not each for each, other, right in zip(ours, alone, due, strict=True))
    assert len(PAIRS) >= 100
    right, wrong = due.count(1), due.count(0)
    page = (Path(__file__).parents[2] / "docs/reference/rewards.md").read_text()
    for name, scores in (("Math-Verify alone", alone), ("this scorer", ours)):
        good = [score for score, deserved in zip(scores, due, strict=True) if score == deserved]
        assert f"| {name} | {good.count(1)} of {right} | {good.count(0)} of {wrong} |" in page


def test_infinities_do_not_pass_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sympy's simplification does this to them by chance, with some values of the objects' hashes."""
    monkeypatch.setattr("math_verify.grader.simplify", lambda difference: Integer(0))
    targets = ("latex",), ("expr", "latex")
    for infinite in ("\\infty\\infty 11", "3 - \\infty", "\\frac{1}{0}"):
        assert guarded_math_verify._score(f"${infinite}$", "5", 6, *targets) == 0.0, infinite
    assert guarded_math_verify._score("$\\boxed{6}$", "5", 6, *targets) == 1.0  # what the simplification says
    monkeypatch.undo()
    for answer, truth in (("-\\infty", "-\\infty"), ("(-\\infty, 3)", "x < 3"), ("(2, \\infty)", "(2, \\infty)")):
        assert guarded_math_verify._score(f"$\\boxed{{{answer}}}$", truth, 6, *targets) == 1.0, answer


HOSTILE = hostile_answers()


def test_hostile_answers_keep_to_their_limit_and_memory(hostile_pool: None) -> None:
    """Each is a call of its own, as in verl's reward loop, but for every third, which comes in a batch below."""

    def score(answer: str) -> float:
        return guarded_math_verify.compute_score(answer, TRUTH, timeout_score=TIMED_OUT)

    peaks: dict[int, int] = {}
    # One thread for each worker: no call waits for another.
    with ThreadPoolExecutor(8) as executor:
        scores = [executor.submit(score, answer) for i, answer in enumerate(HOSTILE) if i % 3]
        while not all(each.done() for each in scores):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):  # it has ended
                for worker in workers():
                    peaks[worker.pid] = max(peaks.get(worker.pid, 0), peak(worker.pid))
            time.sleep(0.02)
    assert {each.result() for each in scores} == {0.0, TIMED_OUT}
    assert len(peaks) > 8 and max(peaks.values()) <= 512 * MEBIBYTE


def test_hostile_answers_in_a_batch(hostile_pool: None) -> None:
    """Among ordinary ones, which get their scores."""
    numbers = range(len(HOSTILE[::3]))
    ordinary = [(f"Therefore \\boxed{{\\frac{{{i}}}{{7}}}}", f"\\frac{{{i + i % 2}}}{{7}}") for i in numbers]
    pairs = [pair for answer, other in zip(HOSTILE[::3], ordinary, strict=True) for pair in ((answer, TRUTH), other)]
    scores = in_pool(pairs)
    assert set(scores[::2]) == {0.0, TIMED_OUT} and scores.count(TIMED_OUT) > 2
    assert scores[1::2] == [float(i % 2 == 0) for i in numbers]


def peak(pid: int) -> int:
    """The most memory that a process has ever mapped, in bytes."""
    with open(f"/proc/{pid}/status") as status:
        # A process that has just ended has none.
        return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmPeak")), 0)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is unparsable, and no burden to later answers."""
    hog = "$$" + "a" * (3 * MEBIBYTE)
    new_pool(monkeypatch, workers=1, timeout=60, memory_mb=256)
    assert in_pool([("7", "7")]) == [1.0]
    (worker,) = workers()
    assert in_pool([(hog, "7")]) == [0.0]
    assert not psutil.wait_procs([worker], timeout=200)[1]
    assert in_pool([("7", "7"), ("8", "7")]) == [1.0, 0.0]
    # More than the worker could even receive
    assert in_pool([("7", "7"), ("7 " + "a" * (64 * MEBIBYTE), "7"), ("7", "7")]) == [1.0, 0.0, 1.0]
    new_pool(monkeypatch, workers=2, timeout=1)
