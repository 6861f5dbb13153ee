# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What verl's policy losses and rollout corrections would have made of a bundle's micro-batch.

A replay imports this file by name, and only where verl can be imported. The settings come from a bundle, which may be a
stranger's: only numbers, flags and names that verl itself has registered are taken from them.
"""

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import verl
from torch import Tensor
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig, PolicyLossConfig

from ..adapters.loss_weights import (
    aggregation_mode,
    kl_coefficients,
    mode_weights,
    policy_weights,
    recorded_aggregation,
)
from ..sources import HOLDS
from ..tools.schema import TEXT, YES_OR_NO, Form, conforms, fields
from .advice import REPAIR

_ACTOR, _CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"

_CORRECTIONS = tuple(
    field.name for field in dataclasses.fields(RolloutCorrectionConfig) if field.name.startswith("rollout_")
)

_NUMBER: Form = {"type": ["number", "null"], "minimum": -1e30, "maximum": 1e30}
_OBJECT: Form = {"type": ["object", "null"]}
_COUNTS = fields({"dp_size batch_num_tokens global_batch_size loss_scale_factor": _NUMBER})
_LOSS_NUMBERS = fields({"clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef dro_beta": _NUMBER})
# The form of the actor's settings that a loss depends on; names that are not verl's, verl refuses.
_PLAIN = fields(
    {
        "clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c tau_pos tau_neg entropy_coeff kl_loss_coef": _NUMBER,
        "use_kl_loss": YES_OR_NO,
        "kl_loss_type loss_agg_mode": TEXT,
    }
)
_FORM: dict[str, Form] = {
    **_PLAIN,
    "global_batch_info": {**_OBJECT, "properties": _COUNTS},
    "policy_loss": {**_OBJECT, "properties": {**_LOSS_NUMBERS, "loss_mode": TEXT}},
}

# Errors that verl raises for settings that it does not take.
_REFUSALS = (ValueError, TypeError, AssertionError, NotImplementedError, KeyError, ArithmeticError)

# How far a recomputed coefficient may be from the recorded one, relative to it. Those of half precision were rounded.
_SAME, _SAME_IN_HALF = 1e-3, 2e-2

# Other policy losses: the name in the table, verl's name, and the settings of their papers or of verl's examples.
_LOSSES: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("PPO's clip (vanilla)", "vanilla", {}),
    ("GSPO", "gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    ("CISPO", "cispo", {}),
    ("SAPO", "sapo", {}),
    ("GMPO", "geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    ("DPPO (TV)", "dppo_tv", {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0}),
    ("DPPO (KL)", "dppo_kl", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0}),
)

# verl's presets of rollout corrections: the name in the table, and verl's.
_PRESETS = (
    ("token TIS", "decoupled_token_is"),
    ("sequence TIS", "decoupled_seq_is"),
    ("IcePop", "decoupled_token_icepop"),
    ("sequence TIS and mask", "decoupled_seq_is_rs"),
    ("geometric mask", "decoupled_geo_rs"),
    ("K3 mask", "decoupled_k3_rs"),
)


class NotTheRecordedLossError(Exception):
    """Why the recorded coefficients cannot be computed again, in one sentence."""


@dataclass(frozen=True)
class LossRemedy:
    """A remedy that changes the loss."""

    name: str
    override: str | None  # the Hydra overrides that turn it on; None for the loss as it was
    meaning: str  # what it does
    coefficient: Tensor  # ∂L/∂log p with it, float32 of shape (rows, response length)
    entropy_coefficient: Tensor  # the derivative by the entropies, same shape
    note: str | None = None  # in what the figures may differ from a run with it


def loss_remedies(
    actor: Mapping[str, Any], tokens: Mapping[str, Tensor], half: bool, recorded_version: str | None
) -> tuple[list[LossRemedy], list[str]]:
    """The loss as it was recorded, then with each remedy that the verl installed here has.

    Args:
        actor (Mapping): The actor's settings, as a bundle has them.
        tokens (Mapping): The values of a micro-batch's tokens, each of shape (rows, response length).
        half (bool): Whether training computed in half precision.
        recorded_version (str, optional): The verl of the run.

    Returns:
        tuple: The remedies, and sentences on what cannot be computed.

    Raises:
        NotTheRecordedLossError: With these settings, verl's loss does not have the recorded coefficients. So others
            would not be comparable with them.
    """
    notes: list[str] = []
    if recorded_version != verl.__version__:
        notes.append(f"The run had verl {recorded_version}; verl {verl.__version__} computes the losses here.")
    try:
        loss = _Loss(actor, tokens)
        loss.check(_SAME_IN_HALF if half else _SAME, recorded_version)
        found = [loss.remedy("as recorded", None, "verl's own loss, computed from the recorded log-probs")]
        for remedies in (_repair(loss), _clips(loss), _losses(loss, notes), _corrections(loss, notes)):
            found += remedies
    except _REFUSALS as error:
        raise NotTheRecordedLossError(f"verl's loss does not take the run's settings: {error!r}.") from error
    return found, notes


class _Loss:
    """The loss of a micro-batch, with the settings of its run or with others."""

    def __init__(self, actor: Mapping[str, Any], tokens: Mapping[str, Tensor]) -> None:
        needed = ("advantage", "old_log_prob")
        if missing := [name for name in needed if name not in tokens]:
            raise NotTheRecordedLossError(f"The bundle has no {missing[0]}, which verl's losses need.")
        self.tokens = tokens
        self.settings, self.of_loss = _settings(actor)
        self.mode = self.of_loss["loss_mode"]
        # Whether the old log-probs are the rollout's, and the loss itself makes the rollout corrections.
        self.bypass = self.mode == "bypass_mode"
        if self.settings["use_kl_loss"] and "ref_log_prob" not in tokens:
            raise NotTheRecordedLossError("The bundle has no ref_log_prob, which the KL loss needs.")
        self._factor = 1.0
        self._factor = self._recorded_factor()

    def remedy(self, name: str, override: str | None, meaning: str, **changes: Any) -> LossRemedy:
        """A remedy; the changes are those of `coefficients`, and `note`."""
        note = changes.pop("note", None)
        return LossRemedy(name, override, meaning, *self.coefficients(**changes), note)

    def coefficients(
        self,
        of_loss: Mapping[str, Any] | None = None,
        mask: Tensor | None = None,
        is_weight: Tensor | None = None,
        **settings: Any,
    ) -> tuple[Tensor, Tensor]:
        """∂L/∂log p, and the derivative by the entropies, with some settings changed.

        Args:
            of_loss (Mapping, optional): Changed settings of `policy_loss`.
            mask (Tensor, optional): Another mask of responses, shape (rows, response length).
            is_weight (Tensor, optional): Other weights of importance sampling, same shape.
            settings (Any): Changed settings of the actor.
        """
        tokens, config = self.tokens, self._config(of_loss, settings)
        mask = tokens["response_mask"] if mask is None else mask
        with torch.enable_grad():
            log_prob = tokens["log_prob"].clone().requires_grad_()
            loss = self._policy_loss(config, log_prob, mask, is_weight)
            coefficient = torch.autograd.grad(loss, log_prob, allow_unused=True, materialize_grads=True)[0]
        options = config.global_batch_info
        entropy = torch.zeros_like(coefficient)
        if config.use_kl_loss or config.entropy_coeff != 0:
            weight = mode_weights(config.loss_agg_mode, mask, **options)
            entropy = -config.entropy_coeff * weight
            if config.use_kl_loss:
                coefficient += kl_coefficients(config, weight, tokens["log_prob"], tokens["ref_log_prob"])
        return coefficient * self._factor, entropy * self._factor

    def note_on(self, mask: Tensor) -> str | None:
        """In what the figures with another mask may differ from a run with it."""
        count = self.settings["global_batch_info"].get("batch_num_tokens")
        if count is None or not self.takes_mean_of_tokens or bool((mask == self.tokens["response_mask"]).all()):
            return None
        return (
            f"The mean stays over the mini-batch's {count:,.0f} tokens: how many the mask would reject in the "
            "micro-batches that the bundle does not have is not known."
        )

    def check(self, tolerance: float, recorded_version: str | None) -> None:
        """Compares the coefficients with the recorded ones.

        Raises:
            NotTheRecordedLossError: They are others.
        """
        weight = self.tokens["weight"].abs()
        different = torch.zeros_like(weight, dtype=torch.bool)
        for name, computed in zip(("coefficient", "entropy_coefficient"), self.coefficients(), strict=True):
            recorded = self.tokens[name]
            # A token's own weight is what an advantage of 1 would give it.
            bound = tolerance * torch.maximum(recorded.abs(), 0.01 * weight)
            same = ((computed - recorded).abs() <= bound) | (~computed.isfinite() & ~recorded.isfinite())
            different |= ~same
        if count := int(different.sum()):
            tokens = int(self.tokens["response_mask"].bool().sum())
            hint = ""
            if "rollout_is_weight" not in self.tokens:
                hint = " If the run had weights of importance sampling, the bundle does not have them."
            elif recorded_version != verl.__version__:
                hint = f" The run had verl {recorded_version}, and this is verl {verl.__version__}."
            raise NotTheRecordedLossError(
                f"verl's loss {self.mode} with the run's settings does not have the recorded coefficients: {count:,} "
                f"of {tokens:,} tokens differ.{hint}"
            )

    def _recorded_factor(self) -> float:
        """What the loss is multiplied by after its aggregation: verl 0.7's factor for gradient accumulation."""
        config, mask = self._config(None, {}), self.tokens["response_mask"]
        with recorded_aggregation() as calls:
            self._policy_loss(config, self.tokens["log_prob"].clone().requires_grad_(), mask, None)
        call = next(iter(calls), None)
        # Some losses have a mode of their own, whatever the settings say; the terms of KL and entropy have not.
        modes = [aggregation_mode(call, config, mask.shape)]
        if config.use_kl_loss or config.entropy_coeff != 0:
            modes.append(config.loss_agg_mode)
        self.takes_mean_of_tokens = "token-mean" in modes
        weight = policy_weights(call, config, mask, **config.global_batch_info)
        known = (weight != 0) & weight.isfinite()
        factors = self.tokens["weight"][known] / weight[known]
        if not len(factors) or not bool(factors.isfinite().all()):
            raise NotTheRecordedLossError("No token of the micro-batch has a weight in verl's loss.")
        factor = float(factors.median())
        if not math.isfinite(factor) or float((factors - factor).abs().max()) > _SAME * abs(factor):
            raise NotTheRecordedLossError(
                f"verl's {self.settings['loss_agg_mode']} does not give the recorded weights of the tokens."
            )
        return factor

    def _config(self, of_loss: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> ActorConfig:
        return ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            use_torch_compile=False,
            policy_loss=_PolicyLoss(**{**self.of_loss, **(of_loss or {})}),
            **{**self.settings, **settings},
        )

    def _policy_loss(self, config: Any, log_prob: Tensor, mask: Tensor, is_weight: Tensor | None) -> Tensor:
        tokens = self.tokens
        loss, _ = core_algos.get_policy_loss_fn(config.policy_loss.loss_mode)(
            old_log_prob=tokens["old_log_prob"],
            log_prob=log_prob,
            advantages=tokens["advantage"],
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=config,
            rollout_is_weights=tokens.get("rollout_is_weight") if is_weight is None else is_weight,
        )
        return loss


