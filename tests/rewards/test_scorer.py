"""The math_verify reward: scores, the hard time limit, and a pool that outlives whatever happens around it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import numpy as np
import psutil
import pytest
from notation import cases
from process_ids import is_alive
from verl.utils import reward_score
from verl.utils.reward_score import default_compute_score

import trees
from gradloc.rewards import guarded_math_verify

pytestmark = pytest.mark.slow

# Sympy computes this tower digit by digit, in C.
HANGING = "The answer is \\boxed{9^{9^{9^{9}}}}."
LIMIT = 2

# Scripts load the scorer's file alone, as importing verl takes seconds.
PRELUDE = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("scorer", {guarded_math_verify.__file__!r})
scorer = importlib.util.module_from_spec(spec)
sys.modules["scorer"] = scorer
spec.loader.exec_module(scorer)
"""


@pytest.fixture(autouse=True, scope="module")
def small_pool() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_MATH_VERIFY_WORKERS", "2")
        patch.setenv("VERL_MATH_VERIFY_TIMEOUT", str(LIMIT))
        yield


def score(answer: str, truth: str) -> float:
    return default_compute_score("math_verify", answer, truth)


def numbered(n: int) -> tuple[str, str, float]:
    """An answer, the truth and the score; every third is wrong."""
    return f"Therefore \\boxed{{\\frac{{{n}}}{{7}}}}", f"\\frac{{{n + (n % 3 == 0)}}}{{7}}", float(n % 3 != 0)


def workers(pid: int | None = None) -> list[psutil.Process]:
    """The children of the pool's server, which is a child of the process."""
    children = [child for child in psutil.Process(pid).children() if is_alive(child.pid)]
    servers = [child for child in children if "guarded_math_verify" in " ".join(child.cmdline())]
    return [worker for server in servers for worker in server.children() if is_alive(worker.pid)]


def new_workers() -> list[psutil.Process]:
    guarded_math_verify._discard(guarded_math_verify._pool)
    for _ in range(2):  # each starts one
        score("1", "1")
    return workers()


def run_script(text: str, **environment: str) -> subprocess.CompletedProcess:
    """Its output goes to files, because a pipe would be held open by children that are left."""
    command = [sys.executable, "-c", PRELUDE + text]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        done = subprocess.run(command, stdout=out, stderr=err, timeout=500, env=os.environ | environment)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, out.read(), err.read())


def test_workers_hold_neither_torch_nor_ray() -> None:
    new_workers()
    # verl's own scorer is not replaced.
    own = Path(reward_score.__file__).with_name("math_verify.py")
    assert own.read_bytes() == (trees.BASE_TREE / "verl/utils/reward_score/math_verify.py").read_bytes()
    assert len(workers()) == 2
    for worker in workers():
        libraries = {Path(m.path).name for m in worker.memory_maps()}
        assert any("python" in name for name in libraries)
        assert not [name for name in libraries if "torch" in name or "raylet" in name]


def test_in_a_ray_actor() -> None:
    import ray

    class Rewards:
        def score(self, answer: str) -> tuple[int, float]:
            from gradloc.rewards import guarded_math_verify

            return os.getpid(), guarded_math_verify.compute_score(answer, "1", timeout_score=0.25, timeout=LIMIT)

    handler = signal.getsignal(signal.SIGTERM)  # which Ray replaces
    try:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        actor = ray.remote(Rewards).options(max_concurrency=3).remote()
        results = [actor.score.remote(answer) for answer in ("\\boxed{1}", HANGING, "\\boxed{2}")]
        pids, scores = zip(*ray.get(results, timeout=500), strict=True)
        left = workers(pids[0])
        assert scores == (1.0, 0.25, 0.0) and left
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)
    assert not psutil.wait_procs(left, timeout=200)[1]


def test_killed_while_idle_and_with_answers_on_their_way() -> None:
    new_workers()[0].kill()
    assert score("\\boxed{7}", "7") == 1.0
    with ThreadPoolExecutor(4) as executor:
        held = new_workers()
        for worker in held:
            worker.suspend()
        scores = executor.map(score, ["\\boxed{7}", "\\boxed{8}", "\\boxed{7}"], ["7"] * 3)
        time.sleep(0.5)
        for worker in held:
            worker.kill()
        assert list(scores) == [1.0, 0.0, 1.0]


