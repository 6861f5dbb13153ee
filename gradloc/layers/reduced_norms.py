# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The layers of a model, and norms and scaling of the reduced gradient by layer, for any sharding of the model."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..fsdp.collectives import added, total, world_size
from ..fsdp.state import flat_handles, flat_parameters
from ..fsdp.torch_compat import IS_TOO_OLD, DTensor, FSDPModule, FullyShardedDataParallel
from ..lines import BrokenParameters

logger = logging.getLogger(__name__)

# Parts of parameter names that FSDP1, activation checkpointing, torch.compile and LoRA insert.
_WRAPPERS = re.compile(r"\b(?:_(?:fsdp|checkpoint)_wrapped_module|_orig_mod|base_model\.model|base_layer)\.")
_ADAPTER = ".lora_"
_LORA = re.compile(r"\.(?:lora_|modules_to_save\b|original_module\b).*")
_MODEL = re.compile(r"^(?:(?:model|transformer|language_model|decoder|module)\.)+")
# The router of a mixture of experts. A "gate" elsewhere (such as in attention) is not a router.
_ROUTER = re.compile(r"\.(?:router|(?:mlp|moe|block_sparse_moe|feed_forward|ffn)\.gate)(?:\.|$)")

# How many parameters with a broken gradient are named.
_NAMED = 16

_FSDP = (FullyShardedDataParallel, FSDPModule)

# On the CPU, torch sums a norm in one float32 accumulator. The relative error is 1e-3 for 28 million elements, but 2e-7
# in chunks of this size. GPUs sum in blocks anyway.
_CPU_CHUNK = 2**16


def layer_name(parameter_name: str) -> str:
    """The layer of a parameter: "embed_tokens", "layers.3", "norm", "lm_head", "visual.blocks.0", ….

    A numbered block is one layer, including all experts of a mixture of experts; only their router is a separate
    layer, "layers.3.router". Outside of numbered blocks, a parameter's layer is the module that owns it, so that a
    model with unusual names is covered as well.
    """
    parts = plain_name(parameter_name).split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            block, rest = ".".join(parts[: i + 1]), ".".join(["", *parts[i + 1 :]])
            return f"{block}.router" if _ROUTER.search(rest) else block
    name = _LORA.sub("", ".".join(parts))
    return name.rpartition(".")[0] if name.endswith((".weight", ".bias")) else name


def layers_by_parameter(parameter_names: Iterable[str]) -> dict[str, str]:
    """The layer of each parameter of a model: its `layer_name`, or without numbered blocks its top-level module.

    It takes the names of all the model's parameters, frozen ones included.
    """
    names = list(parameter_names)
    if any(part.isdigit() for name in names for part in plain_name(name).split(".")):
        return {name: layer_name(name) for name in names}
    layers = {name: plain_name(name).partition(".")[0] for name in names}
    logger.warning(
        "No parameter of this model lies in a numbered block (such as layers.0), so its top-level modules are used as "
        "layers: %s.",
        ", ".join(dict.fromkeys(layers.values())),
    )
    return layers


def plain_name(parameter_name: str) -> str:
    """A parameter's name without what wrappers, and the model itself, put before its parts."""
    return _MODEL.sub("", _WRAPPERS.sub("", parameter_name))


@torch.no_grad()
def norms_of_all(gradients: Iterable[tuple[int, Tensor]]) -> tuple[Sequence[Tensor], list[int]]:
    """The norms of numbered gradients, in one call for all; large ones on the CPU are measured in chunks.

    Returns:
        tuple[Sequence[Tensor], list[int]]: The norms of chunks, float32 of shape (), and the number of each one's
            gradient.
    """
    chunks = [
        (number, chunk)
        for number, gradient in gradients
        for chunk in (
            gradient.flatten().split(_CPU_CHUNK)
            if gradient.numel() > _CPU_CHUNK and gradient.device.type == "cpu"
            else [gradient]
        )
    ]
    norms = torch._foreach_norm([chunk for _, chunk in chunks], 2, dtype=torch.float32)
    return norms, [number for number, _ in chunks]


def on_device(indices: Sequence[int], device: torch.device) -> Tensor:
    """A tensor of them, int64. Pageable memory is copied at once, so the host does not wait for the device."""
    return torch.tensor(indices).to(device, non_blocking=True)


@dataclass(frozen=True)
class _Piece:
    """This rank's part of one parameter."""

    name: str
    numel: int  # the number of its elements on all ranks
    # Whether it is a norm's, a bias or an adapter's. An embedding takes too much memory, and the elements of a head's
    # gradient add up to 0.
    is_small: bool
    trainable: bool  # whether it gets a gradient
    shards: int  # the number of ranks that it is sharded over; the other ranks hold replicas
    gradient: Callable[[], Tensor | None]  # returns this rank's part of the gradient; None if there is none
    weights: Callable[[], Tensor | None]  # the same of the weights


