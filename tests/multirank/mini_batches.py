"""How verl cuts a mini-batch into micro-batches, and how much each token counts in its loss."""

from typing import Any

import torch
import torch.distributed as dist
from actors import DEVICE, ENGINE, GSPO_MODE_IS_FREE, Case
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils.seqlen_balancing import prepare_dynamic_batch
from verl.workers.config import FSDPActorConfig


def whole_mini_batch(case: Case, mini_batch: DataProto) -> dict[str, int]:
    """The sizes of all ranks' mini-batch over which verl 0.9 takes its means; nothing for verl 0.7."""
    if not ENGINE:
        return {}
    tokens = mini_batch.batch["response_mask"].sum().to(DEVICE)
    dist.all_reduce(tokens)
    world = dist.get_world_size()
    return {"dp_size": world, "batch_num_tokens": tokens.item(), "global_batch_size": case.mini_batch * world}


def loss_factor(case: Case, rows: list[int]) -> float:
    """What verl multiplies a micro-batch's loss with: its share of the mini-batch where the mean is its own."""
    if ENGINE:
        return 1.0
    return (len(rows) if case.dynamic else case.micro_batch) / case.mini_batch


def split_rows(case: Case, config: FSDPActorConfig, mini_batch: DataProto) -> list[list[int]]:
    if case.dynamic:
        group = dist.group.WORLD if ENGINE else None
        return prepare_dynamic_batch(mini_batch, config.ppo_max_token_len_per_gpu, dp_group=group)[1]
    return [list(range(i, i + case.micro_batch)) for i in range(0, len(mini_batch), case.micro_batch)]


def token_weights(case: Case, mask: torch.Tensor, factor: float, info: dict[str, Any]) -> torch.Tensor:
    """How much each token's own loss counts in the loss that is differentiated: by autograd through `agg_loss`.

    verl 0.9's engine takes its means over the whole mini-batch of all ranks, whose sizes are in `info`. Some losses
    have an aggregation of their own; the geometric mean alone counts sequences without a token, too.
    """
    of_sequences = ("sapo", "geo_mean") if GSPO_MODE_IS_FREE else ("sapo", "geo_mean", "gspo")
    mode = "seq-mean-token-mean" if case.loss_mode in of_sequences else case.loss_agg_mode
    losses = torch.zeros_like(mask, requires_grad=True)
    if case.loss_mode == "geo_mean":
        info = {"global_batch_size": len(mask)}
    return factor * torch.autograd.grad(agg_loss(losses, mask, mode, **info), losses)[0]
