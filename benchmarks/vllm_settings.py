# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What GradLoc says of verl's own vLLM rollout in settings that users have, and of its faults: runs on a CPU.

    python benchmarks/vllm_settings.py DIR [NAME ...]

Each is `run_experiment.sh --embedded --tiny --rollout vllm` with one worker, of a model whose logits are 20 times as
large: those of a random one are all alike. With 10 GB of memory, a run takes two minutes on two idle cores.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "embedded"), str(ROOT / "tests/support")]

import launch  # type: ignore[import-not-found]  # noqa: E402

from warm_python import FOR_RAY, warm_python  # type: ignore[import-not-found]  # noqa: E402

ROLLOUT, SAMPLING = "actor_rollout_ref.rollout", "embedded.sampling"
BASE = [
    "GPUS_PER_NODE=1",
    "SPIKE_DRILL_STEP=null",
    "LR=5e-4",
    "TOTAL_STEPS=5",
    "trainer.total_epochs=10",
    "GRAD_NORM_THRESHOLD=1e9",
]
BASE += [f"reward.custom_reward_function.path={ROOT}/tests/trainer/varied_rewards.py"]
CUT = [f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.top_p=0.95"]
TOOL = [f"{ROLLOUT}.agent.default_agent_loop=seeded_tool", f"{ROLLOUT}.multi_turn.enable=true"]
TOOL += [f"{ROLLOUT}.multi_turn.format=always", f"{ROLLOUT}.multi_turn.max_assistant_turns=3"]
TOOL += [f"{ROLLOUT}.multi_turn.function_tool_path={ROOT}/benchmarks/vllm_tool.py", "data.max_prompt_length=160"]
TOOL += ["data.max_response_length=64", f"+{SAMPLING}.max_tokens=8"]
ASYNC = ["trainer.v1.trainer_mode=colocate_async", "trainer.v1.sampler.custom_sampler.path=null"]
SETTINGS = {
    "processed": CUT,
    "raw": [*CUT, f"{ROLLOUT}.logprobs_mode=raw_logprobs"],
    "prefix_cache": [f"+{ROLLOUT}.engine_kwargs.vllm.block_size=16"],
    "aborted": [*ASYNC, "data.max_response_length=64"],
    "tool": TOOL,
    "stop": [f"+{SAMPLING}.stop=['er','in']", f"+{SAMPLING}.max_tokens=8"],
    "bfloat16": [f"{ROLLOUT}.dtype=bfloat16", "TOTAL_STEPS=20"],
}
FAULTS: dict[str, list[str]] = {"unsent": [], "kept_cache": [], "tied_head": ["TOTAL_STEPS=12"]}


def sharpened(tiny: Path, model: Path) -> None:
    """Copies the model, with the last norm's weight, and so the logits, 20 times as large."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny, model, dirs_exist_ok=True)
    weights = load_file(tiny / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 20
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def told(output: Path) -> list[str]:
    """A line for each step: how far the probabilities are apart, what is near or over the level, and what is said."""
    metrics = dict(json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines())
    lines = []
    for line in (output / "bisect_dump/steps.jsonl").read_text().splitlines():
        step = json.loads(line)
        apart = metrics[step["global_step"]]["training/rollout_probs_diff_mean"]
        near = [
            f"{name} {each['times']:.3g}" for name, each in step["identities"].items() if (each["times"] or 0) >= 0.1
        ]
        said = [f"{each['name']} since {each['since']}: {each['claim']}" for each in step["warnings"]]
        lines.append(
            f"step {step['global_step']}: {apart:.2g} apart; {', '.join(near) or 'all under 0.1'}; {said or ''}"
        )
    return lines


def run(name: str, directory: Path, model: Path, python: Path) -> None:
    output, start = directory / name, time.monotonic()
    command = ["bash", f"{ROOT}/run_experiment.sh", "--embedded", "--tiny", "--rollout", "vllm"]
    command += ["--fault", name if name in FAULTS else "none", *BASE, f"MODEL_PATH={model}", f"OUTPUT_DIR={output}"]
    command += ["--python", str(python), f"+ray_kwargs.ray_init.runtime_env.py_executable={python}"]
    environment = os.environ | FOR_RAY | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(directory / f"{name}.log", "w") as log:
        done = subprocess.run([*command, *(SETTINGS | FAULTS)[name]], env=environment, stdout=log, stderr=log)
    print(f"{name}: exit code {done.returncode}, {time.monotonic() - start:.0f} s", flush=True)
    if done.returncode == 0:
        print("\n".join(f"  {line}" for line in told(output)), flush=True)


def main(arguments: list[str]) -> None:
    directory = Path(arguments[0]).resolve()
    model = directory / "model"
    sharpened(ROOT / ".embedded/0.9.1-vllm/tiny/model", model)
    own = os.environ | launch.added_environment(os.environ, 1, rollout="vllm") | {"EMBEDDED_METRICS": os.devnull}
    # The processes of verl start by a fork, those of vLLM do not.
    with tempfile.TemporaryDirectory(prefix="warm-") as folder, warm_python(Path(folder), own, verl=True) as python:
        for name in arguments[1:] or [*SETTINGS, *FAULTS]:
            run(name, directory, model, python)


if __name__ == "__main__":
    main(sys.argv[1:])
