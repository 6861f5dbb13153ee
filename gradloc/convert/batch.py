# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Records as the micro-batches of one optimizer step, with the weights and coefficients that a loss gives them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..bundles import limits
from ..measure.micro_batch import MicroBatch, MicroBatchName
from .records import Record, RecordError

# By name, the KL loss of a token, of r = log p_ref − log p.
KL_LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda r: -r,
    "k2": lambda r: r.square() / 2,
    "k3": lambda r: r.exp() - r - 1,
    "low_var_kl": lambda r: (r.exp() - r - 1).clamp(-10, 10),
}

# By name, as verl calls them: the weights of the tokens of a batch.
AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Loss:
    """PPO's clipped loss, which is also GRPO's, with a KL loss beside it."""

    loss_agg_mode: str = "token-mean"  # one of `AGG_MODES`
    clip_low: float = 0.2  # the ratio is clipped under 1 minus this
    clip_high: float = 0.2  # and over 1 plus this
    clip_c: float | None = None  # with a negative advantage, the loss is at most this times −A (dual clip)
    kl_coef: float = 0.0  # what the KL loss is multiplied by
    kl_type: str = "low_var_kl"  # one of `KL_LOSSES`
    loss_scale_factor: float | None = None  # what seq-mean-token-sum-norm divides by; default: the longest response

    def weights(self, masks: Sequence[Tensor]) -> list[Tensor]:
        """The weight of each token: L = Σ w_t ℓ_t over the batch.

        Args:
            masks (Sequence[Tensor]): Each response's mask, float64 of shape (response length,).

        Returns:
            list[Tensor]: The same shapes.
        """
        lengths = [float(mask.sum()) for mask in masks]
        responses = max(sum(length > 0 for length in lengths), 1)
        if self.loss_agg_mode == "token-sum":
            return [mask.clone() for mask in masks]
        if self.loss_agg_mode == "token-mean":
            return [mask / max(sum(lengths), 1.0) for mask in masks]
        if self.loss_agg_mode == "seq-mean-token-mean":
            return [mask / (max(length, 1.0) * responses) for mask, length in zip(masks, lengths, strict=True)]
        factor = 1.0
        if self.loss_agg_mode == "seq-mean-token-sum-norm":
            factor = self.loss_scale_factor or float(max(len(mask) for mask in masks))
        return [mask / (responses * factor) for mask in masks]

    def coefficients(self, tokens: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """∂L/∂log p of each token of a response, by autograd.

        Args:
            tokens (Mapping[str, Tensor]): `weight`, `advantage`, `log_prob`, and if available `old_log_prob`,
                `rollout_is_weight` and `ref_log_prob`; float64 of shape (response length,).

        Returns:
            tuple[Tensor, Tensor | None]: The coefficients, and the KL loss's part of them (None without one).
        """
        log_prob = tokens["log_prob"].clone().requires_grad_()
        with torch.enable_grad():
            policy = _gradient(self._policy_loss(log_prob, tokens), log_prob) * tokens["weight"]
            if not self.kl_coef:
                return policy, None
            kl_loss = self.kl_coef * KL_LOSSES[self.kl_type](tokens["ref_log_prob"] - log_prob)
            kl = _gradient(kl_loss, log_prob) * tokens["weight"]
        return policy + kl, kl

    def _policy_loss(self, log_prob: Tensor, tokens: Mapping[str, Tensor]) -> Tensor:
        advantage = tokens["advantage"]
        # Without old log-probs the loss still has a gradient: that of a ratio of 1.
        old = tokens.get("old_log_prob", log_prob.detach())
        ratio = (log_prob - old).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        found = torch.maximum(-advantage * ratio, -advantage * clipped)
        if self.clip_c is not None:
            found = torch.where(advantage < 0, torch.minimum(-advantage * self.clip_c, found), found)
        return found * tokens["rollout_is_weight"] if "rollout_is_weight" in tokens else found


def _gradient(loss: Tensor, log_prob: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss.sum(), log_prob)
    return found


@dataclass(frozen=True)
class Batch:
    """The micro-batches of an optimizer step."""

    # As returned by `MicroBatch.portable`; the inputs are the samples, as `samples`.
    micro_batches: dict[MicroBatchName, MicroBatch]
    uids: dict[tuple[int, int], str]  # by rank and row, of those that have one
    world_size: int  # the number of data-parallel ranks
    notes: list[str]  # what was taken where the records lack something


def build_batch(
    records: Sequence[Record],
    loss: Loss,
    micro_batch_size: int | None = None,
    old_from_rollout: bool = False,
) -> Batch:
    """Gives records their weights and coefficients, and divides them into micro-batches.

    A record's weights and coefficients are those of the loss of the whole batch; a rank's are W times as large, because
    data-parallel training takes the mean over W ranks.

    Args:
        records (Sequence[Record]): All records of the step, at least one, in order; their tokens get what they lack.
        loss (Loss): Where the records have no coefficients or weights.
        micro_batch_size (int, optional): How many responses a micro-batch has, where records name none; default: as
            few as a bundle's limit allows.
        old_from_rollout (bool): Whether the loss's old log-probs are those of the rollout.

    Raises:
        RecordError: The records do not fit together.
    """
    _check_alike(records)
    unknown = sorted({name for record in records for name in record.unknown})
    notes = [f"Fields that were not read: {', '.join(unknown[:16])}."] if unknown else []
    parts, rows = _divided(records, micro_batch_size)
    _check_size(records, parts.values())
    _add_log_probs(records, old_from_rollout, notes)
    world_size = 1 + max(record.rank for record in records)
    _add_coefficients(records, loss, world_size, notes)
    micro_batches = {}
    for name, indices in parts.items():
        here = [records[index] for index in indices]
        if len(here) > limits.ROWS:
            raise RecordError(f"Micro-batch {name[1]} of rank {name[0]} has over {limits.ROWS:,} responses.")
        samples, own_rows = [record.row for record in here], [rows[index] for index in indices]
        micro_batch = MicroBatch({"samples": samples}, own_rows, (torch.get_rng_state(), None), _padded(here))
        micro_batches[name] = micro_batch.portable(1.0)
    uids = {(r.rank, rows[index]): r.uid for index, r in enumerate(records) if r.uid is not None}
    return Batch(micro_batches, uids, world_size, notes)


def _check_alike(records: Sequence[Record]) -> None:
    """Refuses records that do not all have the same fields."""
    first = records[0]
    for record in records:
        if missing := sorted(first.tokens.keys() ^ record.tokens.keys()):
            has, lacks = (record, first) if missing[0] in record.tokens else (first, record)
            raise RecordError(f"{has.place} has values for '{missing[0]}', and {lacks.place} has none.")
        if (record.micro_batch is None) != (first.micro_batch is None):
            has, lacks = (first, record) if record.micro_batch is None else (record, first)
            raise RecordError(f"{has.place} names a micro-batch, and {lacks.place} does not.")


def _add_log_probs(records: Sequence[Record], old_from_rollout: bool, notes: list[str]) -> None:
    """Gives all records log-probs, and old ones where any are known."""
    names, place = records[0].tokens.keys(), records[0].place
    if old_from_rollout and "rollout_log_prob" not in names:
        raise RecordError(f"{place}, field 'rollout_log_probs': it is missing.")
    source = next((name for name in ("log_prob", "old_log_prob", "rollout_log_prob") if name in names), None)
    if source is None:
        raise RecordError(
            f"{place}, field 'log_probs': it is missing, and so are 'old_log_probs' and 'rollout_log_probs'."
        )
    if source != "log_prob":
        notes.append(
            f"There are no log_probs of training: {source}s are taken instead, as they are in the first step after a "
            "rollout."
        )
    for tokens in (record.tokens for record in records):
        tokens["log_prob"] = tokens[source]
        if old_from_rollout:
            tokens["old_log_prob"] = tokens["rollout_log_prob"]


def _add_coefficients(records: Sequence[Record], loss: Loss, world_size: int, notes: list[str]) -> None:
    """Gives records the weights and coefficients that they have on their ranks."""
    names = {*records[0].tokens}
    if "weight" not in names:
        weights = loss.weights([record.tokens["response_mask"] for record in records])
        for record, weight in zip(records, weights, strict=True):
            record.tokens["weight"] = weight
        notes.append(f"The weights are those of {loss.loss_agg_mode} over all records.")
    if "coefficient" not in names:
        if "old_log_prob" not in names:
            notes.append("There are no old log-probs: all ratios are 1.")
        if loss.kl_coef and "ref_log_prob" not in names:
            raise RecordError(f"{records[0].place}, field 'ref_log_probs': it is missing, and --kl-coef needs it.")
        notes.append("The coefficients are computed from the loss that the options name.")
    for tokens in (record.tokens for record in records):
        if "coefficient" not in names:
            coefficient, kl = loss.coefficients(tokens)
            # Not a product: what the mask leaves out has no gradient, whatever it is.
            tokens["coefficient"] = torch.where(tokens["response_mask"] == 1, coefficient, 0.0)
            if kl is not None:
                tokens["kl_coefficient"] = kl
        for name in {"weight", "coefficient", "kl_coefficient"} & tokens.keys():
            tokens[name] = tokens[name] * world_size


def _divided(
    records: Sequence[Record], micro_batch_size: int | None
) -> tuple[dict[MicroBatchName, list[int]], list[int]]:
    """The indices of the records of each micro-batch, in order, and each record's row in its rank's mini-batch."""
    by_rank: dict[int, list[int]] = {}
    rows = []
    for index, record in enumerate(records):
        of_rank = by_rank.setdefault(record.rank, [])
        rows.append(len(of_rank))
        of_rank.append(index)
    # As few responses as fit: a spike stands out most in a small micro-batch.
    a_rank = max(limits.CONVERTED_MICRO_BATCHES // len(by_rank), 1)
    size = micro_batch_size or max(-(-len(indices) // a_rank) for indices in by_rank.values())
    parts: dict[MicroBatchName, list[int]] = {}
    for rank, indices in sorted(by_rank.items()):
        for number, index in enumerate(indices):
            micro_batch = records[index].micro_batch
            parts.setdefault((rank, number // size if micro_batch is None else micro_batch), []).append(index)
    return dict(sorted(parts.items())), rows


def _check_size(records: Sequence[Record], parts: Iterable[Sequence[int]]) -> None:
    """Refuses micro-batches that are too large once responses are padded: a long one may be beside many short ones."""
    values = len({*records[0].tokens, "log_prob", "weight", "coefficient"})
    total = 0
    for part in parts:
        cells = len(part) * max(records[index].row.response_length for index in part)
        size = cells * (4 * values + 8)  # float32, and the ids
        total += size
        for what, bytes_of_it, most in (
            ("a micro-batch", size, limits.BUNDLE_BYTES),
            ("all micro-batches", total, limits.TOTAL_BYTES),
        ):
            if bytes_of_it > most:
                raise RecordError(
                    f"With responses padded to the longest, {what} would have over {most:,} bytes: divide the records "
                    "into smaller micro-batches (--micro-batch-size), or leave out the longest responses."
                )


def _padded(records: Sequence[Record]) -> dict[str, Tensor]:
    """The tensors of a micro-batch, of shape (responses, response length)."""
    tokens = {
        name: pad_sequence([record.tokens[name].float() for record in records], batch_first=True)
        for name in records[0].tokens
    }
    ids = [record.row.input_ids[record.row.prompt_length :] for record in records]
    return {**tokens, "token_id": pad_sequence(ids, batch_first=True)}