def test_a_long_answer_for_a_worker_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not fit into the connection, so that sending it could wait for ever."""
    monkeypatch.setattr(guarded_math_verify, "START_GRACE", 10)
    stopped = new_workers()
    for worker in stopped:
        worker.suspend()
    assert score("word " * 2**18 + "\\boxed{7}", "7") == 1.0
    assert not psutil.wait_procs(stopped, timeout=200)[1]
    monkeypatch.undo()
    new_workers()


def test_half_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the rest of it is never written, by a process that holds the connection open."""
    monkeypatch.setattr(guarded_math_verify, "START_GRACE", 10)
    new_workers()
    pool, send_fds = guarded_math_verify._pool, socket.send_fds
    held = []

    def start_none(control: socket.socket, message: list[bytes], ends: list[int]) -> None:
        monkeypatch.setattr(socket, "send_fds", send_fds)
        held.append(os.dup(ends[0]))
        os.write(held[0], b"\0\0")

    for _ in range(2):
        pool.places.get(timeout=5)
        pool.places.put(None)
    monkeypatch.setattr(socket, "send_fds", start_none)
    assert score("\\boxed{7}", "7") == 1.0
    assert held and guarded_math_verify._pool is not pool
    os.close(held[0])
    monkeypatch.undo()
    new_workers()


def test_more_threads_than_workers_take_turns() -> None:
    """No call waits until the others have nothing more to ask."""
    new_workers()
    calls, left = [0] * 8, iter(range(800))

    def work(number: int) -> None:
        for n in left:
            answer, truth, expected = numbered(n + 1)
            assert score(answer, truth) == expected
            calls[number] += 1

    with ThreadPoolExecutor(8) as executor:
        list(executor.map(work, range(8)))
    assert sum(calls) == 800 and min(calls) > 10, calls


def test_killed_again_and_again_over_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker has finished of its chunk counts, and what it has not begun with goes to another."""
    monkeypatch.setenv("VERL_MATH_VERIFY_TIMEOUT", "600")
    new_workers()
    answers, truths, expected = map(list, zip(*map(numbered, range(1, 60)), strict=True))
    answers[30], expected[30] = HANGING, 0.25
    killed = set()
    with ThreadPoolExecutor(1) as executor:
        batch = executor.submit(guarded_math_verify.compute_score_batch, [], answers, truths, timeout_score=0.25)
        # On a busy machine a worker's start can take as much time, and the dead can be seen for a while.
        while not batch.done():
            with contextlib.suppress(psutil.NoSuchProcess):
                for worker in workers():
                    if worker.pid not in killed and worker.cpu_times().user > 4.0:
                        worker.kill()
                        killed.add(worker.pid)
                        assert score("\\boxed{7}", "7") == 1.0
            time.sleep(0.1)
    assert batch.result() == expected
    assert len(killed) >= guarded_math_verify.ATTEMPTS
    monkeypatch.undo()
    new_workers()


def test_a_missing_or_unusable_math_verify(tmp_path: Path) -> None:
    result = run_script("sys.modules['math_verify'] = None\nscorer.compute_score('1', '1')")
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and last.startswith("ImportError")
    assert "needs math-verify, which is not installed: `pip install 'math-verify>=0.8'`" in last
    # Releases before 0.8 fail without timeouts of their own, and call every answer wrong. A stand-in for them.
    (tmp_path / "math_verify.py").write_text("""
ExprExtractionConfig = LatexExtractionConfig = StringExtractionConfig = object
def parse(*_, **options):
    return []
def verify(*_, **options):
    return False
""")
    last = run_script("scorer.compute_score('7', '7', workers=2)", PYTHONPATH=str(tmp_path)).stderr.splitlines()[-1]
    assert last.startswith("ImportError: The math_verify reward needs math-verify>=0.8: `pip install"), last


@pytest.mark.timeout(600)
def test_the_limit_is_one_of_cpu_time(tmp_path: Path) -> None:
    """On a busy machine a right answer waits for the CPU; here a stand-in for Math-Verify makes answers wait."""
    (tmp_path / "math_verify").mkdir()
    (tmp_path / "math_verify/grader.py").write_text("sympy_numeric_eq = None")
    (tmp_path / "math_verify/__init__.py").write_text(f"""
