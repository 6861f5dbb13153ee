# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The keys of verl's configurations of actor and critic that turn GradLoc, LayerClip and TokenClip on."""

from dataclasses import dataclass, field, fields

from verl.base_config import BaseConfig

from ..config import GradLocConfig, is_positive_integer
from ..layers import layer_clip
from ..token_clip import token_clip as token_clip_config


@dataclass
class LayerClipConfig(BaseConfig, layer_clip.LayerClipConfig):
    """Configuration for clipping every layer's gradient against a bound of its own.

    Fields and their validation are those of gradloc.LayerClipConfig.
    """


@dataclass
class TokenClipConfig(BaseConfig, token_clip_config.TokenClipConfig):
    """Configuration for cutting single tokens' outlying signals in the backward pass.

    Fields and their validation are those of gradloc.TokenClipConfig.
    """


@dataclass
class SpikeConfig(BaseConfig, GradLocConfig):
    """A base of the actor's configuration, before verl's own.

    The other fields, and their validation, are those of gradloc.GradLocConfig.

    Args:
        spike_detection (bool): Whether to find the tokens behind spikes of the gradient norm (GradLoc).
        bisect_dump_dir (str): Directory of the evidence, spikes.jsonl and steps.jsonl.
        spike_log (bool | str, optional): Whether the trackers of `trainer.logger` get the figures, sources and tokens
            of spikes. None: if there is one besides 'console', 'file' and 'rl_insight'. 'texts': as True, with the
            prompts, responses and ground truths of culprits.
        spike_replay (int): Maximum number of bundles in bisect_dump_dir/replay, each of which lets one spike be
            computed again on one machine. 0: none.
        layer_clip (LayerClipConfig): Configuration for LayerClip.
        token_clip (TokenClipConfig): Configuration for TokenClip.
    """

    spike_detection: bool = False
    bisect_dump_dir: str = "checkpoints/bisect_dump"
    spike_log: bool | str | None = None
    spike_replay: int = 16
    layer_clip: LayerClipConfig = field(default_factory=LayerClipConfig)
    token_clip: TokenClipConfig = field(default_factory=TokenClipConfig)

    def __post_init__(self) -> None:
        super().__post_init__()  # verl's own, which is the next base
        self.check_spike_keys()

    def check_spike_keys(self) -> None:
        """Raises ValueError for a value out of range; the message names the key."""
        self.check()
        if not isinstance(self.spike_detection, bool):
            raise ValueError(f"[actor] spike_detection must be True or False, got {self.spike_detection!r}.")
        if self.spike_log not in (None, True, False, "texts"):
            raise ValueError(f"[actor] spike_log must be True, False, texts or null, got {self.spike_log!r}.")
        for clip, kind in (("layer_clip", LayerClipConfig), ("token_clip", TokenClipConfig)):
            if not isinstance(value := getattr(self, clip), kind):
                raise ValueError(
                    f"[actor] {clip} is a group of keys, got {value!r}: set actor_rollout_ref.actor.{clip}.enable="
                    f"{bool(value)}."
                )
        if self.spike_action != "log" and not self.spike_detection:
            raise ValueError(
                f"[actor] spike_action={self.spike_action} needs spike_detection=True: set that, or spike_action=log."
            )
        if self.token_clip.enable and getattr(self, "use_prefix_grouper", False):
            raise ValueError("[actor] token_clip does not know use_prefix_grouper: set token_clip.enable=False.")
        if self.spike_drill_step is not None and not self.spike_detection:
            raise ValueError("[actor] spike_drill_step needs spike_detection=True.")
        if not isinstance(self.bisect_dump_dir, str) or not self.bisect_dump_dir:
            raise ValueError(f"[actor] bisect_dump_dir must name a folder, got {self.bisect_dump_dir!r}.")
        if self.spike_replay != 0 and not is_positive_integer(self.spike_replay):
            raise ValueError(
                f"[actor] spike_replay must be a number of bundles, 0 for none, got {self.spike_replay!r}."
            )


@dataclass
class CriticSpikeConfig(BaseConfig):
    """A base of the critic's configuration, before verl's own.

    Args:
        spike_detection (bool): Whether to find what spikes of the critic's gradient norm come from.
        grad_norm_threshold (float | str): Gradient norm of a single value (its share of the gradient divided by its
            weight in the loss) that counts as a spike; "auto": 5 × the 90th percentile of the last 256 mini-batches.
        bisect_dump_dir (str): Directory of the evidence, critic.jsonl.
    """

    spike_detection: bool = False
    grad_norm_threshold: float | str = "auto"
    bisect_dump_dir: str = "checkpoints/bisect_dump"

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # verl's own, which is the next base
        keys = {key.name: getattr(self, key.name) for key in fields(CriticSpikeConfig)}
        try:
            SpikeConfig(**keys)
        except ValueError as error:
            raise ValueError(f"[critic] {str(error).removeprefix('[actor] ')}") from None