@dataclass
class _PolicyLoss(PolicyLossConfig):
    """verl's, in every version with what bypass_mode needs."""

    rollout_correction: Any = None


def _settings(actor: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the actor, and those of its `policy_loss`; what is missing is verl's default.

    Raises:
        NotTheRecordedLossError: One is not of its kind.
    """
    for name, form in _FORM.items():
        if name in actor and not conforms(actor[name], form):
            raise NotTheRecordedLossError(f"verl {verl.__version__} does not take the run's {name}.")
    defaults = {field.name: field.default for field in dataclasses.fields(ActorConfig)}
    found = {name: actor.get(name, defaults.get(name)) for name in _PLAIN}
    sizes, given = (actor.get(name) or {} for name in ("global_batch_info", "policy_loss"))
    found["global_batch_info"] = {name: sizes[name] for name in _COUNTS if (sizes.get(name) or 0) > 0}
    known = {field.name for field in dataclasses.fields(_PolicyLoss)} & _LOSS_NUMBERS.keys()
    of_loss = {name: given[name] for name in known if given.get(name) is not None}
    correction = given.get("rollout_correction")
    correction = correction if isinstance(correction, dict) else {}
    of_loss["rollout_correction"] = {
        name: correction[name]
        for name in ("loss_type", *_CORRECTIONS)
        if isinstance(correction.get(name), (str, int, float)) or correction.get(name, 0) is None
    }
    return found, {**of_loss, "loss_mode": given.get("loss_mode", "vanilla")}


def _repair(loss: _Loss) -> Iterator[LossRemedy]:
    """The run's own loss, masked where the policy did not produce the token."""
    mask = loss.tokens["response_mask"]
    facts = {name: value.bool() if name == "after_eos" else value for name, value in loss.tokens.items()}
    unsampled = mask.bool() & HOLDS["unsampled"](facts, {})
    if 0 < (count := int(unsampled.sum())) < int(mask.sum()):
        repaired = mask.masked_fill(unsampled, 0)
        meaning = f"the repair: 0 for {count:,} of the tokens, which the policy did not produce"
        yield loss.remedy(REPAIR, None, meaning, mask=repaired, note=loss.note_on(repaired))


def _clips(loss: _Loss) -> Iterator[LossRemedy]:
    """The run's own loss with tighter clips."""
    settings = loss.settings
    low, high = (
        settings["clip_ratio"] if settings[name] is None else settings[name]
        for name in ("clip_ratio_low", "clip_ratio_high")
    )
    tighter = {"clip_ratio": min(low, high) / 2, "clip_ratio_low": low / 2, "clip_ratio_high": high / 2}
    yield loss.remedy(
        f"clip_ratio {low / 2:g}, {high / 2:g}",
        _overrides(_ACTOR, tighter),
        f"the run's loss with its clip_ratio halved, which was {low:g}, {high:g}",
        **tighter,
    )
    if loss.mode == "vanilla" and (c := settings["clip_ratio_c"]) > 1:
        dual = {"clip_ratio_c": round(1 + (c - 1) / 4, 6)}
        yield loss.remedy(
            f"dual clip {dual['clip_ratio_c']:g}",
            _overrides(_ACTOR, dual),
            f"ratios of tokens with a negative advantage are clipped from there on, not from {c:g}",
            **dual,
        )


def _losses(loss: _Loss, notes: list[str]) -> Iterator[LossRemedy]:
    """Other policy losses."""
    if loss.bypass:
        notes.append("In bypass_mode, verl takes a loss of its own, so other policy losses are left out.")
        return
    missing = [mode for _, mode, _ in _LOSSES if mode not in core_algos.POLICY_LOSS_REGISTRY]
    if missing:
        notes.append(f"verl {verl.__version__} does not have these policy losses: {', '.join(missing)}.")
    for name, mode, settings in _LOSSES:
        if mode != loss.mode and mode not in missing:
            override = _overrides(_ACTOR, {"policy_loss.loss_mode": mode, **settings})
            yield loss.remedy(name, override, f"verl's policy loss {mode}", of_loss={"loss_mode": mode}, **settings)


def _corrections(loss: _Loss, notes: list[str]) -> Iterator[LossRemedy]:
    """verl's rollout corrections."""
    tokens = loss.tokens
    if not loss.bypass and "rollout_log_prob" not in tokens:
        notes.append(
            "The bundle has no log-probs of the rollout, so rollout corrections cannot be computed: "
            "actor_rollout_ref.rollout.calculate_log_probs=True records them."
        )
        return
    if missing := [name for name, preset in _PRESETS if not hasattr(RolloutCorrectionConfig, preset)]:
        notes.append(f"verl {verl.__version__} does not have these rollout corrections: {', '.join(missing)}.")
    for name, config in _presets():
        settings = {key: getattr(config, key) for key in _CORRECTIONS}
        override = _overrides(_CORRECTION, _changed(settings))
        if loss.bypass:
            merged = {**loss.of_loss["rollout_correction"], **settings}
            yield loss.remedy(name, override, _meaning(settings), of_loss={"rollout_correction": merged})
            continue
        known = inspect.signature(rollout_corr_helper.compute_rollout_correction_and_rejection_mask).parameters
        weights, mask, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=tokens["old_log_prob"],
            rollout_log_prob=tokens["rollout_log_prob"],
            response_mask=tokens["response_mask"],
            **{key: value for key, value in settings.items() if key in known},
        )
        is_weight = torch.ones_like(mask) if weights is None else weights.batch["rollout_is_weights"]
        note = loss.note_on(mask)
        yield loss.remedy(name, override, _meaning(settings), mask=mask, is_weight=is_weight, note=note)


