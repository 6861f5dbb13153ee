"""What the hooks in verl's files call: the same as the package has, and nothing where there is no package."""

import ast
import hashlib
import importlib.util
import re
import shutil
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import gradloc
import trees
from gradloc import rewards

FILES = trees.ROOT / "patches/files"
SHIM = FILES / "verl/utils/spikes.py"
PATCHED = trees.ROOT / "build" / trees.TARGET / "verl"
# A hash of the calls and keys below, by `HOOKS`, which tells patches and packages of different releases apart.
CONTRACTS = {1: "6ab0c93ccb58e1e1"}


def shim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("spikes", SHIM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def signature(module: str, name: str) -> str:
    """The parameters of a function; the methods that a hook calls of what it returns are in spike_stop.py."""
    path = trees.ROOT / module.replace(".", "/")
    source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    defined = {node.name: node for node in ast.walk(ast.parse(source.read_text())) if hasattr(node, "name")}
    found = defined[name]
    return ast.unparse(found.args) if isinstance(found, ast.FunctionDef) else ""


def test_a_change_of_what_hooks_call_has_a_new_number() -> None:
    calls = shim().CALLS
    signatures = [f"{name}({signature(module, name)})" for module, names in calls.items() for name in names]
    signatures += [f"{name}({signature('gradloc.adapters.spike_stop', name)})" for name in ("is_due", "end_if_due")]
    for file in sorted(FILES.rglob("*.yaml")):
        keys = yaml.safe_load(file.read_text())
        signatures += [
            f"{file.name}: {key}: {[*value] if isinstance(value, dict) else ''}" for key, value in keys.items()
        ]
    found = hashlib.sha256("\n".join(sorted(signatures)).encode()).hexdigest()[:16]
    assert shim().HOOKS == gradloc.HOOKS
    assert found == CONTRACTS[gradloc.HOOKS], (
        f"the hooks' calls or keys have changed: raise HOOKS in {SHIM} and gradloc/version.py, and have "
        f"{{{gradloc.HOOKS + 1}: {found!r}}} here; before a release, {found!r} is enough"
    )


def test_every_call_is_in_a_patch_and_the_other_way_round() -> None:
    called: set[str] = set()
    for file in trees.ROOT.glob("patches/*/hooks.patch"):
        imported = re.findall(r"^\+from verl\.utils\.spikes import (.+?)(?:  #.*)?$", file.read_text(), re.M)
        called |= {name for names in imported for name in names.split(", ")}
        assert not re.search(r"^\+.*gradloc\.", file.read_text(), re.M), f"{file} imports the package past the shim"
    calls = {name for names in shim().CALLS.values() for name in names}
    assert called == calls - {"why_unsupported"} | {"refuse_bad_keys", "SCORERS"}  # refuse_bad_keys calls it
    assert not [file for file in trees.ROOT.glob("patches/*/fixes.patch") if "gradloc" in file.read_text()]
    assert set(shim().SCORERS) == set(rewards.SCORERS)


def without_the_package(code: str, place: Path, *path: Path, returns: int = 0) -> str:
    """What a program prints, with stderr, in a process that finds the patched verl and no package beside it."""
    search = ":".join(map(str, [PATCHED, *path]))
    environment = {"PYTHONPATH": search, "VERL_USE_EXTERNAL_MODULES": ""}
    done = trees.run(sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), cwd=place, **environment)
    assert done.returncode == returns, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.every_target
