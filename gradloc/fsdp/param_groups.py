# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What is in FSDP2's parameter groups, and what is called before it reduces their gradients."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

# Where a group keeps what is called before its reduction.
_ACTIONS = "_gradloc_before_reduction"


def parameters_of(param_group: Any) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each parameter of a group as (owner, attribute, FSDPParam); a tied one as often as it is in the model."""
    for parameter in param_group.fsdp_params:
        place = parameter._module_info
        yield place.module, place.param_name, parameter
        for owner, attribute in zip(place.shared_modules, place.shared_param_names, strict=True):
            yield owner, attribute, parameter


def before_reduction(param_group: Any, action: Callable[[], None], last: bool = False) -> Callable[[], None]:
    """Has `action` called before FSDP2 reduces a group's gradients, or keeps them until a later backward reduces them.

    A backward may come there several times, each time with gradients that were not there before.

    Args:
        last (bool): Whether it is called after all others that there are now, and not before them.

    Returns:
        Callable: Ends that.
    """
    actions: list[Callable[[], None]] = vars(param_group).setdefault(_ACTIONS, [])

    def post_backward(*arguments: Any) -> None:
        for each in actions.copy():
            each()
        type(param_group).post_backward(param_group, *arguments)

    def remove() -> None:
        if action in actions:
            actions.remove(action)
        if not actions:
            vars(param_group).pop("post_backward", None)

    actions.insert(len(actions) if last else 0, action)
    param_group.post_backward = post_backward
    return remove
