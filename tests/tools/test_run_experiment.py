"""run_experiment.sh: what it would run, what it refuses, and that nothing of it survives an interrupt."""

import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

import trees
from tools.launcher import renamed_keys

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "run_experiment.sh"


def launch(
    *arguments: str, script: Path = SCRIPT, shell: str = "bash", **environment: str
) -> subprocess.CompletedProcess:
    """Runs the script; what it says is read without any change of line ends."""
    command, environ = [shell, script, *arguments], os.environ | environment
    done = subprocess.run(command, env=environ, capture_output=True)
    return subprocess.CompletedProcess(command, done.returncode, *(os.fsdecode(x) for x in (done.stdout, done.stderr)))


def make_executable(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o755)
    return file


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """A stand-in for Python that prints its arguments as JSON."""
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    return make_executable(tmp_path / "recorder", f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')


def test_closed_output() -> None:
    for stream in (">&-", "2>&-", ">&- 2>&-"):
        command = f"bash {SCRIPT} --dry-run --embedded --tiny {stream}"
        assert subprocess.run(["bash", "-c", command], capture_output=True).returncode == 0


def overrides_of(recorder: Path, *arguments: str, **environment: str) -> list[str]:
    """The Hydra overrides that the printed command passes, found by running it."""
    target = ["--target", trees.TARGET]
    printed = launch("--dry-run", "--python", str(recorder), *target, *arguments, **environment)
    assert printed.returncode == 0, printed.stderr
    return executed(printed.stdout)


def executed(command: str) -> list[str]:
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    module, overrides = json.loads(ran.stdout)[:2], json.loads(ran.stdout)[2:]
    assert module == ["-m", "verl.trainer.main_ppo"]
    return overrides


def composed(overrides: list[str]) -> DictConfig:
    config = Path(find_spec("verl").submodule_search_locations[0]) / "trainer/config"
    with initialize_config_dir(config_dir=str(config), version_base=None):
        return compose("ppo_trainer", overrides)


@pytest.mark.every_target
@pytest.mark.smoke
@pytest.mark.parametrize("profile", [["--cluster"], ["--embedded"], ["--embedded", "--tiny"]])
def test_verl_accepts_the_configuration(recorder: Path, profile: list[str]) -> None:
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.workers.config import HFModelConfig

    config = composed(overrides_of(recorder, *profile, "NNODES=1"))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.spike_detection is True
    assert actor.grad_norm_threshold == ("auto" if profile == ["--cluster"] else 160.0)
    assert actor.bisect_dump_dir.endswith("/bisect_dump")
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.name == ("vllm" if profile == ["--cluster"] else "hf")
    assert set(config.actor_rollout_ref.model) - {"_target_"} <= set(HFModelConfig.__dataclass_fields__)
    validate_config(config, use_reference_policy=False, use_critic=False)


def test_settings_come_from_arguments_before_the_environment(recorder: Path) -> None:
    overrides = ["--cluster", "LR=3e-6", "TRAIN_FILES=a b.parquet,it's.parquet"]
    config = composed(overrides_of(recorder, *overrides, LR="9", NNODES="4", SPIKE_ACTION="drop"))
    actor = config.actor_rollout_ref.actor
    assert (actor.optim.lr, config.trainer.nnodes, actor.spike_action) == (3e-6, 4, "drop")
    assert config.data.train_files == ["a b.parquet", "it's.parquet"]


# What needs quoting in Hydra's grammar and in YAML, among all other characters.
CHARACTERS = st.sampled_from("\\'\"${}[]():,=~#%@ \t\r\n01e.-_") | st.characters(
    exclude_categories=["Cs"], exclude_characters="\0"
)
TEXTS = st.text(CHARACTERS, min_size=1, max_size=20).filter(lambda text: "${" not in text and "???" not in text)
DIRECTORIES = TEXTS.filter(lambda text: "://" not in text)
ITEMS = st.lists(TEXTS.map(lambda text: text.replace(",", "") or "x"), min_size=1, max_size=3)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(TEXTS, ITEMS, ITEMS, DIRECTORIES, st.booleans())
@example("20250115", ["null", "True"], ["nan"], "7", True)
@example("0x10", [".5", "1_0"], ["None", "~", "-1", "1e3"], "false", False)
@example("a\\", ["\\\\", "it's"], ["\\\\'", "a\\'b", "'"], "out\\", True)
@example("$HOME/{a: b}", ["(1)", "a b", "[1]"], ["\n"], "line\n", False)
def test_texts_arrive_as_they_are_given(
    recorder: Path,
    model: str,
    files: list[str],
    loggers: list[str],
    output: str,
    arguments: bool,
) -> None:
    """Through bash, the printed command, Hydra's parser and the resolving of the whole configuration in verl."""
    given_values = {
        "MODEL_PATH": model,
        "TRAIN_FILES": ",".join(files),
        "LOGGER": ",".join(loggers),
        "OUTPUT_DIR": output,
    }
    if arguments:
        overrides = overrides_of(recorder, "--cluster", *(f"{name}={value}" for name, value in given_values.items()))
    else:
        overrides = overrides_of(recorder, "--cluster", **given_values)
    parsed = OverridesParser.create().parse_overrides(overrides)
    config = OmegaConf.create({override.key_or_group: override.value() for override in parsed})
    OmegaConf.resolve(config)
    directory = os.path.realpath(output)
    assert config["actor_rollout_ref.model.path"] == model
    name = os.path.basename(model.rstrip("/")) or "/"
    assert config["trainer.experiment_name"] == f"{name.lower()}-grpo"
    assert config["data.train_files"] == files
    assert config["trainer.logger"] == loggers
    assert config["trainer.default_local_dir"] == directory
    assert config["hydra.run.dir"] == f"{directory}/hydra"
    assert config["actor_rollout_ref.actor.bisect_dump_dir"] == os.path.realpath(f"{directory}/bisect_dump")


@pytest.mark.parametrize("posix", [{}, {"POSIXLY_CORRECT": "1"}])
def test_other_shells_options_and_links_do_not_matter(recorder: Path, tmp_path: Path, posix: dict[str, str]) -> None:
    wanted = overrides_of(recorder, "--cluster")
    hostile = posix | {"SHELLOPTS": "noclobber:noglob", "CDPATH": "/", "BASH_FUNC_printf%%": "() { false; }"}
    done = launch("--dry-run", "--cluster", "--python", str(recorder), shell=shutil.which("sh"), **hostile)
    assert done.returncode == 0, done.stderr
    assert executed(done.stdout) == wanted
    (tmp_path / "link").symlink_to(SCRIPT)
    done = launch("--dry-run", "--cluster", "--python", str(recorder), script=tmp_path / "link", **hostile)
    assert executed(done.stdout) == wanted, done.stderr


CLIPS = {"TIS": "3", "SEQUENCE_MASK": "1.05", "TOKEN_CLIP_ACTION": "smooth", "LAYER_CLIP": "ratio"}


def clips(recorder: Path, *arguments: str) -> tuple:
    """The thresholds of both corrections, TokenClip's action and LayerClip's rule; None where one is off."""
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = composed(overrides_of(recorder, *arguments))
    validate_config(config, use_reference_policy=False, use_critic=False)
    correction = config.algorithm.rollout_correction
    rejection = "geometric" if trees.TARGET == "0.7.0" else "seq_mean_k1"
    assert correction.rollout_is in (None, "token") and correction.rollout_rs in (None, rejection)
    assert not correction.bypass_mode and config.actor_rollout_ref.rollout.calculate_log_probs
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    return (
        correction.rollout_is and correction.rollout_is_threshold,
        correction.rollout_rs and correction.rollout_rs_threshold,
        actor.token_clip.action if actor.token_clip.enable else None,
        actor.layer_clip.rule if actor.layer_clip.enable else None,
    )


@pytest.mark.every_target
@pytest.mark.parametrize("profile", ["--cluster", "--embedded"])
def test_one_switch_turns_all_clips_on_and_each_can_be_left_out(recorder: Path, profile: str) -> None:
    assert clips(recorder, profile) == (None, None, None, None)
    remedy = clips(recorder, profile, "--remedy")
    assert remedy == (2.0, 1.2, "drop", "zscore")
    for i, name in enumerate(CLIPS):
        expected = [*remedy[:i], None, *remedy[i + 1 :]]
        assert list(clips(recorder, profile, "--remedy", f"{name}=off")) == expected
    given = clips(recorder, profile, *(f"{name}={value}" for name, value in CLIPS.items()))
    assert given == (3.0, 1.05, "smooth", "ratio")


@pytest.mark.every_target
@pytest.mark.smoke
def test_renamed_keys_are_keys_of_this_verl(recorder: Path) -> None:
    """All names of the table, given with those of verl 0.7.0; one that a verl has not is an error of Hydra's."""
    given = {
        "algorithm.rollout_correction.rollout_rs": "sequence",
        "custom_reward_function.path": "/rewards.py",
        "custom_reward_function.name": "score",
        "reward_model.num_workers": 3,
        "reward_model.enable": True,
        "reward_model.enable_resource_pool": True,
        "reward_model.n_gpus_per_node": 2,
        "reward_model.nnodes": 1,
        "reward_model.model.path": "/model",
        "reward_model.rollout.gpu_memory_utilization": 0.25,
        "reward_manager.name": "dapo",
        "reward_model.sandbox_fusion.url": "http://sandbox",
        "actor_rollout_ref.actor.grad_clip": 0.75,
        "critic.grad_clip": 0.25,
        "critic.model.fsdp_config.param_offload": True,
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes": 64,
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.ref.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float16",
        "actor_rollout_ref.ref.fsdp_config.dtype": "float16",
    }
    overrides = overrides_of(recorder, "--cluster", *(f"{key}={value}" for key, value in given.items()))
    config = composed(overrides)
    for override in OverridesParser.create().parse_overrides(overrides[-len(given) :]):
        assert OmegaConf.select(config, override.key_or_group) == override.value()
    actor = config.actor_rollout_ref.actor
    if not trees.TARGET.startswith("0.7."):
        # What its engine reads.
        assert (actor.optim.clip_grad, actor.fsdp_config.use_torch_compile) == (0.75, False)
        assert actor.fsdp_config.mixed_precision.param_dtype == "float16"
        assert config.reward.custom_reward_function.path == "/rewards.py"
        assert config.critic.optim.clip_grad == 0.25
    assert {override.partition("=")[0].strip("+") for override in overrides[-len(given) :]} == {
        renamed_keys.translated(f"{key}=", trees.TARGET).strip("+=") for key in given
    }


FIRST = trees.ROOT / "build/0.7.0/base/verl/trainer/config"


def leaves(config: Any, prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]


@pytest.mark.every_target
@pytest.mark.skipif(not FIRST.is_dir(), reason="the verl 0.7.0 of its tests is not set up")
def test_every_key_of_the_first_verl_is_there_or_renamed_or_said_to_be_gone() -> None:
    with initialize_config_dir(str(FIRST), version_base=None):
        first = OmegaConf.to_container(compose("ppo_trainer"), resolve=False)
    there = OmegaConf.to_container(composed([]), resolve=False)
    keys = list(leaves(first))
    assert len(keys) > 300
    for key in keys:
        new = renamed_keys.translated(f"{key}=", trees.TARGET).rstrip("=")
        *parents, name = new.split(".")
        node = functools.reduce(lambda inner, part: (inner or {}).get(part), parents, there)
        is_there = new.startswith("+") or name in (node or {})
        assert renamed_keys.is_gone(f"{key}=1", trees.TARGET) != is_there, (key, new)


@pytest.mark.every_target
@pytest.mark.smoke
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_rejection_has_the_same_limits_under_its_new_name(level: str) -> None:
    import torch
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    log_ratio = torch.randn(200, 7, generator=torch.Generator().manual_seed(1)) * 0.3
    mask = (torch.arange(7) < torch.arange(200).unsqueeze(1) % 7 + 1).float()
    name = renamed_keys.translated(f"algorithm.rollout_correction.rollout_rs={level}", trees.TARGET).partition("=")[2]
    kept, _ = compute_rollout_rejection_mask(log_ratio, mask, rollout_rs=name, rollout_rs_threshold=1.2)
    of_sequence = (log_ratio * mask).sum(1, keepdim=True) / (mask.sum(1, keepdim=True) if level == "geometric" else 1)
    measured = (log_ratio if level == "token" else of_sequence).exp()
    expected = mask * ((measured >= 1 / 1.2) & (measured <= 1.2))
    assert torch.equal(kept, expected) and 0 < expected.sum() < mask.sum()


def test_overrides_keep_their_quoting_and_win(recorder: Path) -> None:
    awkward = [
        "+a.b='two words'",
        '+c="$HOME `id` \\"quoted\\""',
        "+d=[1,'x y',{e: 2}]",
        "~algorithm.pf_ppo",
        "+f=line\nbreak",
        "trainer.nnodes=7",
    ]
    overrides = overrides_of(recorder, "--cluster", *awkward, "--", "--info", "x=*?")
    assert overrides[-8:] == [*awkward, "--info", "x=*?"]
    assert composed(overrides[:-4]).a.b == "two words"
    assert composed([override for override in overrides[:-2] if "break" not in override]).trainer.nnodes == 7


def test_an_empty_variable_of_the_environment_counts_as_none(recorder: Path) -> None:
    assert composed(overrides_of(recorder, "--cluster", NNODES="")).trainer.nnodes == 1


def test_help_tells_of_auto_and_of_resuming() -> None:
    rows = {line.split()[0]: line for line in launch("--help").stdout.splitlines() if line.startswith("  ")}
    assert "auto" in rows["GRAD_NORM_THRESHOLD"]
    assert "outputs/MODEL-grpo " in rows["OUTPUT_DIR"] and "resumes" in rows["OUTPUT_DIR"]


def test_runs_of_another_model_or_with_the_remedy_have_a_directory_of_their_own(recorder: Path) -> None:
    names = {}
    for model in ("Qwen/Qwen3-4B", "/models/Llama 3.1-8B/"):
        for remedy in ([], ["--remedy"]):
            trainer = composed(overrides_of(recorder, "--cluster", f"MODEL_PATH={model}", *remedy)).trainer
            assert trainer.default_local_dir == os.path.abspath(f"outputs/{trainer.experiment_name}")
            names[trainer.experiment_name] = model
    expected = ["qwen3-4b-grpo", "qwen3-4b-grpo-remedy", "llama 3.1-8b-grpo", "llama 3.1-8b-grpo-remedy"]
    assert list(names) == expected


def test_runs_with_other_clips_have_a_directory_of_their_own(recorder: Path) -> None:
    def directory(*arguments: str) -> str:
        return composed(overrides_of(recorder, "--cluster", *arguments)).trainer.default_local_dir

    plain, remedy = directory(), directory("--remedy")
    assert directory("TIS=2.0", "SEQUENCE_MASK=1.2", "TOKEN_CLIP_ACTION=drop", "LAYER_CLIP=zscore") == remedy
    assert directory("--remedy", *(f"{name}=off" for name in CLIPS)) == plain
    one_on = [directory(f"{name}={value}") for name, value in CLIPS.items()]
    one_off = [directory("--remedy", f"{name}=off") for name in CLIPS]
    assert len({plain, remedy, *one_on, *one_off}) == 10


@pytest.mark.every_target
def test_every_word_that_a_setting_takes_is_one_of_verl(recorder: Path) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    words = {
        "GRAD_NORM_THRESHOLD": ["auto", "7"],
        "SPIKE_ACTION": ["log", "skip", "drop", "stop"],
    }
    for name, values in words.items():
        for value in values:
            config = composed(overrides_of(recorder, "--cluster", f"{name}={value}"))
            assert omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert composed(overrides_of(recorder, "--cluster", "TOTAL_STEPS=null")).trainer.total_training_steps is None
    actor = composed(overrides_of(recorder, "--cluster", "GRAD_CLIP=0.75")).actor_rollout_ref.actor
    assert (actor.grad_clip if trees.TARGET.startswith("0.7.") else actor.optim.clip_grad) == 0.75


def test_a_model_may_have_a_comma_in_its_path_or_be_an_id_without_a_slash(tmp_path: Path) -> None:
    model = tmp_path / "a,b"
    model.touch()
    for path in (str(model), "gpt2"):
        printed = launch("--dry-run", "--cluster", *files_that_exist(tmp_path), f"MODEL_PATH={path}")
        assert printed.returncode == 0 and printed.stderr == ""


def test_all_missing_paths_are_reported_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "val.parquet").touch()
    model, train, val = tmp_path / "model", tmp_path / "no such.parquet", tmp_path / "val.parquet"
    settings = [f"MODEL_PATH={model}", f"TRAIN_FILES={train},hdfs://here/x", f"VAL_FILES={val}"]
    refused = launch("--cluster", *settings, f"OUTPUT_DIR={tmp_path / 'out'}")
    assert refused.returncode == 2
    assert "these paths do not exist" in refused.stderr
    assert f"MODEL_PATH={model}" in refused.stderr and f"TRAIN_FILES={train}" in refused.stderr
    assert "hdfs" not in refused.stderr and "VAL_FILES" not in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--fast"], "unknown option --fast"),
        (["FAST=1"], "unknown setting FAST"),
        (["train.parquet"], "'train.parquet' is neither an option nor a Hydra override"),
        (["--python"], "--python needs the path of a Python"),
        (["--dry-run", "--python", "--remedy"], "--python needs the path of a Python"),
        (["--dry-run", "NNODES="], "NNODES is empty: give it a value, or leave it out"),
        (["--cluster", "--embedded"], "exclude each other"),
        (["--embedded", "--fault"], "--fault needs the name of a fault after it: unsampled, advantage"),
        (
            ["--embedded", "--fault", "fire"],
            "unknown fault fire: give unsampled, advantage, bitflip, stale, never_synced, adapter, one_worker, "
            "temperature, nan, retokenized, misfire, auxiliary, loss_scale, kernel or resume",
        ),
        (["--cluster", "--fault", "nan"], "--fault belongs to --embedded"),
        (["--embedded", "SPIKE_DRILL_STEP=5"], "SPIKE_DRILL_STEP is 5, and the run ends with step 4"),
        (
            ["--embedded", "--drill", "actor_rollout_ref.actor.spike_detection=False"],
            "--drill is given, and a drill needs GradLoc",
        ),
        (["SPIKE_DETECTION=False"], "no longer a setting: write actor_rollout_ref.actor.spike_detection=False"),
        (["--embedded", "MICRO_BATCH_SIZE=4"], "write actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"),
        (["--cluster", "--tiny"], "--tiny belongs to --embedded"),
        (["--target"], "--target needs a version of verl after it"),
        (["--target", "0.6.0"], "there is no patch for verl 0.6.0: give --target 0.7.0, 0.7.1"),
        (["NNODES=two"], "NNODES is 'two': give an integer"),
        (["--dry-run", "GPUS_PER_NODE=99999999999999999999"], "give an integer from 1 to 999"),
        (["--dry-run", "LR=abc"], "LR is 'abc': give a number of at least 0"),
        (["--dry-run", "LR=amount"], "LR is 'amount': give a number of at least 0"),
        (["--dry-run", "LR=00.5"], "LR is '00.5': give a number"),
        (["--dry-run", "SPIKE_ACTION=stay"], "SPIKE_ACTION is 'stay': give log, skip, drop or stop"),
        (["--dry-run", "GRAD_NORM_THRESHOLD=0"], "give a number over 0 or auto"),
        (["--dry-run", "TOTAL_STEPS=1.5"], "TOTAL_STEPS is '1.5': give an integer of at least 1 or null"),
        (["--dry-run", "TOTAL_STEPS=1e3"], "TOTAL_STEPS is '1e3': give an integer"),
        (["--dry-run", "MODEL_PATH=/m/${x}"], "MODEL_PATH is '/m/${x}': verl would resolve the ${ in it"),
        (["--dry-run", "GRAD_CLIP=0.0"], "GRAD_CLIP is '0.0': give a number over 0"),
        (["--dry-run", "LOGGER=???"], "LOGGER is '???': ??? means a missing value"),
        (["--dry-run", "TRAIN_FILES=a,???"], "TRAIN_FILES is 'a,???'"),
        (["--dry-run", os.fsdecode(b"MODEL_PATH=/m/\xff")], "MODEL_PATH is not valid UTF-8"),
        (["TIS=1.0"], "TIS is '1.0': give a number over 1 or off"),
        (["TIS=01.5"], "TIS is '01.5': give a number over 1 or off"),
        (["--remedy", "SEQUENCE_MASK=no"], "SEQUENCE_MASK is 'no': give a number over 1 or off"),
        (["LAYER_CLIP=True"], "LAYER_CLIP is 'True': give zscore, ratio, fixed or off"),
        (["OUTPUT_DIR=hdfs://host/run"], "OUTPUT_DIR is 'hdfs://host/run': give a directory"),
        (["actor_rollout_ref.actor.bisect_dump_dir=/x"], "give BISECT_DUMP_DIR=/x"),
        (["--plugin", "--embedded", "--target", "0.7.1"], "--plugin needs verl 0.9.1 and this is for 0.7.1"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments: list[str], sentence: str) -> None:
    refused = launch(*arguments)
    assert refused.returncode == 2
    assert sentence in refused.stderr
    assert refused.stderr.count("\n") == 1