def _presets() -> Iterator[tuple[str, RolloutCorrectionConfig]]:
    for name, preset in _PRESETS:
        if (build := getattr(RolloutCorrectionConfig, preset, None)) is not None:
            yield name, build()
    # verl has no preset for the mask of single tokens. Releases after 0.7.0 have the bounds in one text.
    by_text = hasattr(rollout_corr_helper, "SUPPORTED_ROLLOUT_RS_OPTIONS")
    of_tokens: Any = ("token_k1", "0.5_2.0") if by_text else ("token", 2.0)
    kind, bounds = of_tokens
    yield "token mask", RolloutCorrectionConfig(rollout_is=None, rollout_rs=kind, rollout_rs_threshold=bounds)


def _changed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that matter."""
    of_is, of_rs = settings["rollout_is"] is not None, settings["rollout_rs"] is not None
    return {
        key: value
        for key, value in settings.items()
        if key in ("rollout_is", "rollout_rs")
        or (value is not None and ((of_is and key == "rollout_is_threshold") or (of_rs and "_is_" not in key)))
    }


def _meaning(settings: Mapping[str, Any]) -> str:
    parts = []
    if settings["rollout_is"] is not None:
        parts.append(f"importance sampling by {settings['rollout_is']}, bound {settings['rollout_is_threshold']}")
    if settings["rollout_rs"] is not None:
        parts.append(f"rejection by {settings['rollout_rs']}, bounds {settings['rollout_rs_threshold']}")
    return "; ".join(parts)


def _overrides(prefix: str, settings: Mapping[str, Any]) -> str:
    """Hydra's overrides for these settings."""
    texts = {key: "null" if value is None else f"{value}" for key, value in settings.items()}
    return " ".join(f"{prefix}.{key}={text}" for key, text in texts.items())
