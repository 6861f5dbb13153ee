"""run_experiment.sh: the command that it runs, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from notation import cases
from omegaconf import DictConfig

import trees
from tools.check_overrides import refusal

pytestmark = pytest.mark.slow

SCRIPT = trees.ROOT / "run_experiment.sh"
ACTOR = "actor_rollout_ref.actor"


def launch(*arguments: str, script: Path = SCRIPT, **environment: str) -> subprocess.CompletedProcess[str]:
    return trees.run("bash", script, *arguments, **environment)


def stand_in(place: Path, training: str) -> str:
    """A Python that does something else in the place of training; arguments are "$@"."""
    text = f'#!/bin/sh\nif [ "$1" = -m ]; then {training}; exit; fi\nexec {sys.executable} "$@"\n'
    return str(trees.write(place / "python", text, 0o755))


@pytest.fixture
def recorder(tmp_path: Path) -> str:
    """Prints its arguments as JSON."""
    return stand_in(tmp_path, f'{sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"')


def overrides_of(recorder: str, *arguments: str, **environment: str) -> list[str]:
    """The Hydra overrides that training gets."""
    printed = trees.ran(launch("--python", recorder, *arguments, **environment))
    module, overrides = (words := json.loads(printed.splitlines()[-1]))[:2], words[2:]
    assert module == ["-m", "verl.trainer.main_ppo"]
    return overrides


def composed(overrides: list[str]) -> DictConfig:
    (folder,) = find_spec("verl").submodule_search_locations
    with initialize_config_dir(config_dir=f"{folder}/trainer/config", version_base=None):
        return compose("ppo_trainer", overrides)


@pytest.mark.every_target
@pytest.mark.smoke
@pytest.mark.parametrize("remedy", [[], ["--remedy"], ["--remedy", "TIS=off"]])
def test_verl_accepts_the_configuration(recorder: str, remedy: list[str]) -> None:
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    overrides = overrides_of(recorder, "--drill", *remedy)
    assert refusal(overrides) is None
    if len(remedy) == 1:
        dry = launch("--dry-run", "--python", recorder, "--drill", *remedy)
        assert json.loads(trees.ran(trees.run("bash", "-c", dry.stdout)))[2:] == overrides and dry.stderr == ""
    config = composed(overrides)
    validate_config(config, use_reference_policy=False, use_critic=False)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert (actor.spike_detection, actor.grad_norm_threshold, actor.spike_drill_step) == (True, "auto", 2)
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is is None) == (len(remedy) != 1)
    assert actor.token_clip.enable == actor.layer_clip.enable == (correction.rollout_rs is not None) == bool(remedy)
    if remedy:
        assert correction.rollout_is_threshold == 2.0 and correction.rollout_rs_threshold == 1.2
        assert correction.rollout_rs == ("geometric" if trees.TARGET == "0.7.0" else "seq_mean_k1")
        assert actor.token_clip.action == "drop"


def test_arguments_win_over_variables_and_overrides_over_both(recorder: str, tmp_path: Path) -> None:
    given = ["LR=3e-6", "TRAIN_FILES=a b.parquet,c", f"OUTPUT_DIR={tmp_path}/a run", "trainer.nnodes=7", "--", "--info"]
    overrides = overrides_of(recorder, *given, LR="9", NNODES="4", SPIKE_ACTION="drop", TIS="")
    assert overrides[-2:] == ["trainer.nnodes=7", "--info"]
    config = composed(overrides[:-1])
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    assert (actor.optim.lr, actor.spike_action, trainer.nnodes) == (3e-6, "drop", 7)
    assert config.data.train_files == ["a b.parquet", "c"] and trainer.logger == ["console", "tensorboard"]
    assert actor.bisect_dump_dir == f"{trainer.default_local_dir}/bisect_dump" == f"{tmp_path}/a run/bisect_dump"


def test_runs_that_must_not_resume_from_each_other(recorder: str) -> None:
    runs = [["--remedy"], [], ["TIS=3"], ["--remedy", "TIS=3"], ["MODEL_PATH=/m/Other/"]]
    names = [composed(overrides_of(recorder, *run)).trainer.experiment_name for run in runs]
    assert names[:2] == ["qwen3-4b-grpo-remedy", "qwen3-4b-grpo"] and names[-1] == "other-grpo"
    assert len(set(names)) == len(runs)


def test_what_is_refused(recorder: str, tmp_path: Path) -> None:
    bare = trees.write(tmp_path / "bare", f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n', 0o755)
    for arguments, sentence in (
        (["LERNING_RATE=1"], "LERNING_RATE is not a variable of this script"),
        (["PATH=/"], "PATH is not a variable of this script"),
        ([f"LR[$(touch {tmp_path}/ran)]=1"], ")] is not a variable of this script"),
        (["trainer.nnodes"], "'trainer.nnodes' is neither an option nor a Hydra override"),
        (["--dry-run", "--python", recorder, "GPUS_PER_NODE=0"], "n_gpus_per_node must be a positive integer, got 0"),
        (["--python", "/nope"], "there is no Python at '/nope': give one with --python"),
        (["--python", str(bare)], "has no verl"),
        (["--python", recorder, "--plugin", "LAYER_CLIP=ratio"], "LAYER_CLIP is ratio: set it to on or off"),
    ):
        refused = launch(*arguments)
        assert refused.returncode == 2 and sentence in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "ran").exists()
    dry = launch("--dry-run", "--python", str(bare))
    assert "verl.trainer.main_ppo" in dry.stdout and "the values are not checked: " in dry.stderr
    # Also an unpatched verl, unless it has the plugin. pip leaves the package where it installs verl again.
    base = trees.copy_base(tmp_path / "again", None)
    trees.write(base / trees.NEW, "")
    refused = launch("--python", recorder, PYTHONPATH=str(base))
    assert refused.returncode == 2 and f"the verl in {base}/verl is not patched" in refused.stderr
    assert f"{trees.ROOT}/apply_patch.py --installed" in refused.stderr
    overrides = overrides_of(recorder, "--plugin", PYTHONPATH=str(base))
    assert overrides[:2] == ["actor@actor_rollout_ref.actor=gradloc_dp_actor", "critic=gradloc_dp_critic"]


CORRECTION = "algorithm.rollout_correction"
OTHER_MASK = "seq_mean_k1" if trees.TARGET == "0.7.0" else "geometric"


@pytest.mark.every_target
@cases(
    "overrides reason",
    ([f"{ACTOR}.grad_norm_threshold=Auto"], "grad_norm_threshold must be a positive finite number or auto, got 'Auto'"),
    ([f"{ACTOR}.spike_action=Drop"], "spike_action must be one of ['log', 'skip', 'drop', 'stop'], got 'Drop'"),
    ([f"{ACTOR}.spike_acton=drop"], f"Could not override '{ACTOR}.spike_acton'"),
    ([f"{ACTOR}.optim.lr=abc"], f"{ACTOR}.optim.lr must be a number, got 'abc'"),
    ([f"{ACTOR}.optim.lr=-1"], "Invalid learning rate: -1"),
    (["actor_rollout_ref.rollout.n=two"], "actor_rollout_ref.rollout.n must be a number, got 'two'"),
    (["trainer.nnodes=0"], "trainer.nnodes must be a positive integer, got 0"),
    (["trainer.total_training_steps=all"], "trainer.total_training_steps must be a positive integer, got 'all'"),
    (["trainer.logger=[consol]"], "trainer.logger has 'consol', and verl knows "),
    (["algorithm.adv_estimator=grop"], "Unknown advantage estimator simply: grop"),
    ([f"{CORRECTION}.rollout_is=tokens"], f"{CORRECTION}: Invalid rollout_is: tokens"),
    ([f"{CORRECTION}.rollout_rs={OTHER_MASK}", f"{CORRECTION}.rollout_rs_threshold=1.2"], f"{CORRECTION}: Invalid "),
    (["actor_rollout_ref.rollout.n=8"], None),
)
def test_a_dry_run_refuses_what_the_run_would(overrides: list[str], reason: str | None) -> None:
    needed = ["algorithm.adv_estimator=grpo", f"{ACTOR}.use_dynamic_bsz=True", "actor_rollout_ref.rollout.name=vllm"]
    found = refusal([*needed, f"{ACTOR}.spike_detection=True", f"{ACTOR}.bisect_dump_dir=/d", *overrides])
    assert found is None if reason is None else found is not None and reason in found, found


def test_help_is_the_top_of_the_script_and_a_link_to_it_works(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(SCRIPT)
    done = launch("--help", script=tmp_path / "link")
    assert done.returncode == 0 and "--remedy" in done.stdout and "MODEL_PATH=" in done.stdout
    done = launch("--embedded", "--help", script=tmp_path / "link")
    assert done.returncode == 0 and "GRAD_NORM_THRESHOLD" in done.stdout and "  unsampled: " in done.stdout


def test_a_signal_reaches_the_training_itself(tmp_path: Path) -> None:
    """The script has become the training, which ends its own Ray and no other."""
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    python = stand_in(tmp_path, f"exec {sys.executable} -c '{code}'")
    with subprocess.Popen(["bash", SCRIPT, "--python", python], stdout=subprocess.PIPE, text=True) as training:
        assert "To read it: gradloc report " in training.stdout.readline()
        assert int(training.stdout.readline()) == training.pid
        training.terminate()
    assert training.returncode == -signal.SIGTERM
    assert launch("--python", stand_in(tmp_path, "exit 76")).returncode == 76


def test_a_bad_key_is_refused_before_ray_starts(tmp_path: Path) -> None:
    """A bad value by the configuration's own class, a name that does not exist by Hydra."""
    with pytest.raises(ConfigCompositionException) as refused:
        composed([f"{ACTOR}.spike_acton=drop"])
    assert "Key 'spike_acton' is not in struct" in str(refused.value.__cause__)
    environment = {"VERL_USE_EXTERNAL_MODULES": "embedded", "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{trees.ROOT}"}
    given = [f"OUTPUT_DIR={tmp_path}/out", f"{ACTOR}.grad_norm_threshold=-5", f"{ACTOR}.strategy=fsdp2"]
    done = launch("--python", sys.executable, *given, "trainer.device=cpu", **environment)
    words = "grad_norm_threshold must be a positive finite number or auto, got -5"
    assert done.returncode == 1 and words in done.stderr, done.stderr
    assert "ray init kwargs" not in done.stdout  # which main_ppo prints before it starts Ray
