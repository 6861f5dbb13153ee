"""The published schedule of the localization, with which GradLoc's search is compared.

It uses only the norm of the reduced gradient. For a batch of M micro-batches on W ranks with N tokens each:

1. compute every micro-batch alone (M passes), and continue with those over their threshold;
2. bisect the ranks, and measure both halves each time (2 log2 W passes for one culprit);
3. bisect the tokens of a rank in the same way (2 log2 N passes for one culprit);
4. compute the whole batch again, because the passes have overwritten its gradient (M passes; left to the caller).
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """What is left of the batch in one pass: some tokens of one micro-batch on some ranks."""

    micro_batch: int
    ranks: range
    tokens: range


def localize(
    over: Callable[[Part], bool], world_size: int, micro_batches: int, tokens: int
) -> list[tuple[int, int, int]]:
    """Runs steps 1 to 3.

    Args:
        over (Callable): Computes a part in one pass of all ranks; whether its reduced norm is over its threshold.
        world_size (int): W.
        micro_batches (int): M.
        tokens (int): N, the tokens of a micro-batch on one rank.

    Returns:
        list: (rank, micro-batch, token) of each single token over its threshold.
    """
    all_ranks, all_tokens = range(world_size), range(tokens)

    def ranks_over(micro_batch: int) -> list[int]:
        return _bisect(all_ranks, lambda half: over(Part(micro_batch, half, all_tokens)))

    def tokens_over(micro_batch: int, rank: int) -> list[int]:
        return _bisect(all_tokens, lambda half: over(Part(micro_batch, range(rank, rank + 1), half)))

    return [
        (rank, micro_batch, token)
        for micro_batch in range(micro_batches)
        if over(Part(micro_batch, all_ranks, all_tokens))
        for rank in ranks_over(micro_batch)
        for token in tokens_over(micro_batch, rank)
    ]


def _bisect(whole: range, over: Callable[[range], bool]) -> list[int]:
    """The single members of `whole`, which is over its threshold, that are over theirs."""
    if len(whole) == 1:
        return [whole[0]]
    middle = len(whole) // 2
    return [member for half in (whole[:middle], whole[middle:]) if over(half) for member in _bisect(half, over)]
