"""Rewards through verl's own managers: ps_grpo, the batch functions, and options from the command line."""

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager
from verl.utils.reward_score import default_compute_score

import trees
from gradloc.rewards import guarded_math_verify, ps_grpo

HANGING = "\\boxed{9^{9^{9^{9}}}}"
# verl 0.9 has all keys of rewards below this one, and no manager of batches.
ABOVE = "" if trees.TARGET.startswith("0.7") else "reward."
WITH_BATCHES = pytest.mark.skipif(bool(ABOVE), reason="verl 0.9 has no batch manager")
SCORERS = "custom_reward_function.path=pkg://verl.utils.reward_score"
OWN = "custom_reward_function.path=pkg://gradloc.rewards"
KEYS = ["score", "acc", "has_drop", "max_relative_drop", "num_steps"]


@pytest.fixture(autouse=True, scope="module")
def small_pool() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_MATH_VERIFY_WORKERS", "2")
        yield


class Tokenizer:
    """Of responses that are their own bytes."""

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool = True) -> str:
        return bytes(ids.tolist()).decode()


def batch(responses: list[str], truths: list[str], source: str, extras: list[dict[str, Any]]) -> DataProto:
    length = max(map(len, responses))
    ids = torch.zeros(len(responses), length, dtype=torch.long)
    mask = torch.ones(len(responses), 1 + length, dtype=torch.long)
    for row, response in enumerate(responses):
        ids[row, : len(response)] = torch.tensor(list(response.encode()))
        mask[row, 1 + len(response) :] = 0
    tensors = {"prompts": torch.full((len(responses), 1), ord("?")), "responses": ids, "attention_mask": mask}
    others = {
        "data_source": [source] * len(responses),
        "reward_model": [{"ground_truth": truth} for truth in truths],
        "extra_info": [dict(extra) for extra in extras],
    }
    arrays = {name: np.array(values, dtype=object) for name, values in others.items()}
    return DataProto(TensorDict(tensors, batch_size=len(responses)), arrays)