import time
ExprExtractionConfig = LatexExtractionConfig = StringExtractionConfig = object
def parse(text, *_, **options):
    return [text]
def verify(gold, found, **_):
    if "waits" in found[0]:
        time.sleep(6)
        return True
    if "sleeps" in found[0]:
        time.sleep(10**6)
    if "computes" in found[0]:
        begun = time.process_time()
        with open({str(tmp_path / "seconds")!r}, "w") as file:
            while True:
                print(time.process_time() - begun, file=file, flush=True)
    return gold == found
""")
    text = """
print(scorer.compute_score("waits", "7", workers=2, timeout=5))
for answer in "computes", "sleeps":
    print(scorer.compute_score(answer, "7", workers=2, timeout=0.5, timeout_score=0.25))
print(scorer.compute_score("7", "7", workers=2))
"""
    result = run_script(text, PYTHONPATH=str(tmp_path))
    assert result.stdout == "1.0\n0.25\n0.25\n0.0\n", result.stderr
    *_, before, last = (tmp_path / "seconds").read_text().splitlines()
    # Without the last line, which may be cut off. The kernel counts CPU time in ticks of its clock.
    assert float(before) < 1, last


BAD_VARIABLES = {"WORKERS": "two", "TIMEOUT": "nan", "MEMORY_MB": "255", "PRED_TARGET": "latex;expr"}
BAD_OPTIONS = [
    ({"timeout": 86401}, ValueError, "timeout .* at most 86400, but is 86401"),
    ({"workers": 3}, ValueError, "2 workers of 1024 MiB.* not for 3 "),
    ({"time_out": 3}, TypeError, "no option 'time_out'; it has timeout, workers"),
    ({"timeout_score": float("nan")}, ValueError, "timeout_score .* nan"),
]


def test_bad_settings_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BAD_VARIABLES.items():
        with monkeypatch.context() as patch:
            patch.setenv(f"VERL_MATH_VERIFY_{name}", value)
            with pytest.raises(ValueError, match=f"VERL_MATH_VERIFY_{name} .* {value!r}"):
                score("1", "1")
    assert score("1", "1") == 1.0
    for options, error, message in BAD_OPTIONS:
        with pytest.raises(error, match=message):
            default_compute_score("math_verify", "1", "1", **options)


def test_answer_and_truth_are_text_or_a_number() -> None:
    """The text may be of a class that the workers do not have."""
    assert guarded_math_verify.compute_score_batch([], [np.str_("4"), np.str_("5")], ["5", np.str_("5")]) == [0.0, 1.0]
    for truth in (5, np.float32(1e-7), -2.5e-5, 1e22):
        mantissa, _, exponent = str(truth).partition("e")
        assert score(f"\\boxed{{{mantissa} \\times 10^{{{exponent or 0}}}}}", truth) == 1.0
        assert score("\\boxed{0.0}", truth) == 0.0
    # More digits than Python reads and writes by default
    for truth, expected in ((int(Decimal("7" * 5000)), 1.0), ("7" * 4999 + "8", 0.0)):
        found = guarded_math_verify.compute_score("7" * 5000, truth, timeout=600, timeout_score=0.5)
        assert found == expected
    for truth in (None, ["5"], True, np.float32("nan"), float("inf"), -np.inf, " NaN", "nan", "inf", ""):
        with pytest.raises(TypeError, match="must be a string or a number, got "):
            guarded_math_verify.compute_score_batch(["x"], ["5"], [truth])
    for answer in (None, 5):
        with pytest.raises(TypeError, match="must be a string, got "):
            score(answer, "5")


@cases(
    "answer truth options expected",
    ("\\boxed{(x+1)^2}", "x^2+2x+1", {"timeout": 30}, 1),  # a worker's first symbolic answer takes a moment
    ("", "42", {}, 0),
    # 0.333 is one third to three places.
    ("0.333", "\\frac{1}{3}", {}, 0),
    ("0.333", "\\frac{1}{3}", {"precision": 3}, 1),
    ("I get 7", "7", {"pred_extraction_target": "latex"}, 0),
    ("I get $7$", "7", {"pred_extraction_target": ["latex"]}, 1),
    ("7", "\\frac{14}{2}", {"gold_extraction_target": "expr"}, 0),
    ("The answer is B.", "B", {"gold_extraction_target": "string", "pred_extraction_target": "string"}, 1),
    # Those of other scorers and of verl's managers
    ("7", "7", {"gamma": 0.1, "reward_router_address": None}, 1),
    (HANGING, "7", {"timeout": 0.3, "timeout_score": 0.25}, 0.25),
)
def test_options(answer: str, truth: str, options: dict, expected: float) -> None:
    result = default_compute_score("math_verify", answer, truth, **options)
    assert isinstance(result, float) and result == expected


def test_variables_set_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_MATH_VERIFY_PRECISION", "3")
    assert score("0.333", "\\frac{1}{3}") == 1.0
    monkeypatch.setenv("VERL_MATH_VERIFY_PRED_TARGET", "latex,string")
    assert score("I get 7", "7") == 0.0
    monkeypatch.setenv("VERL_MATH_VERIFY_GOLD_TARGET", "string")
    assert score("The answer is B.", "B") == 1.0


class Doomed:
    """Has the first workers killed as soon as they are started."""

    def __init__(self, patch: pytest.MonkeyPatch, lives: int, end: BaseException | None = None) -> None:
        self.lives, self.end, self.send_fds = lives, end, socket.send_fds
        patch.setattr(socket, "send_fds", self)
        patch.setattr(guarded_math_verify, "BACKOFF", (0.1, 0.2))
        guarded_math_verify._discard(guarded_math_verify._pool)

    def __call__(self, control: socket.socket, message: list[bytes], ends: list[int]) -> None:
        """Starts a worker, as the pool does."""
        self.lives -= 1
        doomed = self.lives >= 0
        if doomed and self.end:
            raise self.end
        self.send_fds(control, message, ends)
        while doomed and guarded_math_verify._pool is not None:  # another thread may close it
            with contextlib.suppress(psutil.NoSuchProcess):
                for worker in workers():
                    worker.kill()
                    return


@pytest.mark.parametrize("end", [None, OSError(24, "Too many open files")])
def test_workers_that_die_before_they_score_anything(end: OSError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    doomed = Doomed(monkeypatch, 20, end)
    answers, truths, expected = map(list, zip(*map(numbered, range(1, 60)), strict=True))
    assert guarded_math_verify.compute_score_batch([], answers, truths) == expected
    assert doomed.lives < 0


def test_workers_that_cannot_be_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    doomed = Doomed(monkeypatch, 10**9)
    monkeypatch.setattr(guarded_math_verify, "GIVE_UP", 3)
    with pytest.raises(RuntimeError, match=r"cannot be kept alive; .* in the log \(.+\)"):
        score("7", "7")
    doomed.lives = 0
    assert score("\\boxed{7}", "7") == 1.0


def test_interrupts_while_workers_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are workers: each could take a worker's place for good."""
    doomed = Doomed(monkeypatch, 5, KeyboardInterrupt())
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            score("7", "7")
    assert doomed.lives == 0
    with ThreadPoolExecutor(4) as executor:
        assert list(executor.map(score, ["\\boxed{7}", "\\boxed{8}"] * 4, ["7"] * 8)) == [1.0, 0.0] * 4


