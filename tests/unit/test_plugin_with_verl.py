"""The plugin in processes with a verl 0.9.1 that is not patched, which finds it as verl finds plugins; no training."""

import os
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import apply_patch
import trees
from warm_python import warm_python

pytestmark = [
    pytest.mark.target(version="0.9.1"),
    pytest.mark.skipif(not trees.HAS_PLUGINS, reason="the plugin is for verl 0.9"),
]
PATCHED = trees.ROOT / "build/0.9.1/verl"
# The plugin's target, and the release before it, which shares its requirements and has no patch.
EITHER = pytest.mark.parametrize("tree", [trees.BASE_TREE, trees.ROOT / "build/0.9.0/base"], ids=["target", "0.9.0"])
KEYS = [
    "actor@actor_rollout_ref.actor=gradloc_dp_actor",
    "critic=gradloc_dp_critic",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.n=1",
]
# Each script may use the composed configuration, and an actor's configuration as verl makes one.
PRELUDE = f"""
import logging, sys, warnings
warnings.simplefilter("ignore")
from types import SimpleNamespace
import verl
import gradloc.plugin
from gradloc.plugin import status

KEYS = {KEYS!r}

def composed(*overrides, keys=KEYS):
    from hydra import compose, initialize_config_module
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*keys, *overrides])

# verl's classes have the keys in a patched verl; in this one, the plugin's have them.
def as_patched(keys, config):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    with initialize_config_dir({str(PATCHED / "verl/trainer/config")!r}, version_base=None):
        patched = compose("ppo_trainer", overrides=[key for key in keys if "gradloc_" not in key])
    patched, ours = (OmegaConf.to_yaml(each, sort_keys=True) for each in (patched, config))
    return patched == ours.replace("_target_: gradloc.plugin.config.", "_target_: verl.workers.config.")

def actor_config(*overrides):
    from verl.utils.config import omega_conf_to_dataclass
    return omega_conf_to_dataclass(composed(*overrides).actor_rollout_ref.actor)

def refusal(act, *arguments):
    try:
        act(*arguments)
    except Exception as error:
        return str(error)
    raise AssertionError("nothing was refused")

ON = "actor_rollout_ref.actor.spike_detection=True"
"""

Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a script, or the plugin's command, with a verl and with what an installation adds: the entry point."""
    installed = tmp_path_factory.mktemp("site") / "gradloc_verl-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: gradloc-verl\nVersion: 0\n")
    (installed / "entry_points.txt").write_text("[verl.plugins]\ngradloc = gradloc.plugin\n")

    def call(code: str, *path: Path, returns: int = 0, **environment: str) -> subprocess.CompletedProcess:
        path = *(path or [trees.BASE_TREE]), trees.ROOT, installed.parent
        environment = {"PYTHONPATH": ":".join(map(str, path)), "VERL_USE_EXTERNAL_MODULES": "embedded"} | environment
        what = ["-c", PRELUDE + textwrap.dedent(code)] if code else ["-m", "gradloc.plugin"]
        done = trees.run(interpreter, "-X", "fork", *what, **environment)
        assert done.returncode == returns, done.stdout + done.stderr
        return done

    with tempfile.TemporaryDirectory(prefix="warm-") as folder, warm_python(Path(folder), os.environ) as interpreter:
        yield call


def test_verl_loads_it_and_nothing_is_imported_early(run: Run) -> None:
    code = """
        assert status.installed and not status.left_to_patch and not status.failures
        assert not {"gradloc.gradloc", "gradloc.adapters", "verl.workers.engine"} & sys.modules.keys()
    """
    assert "GradLoc" not in run(code).stderr
    run(code, VERL_USE_EXTERNAL_PLUGINS="none", VERL_USE_EXTERNAL_MODULES="embedded,gradloc.plugin")
    # A process in which verl does not load it refuses runs.
    code = """
        assert not status.installed  # the script's own import comes too late
        actor_config()
        print(refusal(actor_config, ON))
    """
    done = run(code, VERL_USE_EXTERNAL_PLUGINS="none")
    assert "plugin is not loaded in this process" in done.stdout


