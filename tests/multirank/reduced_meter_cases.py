"""Actors whose search reads only the reduced gradient, with and without sequence parallelism.

The sequence parallelism is verl's own, Ulysses. There are stand-ins for flash attention, which needs a GPU, and for an
all-to-all call, which gloo lacks; with verl 0.7 also for flash attention's way of removing padding, for which verl 0.9
has nested tensors, that a CPU has too.
"""

from collections.abc import Callable
from typing import Any

import actor_cases
import cluster
import torch
import torch.distributed as dist
from actor_cases import Run
from actors import ENGINE, IDENTITY_THRESHOLD, Case, build_model
from verl.models.transformers import monkey_patch
from verl.utils import ulysses


def train(
    case: Case,
    size: int,
    meter: str = "reduced",
    detect: bool = True,
    prepare: Callable[[Any], None] = lambda actor: None,
    **gradloc: Any,
) -> Run:
    """One update with groups of `size` ranks that share their data; with the reduced meter they split it."""
    options = {"spike_detection": True, "bisect_budget_steps": 200, **gradloc} if detect else {}
    split = size > 1 and meter == "reduced"
    if split:
        options["ulysses_sequence_parallel_size"] = size
        stand_in_for_a_gpu(case, size)

    def choose_meter(model: torch.nn.Module) -> None:
        # As if it computed its gradients in parts, for which the actor takes the reduced meter.
        model.is_tiled_mlp = meter == "reduced" and not split

    def prepare_and_share(actor: Any) -> None:
        prepare(actor)
        if split:
            share_sequences(actor, size)

    run = actor_cases.train(case, prepare=prepare_and_share, change_model=choose_meter, size=size, **options)
    ulysses.set_ulysses_sequence_parallel_group(None)
    return run


def stand_in_for_a_gpu(case: Case, size: int) -> None:
    """Has verl patch attention for groups of `size` ranks, and replaces what a CPU or gloo lacks.

    Both change whole modules, so other tests get other processes.
    """
    cluster.end_after_this_call()
    monkey_patch.apply_monkey_patch(build_model(case), ulysses_sp_size=size, use_remove_padding=True)
    monkey_patch._flash_attention_forward = packed_attention
    dist.all_to_all = all_to_all


def share_sequences(actor: Any, size: int) -> None:
    """Has neighbouring ranks share the computation of their sequences, as verl's worker does."""
    for module in actor.actor_module.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_attention_2"
    if not ENGINE:  # which makes its groups itself
        group, _ = dist.new_subgroups(size)
        ulysses.set_ulysses_sequence_parallel_group(group)


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, position_ids: torch.Tensor, **__: Any
) -> torch.Tensor:
    """Causal attention within each of the sequences in a row; tensors of shape (1, length, heads, head size)."""
    sequence = (position_ids[0] == 0).cumsum(0)
    seen = ((sequence[:, None] == sequence) & (sequence.new_ones(len(sequence), len(sequence)) > 0)).tril()
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, enable_gqa=True)
    return attended.transpose(1, 2)


def all_to_all(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup, async_op: bool
) -> None:
    assert not async_op
    whole = torch.stack([tensor.contiguous() for tensor in inputs])
    everything = [torch.empty_like(whole) for _ in inputs]
    dist.all_gather(everything, whole, group=group)
    for output, theirs in zip(outputs, everything, strict=True):
        output.copy_(theirs[dist.get_rank(group)])


def drop(case: Case, size: int) -> tuple[float, Run]:
    """The relative distance from the gradient that the local meter leaves after taking the culprits out.

    Groups of ranks with the same data and no split have the same mean gradient as groups that split it.
    """
    detection = {"spike_action": "drop", "grad_norm_threshold": IDENTITY_THRESHOLD}
    run = train(case, size, **detection)
    other = train(case, size, meter="local", **detection)
    ((ours,), (theirs,)) = run.gradients, other.gradients
    return actor_cases.distance(ours, theirs), run
