"""The real `python -m verl.trainer.main_ppo` with Ray, two FSDP2 workers, a random model and a planted spike.

With verl 0.9.1 its trainer V1, with a TransferQueue, and the plugin from its wheel; test_stop.py runs a patched verl.
"""

import contextlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import psutil
import pytest
import verl
from process_ids import is_alive, processes_naming
from runs import CRITIC, clips_in, events_in, interpreter, started
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trees
from gradloc.replay.command import main as replay
from gradloc.tools import schema

pytestmark = pytest.mark.slow

PREPARED = trees.ROOT / ".embedded" / (f"{trees.TARGET}-plugin" if trees.HAS_PLUGINS else trees.TARGET) / "tiny"
THRESHOLD = 80.0
ANSWERS, STEPS = 16, 3
SAMPLES = 4  # to each prompt, of which right_answers.py makes one right


@contextlib.contextmanager
def with_plugin(folder: Path) -> Iterator[dict[str, Any]]:
    """Options for runs of a verl that is not patched, with the plugin's wheel as if it were installed."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, trees.ROOT], check=True)
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder / "site", "zip")
    path = os.pathsep.join(map(str, (trees.BASE_TREE, folder / "site", trees.ROOT / "tests/trainer")))
    with interpreter(verl=False) as python:
        yield {"interpreter": python, "PYTHONPATH": path}


@pytest.fixture(scope="module", params=[pytest.param("", marks=pytest.mark.target(version="0.9.1"))])
def run(tmp_path_factory: pytest.TempPathFactory) -> dict:
    directory = tmp_path_factory.mktemp("run")
    # Four answers of a rank make a mini-batch, in micro-batches of about two that verl fills by their lengths.
    actor = "actor_rollout_ref.actor"
    arguments = [f"GRAD_NORM_THRESHOLD={THRESHOLD}", "SPIKE_DRILL_STEP=1", "algorithm.adv_estimator=planted_spike"]
    arguments += [f"actor_rollout_ref.rollout.n={SAMPLES}", f"TOTAL_STEPS={STEPS}", "LOGGER=console,tensorboard"]
    arguments += [f"{actor}.use_dynamic_bsz=True", f"{actor}.ppo_max_token_len_per_gpu=120", "--remedy"]
    arguments += [f"{actor}.token_clip.action=log", f"{actor}.token_clip.warmup_steps=1"]
    arguments += [f"critic.model.path={PREPARED}/model", *CRITIC]
    environment = {"VERL_USE_EXTERNAL_MODULES": "planted_spike,right_answers"}
    environment["PLANTED_SPIKE_FILE"] = str(directory / "planted.json")
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"interpreter": sys.executable}  # as a user starts it
        if trees.HAS_PLUGINS:
            options = stack.enter_context(with_plugin(tmp_path_factory.mktemp("wheel")))
            arguments.append("--plugin")
        script = stack.enter_context(started(directory / "out", *arguments, **options, **environment))
        output, _ = script.communicate()
    assert script.returncode == 0, output
    events = events_in(directory / "out")
    return {
        "output": output,
        "log": (directory / "out/train.log").read_text(),
        "planted": json.loads((directory / "planted.json").read_text()),
        "events": [event for event in events if not event["drill"]],
        "drills": [event for event in events if event["drill"]],
        "clips": clips_in(directory / "out"),
        "evidence": directory / "out/bisect_dump",
        "ray": f"/tmp/gradloc-{script.pid}",
        "tensorboard": directory / "out/tensorboard",
    }


def test_the_planted_token_is_the_only_culprit(run: dict) -> None:
    planted = run["planted"]
    (event,) = run["events"]
    assert event["global_step"] == planted["global_step"]
    assert event["complete"] and event["open_segments"] == []
    assert (event["action"], event["search"], event["world_size"]) == ("log", "local", 2)
    (culprit,) = event["culprits"]
    assert {name: culprit[name] for name in ("uid", "position", "advantage")}.items() <= planted.items()
    # The batch is dealt out in halves to the ranks, and each rank's half in mini-batches.
    per_rank, per_mini_batch = ANSWERS // 2, ANSWERS // 4
    rank_row = event["mini_batch"] * per_mini_batch + culprit["row"]
    assert culprit["rank"] * per_rank + rank_row == planted["batch_row"]
    assert event["units"][0]["rows"] < per_mini_batch


def test_the_drill_finds_its_token_and_is_no_spike(run: dict) -> None:
    (drill,) = run["drills"]
    assert drill["global_step"] == 1 and drill["drill"]["found"]
    assert re.search(r"Drill in step 1: the planted token was found \(\d+ extra pass(es)?, \d+ s\)", run["output"])


def test_the_evidence_describes_the_token(run: dict) -> None:
    (event,) = run["events"]
    (culprit,) = event["culprits"]
    assert culprit["grad_norm"] > culprit["threshold"] == event["threshold"] == THRESHOLD
    assert set(event["layer_clip"]) == set(culprit["layer_norms"])

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PREPARED / "model")
    assert culprit["token"] == tokenizer.decode([culprit["token_id"]])
    assert culprit["token"] in culprit["response"] and culprit["token"] in culprit["context"]
    sums = pandas.read_parquet(PREPARED / "train.parquet")
    row = next(row for row in sums.to_dict("records") if row["prompt"][0]["content"] in culprit["prompt"])
    assert culprit["ground_truth"] == row["reward_model"]["ground_truth"]
    assert (culprit["data_source"], culprit["reward"]) == ("math_verify", 1.0)
    assert f"The answer is {culprit['ground_truth']}." in culprit["response"]
    # The first mini-batch of a step is on-policy, the second nearly so: one small step lies between.
    assert culprit["ratio"] == pytest.approx(1.0, abs=0.05)
    assert culprit["old_log_prob"] == pytest.approx(culprit["rollout_log_prob"], abs=1e-3)


def test_the_spike_replays_in_one_process(run: dict, capsys: pytest.CaptureFixture[str]) -> None:
    (event,) = run["events"]
    (culprit,) = event["culprits"]
    # The model is the one that the bundle names: that of the start, a few small steps before the spike.
    assert replay([str(run["evidence"] / event["replay"]), "--json", "--only"]) == 0
    result = json.loads(capsys.readouterr().out)
    (token,) = [token for token in result["tokens"] if token["culprit"]]
    assert (token["token_id"], token["grad_norm"]) == (culprit["token_id"], culprit["grad_norm"])
    assert token["replayed"] == pytest.approx(culprit["grad_norm"], rel=0.1)
    assert result["sentences"][0].startswith("The spike comes back")


def test_token_clip_saw_the_token_in_the_training_pass(run: dict) -> None:
    (event,) = run["events"]
    (line,) = [line for line in run["clips"] if line["global_step"] == event["global_step"]]
    (culprit,), token = event["culprits"], line["token_clip"]["tokens"][0]
    for name in ("rank", "micro_batch", "row", "position", "token_id", "advantage", "token", "uid", "reward"):
        assert token[name] == culprit[name], name
    assert token["boundary"] == "log_probs" and token["multiple"] > 100 and not token["cut"]


def test_metrics_are_logged_in_every_step(run: dict) -> None:
    logged = re.findall(r"step:(\d+) - .*?actor/gradloc/triggered:(?:np\.float64\()?([\d.]+)", run["log"])
    triggered = {int(step): float(value) for step, value in logged}
    assert triggered == {step: float(step == run["planted"]["global_step"]) for step in range(1, STEPS + 1)}
    rejection = "rollout_rs_mean" if verl.__version__ == "0.7.0" else "rollout_rs_seq_mean_k1_mean"
    actor = ["gradloc/token_norm_max", "layer_clip/fraction", "token_clip/over"]
    for name in [*(f"actor/{each}" for each in actor), f"rollout_corr/{rejection}"]:
        assert len(re.findall(rf"{name}:", run["log"])) == STEPS


def test_the_critic_is_watched_where_the_actor_is(run: dict) -> None:
    spikes = [json.loads(line) for line in (run["evidence"] / "critic.jsonl").read_text().splitlines()]
    assert all(schema.conforms(spike, schema.CRITIC) for spike in spikes)
    assert {spike["global_step"] for spike in spikes} == set(range(1, STEPS + 1))
    assert {unit["rank"] for spike in spikes for unit in spike["micro_batches"]} == {0, 1}
    value = spikes[0]["values"][0]
    assert value["context"] and value["uid"] and value["data_source"] == "math_verify" and value["reward"] is not None
    triggered = re.findall(r"critic/gradloc/triggered:(?:np\.float64\()?([\d.]+)", run["log"])
    counts = [sum(spike["global_step"] == step for spike in spikes) for step in range(1, STEPS + 1)]
    assert [float(figure) for figure in triggered] == counts


def test_the_tracker_gets_the_spike_and_the_drill(run: dict) -> None:
    events = EventAccumulator(str(run["tensorboard"]))
    events.Reload()
    tensors = events.Tensors("gradloc/spikes/text_summary")
    texts = {each.step: each.tensor_proto.string_val[0].decode() for each in tensors}
    assert texts[1].startswith("A drill: the planted token was found")
    (event,) = run["events"]
    assert texts.keys() == {1, event["global_step"]}
    assert html.escape(event["summary"], quote=False) in texts[event["global_step"]]


def test_the_summary_shows_the_culprit(run: dict) -> None:
    (culprit,) = run["events"][0]["culprits"]
    assert f"1 of {STEPS} steps spiked" in run["output"]
    for said in (f"{culprit['grad_norm']:.4g}", "report.html", "What next:", "GRAD_NORM_THRESHOLD=90"):
        assert said in run["output"]


def test_nothing_of_ray_is_left(run: dict) -> None:
    assert not Path(run["ray"]).exists()
    assert not processes_naming(run["ray"])


def test_an_interrupt_ends_ray_too(tmp_path: Path) -> None:
    log = tmp_path / "out/train.log"
    with started(tmp_path / "out", interpreter=sys.executable) as script:
        ray = f"/tmp/gradloc-{script.pid}"
        while not (log.exists() and "(TaskRunner" in log.read_text()):
            assert script.poll() is None
            time.sleep(0.5)
        # Ray's workers lose their command line, but share their session with those that keep it.
        (session,) = {os.getsid(each.pid) for each in processes_naming(ray) if each.pid != script.pid}
        script.send_signal(signal.SIGINT)
        assert script.wait() == 130
    assert not Path(ray).exists()
    assert not [each for each in psutil.process_iter() if is_alive(each.pid) and os.getsid(each.pid) == session]