class ReducedNorms:
    """Measures the norms of the optimizer's gradient by layer, and scales it.

    Every element counts once: a tied parameter counts once, each of n replicas counts 1/n, and a rank without a shard
    of a layer adds nothing. The model is wrapped by FSDP1 or FSDP2 over all ranks of the default process group, or not
    at all. Offloaded gradients are not on the device for compute and communication.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        if IS_TOO_OLD:
            raise RuntimeError(
                f"the gradient's norms by layer need torch 2.6 or later, and this is {torch.__version__}"
            )
        # A forward without a backward, as for old log-probs, leaves the gathered parameters of FSDP2's root where the
        # optimizer's sharded ones were: only these get a gradient.
        for child in module.modules():
            if isinstance(child, FSDPModule):
                child.reshard()
        pieces = list(_pieces(module))
        by_name = layers_by_parameter(piece.name for piece in pieces)
        self._pieces = [piece for piece in pieces if piece.trainable]
        layers = [by_name[piece.name] for piece in self._pieces]
        self.layers = list(dict.fromkeys(layers))
        self._layers = [self.layers.index(layer) for layer in layers]  # by piece
        self.numels = [0] * len(self.layers)  # the number of trainable parameters (elements) in each layer
        for layer, piece in zip(self._layers, self._pieces, strict=True):
            self.numels[layer] += piece.numel
        self._layer_of_small: Tensor | None = None  # of each element of `small_weights`, its layer
        self._has_half = False  # whether some of these are in half precision
        # By layer with a small one, the piece with the fewest elements.
        by_size = sorted(enumerate(self._layers), key=lambda of: -self._pieces[of[0]].numel)
        self._small = {layer: i for i, layer in by_size if self._pieces[i].is_small}
        self.small_names = {self._pieces[i].name for i in self._small.values()}
        self._device = device
        # Also if nothing is sharded: all ranks must make the same decisions.
        self._summed = world_size() > 1 and any(isinstance(child, _FSDP) for child in module.modules())
        # By piece its replicas' weight: the sum is over all of them.
        shares = [piece.shards / world_size() if self._summed else 1.0 for piece in self._pieces]
        self._share_of = torch.tensor(shares, dtype=torch.float64, device=device)
        of_small = [shares[self._small[i]] if i in self._small else math.nan for i in range(len(self.layers))]
        self._share_of_small = torch.tensor(of_small, dtype=torch.float64, device=device)

    def squared_norms(self) -> Tensor:
        """The layers' squared norms, without a host sync. A collective call (one all-gather) if FSDP wraps the module.

        Returns:
            Tensor: float64 of shape (len(layers),); with FSDP the same on every rank. 0 for a layer without a gradient.
        """
        return self.add_up(self.own_squares())

    def add_up(self, squares: Tensor) -> Tensor:
        """Sums every rank's `own_squares`. A collective call if FSDP wraps the module."""
        return total(squares) if self._summed else squares

    def of_ranks(self, squares: Tensor) -> Tensor:
        """What `add_up` gives of every rank's `own_squares`, gathered in rows. No collective call."""
        return added(squares) if self._summed else squares[0]

    @torch.no_grad()
    def own_squares(self, with_weights: bool = False) -> Tensor:
        """This rank's contribution to the layers' squared norms of gradients, or of weights and then gradients.

        Returns:
            Tensor: float64 of shape (len(layers),), or twice as long. No host sync.
        """
        parts = [self._parts(of_weights=True), self._parts()] if with_weights else [self._parts()]
        squares = torch.zeros(len(parts) * len(self.layers), dtype=torch.float64, device=self._device)
        count = len(self._pieces)
        if numbered := [(count * of + i, part) for of, each in enumerate(parts) for i, part in each.items()]:
            norms, numbers = norms_of_all(numbered)
            places = [divmod(number, count) for number in numbers]
            share = self._share_of[on_device([i for _, i in places], self._device)]
            layers = on_device([of * len(self.layers) + self._layers[i] for of, i in places], self._device)
            squares.index_add_(0, layers, torch.stack([*norms]).to(self._device).double().square() * share)
        return squares

    @torch.no_grad()
    def small_weights(self, of_gradient: bool = False) -> Tensor:
        """A copy of this rank's part of each layer's smallest tensor, or of its gradient, in single precision.

        Such as a norm's weights; layers without a small one have none. Kept over an optimizer step, they show how it
        moves.
        """
        found: list[Tensor] = []
        for i in self._small.values():
            part = self._pieces[i].weights()
            if part is not None and of_gradient:
                gradient = self._pieces[i].gradient()
                part = torch.zeros_like(part) if gradient is None else gradient
            if part is not None:
                found.append(part.flatten().to(self._device, torch.float32))
        return torch.cat(found) if found else torch.zeros(0, device=self._device)

    @torch.no_grad()
    def own_changes(self, moves: Tensor) -> Tensor:
        """By layer, how many elements of `small_weights` have moved on this rank: float64 of shape (len(layers),).

        NaN where a layer has none, or where weights are in half precision: a small step may be lost in them.
        """
        changed = self._by_layer((moves != 0).double()) + 0 * self._share_of_small
        return changed * math.nan if self._has_half else changed

    @torch.no_grad()
    def own_sums(self, gradient: Tensor) -> Tensor:
        """By layer, this rank's part of the sum of the elements of a gradient that `small_weights` gave.

        Returns:
            Tensor: float64 of shape (2 · len(layers),), the sums and then those of squares, to be added up over the
                ranks; NaN where a layer has none.
        """
        gradient = gradient.double()
        return (self._by_layer(torch.stack([gradient, gradient.square()])) * self._share_of_small).flatten()

    def _by_layer(self, values: Tensor) -> Tensor:
        """The sums of values of each element of `small_weights`, float64 of shape (…, elements): (…, len(layers))."""
        if self._layer_of_small is None or len(self._layer_of_small) != values.shape[-1]:
            parts = [(layer, self._pieces[i].weights()) for layer, i in self._small.items()]
            known = [(layer, part) for layer, part in parts if part is not None]
            layers = [torch.full((part.numel(),), layer) for layer, part in known]
            self._layer_of_small = torch.cat([torch.zeros(0, dtype=torch.int64), *layers]).to(values.device)
            self._has_half = any(part.dtype in (torch.float16, torch.bfloat16) for _, part in known)
        sums = torch.zeros(*values.shape[:-1], len(self.layers), dtype=torch.float64, device=values.device)
        return sums.index_add_(-1, self._layer_of_small, values)

    @torch.no_grad()
    def broken_parameters(self) -> BrokenParameters:
        """The parameters of whose gradient an element is NaN or infinite on some rank.

        A collective call if FSDP wraps the module; the same on every rank.

        Returns:
            dict: Their `count`, `of` how many, and the first 16 `names` as the backward reaches them.
        """
        own = torch.zeros(len(self._pieces), dtype=torch.float64, device=self._device)
        if found := self._parts():
            # Not isfinite(): of the whole gradient, that takes memory.
            largest = torch.stack(torch._foreach_norm([*found.values()], math.inf))
            own[on_device([*found], self._device)] = (~largest.isfinite()).to(own)
        by_piece = self.add_up(own).tolist()
        names = [plain_name(piece.name) for piece, broken in zip(self._pieces, by_piece, strict=True) if broken]
        return {"count": len(names), "of": len(self._pieces), "names": names[::-1][:_NAMED]}

    @torch.no_grad()
    def scale_(self, factors: Mapping[int, float]) -> None:
        """Multiplies the gradients of some layers, given by their index, in place."""
        layers = ((self._layers[i], gradient) for i, gradient in self._parts().items())
        found = [(gradient, factors[layer]) for layer, gradient in layers if layer in factors]
        if found:
            torch._foreach_mul_([gradient for gradient, _ in found], [factor for _, factor in found])

    def _parts(self, of_weights: bool = False) -> dict[int, Tensor]:
        """This rank's parts of the gradients that there are, or of the weights, by the index of their pieces."""
        parts = {i: piece.weights() if of_weights else piece.gradient() for i, piece in enumerate(self._pieces)}
        return {i: part for i, part in parts.items() if part is not None and part.numel() > 0}