def test_an_interrupt_sets_the_workers_free() -> None:
    result = run_script(f"""
import signal, threading
for _ in range(2):
    threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        scorer.compute_score_batch([], [{HANGING!r}] * 9, ["7"] * 9, workers=2, timeout=600)
    except KeyboardInterrupt:
        print(scorer.compute_score("7", "7", workers=2))
""")
    assert result.stdout == "1.0\n1.0\n", result.stderr


@pytest.mark.parametrize("free", [0, 4])
def test_no_file_descriptors_for_a_while(free: int) -> None:
    """Neither for the pool nor for its workers, at the start and when a worker is replaced."""
    result = run_script(f"""
import psutil, resource, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

def score_without_descriptors(answer):
    held = []
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        pass
    for _ in range({free}):
        os.close(held.pop())
    threading.Timer(2, lambda: [os.close(fd) for fd in held]).start()
    return scorer.compute_score(answer, "7", workers=2, timeout=1)

print(score_without_descriptors("7"))
for worker in psutil.Process().children()[0].children():
    worker.kill()
print(score_without_descriptors("7"), scorer.compute_score("8", "7", workers=2))
""")
    assert result.stdout == "1.0\n1.0 0.0\n", result.stderr


def test_the_server_is_killed() -> None:
    old = new_workers()
    server = old[0].parent()
    server.kill()
    assert score("\\boxed{7}", "7") == 1.0
    for worker in old:
        worker.kill()
    assert score("\\boxed{8}", "7") == 0.0
    assert not psutil.wait_procs([server, *old], timeout=200)[1]
    assert workers()