def test_without_the_package_verl_is_as_released_and_refuses_what_needs_it(tmp_path: Path) -> None:
    code = """
        import pickle, sys
        import pandas, ray
        from hydra import compose, initialize_config_module
        from verl.trainer.main_ppo import refuse_bad_keys
        from verl.utils import spikes
        from verl.utils.config import omega_conf_to_dataclass
        from verl.utils.tracking import Tracking
        from verl.workers.config import FSDPActorConfig, LayerClipConfig

        def composed(*overrides):
            overrides = ["algorithm.adv_estimator=grpo", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", *overrides]
            with initialize_config_module("verl.trainer.config", version_base=None):
                return compose("ppo_trainer", overrides=overrides)

        ACTOR, ray.init = "actor_rollout_ref.actor", None
        config = composed()
        refuse_bad_keys(config)
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        assert type(actor) is FSDPActorConfig and type(actor.layer_clip) is LayerClipConfig
        assert not actor.spike_detection and pickle.loads(pickle.dumps(actor)).layer_clip == actor.layer_clip
        assert spikes.watched(FSDPActorConfig) is FSDPActorConfig
        stop = spikes.start_spike_stop(config, 9)
        assert not stop.is_due({"actor/gradloc/triggered": 9}, 1) and stop.end_if_due(1) is None
        assert Tracking("project", "name", ["console"], config).logger.keys() == {"console"}
        with spikes.exit_at_repeated_spikes():
            pass
        try:
            from verl.workers.actor.dp_actor import DataParallelPPOActor as trained
        except ImportError:
            from verl.workers.engine import EngineRegistry
            trained = EngineRegistry.get_engine_cls("language_model", "fsdp2")
        assert {each.__module__.split(".")[0] for each in trained.__mro__} <= {"verl", "builtins", "abc"}
        assert not [name for name in sys.modules if name.split(".")[0] == "gradloc"]

        def refused(act, *arguments):
            try:
                act(*arguments)
            except (SystemExit, ValueError) as error:
                assert "GradLoc is not installed in" in str(error) and "pip install" in str(error), error
            else:
                raise AssertionError(arguments)

        pandas.DataFrame({"data_source": ["gsm8k", "math_verify"]}).to_parquet("train.parquet")
        clips = [f"{ACTOR}.{clip}.enable=True" for clip in ("layer_clip", "token_clip")]
        for override in (f"{ACTOR}.spike_detection=True", *clips, "data.train_files=train.parquet"):
            refused(refuse_bad_keys, composed(override))
        refused(spikes.CriticSpikeConfig, "", True)
        refused(spikes.score, "math_verify", "13", "13", None)
    """
    without_the_package(code, tmp_path)


@pytest.mark.parametrize(
    "number, words", [(0, "patch is newer than its package"), (99, "package is newer than its patch")]
)
def test_a_package_for_other_hooks_is_named(number: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "gradloc").mkdir()
    (tmp_path / "gradloc/__init__.py").write_text(f"HOOKS = {number}\n")
    said = without_the_package("from verl.utils.spikes import why_off; print(why_off())", tmp_path, tmp_path)
    assert words in said and "apply_patch.py" in said


def test_a_package_in_verls_folder_is_found_where_none_is_installed(tmp_path: Path) -> None:
    tree = shutil.copytree(PATCHED / "verl", tmp_path / "verl").parent
    vendored = shutil.copytree(trees.ROOT / "gradloc", tree / "verl/_vendored/gradloc")
    code = "from verl.utils.spikes import why_off; print(why_off()); import gradloc; print(gradloc.__file__)"
    assert without_the_package(code, tmp_path, tree).splitlines()[-2:] == ["None", str(vendored / "__init__.py")]
    # One that is installed comes first, and then it is the only one.
    assert str(trees.ROOT / "gradloc") in without_the_package(code, tmp_path, tree, trees.ROOT)


@pytest.mark.every_target
def test_a_reward_worker_needs_no_torch_for_a_dispatch(tmp_path: Path) -> None:
    code = """
        import sys
        sys.modules |= dict.fromkeys(("torch", "hydra", "omegaconf"))
        spec = __import__("importlib.util").util.spec_from_file_location("spikes", SHIM)
        spikes = __import__("importlib.util").util.module_from_spec(spec)
        spec.loader.exec_module(spikes)
        print(spikes.score("math_verify", "so it is 13", "13", None))
    """
    assert without_the_package(code.replace("SHIM", repr(str(SHIM))), tmp_path, trees.ROOT).split()[-1] == "1.0"