def _pieces(module: nn.Module) -> Iterator[_Piece]:
    """This rank's part of each parameter, in the model's order; frozen ones included, tied ones once."""
    if flat_handles(module):
        for name, handle, i in flat_parameters(module):
            yield _flat_piece(name, handle, i)
    else:
        for name, parameter in module.named_parameters():
            yield _plain_piece(name, parameter)


def _flat_piece(name: str, handle, i: int) -> _Piece:
    """This rank's part of the i-th parameter in one of FSDP1's flat parameters."""
    flat = handle.flat_param
    part = flat._shard_param_infos[i]

    def original() -> Tensor | None:
        return flat._params[i].grad

    def cut_out(of: Tensor | None) -> Tensor | None:
        if of is None or not part.in_shard:
            return None
        return of[part.offset_in_shard : part.offset_in_shard + part.numel_in_shard]

    return _Piece(
        name=name,
        numel=flat._shapes[i].numel(),
        is_small=len(flat._shapes[i]) == 1 or _ADAPTER in name,
        trainable=flat._params[i].requires_grad if handle._use_orig_params else flat.requires_grad,
        shards=handle.process_group.size() if handle.uses_sharded_strategy else 1,
        gradient=original if handle._use_orig_params else lambda: cut_out(flat.grad),
        weights=lambda: cut_out(flat._local_shard if handle.uses_sharded_strategy else flat.detach()),
    )


def _plain_piece(name: str, parameter: nn.Parameter) -> _Piece:
    """This rank's part of a parameter under FSDP2, or without sharding."""
    shards = 1
    if isinstance(parameter, DTensor):
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        shards = math.prod(size for placement, size in sizes if not placement.is_replicate())

    def local(of: Tensor | None) -> Tensor | None:
        return of.to_local() if isinstance(of, DTensor) else of

    return _Piece(
        name,
        parameter.numel(),
        parameter.dim() == 1 or _ADAPTER in name,
        parameter.requires_grad,
        shards,
        gradient=lambda: local(parameter.grad),
        weights=lambda: local(parameter),  # without its detach(), which for a DTensor takes longer than its norm
    )
