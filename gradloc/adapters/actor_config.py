# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The keys of verl's actor configuration that turn GradLoc and LayerClip on."""

from dataclasses import dataclass, field

from verl.base_config import BaseConfig

from ..checks import is_positive_integer
from ..config import GradLocConfig
from ..layers import layer_clip


@dataclass
class LayerClipConfig(BaseConfig, layer_clip.LayerClipConfig):
    """Configuration for clipping every layer's gradient against a bound of its own.

    Fields and their validation are those of verl.utils.gradloc.LayerClipConfig.
    """


@dataclass
class SpikeConfig(BaseConfig):
    """A base of the actor's configuration. Its `__post_init__` is to call `check_spike_keys`.

    Args:
        spike_detection (bool): Whether to find the tokens behind spikes of the gradient norm (GradLoc).
        grad_norm_threshold (float | str): Gradient norm of a single token that counts as a spike, or 'auto': from the
            norms that the run usually has.
        bisect_budget_steps (int): At most so many extra forward/backward passes to explain one spike.
        bisect_dump_dir (str): Folder of the evidence, spikes.jsonl and steps.jsonl.
        spike_trigger (str): What starts a search. Options: 'unit' (any micro-batch of any rank over its threshold),
            'global' (only the norm of the reduced gradient).
        bisect_until (str): When a search ends. Options: 'explained' (a few tokens are known without which every
            micro-batch is under its threshold), 'exhaustive' (every token over its threshold is found).
        spike_action (str): What becomes of the optimizer step. Options: 'log' (taken as usual), 'skip' (left out),
            'drop' (taken without the gradient of the tokens found), 'stop' (taken as usual; the run ends after
            repeated spikes).
        spike_stop_after (int): For 'stop': after N spikes within N steps, N being this value, the trainer saves a
            checkpoint and ends the run.
        spike_drill_step (int, optional): At this global step, a spike is planted beside training and searched, to show
            that it would be found.
        spike_log (bool | str, optional): Whether the trackers of `trainer.logger` get the figures, sources and tokens
            of spikes. None: where there is one besides 'console' and 'file'. 'texts': as True, and the prompts,
            responses and ground truths of the tokens as well.
        spike_replay (int): The largest number of bundles in bisect_dump_dir/replay, one for each spike: what its
            micro-batches need to be computed again on one machine. 0: none.
        layer_clip (LayerClipConfig): Configuration for clipping layer by layer.
    """

    spike_detection: bool = False
    grad_norm_threshold: float | str = 640.0
    bisect_budget_steps: int = 128
    bisect_dump_dir: str = "checkpoints/bisect_dump"
    spike_trigger: str = "unit"
    bisect_until: str = "explained"
    spike_action: str = "log"
    spike_stop_after: int = 5
    spike_drill_step: int | None = None
    spike_log: bool | str | None = None
    spike_replay: int = 16
    layer_clip: LayerClipConfig = field(default_factory=LayerClipConfig)

    def check_spike_keys(self) -> None:
        """Raises ValueError for a value out of range; the message names the key."""
        self.gradloc_config()
        if not isinstance(self.spike_detection, bool):
            raise ValueError(f"[actor] spike_detection must be True or False, got {self.spike_detection!r}.")
        if self.spike_log not in (None, True, False, "texts"):
            raise ValueError(f"[actor] spike_log must be True, False, texts or null, got {self.spike_log!r}.")
        if self.spike_drill_step is not None and not self.spike_detection:
            raise ValueError("[actor] spike_drill_step needs spike_detection=True.")
        if not isinstance(self.bisect_dump_dir, str) or not self.bisect_dump_dir:
            raise ValueError(f"[actor] bisect_dump_dir must name a folder, got {self.bisect_dump_dir!r}.")
        if self.spike_replay != 0 and not is_positive_integer(self.spike_replay):
            raise ValueError(
                f"[actor] spike_replay must be a number of bundles, 0 for none, got {self.spike_replay!r}."
            )

    def gradloc_config(self) -> GradLocConfig:
        """The GradLoc settings, validated."""
        return GradLocConfig(
            threshold=self.grad_norm_threshold,
            budget=self.bisect_budget_steps,
            trigger=self.spike_trigger,
            until=self.bisect_until,
            action=self.spike_action,
            stop_after=self.spike_stop_after,
            drill_step=self.spike_drill_step,
        )
