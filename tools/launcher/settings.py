# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The settings: one table, from which come --help, the checks, the Hydra overrides and docs/launching.md."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import faults
from .errors import Refused
from .values import AMOUNT, COUNT, FEW, NUMBER, OVER_1, POSITIVE, SHARE, SWITCH, Allowed, Text, check

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Setting:
    """A setting that users give as NAME=value.

    Args:
        cluster: Default on a cluster; None: no effect there.
        embedded: Default in the embedded profile; None: no effect there.
        meaning: For --help and the documentation.
        keys: Hydra keys that take the value.
        tiny: Default with --tiny, where it is another.
        remedy: Default with --remedy, where it is another.
        embedded_allowed: What it may be in the embedded profile, where that is less.
        off: The value for which `keys` are left out.
        on_arguments: Hydra overrides that go with `keys`.
        off_arguments: Hydra overrides instead of `keys`.

    Defaults may contain {prepared}, the directory of the prepared model and data; {run}, the name of the run; {now},
    the time; and {nodes}, the number of nodes that Slurm gave.
    """

    name: str
    allowed: Allowed
    cluster: str | None
    embedded: str | None
    meaning: str
    keys: tuple[str, ...] = ()
    tiny: str | None = None
    remedy: str | None = None
    embedded_allowed: Allowed | None = None
    off: str | None = None
    on_arguments: tuple[str, ...] = ()
    off_arguments: tuple[str, ...] = ()

    def default(self, profile: str, tiny: bool = False, remedy: bool = False) -> str | None:
        default = self.cluster if profile == "cluster" else self.embedded
        if remedy and self.remedy is not None:
            return self.remedy
        if tiny and self.tiny is not None:
            return self.tiny
        return default

    def allowed_in(self, profile: str) -> Allowed:
        if profile == "embedded" and self.embedded_allowed is not None:
            return self.embedded_allowed
        return self.allowed

    def is_off(self, value: str) -> bool:
        """Whether the value is `off`, or, where that is a number, another way of writing it."""
        if self.off is None:
            return False
        both_numbers = NUMBER.accepts(self.off) and NUMBER.accepts(value)
        return float(value) == float(self.off) if both_numbers else value == self.off