def composed(*overrides: str) -> DictConfig:
    directory = str(Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(directory, version_base=None):
        # Without the +, which is for new keys only; with one more, it is for both.
        return compose("ppo_trainer", overrides=[f"++{ABOVE}{each.lstrip('+')}" for each in overrides])


def manager(*overrides: str) -> Any:
    """As `main_ppo` makes it."""
    return load_reward_manager(composed(*overrides), Tokenizer(), *[] if ABOVE else [0])


def scored(manager: Any, data: DataProto) -> tuple[list[float], dict[str, list[Any]]]:
    """The rewards, which lie on the last tokens, and what comes with them; the reward loop takes a sample at a time."""

    async def in_loop() -> list[dict[str, Any]]:
        return await asyncio.gather(*(manager.run_single(data[row : row + 1]) for row in range(len(data))))

    if hasattr(manager, "run_single"):
        found = manager.loop.run_until_complete(in_loop())
        extras = [row["reward_extra_info"] for row in found]
        return [row["reward_score"] for row in found], {key: [extra[key] for extra in extras] for key in extras[0]}
    result = manager(data, return_dict=True)
    last = data.batch["attention_mask"].sum(-1) - 2
    found = result["reward_tensor"][torch.arange(len(data)), last]
    assert result["reward_tensor"].abs().sum() == found.abs().sum()
    return found.tolist(), result["reward_extra_info"]


# step scores, outcome, gamma, rho, min_steps; score, has_drop, max_relative_drop: worked out by hand
SHAPES = [
    ([0.8, 0.4, 0.9], True, {}, 0.5, 1.0, 0.5),
    ([0.8, 0.4, 0.9], False, {}, 0.0, 1.0, 0.5),
    # A fall by exactly rho counts, whatever binary fractions make of it.
    ([0.8, 0.56], True, {}, 0.5, 1.0, 0.3),
    # Many small falls are no drop moment; neither is a fall between steps that are no neighbours.
    ([1.0, 0.8, 0.64, 0.512], True, {}, 1.0, 0.0, 0.2),
    ([1.0, 0.25, 1.0, 0.5], True, {}, 0.5, 1.0, 0.75),
    ([0.8, 0.4], True, {"rho": 0.6}, 1.0, 0.0, 0.5),
    # Too few steps
    ([0.9], True, {}, 0.5, 0.0, 0.0),
    ([], True, {"min_steps": 0}, 1.0, 0.0, 0.0),
    # Both reasons to lower it lower it once.
    ([0.9, 0.1], True, {"min_steps": 4}, 0.5, 1.0, 8 / 9),
    # As parquet and torch deliver them
    (np.array([0.75, 0.375], dtype=np.float32), True, {"gamma": np.float32(0.25)}, 0.75, 1.0, 0.5),
    # A fall by exactly rho, which these are below in float32
    (torch.tensor([0.9, 0.63]), True, {}, 0.5, 1.0, 0.3),
]


@pytest.mark.parametrize(("steps", "right", "options", "score", "has_drop", "drop"), SHAPES)
def test_ps_grpo(steps: Any, right: bool, options: dict, score: float, has_drop: float, drop: float) -> None:
    answer = "\\boxed{7}" if right else "\\boxed{8}"
    result = default_compute_score("ps_grpo", answer, "7", {"step_scores": steps}, **options)
    assert list(result) == KEYS
    assert all(type(value) is float for value in result.values())
    expected = (score, float(right), has_drop, drop, len(steps))
    # Step scores may be float32.
    assert list(result.values()) == pytest.approx(expected, abs=1e-12 if isinstance(steps, list) else 1e-6)


BAD_STEP_SCORES = [
    (None, "no step scores"),
    ({"step_scores": [0.5, None]}, "malformed step scores"),
    ({"step_scores": [0.5, float("nan")]}, "malformed step scores"),
    ({"step_scores": [0.5, 1.01]}, "malformed step scores"),
    ("{'step_scores': [1, 1]}", "malformed step scores: extra_info must be a dict"),
]
BAD_OPTIONS = [
    ({"gamma": 1.5}, "gamma must be .* 1.5"),
    ({"rho": 0}, "rho must be .* 0"),
    ({"min_steps": 1.5}, "min_steps must be .* 1.5"),
]


def test_bad_step_scores_name_the_data_source_and_bad_options() -> None:
    """Also where the answer is wrong and earned nothing anyway."""
    good = {"step_scores": [1.0, 1.0]}
    for extra, message in BAD_STEP_SCORES:
        with pytest.raises(ValueError, match=f"data source 'ps_grpo' has {message}"):
            default_compute_score("ps_grpo", "\\boxed{8}", "7", extra)
        with pytest.raises(ValueError, match=f"data source 'mine' has {message}"):
            ps_grpo.compute_score_batch(["yours", "mine"], ["7", "7"], ["7", "7"], [good, extra])
    for options, message in BAD_OPTIONS:
        with pytest.raises(ValueError, match=message):
            default_compute_score("ps_grpo", "7", "7", good, **options)
    # An outcome that takes too long is wrong.
    result = default_compute_score("ps_grpo", HANGING, "7", good, timeout=0.5, timeout_score=0.9)
    assert (result["score"], result["acc"]) == (0.0, 0.0)


RESPONSES = ["So \\boxed{7}", "\\boxed{7}, short", "\\boxed{7}", "\\boxed{8}"]
STEPS = [[0.9, 0.9], [0.9, 0.3], [0.9], [0.9, 0.9, 0.9]]
SHAPED = [1.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize("how", ["alone", "loop", pytest.param("batch", marks=WITH_BATCHES)])
def test_verl_logs_what_ps_grpo_returns(how: str) -> None:
    """The reward loop is verl's default since 0.7."""
    overrides = [f"{OWN}.ps_grpo", "custom_reward_function.name=compute_score_batch", "reward_manager.name=batch"]
    loop = NaiveRewardManager(None, Tokenizer(), default_compute_score) if how == "loop" else None
    data = batch(RESPONSES, ["7"] * 4, "ps_grpo", [{"step_scores": steps} for steps in STEPS])
    found, extra = scored(loop or manager(*overrides if how == "batch" else []), data)
    assert found == extra["score"] == SHAPED
    assert extra["acc"] == [1, 1, 1, 0] and extra["has_drop"] == [0, 1, 0, 0] and extra["num_steps"] == [2, 2, 1, 3]
    assert extra["max_relative_drop"] == pytest.approx([0, 2 / 3, 0, 0])

    logged = process_validation_metrics(["ps_grpo"] * 4, ["a", "a", "b", "b"], extra)["ps_grpo"]
    assert set(logged) == set(KEYS)
    assert {key: logged[key]["mean@2"] for key in KEYS} == pytest.approx({key: np.mean(extra[key]) for key in KEYS})


@pytest.mark.parametrize(("source", "expected"), [("math_verify", [1.0, 0.0]), ("ps_grpo", [0.8, 0.0])])
def test_options_reach_default_compute_score(source: str, expected: list[float]) -> None:
    made = manager(
        SCORERS,
        "custom_reward_function.name=default_compute_score",
        "+custom_reward_function.reward_kwargs.precision=2",
        "+custom_reward_function.reward_kwargs.gamma=0.2",
    )
    responses = ["\\boxed{0.33}", "\\boxed{0.34}"]
    data = batch(responses, ["\\frac{1}{3}"] * 2, source, [{"step_scores": [0.9, 0.1]}] * 2)
    assert scored(made, data)[0] == pytest.approx(expected)


class ProcessRewardModel(http.server.BaseHTTPRequestHandler):
    """A stand-in for its server: it doubts every step with a question mark."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["question"] == "What is 3 + 4?"
        steps = json.dumps([0.3 if "?" in step else 0.9 for step in asked["steps"]]).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(steps)


def test_the_example_that_asks_a_process_reward_model() -> None:
    """The overrides are the README's."""
    responses = ["3 is 1 + 2.\n\nSo \\boxed{7}", "3 is 1 + 2.\n\n\n\nIs it \\boxed{7}?", "4\n\n\\boxed{8}"]
    data = batch(responses, ["7"] * 3, "sums", [{"question": "What is 3 + 4?"}] * 3)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ProcessRewardModel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = manager(
            f"custom_reward_function.path={trees.ROOT}/examples/prm_reward.py",
            "custom_reward_function.name=compute_score",
            f"+custom_reward_function.reward_kwargs.prm_url=http://127.0.0.1:{server.server_port}/",
            "+custom_reward_function.reward_kwargs.gamma=0.4",
        )
        found, extra = scored(made, data)
        server.shutdown()
    assert found == pytest.approx([1.0, 0.6, 0.0])
    assert extra["num_steps"] == [2, 2, 2] and extra["has_drop"] == [0, 1, 0]


def test_reward_functions_can_be_sent_to_other_processes() -> None:
    from ray import cloudpickle

    config = composed(f"{OWN}.guarded_math_verify", "custom_reward_function.name=compute_score_batch")
    guarded_math_verify.compute_score("1", "1")
    function = cloudpickle.loads(cloudpickle.dumps(get_custom_reward_fn(config)))
    assert function(data_sources=["x"], solution_strs=["7"], ground_truths=["7"], extra_infos=[{}]) == [1.0]
