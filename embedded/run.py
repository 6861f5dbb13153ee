# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A run of `run_experiment.sh --embedded`, by the Python that trains: launch.py starts it.

python embedded/run.py PYTHON -m verl.trainer.main_ppo --config-dir DIR --config-name NAME OVERRIDE ...
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from follow import follow  # type: ignore[import-not-found]  # this file's folder is on the path
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from processes import exit_code, exit_on_signals, session  # type: ignore[import-not-found]
from set_up import locked, prepare, refuse, say  # type: ignore[import-not-found]

from gradloc.replay.advice import REPAIR, recommended
from gradloc.tools.figures import count

# The exit code of a run that spike_action=stop has ended (EXIT_CODE in gradloc/adapters/spike_stop.py), and how the
# sentence begins that such a run ends with.
STOPPED = 76
STOPPING = "Training ends after step "
# Ray's message if its own processes are not up in time; it gives some of them half a minute, whatever is set.
NOT_STARTED = "The current node timed out during startup"
STARTS = 3
NEXT = """\
What next:
  other faults                  bash run_experiment.sh --embedded{options} --help
  natural spikes of this model  bash run_experiment.sh --embedded{options} --fault none GRAD_NORM_THRESHOLD=90
  your own run                  docs/use/my-run-spikes.md"""


def composed(overrides: Sequence[str]) -> DictConfig:
    """The configuration of the run, as verl's own Hydra composes it."""
    verl = importlib.util.find_spec("verl")
    assert verl is not None and verl.submodule_search_locations is not None
    verls = f"hydra.searchpath=[file://{verl.submodule_search_locations[0]}/trainer/config]"
    with initialize_config_dir(str(Path(__file__).with_name("config")), version_base=None):
        return compose("embedded", [*overrides, verls])


def events_in(evidence: Path) -> list[dict[str, Any]]:
    """What a run has written to spikes.jsonl; a line that is not complete is left out."""
    events = []
    for file in sorted(evidence.glob("spikes*.jsonl")):
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
    return events


def drill_verdict(events: Sequence[dict[str, Any]], step: int) -> str:
    """One line on the drill that was to be in a step."""
    for event in reversed(events):
        if event.get("drill") and event["global_step"] == step:
            drill = event["drill"]
            passes = count(drill["passes"], "extra pass", "extra passes")
            found = "found" if drill["found"] else "NOT FOUND: detection does not work here; see the log"
            return f"Drill in step {step}: the planted token was {found} ({passes}, {event['seconds']:.0f} s)"
    return f"THE DRILL OF STEP {step} LEFT NO EVIDENCE, so detection was not tested: see the log"


def why_it_ended(status: int, log: Path, lines: int = 30) -> str:
    """Why a run has failed: the sentence of spike_action=stop, otherwise the end of its log."""
    said = log.read_text(errors="replace").splitlines()
    sentences = [line for line in said if line.startswith(STOPPING)]
    if status == STOPPED and sentences:
        return f"Training was stopped after repeated spikes (exit code {status}).\n{sentences[-1]}"
    return "\n".join([f"Training failed (exit code {status}). The end of {log}:", *deque(said, lines)])


def show_report(evidence: Path, page: Path, events: Sequence[dict[str, Any]]) -> None:
    """Prints the report and writes its page. Without a spike or an outlying token there is no table to print."""
    tables = any(not event.get("drill") and "note" not in event for event in events)
    if events or any(evidence.glob("steps*.jsonl")):
        stdout = None if tables else subprocess.DEVNULL
        command = [sys.executable, "-m", "gradloc", "report", str(evidence), "--html", str(page)]
        subprocess.run(command, stdout=stdout)
        if not tables and page.is_file():
            print(f"The report: {page}", flush=True)