def files_that_exist(directory: Path) -> list[str]:
    for name in ("model", "train.parquet", "val.parquet"):
        (directory / name).touch()
    names = {"MODEL_PATH": "model", "TRAIN_FILES": "train.parquet", "VAL_FILES": "val.parquet", "OUTPUT_DIR": "out"}
    return [f"{setting}={directory / name}" for setting, name in names.items()]


def test_unpatched_verl_is_refused(tmp_path: Path) -> None:
    arguments = ["--cluster", "--python", sys.executable, *files_that_exist(tmp_path)]
    refused = launch(*arguments, PYTHONPATH=os.environ["GRADLOC_BASE_TREE"])
    assert refused.returncode == 2
    base_tree = os.environ["GRADLOC_BASE_TREE"]
    assert "is not patched" in refused.stderr and f"apply_patch.py --repo {base_tree}" in refused.stderr


def test_the_verl_that_training_has_decides(tmp_path: Path) -> None:
    def printed(version: str, *arguments: str) -> str:
        (tmp_path / "verl/version").mkdir(parents=True, exist_ok=True)
        (tmp_path / "verl/__init__.py").touch()
        (tmp_path / "verl/version/version").write_text(f"{version}\n")
        command = ["--dry-run", "--cluster", "SEQUENCE_MASK=1.5", "--python", sys.executable, *arguments]
        return launch(*command, PYTHONPATH=str(tmp_path)).stdout

    assert "rollout_rs=geometric" in printed("0.7.0")
    for version in ("0.7.1", "0.9.1"):
        assert "rollout_rs=seq_mean_k1" in printed(version)
        assert "rollout_rs=geometric" in printed(version, "--target", "0.7.0")
    default = (ROOT / "patches/DEFAULT").read_text().strip()
    assert printed("0.6.0") == printed("0.6.0", "--target", default)