def test_an_unguarded_script_under_a_lower_memory_limit(tmp_path: Path) -> None:
    """Lower than the setting. The script is not run again in the workers."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (800 * 2**20,) * 2)\n"
    script = tmp_path / "unguarded.py"
    script.write_text(f"{PRELUDE}{limit}print('main')\nprint(scorer.compute_score('1', '1'))\n")
    result = subprocess.run([sys.executable, script], text=True, capture_output=True, timeout=500)
    assert result.stdout == "main\n1.0\n", result.stderr


def test_modules_in_the_working_directory_are_not_taken_for_pythons(tmp_path: Path) -> None:
    """The server looks for modules where the caller does, from its first import."""
    for module in "pkgutil", "types", "warnings":
        (tmp_path / f"{module}.py").write_text("raise AssertionError")
    result = run_script(f"""
os.chdir({str(tmp_path)!r})
sys.path.remove("")
print(scorer.compute_score("7", "7", workers=2))
""")
    assert result.stdout == "1.0\n", result.stderr


def test_forked_children_get_a_pool_of_their_own() -> None:
    result = run_script("""
import multiprocessing, psutil
assert scorer.compute_score("1", "1") == 1.0
workers = psutil.Process().children(recursive=True)
child = os.fork()
if child == 0:
    sys.exit(int(scorer.compute_score("2", "2") + scorer.compute_score("2", "3")))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1

# A child of multiprocessing joins its own children when it ends, and a daemon may have none.
for daemon in (False, True):
    child = multiprocessing.get_context("fork").Process(target=scorer.compute_score, args=("1", "1"), daemon=daemon)
    child.start()
    child.join(30)
    assert child.exitcode == 0

assert scorer.compute_score("3", "3") == 1.0
assert {*workers} <= {*psutil.Process().children(recursive=True)}
print("done")
""")
    assert result.stdout == "done\n", result.stderr


REPORT_WORKERS = """
import psutil, threading, time
threading.Thread(target=scorer.compute_score, args=({!r}, "1"), daemon=True).start()
time.sleep(0.5)
scorer.compute_score("1", "1")
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
"""
KILLED = "os.kill(os.getpid(), 9)"
FORKED = f"""
if child := os.fork():
    print(child, flush=True)
    {KILLED}
time.sleep(500)
"""


@pytest.mark.parametrize("end", ["", "raise ValueError", KILLED, FORKED])
def test_no_worker_is_left_behind(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the process ends well or not, with one worker idle and one in an endless computation; and its child."""
    monkeypatch.setenv("VERL_MATH_VERIFY_TIMEOUT", "600")
    result = run_script(REPORT_WORKERS.format(HANGING) + end)
    pids = [int(pid) for pid in result.stdout.split()]
    child = pids.pop() if end == FORKED else None
    assert len(pids) == 3, result.stderr  # with the server
    assert result.returncode == {"": 0, "raise ValueError": 1}.get(end, -signal.SIGKILL)
    deadline = time.monotonic() + 200
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    if child is not None:
        assert is_alive(child)
        os.kill(child, signal.SIGKILL)
