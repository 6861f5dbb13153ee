"""Whole runs of `run_experiment.sh --embedded --tiny`, with the real `python -m verl.trainer.main_ppo`."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verl
from scripts import launch
from valid_events import lines_in, valid_events

from gradloc.tools.schema import CLIP, conforms
from warm_python import FOR_RAY, warm_python

ROOT = Path(__file__).parents[2]
IS_0_9 = verl.__version__ == "0.9.1"  # where keys have other names
REWARD = "reward.custom_reward_function" if IS_0_9 else "custom_reward_function"
REWARDS = [f"{REWARD}.path={ROOT}/tests/trainer/varied_rewards.py"]
# A critic, whose τ is so small that each of its mini-batches is a spike.
CRITIC = ["critic.enable=True", "critic.strategy=fsdp2", "critic.ppo_micro_batch_size_per_gpu=2"]
CRITIC += ["critic.model.use_remove_padding=False", "critic.model.enable_gradient_checkpointing=False"]
CRITIC += ["critic.fsdp.dtype=float32" if IS_0_9 else "critic.model.fsdp_config.model_dtype=float32"]
CRITIC += ["critic.grad_norm_threshold=1e-4"]
HANGS = 900  # seconds that no run takes, however busy the machine is
warm_interpreter: Path | None = None  # what conftest.py has made


@contextlib.contextmanager
def interpreter(verl: bool) -> Iterator[Path]:
    """One that has imported what runs need: libraries, or verl with them."""
    environment = os.environ | launch.added_environment(os.environ) | {"EMBEDDED_METRICS": os.devnull}
    with tempfile.TemporaryDirectory(prefix="warm-") as folder, warm_python(Path(folder), environment, verl) as path:
        yield path


@contextlib.contextmanager
def started(
    output: Path, *arguments: str, interpreter: str | Path | None = None, **environment: str
) -> Iterator[subprocess.Popen]:
    """A run of run_experiment.sh with these arguments and variables, which is ended with the block if it still goes on.

    Its processes, Ray's workers included, are forked from an interpreter that has imported what they need, unless they
    are given another.
    """
    interpreter = interpreter or warm_interpreter
    search_path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "tests/trainer")])
    own = [f"OUTPUT_DIR={output}", *([] if "--fault" in arguments else ["--fault", "none"])]
    if interpreter != sys.executable:
        own.append(f"+ray_kwargs.ray_init.runtime_env.py_executable={interpreter}")
        environment = FOR_RAY | environment
    command = ["bash", ROOT / "run_experiment.sh", "--embedded", "--tiny", "--python", interpreter, *own, *arguments]
    environment = os.environ | {"PYTHONPATH": search_path} | environment
    script = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield script
    finally:
        if script.poll() is None:
            script.terminate()
            script.wait()


def finished(output: Path, *arguments: str, **options: Any) -> tuple[str, list[dict[str, Any]]]:
    """What a run printed, and its events; the options are those of `started`."""
    with started(output, *arguments, **options) as script:
        printed, _ = script.communicate(timeout=HANGS)
    assert script.returncode == 0, printed
    return printed, events_in(output)


def events_in(output: Path) -> list[dict[str, Any]]:
    return valid_events(json.dumps([line for line in _lines(output) if line.keys().isdisjoint({"note", "token_clip"})]))


def clips_in(output: Path) -> list[dict[str, Any]]:
    """What TokenClip found."""
    clips = [line for line in _lines(output) if "token_clip" in line]
    assert all(conforms(line, CLIP) for line in clips)
    return clips


def _lines(output: Path) -> list[dict[str, Any]]:
    return lines_in(output / "bisect_dump") if (output / "bisect_dump/spikes.jsonl").exists() else []