def test_another_target_than_the_installed_one_is_refused(tmp_path: Path) -> None:
    arguments = ["--cluster", "--target", "0.9.1", "--python", sys.executable, *files_that_exist(tmp_path)]
    refused = launch(*arguments)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert f"--target is 0.9.1, and the verl in {find_spec('verl').submodule_search_locations[0]}" in refused.stderr
    assert f"is {trees.TARGET}: leave --target out" in refused.stderr


def test_a_translated_override_is_told() -> None:
    told = launch("--dry-run", "--embedded", "--target", "0.9.1", "custom_reward_function.path=/r.py")
    assert "for verl 0.9.1, custom_reward_function.path=/r.py is reward.custom_reward_function.path" in told.stderr
    assert launch("--dry-run", "--embedded", "--target", "0.9.1").stderr == ""


def test_the_plugin_gives_an_unpatched_verl_its_keys(tmp_path: Path) -> None:
    dry = ["--dry-run", "--embedded", "--target", "0.9.1"]
    plain, plugin = (launch(*dry, *more).stdout.splitlines() for more in ([], ["--plugin"]))
    added = [line.strip(" \\") for line in plugin if line not in plain]
    groups = ["actor@actor_rollout_ref.actor=gradloc_dp_actor", "critic=gradloc_dp_critic"]
    assert [line for line in added if "gradloc_dp" in line] == groups


