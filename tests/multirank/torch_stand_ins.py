"""What other versions of torch do, on the one that is installed. All here runs inside the ranks of a cluster."""

import sys
from typing import Any

from torch import nn

from gradloc.fsdp.torch_compat import param_groups


def as_in_torch_2_15(module: nn.Module) -> None:
    """FSDP2 leaves a gradient whose reduction is deferred in `.grad`, and `unsharded_accumulated_grad` is read-only."""
    for parameter in [parameter for group in param_groups(module) for parameter in group.fsdp_params]:
        if vars(parameter).pop("unsharded_accumulated_grad", module) is not module:
            kept = {"to_accumulated_grad_if_needed": _nothing, "accumulate_unsharded_grad_if_needed": _nothing}
            kept["unsharded_accumulated_grad"] = property(_nothing)
            parameter.__class__ = type("FSDPParam", (type(parameter),), kept)


def _nothing(_parameter: Any) -> None:
    pass


def without_name(found: Any, name: str) -> None:
    """An attribute is there for torch's own code alone, as if a later torch had another name for it."""

    def read(self: Any, wanted: str) -> Any:
        if wanted == name and not sys._getframe(1).f_globals["__name__"].startswith("torch."):
            raise AttributeError(name)
        return super(renamed, self).__getattribute__(wanted)

    renamed = type(type(found).__name__, (type(found),), {"__getattribute__": read})
    found.__class__ = renamed