SETTINGS = (
    Setting(
        "MODEL_PATH",
        Text.ONE,
        "Qwen/Qwen3-4B",
        "{prepared}/model",
        "directory of the model, or its Hugging Face id",
        ("actor_rollout_ref.model.path",),
    ),
    Setting(
        "TRAIN_FILES",
        Text.LIST,
        "data/train.parquet",
        "{prepared}/train.parquet",
        "training data in verl's parquet format; several files: a,b",
        ("data.train_files",),
    ),
    Setting(
        "VAL_FILES",
        Text.LIST,
        "data/val.parquet",
        "{prepared}/val.parquet",
        "validation data; several files: a,b",
        ("data.val_files",),
    ),
    # verl's own corrections of the rollout's probabilities. They need calculate_log_probs.
    Setting(
        "TOKEN_CLIP",
        (OVER_1, "off"),
        "off",
        "off",
        "off, or the largest weight of a token, which is its probability in training over that in the rollout",
        ("algorithm.rollout_correction.rollout_is_threshold",),
        remedy="2.0",
        off="off",
        on_arguments=("algorithm.rollout_correction.rollout_is=token",),
    ),
    Setting(
        "SEQUENCE_CLIP",
        (OVER_1, "off"),
        "off",
        "off",
        "off, or x: a response is left out if the geometric mean of its tokens' ratios is over x or under 1/x",
        ("algorithm.rollout_correction.rollout_rs_threshold",),
        remedy="1.2",
        off="off",
        on_arguments=("algorithm.rollout_correction.rollout_rs=geometric",),
    ),
    Setting(
        "LAYER_CLIP",
        ("zscore", "ratio", "fixed", "off"),
        "off",
        "off",
        "off, or LayerClip's rule: zscore, ratio or fixed",
        (f"{ACTOR}.layer_clip.rule",),
        remedy="zscore",
        off="off",
        on_arguments=(f"{ACTOR}.layer_clip.enable=True",),
    ),
    Setting(
        "OUTPUT_DIR",
        Text.DIRECTORY,
        "outputs/{run}",
        "outputs/embedded-{now}",
        "checkpoints, logs and evidence; on a cluster, training is resumed from a checkpoint in it",
        ("trainer.default_local_dir",),
    ),
    Setting("EXPERIMENT", Text.ONE, "{run}", "embedded", "name of the run in its logs", ("trainer.experiment_name",)),
    Setting("PROJECT", Text.ONE, "gradloc", "gradloc", "name of the project in its logs", ("trainer.project_name",)),
    Setting("LOGGER", Text.LIST, "console,tensorboard", "console", "verl's loggers; several: a,b", ("trainer.logger",)),
    Setting(
        "NNODES",
        (COUNT,),
        "{nodes}",
        "1",
        "number of nodes; for more than one, start Ray on them first (RAY_ADDRESS)",
        ("trainer.nnodes",),
    ),
    Setting("GPUS_PER_NODE", (FEW,), "8", "2", "GPUs, or CPU workers, on each node", ("trainer.n_gpus_per_node",)),
    Setting("TRAIN_BATCH_SIZE", (COUNT,), "128", "6", "prompts in a step", ("data.train_batch_size",), tiny="4"),
    Setting(
        "MINI_BATCH_SIZE",
        (COUNT,),
        "32",
        "3",
        "prompts in a mini-batch, which is one optimizer step",
        (f"{ACTOR}.ppo_mini_batch_size",),
        tiny="2",
    ),
    Setting(
        "MICRO_BATCH_SIZE",
        (COUNT,),
        None,
        "2",
        "responses in a worker's micro-batch in training (on a cluster micro-batches are filled by tokens)",
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu",),
    ),
    Setting(
        "MAX_TOKENS_PER_GPU",
        (COUNT,),
        "18432",
        None,
        "largest number of tokens in a GPU's micro-batch",
        (f"{ACTOR}.ppo_max_token_len_per_gpu",),
    ),
    Setting("ROLLOUT_N", (COUNT,), "8", "4", "responses to each prompt", (f"{ROLLOUT}.n",)),
    Setting("MAX_PROMPT_LENGTH", (COUNT,), "1024", "48", "longest prompt, in tokens", ("data.max_prompt_length",)),
    Setting(
        "MAX_RESPONSE_LENGTH",
        (COUNT,),
        "8192",
        "32",
        "longest response, in tokens",
        ("data.max_response_length",),
        tiny="12",
    ),
    Setting("TEMPERATURE", (POSITIVE,), "1.0", "1.0", "sampling temperature in training", (f"{ROLLOUT}.temperature",)),
    Setting(
        "TENSOR_PARALLEL",
        (COUNT,),
        "1",
        "2",
        "workers that share a rollout engine",
        (f"{ROLLOUT}.tensor_model_parallel_size",),
    ),
    Setting(
        "GPU_MEMORY_UTILIZATION",
        (SHARE,),
        "0.6",
        None,
        "share of a GPU's memory for vLLM",
        (f"{ROLLOUT}.gpu_memory_utilization",),
    ),
    Setting(
        "STRATEGY",
        ("fsdp", "fsdp2"),
        "fsdp",
        "fsdp2",
        "fsdp or fsdp2 (on a CPU fsdp2 only)",
        (f"{ACTOR}.strategy",),
        embedded_allowed=("fsdp2",),
    ),
    Setting(
        "OFFLOAD",
        (SWITCH,),
        "False",
        "False",
        "keep parameters and optimizer state in host memory while they are not in use",
        (f"{ACTOR}.fsdp_config.param_offload", f"{ACTOR}.fsdp_config.optimizer_offload"),
    ),
    Setting("LR", (AMOUNT,), "1e-6", "1e-5", "learning rate", (f"{ACTOR}.optim.lr",)),
    Setting(
        "CLIP_RATIO_LOW",
        (AMOUNT,),
        "0.2",
        "0.2",
        "lower clip range of the importance ratio",
        (f"{ACTOR}.clip_ratio_low",),
    ),
    Setting(
        "CLIP_RATIO_HIGH",
        (AMOUNT,),
        "0.28",
        "0.28",
        "upper clip range of the importance ratio",
        (f"{ACTOR}.clip_ratio_high",),
    ),
    Setting(
        "LOSS_AGG_MODE",
        ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
        "token-mean",
        "token-mean",
        "how the losses of tokens are aggregated",
        (f"{ACTOR}.loss_agg_mode",),
    ),
    Setting(
        "KL_LOSS_COEF",
        (AMOUNT,),
        "0",
        "0",
        "weight of the KL loss; with 0 no reference model runs",
        (f"{ACTOR}.kl_loss_coef",),
        off="0",
        on_arguments=(f"{ACTOR}.use_kl_loss=True",),
        off_arguments=(f"{ACTOR}.use_kl_loss=False",),
    ),
    Setting("ENTROPY_COEFF", (NUMBER,), "0", "0", "weight of the entropy bonus", (f"{ACTOR}.entropy_coeff",)),
    Setting("TOTAL_EPOCHS", (COUNT,), "10", "1", "epochs over the training data", ("trainer.total_epochs",)),
    Setting(
        "TOTAL_STEPS",
        (COUNT, "null"),
        "null",
        "4",
        "training steps; null: as many as the epochs have",
        ("trainer.total_training_steps",),
        tiny="3",
    ),
    Setting("TEST_FREQ", (COUNT, "0", "-1"), "10", "-1", "steps between validations; -1: none", ("trainer.test_freq",)),
    Setting("SAVE_FREQ", (COUNT, "0", "-1"), "20", "-1", "steps between checkpoints; -1: none", ("trainer.save_freq",)),
    Setting("SEED", (COUNT, "0", "null"), "1", "1", "seed for the order of the data", ("data.seed",)),
    Setting("SPIKE_DETECTION", (SWITCH,), "True", "True", "GradLoc on or off", (f"{ACTOR}.spike_detection",)),
    Setting(
        "GRAD_NORM_THRESHOLD",
        (POSITIVE, "auto"),
        "auto",
        "160.0",
        "gradient norm of a single token that counts as a spike; auto: from the norms of the run",
        (f"{ACTOR}.grad_norm_threshold",),
    ),
    Setting(
        "BISECT_BUDGET_STEPS",
        (COUNT,),
        "128",
        "128",
        "most extra forward/backward passes for one spike",
        (f"{ACTOR}.bisect_budget_steps",),
    ),
    Setting(
        "BISECT_DUMP_DIR",
        Text.DIRECTORY,
        "OUTPUT_DIR/bisect_dump",
        "OUTPUT_DIR/bisect_dump",
        "directory of the evidence, spikes.jsonl and steps.jsonl",
        (f"{ACTOR}.bisect_dump_dir",),
    ),
    Setting(
        "SPIKE_TRIGGER",
        ("unit", "global"),
        "unit",
        "unit",
        "when a search starts (unit: any micro-batch is over its threshold; global: the reduced gradient is)",
        (f"{ACTOR}.spike_trigger",),
    ),
    Setting(
        "BISECT_UNTIL",
        ("explained", "exhaustive"),
        "explained",
        "explained",
        "when a search ends (explained: a few tokens explain the spike; exhaustive: all over the threshold are found)",
        (f"{ACTOR}.bisect_until",),
    ),
    Setting(
        "SPIKE_ACTION",
        ("log", "skip", "drop", "stop"),
        "log",
        "log",
        "what happens on a spike (log: step as usual; skip: do not step; drop: step without the culprits; "
        "stop: step as usual, and end the run after repeated spikes)",
        (f"{ACTOR}.spike_action",),
    ),
    Setting(
        "SPIKE_STOP_AFTER",
        (COUNT,),
        "5",
        "5",
        "for SPIKE_ACTION=stop: the run ends after N spikes within N steps, with exit code 76",
        (f"{ACTOR}.spike_stop_after",),
    ),
    Setting(
        "SPIKE_DRILL_STEP",
        (COUNT, "null"),
        "null",
        "2",
        "step in which a spike is planted in a copy of a mini-batch, to test the search; null: none",
        (f"{ACTOR}.spike_drill_step",),
    ),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
DRILL_STEP = 2
# All that do not change how long a step of the embedded profile takes; a drill takes a few seconds of a run.
WITHOUT_DURATION = frozenset(
    "OUTPUT_DIR EXPERIMENT PROJECT LOGGER BISECT_DUMP_DIR TOTAL_EPOCHS TOTAL_STEPS SPIKE_DRILL_STEP".split()
)
CLIPS = tuple(setting.name for setting in SETTINGS if setting.remedy is not None)


def run_name(model: str, clips: Mapping[str, str]) -> str:
    """The name of a run: one with another model, or other clips, must not resume from its checkpoints."""
    name = (os.path.basename(model.rstrip("/")) or "/").lower() + "-grpo"
    if all(BY_NAME[clip].is_off(value) for clip, value in clips.items()):
        return name
    if all(BY_NAME[clip].remedy == value for clip, value in clips.items()):
        return f"{name}-remedy"
    return f"{name}-clip-{'-'.join(clips.values())}"


def resolve(
    given: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    profile: str,
    tiny: bool,
    remedy: bool,
    prepared: Path,
    now: str,
    drill: bool = False,
    fault: str | None = None,
    overridden: Collection[str] = (),
) -> dict[str, str]:
    """The value of every setting that has an effect in the profile, checked; directories are absolute.

    An argument wins over the environment, and that over the default. An empty variable of the environment counts as
    none. Raises Refused for the first setting that is unknown, has no effect or may not have its value. `overridden`
    are the keys of the Hydra overrides.
    """

    def asked(name: str) -> str | None:
        return given.get(name) or environment.get(name)

    def chosen(setting: Setting, default: str) -> str:
        return asked(setting.name) or default

    defaults = {setting: setting.default(profile, tiny, remedy) for setting in SETTINGS}
    if fault is not None:
        defaults |= {BY_NAME[name]: value for name, value in faults.find(fault).settings.items()}
    for setting, default in defaults.items():
        if default is None and setting.name in given:
            raise Refused(f"{setting.name} has no effect in the {profile} profile: leave it out")
    for name in given:
        if name not in BY_NAME:
            raise Refused(f"unknown setting {name}: see --help for the settings")

    places = {"prepared": str(prepared), "now": now, "nodes": environment.get("SLURM_JOB_NUM_NODES") or "1"}

    def value(setting: Setting, **more: str) -> str:
        return chosen(setting, (defaults[setting] or "").format(**places, **more))

    run = run_name(value(BY_NAME["MODEL_PATH"]), {clip: value(BY_NAME[clip]) for clip in CLIPS})
    values = {setting.name: value(setting, run=run) for setting, default in defaults.items() if default is not None}
    for name, text in values.items():
        check(name, text, BY_NAME[name].allowed_in(profile))
    values["SPIKE_DRILL_STEP"] = _drill_step(values, asked("SPIKE_DRILL_STEP"), drill, fault, overridden)
    return values | _directories(values)


_DRILL_DEPENDS_ON = frozenset({f"{ACTOR}.spike_detection", f"{ACTOR}.spike_drill_step", "trainer.total_training_steps"})


def _drill_step(
    values: Mapping[str, str], asked: str | None, drill: bool, fault: str | None, overridden: Collection[str]
) -> str:
    """The step of the drill, checked against the settings that it depends on; `null` for none.

    By default there is none where GradLoc is off, with a fault (a drill is about a run without faults), and where it is
    not known whether GradLoc is on, or how many steps the run has.
    """
    if drill and asked == "null":
        raise Refused("SPIKE_DRILL_STEP is null, which means no drill, and --drill is given: leave one of them out")
    on = values["SPIKE_DETECTION"].lower() == "true"
    steps = int(values["TOTAL_STEPS"]) if values["TOTAL_STEPS"] != "null" else None
    explicit = asked not in (None, "null")
    if not on and (explicit or drill):
        named = f"SPIKE_DRILL_STEP is {asked}" if explicit else "--drill is given"
        raise Refused(f"{named}, and a drill needs GradLoc, but SPIKE_DETECTION is False: leave one of them out")
    if explicit:
        if steps is not None and int(values["SPIKE_DRILL_STEP"]) > steps:
            raise Refused(
                f"SPIKE_DRILL_STEP is {asked}, and the run ends with step {steps}: give a step from 1 to {steps}"
            )
        return values["SPIKE_DRILL_STEP"]
    unknown = steps is None or not _DRILL_DEPENDS_ON.isdisjoint(overridden)
    if not drill and (not on or unknown or fault is not None or values["SPIKE_DRILL_STEP"] == "null"):
        return "null"
    return str(min(DRILL_STEP, steps or DRILL_STEP))


def _directories(values: Mapping[str, str]) -> dict[str, str]:
    """The directories as absolute paths; that of the evidence may be given as one in OUTPUT_DIR."""
    output, dump = values["OUTPUT_DIR"], values["BISECT_DUMP_DIR"]
    if dump.startswith("OUTPUT_DIR/"):
        dump = f"{output}/{dump.removeprefix('OUTPUT_DIR/')}"
    directories = {"OUTPUT_DIR": os.path.realpath(output), "BISECT_DUMP_DIR": os.path.realpath(dump)}
    for name, directory in directories.items():
        check(name, directory, Text.DIRECTORY)
    return directories