@pytest.mark.skipif(trees.TARGET != "0.9.1", reason="the plugin is for verl 0.9")
@pytest.mark.target(version="0.9.1")
def test_the_plugin_needs_an_unpatched_verl_and_has_to_be_installed(tmp_path: Path) -> None:
    arguments = ["--plugin", "--cluster", "--python", sys.executable, *files_that_exist(tmp_path)]
    for path, sentence in (
        (os.environ["PYTHONPATH"], "is patched: give --plugin one that is not"),
        (os.environ["GRADLOC_BASE_TREE"], f"has no plugin of GradLoc: run {sys.executable} -m pip install {ROOT}"),
    ):
        refused = launch(*arguments, PYTHONPATH=path)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1
        assert sentence in refused.stderr


def test_a_folder_left_behind_is_no_patched_verl(tmp_path: Path) -> None:
    shutil.copytree(Path(os.environ["GRADLOC_BASE_TREE"]) / "verl", tmp_path / "verl")
    (tmp_path / "verl/utils/gradloc").mkdir()
    refused = launch("--cluster", "--python", sys.executable, *files_that_exist(tmp_path), PYTHONPATH=str(tmp_path))
    assert refused.returncode == 2
    assert "is not patched" in refused.stderr


@pytest.mark.parametrize("name", ["verl/workers/actor/dp_actor.py", "verl/utils/gradloc/__init__.py"])
def test_a_verl_that_is_patched_in_another_way_is_refused(tmp_path: Path, name: str) -> None:
    """As by an older patch, in the hooks or in the package."""
    shutil.copytree(Path(find_spec("verl").submodule_search_locations[0]), tmp_path / "verl")
    file = tmp_path / name
    file.write_text(file.read_text() + "# gradloc\n")
    refused = launch("--cluster", "--python", sys.executable, *files_that_exist(tmp_path), PYTHONPATH=str(tmp_path))
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "differs from what this patch writes" in refused.stderr and name in refused.stderr