@EITHER
def test_every_hook_fits_verl(run: Run, tree: Path) -> None:
    code = """
        import importlib
        from gradloc.plugin.hooks import HOOKS
        for name in HOOKS:
            importlib.import_module(name)
        assert not status.failures, status.failures

        from gradloc.adapters.engines import WatchedEngine
        from verl.workers.engine import EngineRegistry
        for backend in ("fsdp", "fsdp2"):
            for model_type in ("language_model", "value_model"):
                assert issubclass(EngineRegistry.get_engine_cls(model_type, backend), WatchedEngine)

        from gradloc.plugin.trainer import SpikeTrainer
        from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
        assert get_trainer_cls("sync").__mro__[1:3] == (SpikeTrainer, PPOTrainerSync)
        assert get_trainer_cls("sync") is get_trainer_cls("sync")

        import torch
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu
        data = TensorDict({"row": torch.arange(6)}, batch_size=6)
        places = [tu.get(each, "epoch_and_mini_batch") for each in tu.make_iterator(data, 2, epochs=2, seed=1)]
        assert places == [(epoch, number) for epoch in range(2) for number in range(3)], places

        from verl.trainer.ppo.rollout_corr_helper import (
            compute_offpolicy_metrics, compute_rollout_correction_and_rejection_mask
        )
        numbers, mask = torch.full((2, 3), -1.0), torch.zeros(2, 3)
        metrics = compute_offpolicy_metrics(numbers, 2 * numbers, mask)
        assert metrics["kl"] == 0.0 and metrics.keys() == compute_offpolicy_metrics(numbers, numbers, mask + 1).keys()
        _, kept, metrics = compute_rollout_correction_and_rejection_mask(numbers, 2 * numbers, mask)
        assert metrics["rollout_corr/kl"] == 0.0 and not kept.any()

        from verl.utils.tracking import Tracking
        config = {"actor_rollout_ref": {"actor": {"spike_detection": True, "spike_log": True, "bisect_dump_dir": "x"}}}
        assert Tracking("project", "name", ["console"], config).logger.keys() == {"console", "gradloc"}

        from verl.utils.reward_score import default_compute_score
        assert default_compute_score("math_verify", "so it is 13", "13") == 1.0
        assert verl.__path__[0] == TREE
    """
    run(code.replace("TREE", repr(str(tree / "verl"))), tree)


def test_a_module_of_the_user_may_import_parts_of_verl_first(run: Run, tmp_path: Path) -> None:
    (tmp_path / "of_the_user.py").write_text("""
import sys
import verl.trainer.ppo.v1
import verl.workers.engine
import verl.experimental.reward_loop.reward_manager.naive
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

class Early(RayPPOTrainer):
    def __init__(self, config):
        pass
assert "gradloc.plugin" not in sys.modules
""")
    code = """
        assert "of_the_user" in sys.modules and status.installed and not status.failures, status.failures
        from gradloc.plugin.trainer import SpikeTrainer
        from verl.trainer.ppo import v1
        assert v1.get_trainer_cls is v1.trainer_base.get_trainer_cls
        assert issubclass(v1.get_trainer_cls("sync"), SpikeTrainer)
        from verl.experimental.reward_loop.reward_manager.naive import default_compute_score
        assert default_compute_score("math_verify", "so it is 13", "13") == 1.0
        from verl.workers.engine.fsdp.transformer_impl import enable_activation_offloading
        assert hasattr(enable_activation_offloading, "__wrapped__")
        from of_the_user import Early
        assert "does not know Early" in refusal(Early, composed(ON))
    """
    run(code, trees.BASE_TREE, tmp_path, VERL_USE_EXTERNAL_MODULES="embedded,of_the_user")


def test_the_keys_work_without_a_plus_and_are_validated(run: Run) -> None:
    code = """
        off = actor_config()
        from gradloc.adapters.actor_config import SpikeConfig
        from verl.workers.config import FSDPActorConfig
        assert isinstance(off, SpikeConfig) and isinstance(off, FSDPActorConfig) and not off.spike_detection
        on = actor_config(ON, "actor_rollout_ref.actor.grad_norm_threshold=auto",
                          "actor_rollout_ref.actor.layer_clip.enable=True")
        assert on.spike_detection and on.grad_norm_threshold == "auto" and on.layer_clip.enable
        assert "spike_action" in refusal(actor_config, "actor_rollout_ref.actor.spike_action=shout")
        for key, is_ours in ((ON, True), ("critic.spike_detection=True", True), ("critic.typo=1", False)):
            told = refusal(lambda: composed(key, keys=[]))
            assert "Could not override" in told and ("add " + " ".join(KEYS[:2]) in told) == is_ours, told
        assert "config groups" not in refusal(composed, "actor_rollout_ref.actor.spike_typo=1")
        critic = composed(ON).critic
        assert critic.spike_detection is True and critic.grad_norm_threshold == "auto"
        # Everything else is verl's own.
        assert as_patched(KEYS, composed())
    """
    run(code)


