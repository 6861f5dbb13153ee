"""GradLoc's keys in verl's own configuration: yaml, dataclass, and the rules that verl sets for both."""

import contextlib
import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import verl
from hydra import compose, initialize_config_dir
from notation import Patch, cases
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig

import trees
from gradloc.adapters import trainer_checks
from gradloc.adapters.actor_config import CriticSpikeConfig, LayerClipConfig, SpikeConfig, TokenClipConfig
from gradloc.adapters.trainer_checks import check_trainer

# Since verl 0.8, an engine trains the actor.
ENGINE = importlib.util.find_spec("verl.workers.actor") is None
ACTOR = "actor_rollout_ref.actor"
CONFIG_DIR = Path(verl.__file__).parent / "trainer" / "config"
DEFAULTS = {
    "spike_detection": False,
    "grad_norm_threshold": "auto",
    "bisect_budget_steps": 128,
    "bisect_budget_seconds": "auto",
    "spike_trigger": "unit",
    "bisect_until": "explained",
    "spike_action": "log",
    "spike_stop_after": 5,
    "spike_drill_step": None,
    "spike_log": None,
    "spike_replay": 16,
}


@functools.cache
def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def actor_config(*overrides: str) -> FSDPActorConfig:
    config = composed(*(f"{ACTOR}.{override}" for override in ("ppo_micro_batch_size_per_gpu=1", *overrides)))
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


@pytest.mark.every_target
@pytest.mark.smoke
def test_every_key_is_declared_with_its_default() -> None:
    config = composed("trainer.project_name=p", "trainer.experiment_name=e")
    actor = config.actor_rollout_ref.actor
    assert {key: actor[key] for key in DEFAULTS} == DEFAULTS
    assert actor.bisect_dump_dir == "checkpoints/p/e/bisect_dump"
    as_dataclass = actor_config()
    assert {key: as_dataclass[key] for key in DEFAULTS} == DEFAULTS
    # The generated reference mirrors the composed configuration.
    generated = OmegaConf.load(CONFIG_DIR / "_generated_ppo_trainer.yaml")
    want = OmegaConf.to_container(composed().actor_rollout_ref.actor, resolve=False)
    got = OmegaConf.to_container(generated.actor_rollout_ref.actor, resolve=False)
    ours = [*DEFAULTS, "bisect_dump_dir", "layer_clip", "token_clip"]
    assert {key: got[key] for key in ours} == {key: want[key] for key in ours} and list(got) == list(want)
    for clip, own in (("layer_clip", LayerClipConfig), ("token_clip", TokenClipConfig)):
        assert want[clip] == {**own(), "_target_": want[clip]["_target_"]}
        assert dict(as_dataclass[clip]) == dict(own())


def documented(page: str, heading: str = "") -> dict[str, str]:
    """The keys in a page's tables, or in those from a heading to the next one, with the defaults written there."""
    text = (trees.ROOT / page).read_text()
    text = re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], flags=re.M)[0] if heading else text
    return dict(re.findall(r"^\| `([\w.]+)` \| `([^`]+)` \|", text, re.M))


@pytest.mark.every_target
def test_the_documentation_has_every_key_and_its_default() -> None:
    actor = composed().actor_rollout_ref.actor
    own = OmegaConf.to_container(actor, resolve=False)
    gradloc = {key: "null" if actor[key] is None else str(actor[key]) for key in DEFAULTS}
    # As the yaml's resolver resolves it in a run of the trainer.
    gradloc["bisect_dump_dir"] = own["bisect_dump_dir"].replace("oc.select:", "").replace(",checkpoints", "")
    for name, title in (("layer_clip", "LayerClip"), ("token_clip", "TokenClip")):
        gradloc[f"{name}.enable"] = str(actor[name].enable)
        settings = {key: str(value) for key, value in own[name].items() if not key.startswith("_")}
        assert documented("docs/reference/clips.md", f"Settings of {title}") == settings
    assert documented("docs/use/configuration.md") == gradloc
    assert documented("README.md").items() <= gradloc.items()


@pytest.mark.every_target
def test_keys_are_overridden_without_a_plus() -> None:
    keys = {"spike_detection": True, "grad_norm_threshold": 80, "bisect_dump_dir": "/elsewhere", "spike_log": "texts"}
    config = actor_config(*(f"{key}={value}" for key, value in keys.items()), "layer_clip.z=2.5")
    assert {key: config[key] for key in keys} == keys and config.layer_clip.z == 2.5
    assert [actor_config(f"bisect_budget_seconds={s}").bisect_budget_seconds for s in ("60", "null")] == [60, None]