def test_the_evidence_is_named_where_there_is_some(tmp_path: Path) -> None:
    python = make_executable(tmp_path / "python", f'#!/bin/sh\n[ "$1" = -m ] && exit\nexec {sys.executable} "$@"\n')
    evidence = tmp_path / "all spikes"
    settings = [*files_that_exist(tmp_path), f"BISECT_DUMP_DIR={evidence}"]
    command = ["--cluster", "--python", str(python), *settings]
    assert f"There is no spikes.jsonl in {evidence}" in launch(*command).stdout
    evidence.mkdir()
    (evidence / "steps.jsonl").touch()
    assert f"No spike was recorded. The figures of each step are in {evidence}/steps.jsonl" in launch(*command).stdout
    (evidence / "spikes.jsonl").touch()
    out = launch(*command).stdout
    assert f"{evidence}/spikes.jsonl" in out
    printed = out.splitlines()[-1]
    assert shlex.split(printed)[1:] == ["-m", "gradloc_tools", "report", str(evidence), "--html", "report.html"]


@pytest.mark.parametrize(
    ("arguments", "found", "verdict"),
    [
        (["--drill"], True, "Drill in step 2: the planted token was found (1 extra pass, 3 s)"),
        (["--drill"], False, "Drill in step 2: the planted token was NOT FOUND"),
        (["--drill"], None, "THE DRILL OF STEP 2 LEFT NO EVIDENCE"),
        ([], True, None),
    ],
)
def test_the_verdict_of_the_drill(
    tmp_path: Path, arguments: list[str], found: bool | None, verdict: str | None
) -> None:
    """A run adds to the evidence of an earlier one, in which the drill had the other result."""
    evidence = tmp_path / "spikes"
    evidence.mkdir()
    event = {"global_step": 2, "seconds": 3.2, "drill": {"planted": None, "found": not found, "passes": 1}}
    (evidence / "spikes.jsonl").write_text(json.dumps(event) + "\n")
    event["drill"]["found"] = found
    (tmp_path / "event").write_text("" if found is None else json.dumps(event) + "\n")
    training = f"cat {tmp_path}/event >>{evidence}/spikes.jsonl"
    python = make_executable(
        tmp_path / "python", f'#!/bin/sh\n[ "$1" = -m ] && {{ {training}; exit; }}\nexec {sys.executable} "$@"\n'
    )
    settings = [*files_that_exist(tmp_path), f"BISECT_DUMP_DIR={evidence}"]
    out = launch("--cluster", "--python", str(python), *settings, *arguments).stdout
    assert f"{evidence}/spikes.jsonl" in out
    if verdict is None:
        assert "planted token" not in out and "NO EVIDENCE" not in out
    else:
        assert verdict in out


