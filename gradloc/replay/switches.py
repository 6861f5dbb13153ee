# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What each part of the computation changes: attention, precision, fused kernels, RMSNorm and rotary embedding.

Each is switched alone, and the gradient of the bundle's first micro-batch measured again. A spike that only one of them
takes away comes from that kernel or that rounding.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .model import FLASH, HALF, Model, Variant

AS_REPLAYED = "as replayed"
# A norm's and a rotary embedding's class names contain these; the function that rotates queries and keys.
_NORMS, _ROTARY, _ROTATE = "RMSNorm", "RotaryEmbedding", "apply_rotary_pos_emb"
# A formula is taken for a module's own if half of the outputs differ by less than this factor.
_SAME_FORMULA = 1.65

_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
_ON_CPU = ("math", "flash")


@dataclass(frozen=True)
class Switch:
    """What is computed in another way."""

    name: str
    on: Callable[[Model], AbstractContextManager[None]] | None = None  # the context in which it is on
    variant: Variant | None = None  # with which the model is loaded again; None for the model that is loaded


def find_switches(main: Variant, device: str) -> list[Switch]:
    """The switches that there are, the most specific first: before those that load the model again, the others.

    Args:
        main (Variant): What the replay computes with.
    """
    found = [Switch("RMSNorm in float32", _precise_norms), Switch("rotary embedding in float32", _precise_rotation)]
    if main.attention == "sdpa":
        names = _ON_CPU if device == "cpu" else _BACKENDS
        found += [Switch(f"attention: sdpa, {name}", partial(_backend, _BACKENDS[name])) for name in names]
    attentions = ["eager", "sdpa"]
    if device == "cuda" and main.dtype in HALF and find_spec("flash_attn") is not None:
        attentions.append(FLASH)
    for name in attentions:
        if name != main.attention:
            found.append(Switch(f"attention: {name}", variant=Variant(main.dtype, name)))
    if device == "cuda" and find_spec("liger_kernel") is not None:
        found.append(Switch("fused kernels: Liger", _liger, main))
    for dtype in ("float32", "bfloat16", "float64"):
        attention = "sdpa" if main.attention == FLASH and dtype not in HALF else main.attention
        if dtype != main.dtype:
            found.append(Switch(f"precision: {dtype}", variant=Variant(dtype, attention)))
    return found


def _backend(backend: SDPBackend, _: Model) -> AbstractContextManager[None]:
    return sdpa_kernel([backend])


@contextmanager
def _precise_norms(model: Model) -> Iterator[None]:
    """Computes every RMSNorm by its formula in float32; its output has the dtype that it had."""
    norms = [child for child in model.module.modules() if type(child).__name__.endswith(_NORMS)]
    if not norms:
        raise RuntimeError("the model has no RMSNorm")
    with ExitStack() as stack:
        for norm in norms:
            stack.enter_context(norm.register_forward_hook(partial(_norm, model.device.type), with_kwargs=True))
        yield


def _norm(device: str, norm: Any, arguments: Sequence[Any], options: Mapping[str, Any], usual: Tensor) -> Tensor:
    """The hook of a norm: what replaces its usual output."""
    hidden, *rest = arguments
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    with torch.autocast(device, enabled=False):
        precise = hidden.float()
        if weight is not None and eps is not None and not rest and not options:
            scaled = precise * torch.rsqrt(precise.square().mean(-1, keepdim=True) + eps)
            # Gemma's weights begin at 0.
            formulas = [scaled * weight.float(), scaled * (1 + weight.float())]
            best = min(formulas, key=partial(_distance, usual))
            if _distance(usual, best) < _SAME_FORMULA:
                return best.to(usual.dtype)
        found: Tensor = norm.forward(precise, *rest, **options)  # without this hook
        return found.to(usual.dtype)


@contextmanager
def _precise_rotation(model: Model) -> Iterator[None]:
    """Computes rotary embeddings from frequencies in float32, and rotates in float32."""
    rotary = [child for child in model.module.modules() if type(child).__name__.endswith(_ROTARY)]
    modules = {sys.modules[type(child).__module__] for child in model.module.modules()}
    rotations = [(module, getattr(module, _ROTATE)) for module in modules if hasattr(module, _ROTATE)]
    if not (rotary and rotations):
        raise RuntimeError("the model's rotary embedding is not known")
    with ExitStack() as stack:
        for module, own in rotations:
            stack.enter_context(mock.patch.object(module, _ROTATE, partial(_rotate, own, model.device.type)))
        for child in rotary:
            stack.enter_context(child.register_forward_hook(partial(_angles, model.device), with_kwargs=True))
        yield


def _angles(device: torch.device, rotary: Any, arguments: Sequence[Any], options: Mapping[str, Any], _: Any) -> Any:
    """The cosines and sines, in float32, with frequencies that are computed anew where that is possible."""
    hidden, *rest = arguments
    try:
        rotary = type(rotary)(config=rotary.config, device=device)
    except (TypeError, AttributeError):
        pass  # another signature: its own frequencies
    with torch.autocast(device.type, enabled=False):
        return rotary.forward(hidden.float(), *rest, **options)


def _rotate(
    own: Callable[..., Any], device: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any
) -> Any:
    with torch.no_grad():
        usual = own(q, k, cos.to(q.dtype), sin.to(q.dtype), *rest, **options)
    with torch.autocast(device, enabled=False):
        cos, sin = cos.float(), sin.float()
        wide = [values.unsqueeze(1) for values in (cos, sin)]
        found = [_rotated(x.float(), *wide) for x in (q, k)] if wide[0].shape[-1] == q.shape[-1] else None
        if rest or options or found is None or max(map(_distance, usual, found)) >= _SAME_FORMULA:
            found = own(q.float(), k.float(), cos, sin, *rest, **options)
        return tuple(new.to(old.dtype) for new, old in zip(found, usual, strict=True))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _distance(one: Tensor, other: Tensor) -> float:
    """The factor by which half of the values differ at least."""
    one, other = one.detach().float(), other.detach().float()
    known = (one != 0) & (other != 0) & one.isfinite() & other.isfinite()
    logs = (one[known] / other[known]).abs().log().abs()
    opposite = (one[known] * other[known] < 0).float().mean() > 0.5 if len(logs) else False
    return float("inf") if opposite or not len(logs) else float(logs.median().exp())


@contextmanager
def _liger(model: Model) -> Iterator[None]:
    # As verl does with use_liger.
    import_module("liger_kernel.transformers.monkey_patch")._apply_liger_kernel_to_instance(model=model.module)
    yield