@EITHER
def test_a_command_says_what_fits(run: Run, tmp_path: Path, tree: Path) -> None:
    done = run("", tree)
    version, *hooks, last = done.stdout.splitlines()
    assert last == "The plugin fits."
    assert version.startswith(f"verl {apply_patch.release_of(tree)} in {tree}")
    assert len(hooks) == 11 and all(line.endswith(": fits") for line in hooks)
    # Another verl: the trackers take other arguments.
    changed = shutil.copytree(tree / "verl", tmp_path / "verl").parent
    tracking = changed / "verl/utils/tracking.py"
    tracking.write_text(tracking.read_text().replace("default_backend", "backends"))
    done = run("", changed, returns=1)
    other, last = (line.strip() for line in done.stdout.splitlines()[1:] if not line.endswith(": fits"))
    assert last.startswith("The plugin does not fit: ")
    assert other == (
        "verl.utils.tracking: does not fit, it cannot do spike_log (Tracking.__init__ takes (self, project_name, "
        "experiment_name, backends, config), not (self, project_name, experiment_name, default_backend, config, …))"
    )


def test_a_half_loaded_plugin_refuses_runs_and_says_why(run: Run, tmp_path: Path) -> None:
    """What a run can do without is only logged."""
    changed = trees.copy_base(tmp_path, None)
    (changed / "verl/trainer/ppo/v1/trainer_base.py").unlink()
    helper = changed / "verl/trainer/ppo/rollout_corr_helper.py"
    helper.write_text(helper.read_text().replace("compute_offpolicy_metrics", "offpolicy_metrics"))
    code = """
        from gradloc.plugin.loading import AfterImport
        def change(module):
            module.FSDPEngineWithLMHead.forward_step = lambda self, micro_batch, loss_function: None
        AfterImport({"verl.workers.engine.fsdp.transformer_impl": change}).install()
        import verl.workers.engine
        import verl.trainer.ppo.rollout_corr_helper
        actor_config()
        print(refusal(actor_config, ON))
    """
    done = run(code, changed)
    no_module, no_argument, no_function = (
        "there is no verl.trainer.ppo.v1.trainer_base",
        "FSDPEngineWithLMHead.forward_step takes (self, micro_batch, loss_function), "
        "not (self, micro_batch, loss_function, forward_only, …)",
        "verl.trainer.ppo.rollout_corr_helper has no compute_offpolicy_metrics",
    )
    logged = [line for line in done.stderr.splitlines() if "GradLoc's plugin" in line]
    assert all(line.startswith("ERROR") for line in logged)
    assert [line.rpartition(": ")[2] for line in logged] == [no_module, no_argument, no_function]
    assert f"({no_module})" in done.stdout and f"({no_argument})" in done.stdout and no_function not in done.stdout