def test_a_patched_verl_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "verl").symlink_to(find_spec("verl").submodule_search_locations[0])
    python = make_executable(tmp_path / "python", f'#!/bin/sh\n[ "$1" = -m ] && exit\nexec {sys.executable} "$@"\n')
    done = launch("--cluster", "--python", str(python), *files_that_exist(tmp_path), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_missing_verl_is_refused(tmp_path: Path) -> None:
    python = make_executable(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    refused = launch("--cluster", "--python", str(python), *files_that_exist(tmp_path))
    assert refused.returncode == 2
    assert "has no verl" in refused.stderr


@pytest.mark.parametrize(("exit_code", "rollout"), [(0, "vllm"), (9, "hf")])
def test_a_gpu_decides_the_profile(recorder: Path, tmp_path: Path, exit_code: int, rollout: str) -> None:
    lines = "echo 'GPU 0: some GPU' && sleep 0.2 && echo 'GPU 1: some GPU'"
    text = f"#!/bin/sh\n[ {exit_code} != 0 ] || {{ {lines} || exit 1; }}\nexit {exit_code}\n"
    make_executable(tmp_path / "nvidia-smi", text)
    overrides = overrides_of(recorder, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert f"actor_rollout_ref.rollout.name={rollout}" in overrides


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], True),
        (["--drill"], True),
        (["trainer.resume_mode=auto"], True),
        (["trainer.resume_mode=disable"], False),
        (["trainer.default_local_dir=elsewhere"], False),
    ],
)
def test_a_checkpoint_that_will_be_resumed_is_told(tmp_path: Path, arguments: list[str], told: bool) -> None:
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename

    python = make_executable(
        tmp_path / "python", f'#!/bin/sh\n[ "$1" = -m ] && echo training && exit\nexec {sys.executable} "$@"\n'
    )
    command = ["--cluster", "--python", str(python), *files_that_exist(tmp_path), *arguments]
    assert "Resuming" not in launch(*command).stdout
    output = tmp_path / "out"
    (output / "global_step_40").mkdir(parents=True)
    Path(get_checkpoint_tracker_filename(str(output))).write_text("40")
    assert find_latest_ckpt_path(str(output))
    lines = launch(*command).stdout.splitlines()
    no_drill = any("No drill: step 2 is already done (for a drill: SPIKE_DRILL_STEP=41)" in line for line in lines)
    assert no_drill == ("--drill" in arguments)
    assert lines.index("training") == told + no_drill
    assert ("Resuming from step 40" in lines[0] and str(output) in lines[0]) == told


