# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The facts about culprits, of which the ranks that have their data tell the others."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..fsdp import collectives
from ..measure.mini_batch import MiniBatch
from ..search.groups import Token
from ..search.investigation import Investigation
from .token_facts import response_evidence, token_evidence

# What is known of a culprit, for which the search has no use: see `token_evidence` and `response_evidence`.
Facts = dict[str, Any]


def token_facts_of(investigation: Investigation, tokens: Sequence[Token]) -> dict[Token, Facts]:
    """The facts about some tokens, the same on every rank. A collective call.

    Args:
        investigation (Investigation): The search, after its end.
        tokens (Sequence[Token]): The same on every rank: its culprits, or others.

    Raises:
        RankFailedError: A rank could not tell of its tokens.
    """
    mini_batch = investigation.mini_batch
    by_rank: dict[int, list[Token]] = {}
    for token in tokens:
        by_rank.setdefault(token[0][0], []).append(token)
    found: dict[Token, Facts] = {}
    for rank, of_rank in by_rank.items():
        # Not an all-gather, which would pad what each rank sends to the longest.
        sender = rank * mini_batch.model.sequence_parallel_size
        found |= collectives.broadcast(partial(_own_facts, mini_batch, of_rank), sender)
    return found


def _own_facts(mini_batch: MiniBatch, culprits: Sequence[Token]) -> dict[Token, Facts]:
    indices = {index for (_, index), _, _ in culprits}
    columns = {i: mini_batch.micro_batches[i].portable(mini_batch.scale, inputs=False).tokens for i in indices}
    return {
        (name, row, position): {
            **token_evidence(columns[name[1]], row, position),
            **response_evidence(columns[name[1]], row, position),
        }
        for name, row, position in culprits
    }