def test_a_trainer_is_extended(run: Run) -> None:
    code = """
        from gradloc.plugin.trainer import check_trainer_class, with_spikes
        said = []

        class Trainer:
            local_trigger_step, parameter_sync_step, timing_raw, total_training_steps = 1, 2, {}, 9
            trainer_mode = "sync"

            def __init__(self, config, save_in=()):
                self.config, self.save_in, self.global_steps = config, save_in, 0

            def _init_dataloader(self): said.append("data")
            def on_step_begin(self): said.append(f"begin {self.global_steps}")
            def on_step_end(self): said.append("end")
            def on_train_end(self): said.append("over")
            def _save_checkpoint(self): said.append("save")
            def step(self, metrics, timing_raw):
                batch = SimpleNamespace(extra_info={})
                self._update_critic(batch, metrics)
                assert batch.extra_info == {"training_step": self.global_steps, "of": "critic"}
                self._update_actor(batch, metrics)
                return batch
            def _update_critic(self, batch, metrics): batch.extra_info["of"] = "critic"
            def _update_actor(self, batch, metrics):
                batch.extra_info["of"] = "actor"
                metrics["actor/gradloc/triggered"] = float(self.global_steps > 1)

            # As verl's: a step, its checkpoint, its end, its log.
            def fit(self):
                self._init_dataloader()
                self.global_steps += 1
                while self.global_steps < 5:
                    self.on_step_begin()
                    info = self.step({}, {}).extra_info
                    told = {"update_of_step": (1, 2), "rollout_is_current": True}
                    assert info == {"training_step": self.global_steps, **told, "of": "actor"}
                    if self.global_steps in self.save_in:
                        self._save_checkpoint()
                    self.on_step_end()
                    said.append(f"log {self.global_steps}")
                    self.global_steps += 1
                self.on_train_end()

        check_trainer_class(Trainer)
        stop = ["actor_rollout_ref.actor.spike_action=stop", "actor_rollout_ref.actor.spike_stop_after=2"]
        start = ["data", "begin 1", "end", "log 1", "begin 2", "end", "log 2"]
        for save_in in ((), (3,)):
            said.clear()
            trainer = with_spikes(Trainer)(composed(ON, *stop), save_in)
            assert "Training ends after step 3" in refusal(trainer.fit)
            assert said == [*start, "begin 3", "save", "end", "log 3"], said
        said.clear()
        with_spikes(Trainer)(composed(ON)).fit()
        assert said == [*start, "begin 3", "end", "log 3", "begin 4", "end", "log 4", "over"], said
        drill = "actor_rollout_ref.actor.spike_drill_step=99"
        assert "spike_drill_step=99" in refusal(with_spikes(Trainer)(composed(ON, drill)).fit)
    """
    run(code)


def test_the_older_trainer_refuses_runs(run: Run) -> None:
    code = """
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer
        print(refusal(RayPPOTrainer, composed(ON), None, {}, None))

        class Separate(RayPPOTrainer):
            def __init__(self, workers, config):
                self.workers = workers
        class Derived(Separate): ...
        import cloudpickle  # as Ray does with actors
        for trainer in (Separate, Derived, cloudpickle.loads(cloudpickle.dumps(Derived))):
            assert f"does not know {trainer.__name__}" in refusal(trainer, None, composed(ON))
            assert trainer(1, config=composed()).workers == 1

        # Nor is an engine watched without the trainer that it needs.
        import verl.workers.engine
        from gradloc.adapters.engines import WatchedEngine
        started = []
        engine = SimpleNamespace(_where=(0, 0), watch=SimpleNamespace(start_update=lambda *told: started.append(told)))
        WatchedEngine._start(engine, 3, True)
        assert "the trainer, which passes no step number" in refusal(WatchedEngine._start, engine, None)
        assert started == [(3, True)]
    """
    assert "does not know RayPPOTrainer" in run(code).stdout


def test_a_patch_that_pip_has_replaced_but_for_its_package_is_none(run: Run, tmp_path: Path) -> None:
    again = trees.copy_base(tmp_path, None)
    trees.write(again / trees.NEW, "")
    run("assert status.installed and not status.left_to_patch and not status.is_patched()", again)


def test_a_patched_verl_wins(run: Run) -> None:
    code = """
        assert status.left_to_patch and not status.installed
        import verl.workers.config
        import gradloc.plugin.config
        assert gradloc.plugin.config.FSDPActorConfig is verl.workers.config.FSDPActorConfig
        config = actor_config(ON)
        assert type(config) is verl.workers.config.FSDPActorConfig
        assert type(config.layer_clip) is verl.workers.config.LayerClipConfig
        from gradloc.adapters.engines import WatchedEngine
        from verl.workers.engine import EngineRegistry
        engine = EngineRegistry.get_engine_cls("language_model", "fsdp2")
        assert [each.__name__ for each in engine.__mro__].count("WatchedEngine") == 1
    """
    done = run(code, PATCHED)
    # The wheel stands there for the command gradloc: nothing is wrong.
    assert "GradLoc" not in done.stderr