# Ray's workers lead process groups of their own, and may not heed SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
child = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print("up", flush=True); time.sleep(600)'
options = {"stdout": subprocess.PIPE, "preexec_fn": os.setpgrp}
children = [subprocess.Popen([sys.executable, "-c", child], **options) for _ in range(2)]
for process in children:
    process.stdout.readline()
with open(sys.argv[1] + ".partial", "w") as file:
    file.write(" ".join(str(pid) for pid in [os.getpid(), *(process.pid for process in children)]))
os.rename(sys.argv[1] + ".partial", sys.argv[1])
if sys.argv[2] == "fail":
    sys.exit(3)
time.sleep(600)
"""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("how", "exit_code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), ("fail", 3)],
    ids=["SIGINT", "SIGTERM", "failure"],
)
def test_no_process_survives(tmp_path: Path, how: signal.Signals | str, exit_code: int) -> None:
    """A stand-in for verl's processes; a run with Ray itself is interrupted in test_end_to_end.py."""
    trainer, pids = tmp_path / "trainer.py", tmp_path / "pids"
    trainer.write_text(STUBBORN)
    python = make_executable(
        tmp_path / "python",
        f'#!/bin/sh\n[ "$1" = -m ] && exec {sys.executable} {trainer} {pids} {how}\nexec {sys.executable} "$@"\n',
    )
    command = ["bash", SCRIPT, "--cluster", "--python", python, *files_that_exist(tmp_path)]
    script = subprocess.Popen(command)
    while not pids.exists() and script.poll() is None:
        time.sleep(0.1)
    processes = [int(pid) for pid in pids.read_text().split()]
    if how != "fail":
        assert all(map(running, processes))
        script.send_signal(how)
    assert script.wait() == exit_code
    assert not any(map(running, processes))


