"""How verl cuts a mini-batch into micro-batches, and how much each token counts in its loss: closed formulas."""

from typing import Any

import torch
import torch.distributed as dist
from actors import DEVICE, ENGINE, FIRST_RELEASE, GSPO_MODE_IS_FREE, Case
from verl import DataProto
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
    """How much each token's own loss counts in the loss that is differentiated.

    verl 0.9's engine takes its means over the whole mini-batch of all ranks, whose sizes are in `info`. Of the losses
    with an aggregation of their own, it has left theirs to sapo and geo_mean, and in other releases than 0.9.1 to gspo.
    """
    lengths = mask.sum(-1, keepdim=True)
    if info and case.loss_mode != "geo_mean":
        fixed = ("sapo",) if GSPO_MODE_IS_FREE else ("sapo", "gspo")
        of_sequence = info["dp_size"] / info["global_batch_size"]
        weight = {
            "token-mean": torch.tensor(info["dp_size"] / info["batch_num_tokens"]),
            "seq-mean-token-sum": torch.tensor(of_sequence),
            "seq-mean-token-mean": of_sequence / lengths.clamp(min=1),
            "seq-mean-token-sum-norm": torch.tensor(of_sequence / mask.shape[1]),
        }["seq-mean-token-mean" if case.loss_mode in fixed else case.loss_agg_mode]
        return torch.where(mask > 0, weight, 0.0)
    # The geometric mean alone counts sequences without a token, too.
    sequences = len(mask) if case.loss_mode == "geo_mean" else (lengths > 0).sum()
    of_sequences = case.loss_mode in ("gspo", "sapo", "geo_mean")
    mode = "seq-mean-token-mean" if of_sequences else case.loss_agg_mode
    weight = {
        "token-mean": 1 / lengths.sum().clamp(min=1),
        "seq-mean-token-sum": 1 / sequences,
        "seq-mean-token-mean": 1 / (sequences * lengths.clamp(min=1)),
        # Only 0.7.1 takes the mean that the name promises.
        "seq-mean-token-sum-norm": torch.tensor(1 / mask.shape[1]) / (1 if FIRST_RELEASE else sequences),
    }[mode]
    return torch.where(mask > 0, factor * weight, 0.0)