def replayed(event: Mapping[str, Any], evidence: Path, output: Path) -> dict[str, Any] | None:
    """A replay of the event with the weights before it; None without a bundle or these weights."""
    model = output / f"global_step_{event['global_step'] - 1}/actor/huggingface"
    if event["replay"] is None or not model.is_dir():
        return None
    say("Replaying the spike with the weights of the step before, repaired and with each remedy")
    replay = [sys.executable, "-m", "gradloc", "replay", str(evidence / event["replay"]), "--model", str(model)]
    replay += ["--only", "--remedies", "--json"]
    # Without the modules that make this run what it is: they would plant the fault in the replay, too.
    environment = {name: value for name, value in os.environ.items() if name != "VERL_USE_EXTERNAL_MODULES"}
    done = subprocess.run(replay, env=environment, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else None


def advised(result: Mapping[str, Any]) -> tuple[str, float, str] | None:
    """What a replay's own report advises: its name, the norm that it leaves, and the override of the run with it."""
    remedy, _ = recommended(result)
    if remedy is not None:
        return f"with {remedy['name']}", remedy["norm"], remedy["override"]
    repaired = (row for row in result["remedies"] if row["name"] == REPAIR)
    return next((("with the fault repaired", row["norm"], "embedded.mask_unsampled=true") for row in repaired), None)


def figures_of(event: Mapping[str, Any], advice: tuple[str, float, str] | None, options: str) -> str:
    """The norm of the micro-batch with the spike: as it was, without the culprits, and with what is advised."""
    unit = event["units"][0]
    rows = [("as it was", unit["norm"], "")]
    if unit["rest"] is not None:
        rows.append(("without the culprits", unit["rest"]["norm"], "measured in training"))
    if advice is not None:
        rows.append((*advice[:2], "measured by gradloc replay --remedies"))
    width = max(len(name) for name, *_ in rows)
    place = f"step {event['global_step']}, of rank {unit['rank']}'s micro-batch {unit['micro_batch']}"
    lines = [f"The gradient norm in {place} (threshold {unit['threshold']:.3g}):"]
    lines += [f"  {name:{width}}  {float(norm):8.2f}  {how}".rstrip() for name, norm, how in rows]
    if advice is not None:
        lines.append(f"The same run {advice[0]}: bash run_experiment.sh --embedded{options} {advice[2]}")
    return "\n".join(lines)


def train(command: Sequence[str], config: DictConfig, fault: str | None, options: str) -> int:
    """Trains, shows its progress and, at the end, the report; returns the exit code of the training."""
    output, evidence = Path(config.trainer.default_local_dir), Path(config.actor_rollout_ref.actor.bisect_dump_dir)
    ray_directory = config.ray_kwargs.ray_init._temp_dir
    log = output / "train.log"
    say(f"Training; the full log is {log}")
    if fault is not None:
        say(f"FAULT '{fault}' IS PLANTED IN THIS RUN ON PURPOSE: {config.embedded.fault}")
    metrics = output / "metrics.jsonl"
    environment = os.environ | {"TENSORBOARD_DIR": str(output / "tensorboard"), "EMBEDDED_METRICS": str(metrics)}
    for tries_left in reversed(range(STARTS)):
        with contextlib.ExitStack() as stack:
            os.mkdir(ray_directory, mode=0o700)
            stack.callback(shutil.rmtree, ray_directory, ignore_errors=True)
            metrics.unlink(missing_ok=True)
            file = stack.enter_context(open(log, "wb"))
            training = stack.enter_context(session(command, environment, file))
            follow(log, metrics, training, config.trainer.total_training_steps)
            status = exit_code(training.wait())
        if not (status and tries_left and NOT_STARTED in log.read_text(errors="replace")):
            break
        say("Ray's own processes were not up in time, as on a busy machine: starting again")
    events = events_in(evidence)
    spike = next((event for event in events if event.get("culprits") and not event.get("drill")), None)
    result = None if status or spike is None else replayed(spike, evidence, output)
    show_report(evidence, output / "report.html", events)
    if status:
        say(why_it_ended(status, log))
        return status
    print()
    if spike is not None:
        print(figures_of(spike, advised(result) if result else None, options))
    step = config.actor_rollout_ref.actor.spike_drill_step
    if step is not None:
        print(drill_verdict(events, step))
    if fault is not None:
        print(f"The fault '{fault}' was planted on purpose: {config.embedded.fault}.")
        if not any("token_clip" not in event and not event.get("drill") for event in events):
            print("It did not raise any gradient over the threshold.")
    print(NEXT.format(options=options), flush=True)
    return status


def main(command: Sequence[str]) -> int:
    exit_on_signals()
    overrides = command[command.index("--config-name") + 2 :]
    try:
        config = composed(overrides)
        output, evidence = Path(config.trainer.default_local_dir), Path(config.actor_rollout_ref.actor.bisect_dump_dir)
    except (HydraException, OmegaConfBaseException) as error:
        refuse(str(error))
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = open(output / "lock", "a+")  # until this process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        refuse(f"process {lock.read()} trains in {output}: give another OUTPUT_DIR, or wait until it has ended")
    except OSError as error:
        refuse(f"nothing can be written to {output} ({error}): give another OUTPUT_DIR")
    resumes = config.trainer.resume_mode != "disable"
    for file in [] if resumes else [*sorted(evidence.glob("s*.jsonl")), output / "train.log"]:
        if file.is_file() and file.stat().st_size:
            refuse(f"{file} is of another run, and must not be mixed with this one: give another OUTPUT_DIR")
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    prepared = Path(config.embedded.prepared)
    prepared.parent.mkdir(parents=True, exist_ok=True)
    with locked(prepared.parent / "lock"):
        prepare(prepared, prepared.name == "tiny", Path(config.embedded.root))
    target = overrides[0].removeprefix("verl=")
    options = "" if target == "0.7.0" else f" --target {target}" + " --plugin" * prepared.parent.name.endswith("plugin")
    options += " --rollout vllm" * (config.actor_rollout_ref.rollout.name == "vllm")
    return train(command, config, os.environ.get("EMBEDDED_FAULT"), options)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # the command has said itself what is wrong