def path_without_python(directory: Path) -> Path:
    """A PATH with what the script itself calls, and no Python."""
    directory.mkdir()
    for name in ("bash", "dirname", "env", "readlink"):
        (directory / name).symlink_to(shutil.which(name))
    return directory


def test_a_cluster_needs_no_python_that_can_make_environments(recorder: Path, tmp_path: Path) -> None:
    """A system's Python may lack venv, and that of the training may be off PATH."""
    path = path_without_python(tmp_path / "bin")
    text = f'#!/bin/sh\ncase "$2" in *venv*) exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    training = make_executable(tmp_path / "the training's python", text)
    done = launch("--cluster", "--dry-run", "--python", str(training), PATH=str(path))
    assert done.returncode == 0, done.stderr
    refused = launch("--cluster", "--dry-run", PATH=str(path))
    assert refused.returncode == 2 and "no Python 3.10 or later was found" in refused.stderr
    (path / "python3").symlink_to(training)
    assert launch("--cluster", "--dry-run", PATH=str(path)).returncode == 0


def test_pythons_own_variables_reach_the_training_only(recorder: Path) -> None:
    assert overrides_of(recorder, "--cluster", PYTHONHOME="/nonexistent", PYTHONPATH="/nonexistent", LC_ALL="C")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = f"bash {shlex.quote(str(SCRIPT))} --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode in (0, 141) and done.stderr == ""