PAGES = [trees.ROOT / "README.md", *sorted((trees.ROOT / "docs").rglob("*.md"))]
OVERRIDE = re.compile(r"[+~]*([a-z][\w@.]*)=\S+")


def commands_of(page: Path) -> list[list[str]]:
    """The overrides of each command of a page, but of those that a comment over them gives to another verl."""
    found = []
    for block in re.findall(r"^ *```.*?^ *```$", page.read_text(), re.M | re.S):
        for piece in re.split(r"^(?= *#)", block.replace("\\\n", " "), flags=re.M):
            named = re.match(r" *# .*?(0\.[789])", piece)
            if named is None or trees.TARGET.startswith(named[1]):
                commands = re.findall(r"^.*(?:verl\.trainer\.main_ppo|run_experiment\.sh).*$", piece, re.M)
                found += [[*filter(OVERRIDE.fullmatch, shlex.split(each, comments=True))] for each in commands]
    return found


@pytest.mark.every_target
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_documentation_are_those_of_this_verl(page: Path, monkeypatch: Patch) -> None:
    """Their overrides are composed as written, and none is a key that verl no longer reads."""
    monkeypatch.chdir(trees.ROOT)
    ignored = {*OmegaConf.load(CONFIG_DIR / "legacy_reward_impl.yaml")} if ENGINE else set()
    for overrides in commands_of(page):
        groups = any("gradloc_" in override for override in overrides)
        place = [f"hydra.searchpath=[file://{trees.ROOT}/gradloc/plugin/conf]"] if groups else []
        config = composed(*overrides, *place)
        keys = {OVERRIDE.fullmatch(each)[1].split(".")[0] for each in overrides}
        assert not keys & ignored, f"verl {trees.TARGET} does not read {overrides}"
        if any("custom_reward_function.path=" in override for override in overrides):
            assert isinstance(get_custom_reward_fn(config), functools.partial)


def test_keys_of_gradloc_in_the_text_of_pages_have_their_values() -> None:
    words = {word for page in PAGES for code in re.findall(r"`([^`\n]+)`", page.read_text()) for word in code.split()}
    overrides = {word.removeprefix(f"{ACTOR}.") for word in words if OVERRIDE.fullmatch(word)}
    own = [each for each in overrides if re.match(r"(spike|bisect|grad_norm|layer_clip|token_clip)", each)]
    assert len(own) > 10 and composed(*(f"{ACTOR}.{each}" for each in own))


@cases(
    "overrides message",
    ("bisect_dump_dir=''", "bisect_dump_dir must name a folder"),
    ("spike_action=drop", "spike_action=drop needs spike_detection=True"),
    *(
        (f"{clip}={value}", rf"{clip} is a group of keys, got .*: set actor_rollout_ref.actor.{clip}.enable={wanted}\.")
        for clip in ("layer_clip", "token_clip")
        for value, wanted in (("True", "True"), ("null", "False"))
    ),
)
def test_bad_values_are_refused_at_start(overrides: str, message: str) -> None:
    # Hydra wraps what the dataclass raises.
    with pytest.raises(Exception, match=message):
        actor_config(*overrides.split())


def test_a_clip_without_its_class_is_refused() -> None:
    """As a yaml of one's own has it that lacks `_target_`."""
    with pytest.raises(ValueError, match=r"layer_clip is a group of keys, got \{'enable': True\}: set "):
        SpikeConfig(layer_clip={"enable": True})


@pytest.mark.every_target
def test_bad_values_of_the_critic_are_refused() -> None:
    fine = {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 1}
    if not ENGINE:
        fine["model_config"] = {}  # or verl 0.7 looks for its default model
    assert isinstance(FSDPCriticConfig(**fine), CriticSpikeConfig)
    message = "[critic] grad_norm_threshold must be a positive finite number or auto, got -1."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FSDPCriticConfig(**fine, grad_norm_threshold=-1)


@pytest.mark.every_target
@cases(
    "key name",
    ("spike_detection", "spike_detection"),
    ("layer_clip.enable", "layer_clip"),
    ("token_clip.enable", "token_clip"),
)
def test_other_engines_are_refused_before_anything_starts(key: str, name: str) -> None:
    """Their actors lack the keys, which Hydra says of an override without a plus."""
    from verl.utils.spikes import refuse_bad_keys

    engine = "model_engine=megatron" if ENGINE else f"actor@{ACTOR}=megatron_actor"
    fine = engine, f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", "algorithm.adv_estimator=grpo"
    refuse_bad_keys(composed(*fine))
    with pytest.raises(SystemExit, match=f"^{name} needs the FSDP engine and does not know strategy=megatron: train"):
        refuse_bad_keys(composed(*fine, f"+{ACTOR}.{key}=True"))


