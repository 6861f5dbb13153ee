# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The settings: one table, from which come --help, the checks, the Hydra overrides and docs/launching.md.

What else a profile gives to verl is in profiles.py; users change it with Hydra overrides.
"""

from dataclasses import dataclass

from .values import AMOUNT, COUNT, FEW, OVER_1, POSITIVE, Allowed, Text

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
OFF = "off"


@dataclass(frozen=True)
class Setting:
    """A setting that users give as NAME=value.

    Args:
        key: The Hydra key that takes the value.
        cluster: Default on a cluster.
        embedded: Default in the embedded profile, where it is another.
        tiny: Default with --tiny, where it is another.
        remedy: Default with --remedy, where it is another.
        turned_on_by: For a clip: the Hydra override that goes with the key. The value `off` leaves both out.

    Defaults may contain {prepared}, the directory of the prepared model and data; {run}, the name of the run; {now},
    the time; and {nodes}, the number of nodes that Slurm gave.
    """

    name: str
    key: str
    allowed: Allowed
    meaning: str
    cluster: str
    embedded: str | None = None
    tiny: str | None = None
    remedy: str | None = None
    turned_on_by: str | None = None

    def default(self, profile: str, tiny: bool = False, remedy: bool = False) -> str:
        if remedy and self.remedy is not None:
            return self.remedy
        if tiny and self.tiny is not None:
            return self.tiny
        return self.embedded if profile == "embedded" and self.embedded is not None else self.cluster


SETTINGS = (
    Setting(
        "MODEL_PATH",
        "actor_rollout_ref.model.path",
        Text.ONE,
        "model directory or Hugging Face id",
        cluster="Qwen/Qwen3-4B",
        embedded="{prepared}/model",
    ),
    Setting(
        "TRAIN_FILES",
        "data.train_files",
        Text.LIST,
        "training data in verl's parquet format; several files: a,b",
        cluster="data/train.parquet",
        embedded="{prepared}/train.parquet",
    ),
    Setting(
        "VAL_FILES",
        "data.val_files",
        Text.LIST,
        "validation data; several files: a,b",
        cluster="data/val.parquet",
        embedded="{prepared}/val.parquet",
    ),
    Setting(
        "OUTPUT_DIR",
        "trainer.default_local_dir",
        Text.DIRECTORY,
        "checkpoints, logs and evidence; on a cluster, training resumes from a checkpoint in it",
        cluster="outputs/{run}",
        embedded="outputs/embedded-{now}",
    ),
    Setting(
        "BISECT_DUMP_DIR",
        f"{ACTOR}.bisect_dump_dir",
        Text.DIRECTORY,
        "directory of the evidence, spikes.jsonl and steps.jsonl",
        cluster="OUTPUT_DIR/bisect_dump",
    ),
    Setting(
        "LOGGER",
        "trainer.logger",
        Text.LIST,
        "verl's loggers; several: a,b",
        cluster="console,tensorboard",
        embedded="console",
    ),
    Setting(
        "NNODES",
        "trainer.nnodes",
        (COUNT,),
        "number of nodes; for more than one, start Ray on them first (RAY_ADDRESS)",
        cluster="{nodes}",
        embedded="1",
    ),
    Setting(
        "GPUS_PER_NODE",
        "trainer.n_gpus_per_node",
        (FEW,),
        "GPUs (or CPU workers) per node",
        cluster="8",
        embedded="2",
    ),
    Setting("LR", f"{ACTOR}.optim.lr", (AMOUNT,), "learning rate", cluster="1e-6", embedded="1e-5"),
    Setting(
        "TOTAL_STEPS",
        "trainer.total_training_steps",
        (COUNT, "null"),
        "training steps; null: all epochs",
        cluster="null",
        embedded="4",
        tiny="3",
    ),
    Setting(
        "GRAD_NORM_THRESHOLD",
        f"{ACTOR}.grad_norm_threshold",
        (POSITIVE, "auto"),
        "τ, the gradient norm of a single token that counts as a spike; auto: 5 × the 90th percentile of the last 256 "
        "mini-batches",
        cluster="auto",
        embedded="160.0",
    ),
    Setting(
        "SPIKE_ACTION",
        f"{ACTOR}.spike_action",
        ("log", "skip", "drop", "stop"),
        "what happens to the optimizer step on a spike (log: step as usual; skip: skip it; drop: step without the "
        "culprits; stop: step as usual, and end the run after repeated spikes)",
        cluster="log",
    ),
    Setting(
        "SPIKE_DRILL_STEP",
        f"{ACTOR}.spike_drill_step",
        (COUNT, "null"),
        "step in which a spike is planted in a copy of a mini-batch, to test the search; null: none",
        cluster="null",
        embedded="2",
    ),
    Setting(
        "GRAD_CLIP",
        f"{ACTOR}.grad_clip",
        (POSITIVE,),
        "maximum norm of the whole gradient",
        cluster="1.0",
    ),
    # verl's own corrections of the rollout's probabilities. They need calculate_log_probs.
    Setting(
        "TIS",
        f"{CORRECTION}.rollout_is_threshold",
        (OVER_1, OFF),
        "truncated importance sampling: off, or the maximum ratio of a token's probabilities in training and rollout",
        cluster=OFF,
        remedy="2.0",
        turned_on_by=f"{CORRECTION}.rollout_is=token",
    ),
    Setting(
        "SEQUENCE_MASK",
        f"{CORRECTION}.rollout_rs_threshold",
        (OVER_1, OFF),
        "off, or x: mask responses whose geometric mean ratio is over x or under 1/x",
        cluster=OFF,
        remedy="1.2",
        turned_on_by=f"{CORRECTION}.rollout_rs=geometric",
    ),
    Setting(
        "LAYER_CLIP",
        f"{ACTOR}.layer_clip.rule",
        ("zscore", "ratio", "fixed", OFF),
        "off, or LayerClip's rule: zscore, ratio or fixed",
        cluster=OFF,
        remedy="zscore",
        turned_on_by=f"{ACTOR}.layer_clip.enable=True",
    ),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
# Those that --remedy turns on.
CLIPS = tuple(setting.name for setting in SETTINGS if setting.remedy is not None)
# All that do not change how long a step of the embedded profile takes; a drill takes a few seconds of a run.
WITHOUT_DURATION = frozenset("OUTPUT_DIR BISECT_DUMP_DIR LOGGER TOTAL_STEPS SPIKE_DRILL_STEP".split())
