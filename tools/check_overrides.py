# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What `run_experiment.sh --dry-run` asks of verl: whether a run would refuse these overrides by the end of step 1.

python tools/check_overrides.py OVERRIDE ...     # by the Python that trains; the model and the data are not looked at

Exit code: 0 if it would not, 2 if it would, another if that cannot be told; the last line of stderr says why.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any


def refusal(overrides: Sequence[str]) -> str | None:
    """Why a run with these overrides would end, in one line; None if nothing is found."""
    import verl  # before Hydra composes: it loads the plugin, which adds to where Hydra looks
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException, InstantiationException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(f"{verl.__path__[0]}/trainer/config", version_base=None):
            config, default = compose("ppo_trainer", [*overrides]), compose("ppo_trainer")
        for sentence in _no_numbers(OmegaConf.to_container(config), OmegaConf.to_container(default)):
            return sentence
        OmegaConf.resolve(config)
        _check(config)
    except InstantiationException as error:  # of one of the configuration's classes
        return _one_line(error.__cause__ or error)
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, AssertionError) as error:
        return _one_line(error)
    return None


def _no_numbers(given: Any, default: Any, name: str = "") -> Iterator[str]:
    """A sentence for each text that is where verl's own configuration has a number."""
    if isinstance(given, dict) and isinstance(default, dict):
        for key in given:
            if key in default and key != "rollout_correction":  # where "0.5_2.0" is a range
                yield from _no_numbers(given[key], default[key], f"{name}.{key}" if name else key)
    elif isinstance(given, str) and "${" not in given and type(default) in (int, float):
        yield f"{name} must be a number, got {given!r}"


def _check(config: Any) -> None:
    """Raises what a run would raise, but for what needs the model, the data, Ray or a GPU."""
    import torch
    from hydra.utils import instantiate
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.trainer.ppo.utils import need_critic
    from verl.utils.config import validate_config
    from verl.utils.tracking import Tracking

    actor, trainer, algorithm = config.actor_rollout_ref.actor, config.trainer, config.algorithm
    for key in ("nnodes", "n_gpus_per_node", "total_training_steps"):
        value = trainer[key]
        if (type(value) is not int or value < 1) and (key, value) != ("total_training_steps", None):
            raise ValueError(f"trainer.{key} must be a positive integer, got {value!r}")
    for name in [trainer.logger] if isinstance(trainer.logger, str) else trainer.logger:
        if name not in Tracking.supported_backend:
            raise ValueError(f"trainer.logger has {name!r}, and verl knows {', '.join(Tracking.supported_backend)}")
    with_reference = algorithm.use_kl_in_reward or actor.use_kl_loss
    validate_config(config, use_reference_policy=with_reference, use_critic=need_critic(config))
    for section in (algorithm, config.actor_rollout_ref.rollout):
        instantiate(section, _convert_="partial")
    core_algos.get_adv_estimator_fn(algorithm.adv_estimator)
    core_algos.get_policy_loss_fn(actor.policy_loss.loss_mode)
    torch.optim.SGD([torch.zeros(1)], lr=actor.optim.lr)  # which refuses a negative rate, as all do
    # No class checks the keys of the correction: do for one token what a step does.
    correct, one = rollout_corr_helper.compute_rollout_correction_and_rejection_mask, torch.ones(1, 1)
    correction = algorithm.rollout_correction or {}
    taken = {key: correction[key] for key in inspect.signature(correct).parameters if key in correction}
    try:
        correct(one, one, one, **taken)
    except (ValueError, TypeError) as error:
        raise ValueError(f"algorithm.rollout_correction: {error}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main(overrides: Sequence[str]) -> int:
    if any(word.startswith("-") for word in overrides):
        sys.exit("options of Hydra's may name another configuration")
    reason = refusal(overrides)
    if reason is not None:
        print(reason, file=sys.stderr)
    return 0 if reason is None else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