OWN = """
defaults: [ppo_trainer, _self_]
hydra: {searchpath: ["pkg://verl.trainer.config"]}
actor_rollout_ref: {actor: {spike_action: stop}}
"""


@pytest.mark.every_target
def test_configurations_of_a_users_own_have_the_keys(tmp_path: Path) -> None:
    """Of folders elsewhere: one on top of verl's, and an actor on top of verl's."""
    (tmp_path / "own.yaml").write_text(OWN)
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/own_actor.yaml").write_text("defaults: [dp_actor, _self_]\nspike_stop_after: 9\n")
    overrides = [f"actor@{ACTOR}=own_actor", f"{ACTOR}.spike_detection=True", f"{ACTOR}.token_clip.enable=True"]
    with initialize_config_dir(str(tmp_path), version_base=None):
        actor = compose("own", overrides=overrides).actor_rollout_ref.actor
    assert actor.spike_detection and actor.token_clip.enable
    assert (actor.spike_action, actor.spike_stop_after) == ("stop", 9)


def test_the_keys_are_in_no_yaml_of_every_engine() -> None:
    """An engine of one's own, whose class derives from verl's ActorConfig, would not know them."""
    keys = (CONFIG_DIR / "actor/actor.yaml").read_text()
    assert "spike_" not in keys and "optim" in keys


DETECTION = f"{ACTOR}.spike_detection=True"
TURBO = f"{ACTOR}.strategy=fsdp_turbo"
OF_THE_LEGACY_WORKERS = [
    (["trainer.use_legacy_worker_impl=disable", f"{ACTOR}.{key}=True"], f"{key.split('.')[0]} needs the FSDP workers")
    for key in ("spike_detection", "layer_clip.enable", "token_clip.enable")
]
OF_THE_ENGINE = [
    ([TURBO, DETECTION], "does not know strategy=fsdp_turbo"),
    (["distillation.enabled=True", DETECTION], "does not know distillation losses"),
    (["distillation.enabled=True"], None),
]


@pytest.mark.every_target
@pytest.mark.smoke
@cases(
    "overrides message",
    *(OF_THE_ENGINE if ENGINE else OF_THE_LEGACY_WORKERS),
    ([f"{ACTOR}.spike_drill_step=2", "trainer.critic_warmup=3"], "choose one of 3 to 4"),
    ([f"{ACTOR}.spike_drill_step=4"], None),
)
def test_what_the_trainer_refuses(monkeypatch: Patch, overrides: list[str], message: str | None) -> None:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer, Role

    def of_four_steps(trainer: RayPPOTrainer, *_: object) -> None:
        trainer.total_training_steps = 4

    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        if ENGINE:  # its trainers check where they count their steps, which takes data
            check_trainer(composed(*overrides), 4)
        else:
            monkeypatch.setattr(RayPPOTrainer, "_create_dataloader", of_four_steps)
            RayPPOTrainer(composed(*overrides), None, {Role.ActorRollout: None}, None)


def test_a_directory_that_another_run_writes_to_is_refused(monkeypatch: Patch) -> None:
    first = "another run (process 7 on a-host, since noon)"
    monkeypatch.setattr(trainer_checks, "writer_of", lambda directory: first if directory == "/used" else None)
    message = re.escape(f"{first} writes its evidence to /used: end it, or give this run another {ACTOR}.")
    with pytest.raises(ValueError, match=f"^{message}"):
        check_trainer(composed(DETECTION, f"{ACTOR}.bisect_dump_dir=/used"), 4)
    check_trainer(composed(f"{ACTOR}.bisect_dump_dir=/used"), 4)  # without detection
    check_trainer(composed(DETECTION, f"{ACTOR}.bisect_dump_dir=/free"), 4)


def test_the_configuration_needs_no_recent_torch() -> None:
    """Whoever trains without FSDP imports it, too."""
    code = """
        import sys
        import torch.distributed.fsdp
        del torch.distributed.fsdp.FSDPModule
        import verl.workers.config
        import gradloc.gradloc
        assert "gradloc.fsdp.torch_compat" in sys.modules
    """
    environment = {name: value for name, value in os.environ.items() if name != "VERL_USE_EXTERNAL_MODULES"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=True)
