"""Natural and coherent spikes of a real actor: with nothing planted, which few tokens explain them?

All ranks call everything here.
"""

from __future__ import annotations

import math
import random
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from localization_actor import (
    PROMPT,
    VOCABULARY,
    Place,
    Shape,
    Solver,
    UnshardedCopy,
    build_batch,
    copy_batch,
    gather,
    token_norms,
)
from torch import Tensor
from verl import DataProto

Unit = tuple[int, int]  # (rank, micro-batch)

# The gradient is linear in the advantages, as these are on-policy updates. So they are scaled, and τ stays.
THRESHOLD = 1.0
UNDER = 0.5  # the norm of the other micro-batches, as a fraction of their thresholds
CLIPPED = 0.1  # the share of tokens without an advantage in the other rows of sparse batches
# Coherent events start here: closer to the threshold, leaving out a few tokens would explain them.
COHERENT_EXCESS = 1.5
TRIES = 20  # how many coherent batches in a row may have a token over τ


@dataclass(frozen=True)
class Spike:
    """A batch with some micro-batches at their thresholds and the others at half of theirs, and the truth about it.

    Args:
        batch (DataProto): This rank's rows.
        grams (dict[Unit, Tensor]): Of each of the former ⟨g_s, g_t⟩ of all its tokens; float64, shape (N, N).
    """

    batch: DataProto
    grams: Mapping[Unit, Tensor]

    def at(self, excess: float, own_rows: Mapping[Unit, slice]) -> Spike:
        """The same with the micro-batches at their thresholds `excess` times over these."""
        batch = copy_batch(self.batch)
        for unit in self.grams.keys() & own_rows.keys():
            batch.batch["advantages"][own_rows[unit]] *= excess
        return Spike(batch, {unit: gram * excess**2 for unit, gram in self.grams.items()})

    def norms(self) -> dict[Place, float]:
        """‖g_t‖ of every token of the micro-batches over their thresholds."""
        return {
            (*unit, token): norm
            for unit, gram in self.grams.items()
            for token, norm in enumerate(gram.diagonal().sqrt().tolist())
        }

    def coherence(self) -> float:
        """The squared norm over the sum of the tokens' squared norms: 1 if they have nothing in common, N at most.

        Of the micro-batch over its threshold where it is smallest.
        """
        return min(float(gram.sum() / gram.trace()) for gram in self.grams.values())

    def is_explained(self, tokens: Collection[Place]) -> bool:
        """Whether without these tokens every micro-batch is under its threshold."""
        return all(self.rest(unit, tokens) <= THRESHOLD for unit in self.grams)

    def rest(self, unit: Unit, without: Iterable[Place]) -> float:
        """norm/sqrt(Σ w_t²) of a micro-batch over its threshold without these tokens."""
        return _rest(self.grams[unit], [token for *place, token in without if tuple(place) == unit])

    def needed(self) -> list[Place]:
        """The fewest tokens that explain it, largest gradient norm first."""
        needed: list[Place] = []
        for unit, gram in self.grams.items():
            order = gram.diagonal().argsort(descending=True).tolist()
            fewest = next(k for k in range(len(order) + 1) if _rest(gram, order[:k]) <= THRESHOLD)
            needed += [(*unit, token) for token in order[:fewest]]
        return needed


class NaturalEvents:
    """Natural and coherent events of one (W, M, N), searched, with the truth from brute force.

    Args:
        micro_batches (int): M.
        tokens (int): N, of each micro-batch.
        setting (Namespace): The options of `localization.py`.
    """

    def __init__(self, micro_batches: int, tokens: int, setting: Namespace) -> None:
        self._shape = shape = Shape.of(tokens)
        self._micro_batches = micro_batches
        self._setting = setting
        self._copy = UnshardedCopy(shape, micro_batches)
        self._solver = Solver(shape, micro_batches, THRESHOLD, setting.until)
        rows = {m: slice(m * shape.rows, (m + 1) * shape.rows) for m in range(micro_batches)}
        self._own_rows = {(dist.get_rank(), m): here for m, here in rows.items()}

    def records(self) -> Iterator[dict[str, Any]]:
        """Solves all events. Each is a batch of its own, and all x scale the same batches."""
        sizes: dict[str, Any] = {"part": "natural", "sigma": self._setting.sigma}
        sizes |= {"W": dist.get_world_size(), "M": self._micro_batches, "N": self._shape.tokens}
        for kind in self._setting.kinds:
            least = COHERENT_EXCESS if kind == "coherent" else 0.0
            excess = [x for x in self._setting.excess if x >= least]
            for over_threshold in self._setting.over_threshold:
                for number in range(self._setting.events if excess else 0):
                    seed = 1_000_000 * self._setting.seed + 1000 * number
                    spike = self._draw(kind, over_threshold, seed, max(excess))
                    for x in excess:
                        for record in self._solve(spike.at(x, self._own_rows)):
                            place = {"kind": kind, "x": x, "over_threshold": over_threshold, "seed": seed}
                            yield sizes | place | record

    def _draw(self, kind: str, over_threshold: int, seed: int, excess: float) -> Spike:
        """An event; a coherent one has no token over τ, even at `excess` times the threshold."""
        for attempt in range(TRIES):
            spike = self._draw_batch(kind, over_threshold, seed + attempt)
            if kind != "coherent" or max(spike.norms().values()) * excess <= THRESHOLD:
                return spike
        raise RuntimeError(
            f"no coherent batch without a token over τ at {excess:g} times the threshold: lower --excess"
        )

    def _draw_batch(self, kind: str, over_threshold: int, seed: int) -> Spike:
        """A batch of which so many micro-batches are over their thresholds: the largest, or any that are made coherent.

        A rollout that runs into a loop repeats a token to its end, and all of it has one advantage. The contexts are
        nearly the same, and so are the gradients.

        In a sparse batch, half of the rows of each micro-batch have advantages of zero, as those of a group with equal
        rewards, and so have a tenth of the other tokens. These stand for those that PPO clips, of which an on-policy
        update has none: a clipped token has no gradient either.
        """
        batch = build_batch(self._shape, self._micro_batches, seed, self._setting.sigma)
        if kind == "sparse":
            generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
            advantages = batch.batch["advantages"]
            moves = torch.rand(advantages.shape, generator=generator) > CLIPPED
            moves &= (torch.arange(len(moves)) % self._shape.rows >= self._shape.rows // 2).unsqueeze(1)
            batch.batch["advantages"] = torch.where(moves, advantages, 0.0)
        units = [(rank, m) for rank in range(dist.get_world_size()) for m in range(self._micro_batches)]
        chance = random.Random(seed)
        looped = set(chance.sample(units, over_threshold)) if kind == "coherent" else set()
        for unit in sorted(looped):
            ids = torch.tensor([[chance.randrange(VOCABULARY)] for _ in range(self._shape.rows)])
            if unit in self._own_rows:
                rows = self._own_rows[unit]
                batch.batch["responses"][rows] = ids
                batch.batch["input_ids"][rows, PROMPT:] = ids
                batch.batch["advantages"][rows] = 1.0
        own = {unit: self._copy.token_equivalent(batch, unit[1]) for unit in self._own_rows}
        sizes = {unit: size for part in gather(own) for unit, size in part.items()}
        over = looped or set(sorted(units, key=sizes.__getitem__)[-over_threshold:])
        for unit, rows in self._own_rows.items():
            batch.batch["advantages"][rows] *= (1.0 if unit in over else UNDER) * THRESHOLD / sizes[unit]
        own_grams = {unit: self._copy.gram_matrix(batch, unit[1]) for unit in self._own_rows.keys() & over}
        grams = {unit: gram for part in gather(own_grams) for unit, gram in part.items()}
        return Spike(batch, dict(sorted(grams.items())))

    def _solve(self, spike: Spike) -> Iterator[dict[str, Any]]:
        """Searches an event.

        Yields:
            dict: For each end of GradLoc's search: `largest`, the largest token's norm in τ; `over`, how many tokens
                are over τ; how many are `needed`, in one micro-batch `needed_at_most`, and whether each of these is
                over τ (`explainable`). In `gradloc`: how many tokens are `named`, how many of these are not over τ
                (`wrong`), whether they explain the event (`explained_truth`), `passes`, `seconds`; what the event says
                of itself, and the largest relative error of the norms in it (`norm_error`), of tokens and of
                micro-batches without them.
        """
        norms, needed = spike.norms(), spike.needed()
        record: dict[str, Any] = {
            "coherence": spike.coherence(),
            "largest": max(norms.values()) / THRESHOLD,
            "over": sum(norm > THRESHOLD for norm in norms.values()),
            "needed": len(needed),
            "needed_at_most": max(Counter(place[:2] for place in needed).values()),
            "explainable": all(norms[place] > THRESHOLD for place in needed),
        }

        for until in self._setting.until:
            result = self._solver.search(spike.batch, until)
            said = result.pop("culprits")
            errors = [said[place] / norms[place] - 1 for place in said.keys() & norms.keys()]
            errors += [norm / spike.rest(unit, said) - 1 for unit, norm in result.pop("rests").items()]
            # Tokens of other micro-batches have not been measured yet.
            measured = norms | token_norms(self._copy, spike.batch, said.keys() - norms.keys())
            judged = {
                "named": len(said),
                "wrong": sum(not measured[place] > THRESHOLD for place in said),
                "explained_truth": spike.is_explained(said),
                "norm_error": max(map(abs, errors), default=0.0),
            }
            yield record | {"until": until, "gradloc": result | judged}


def _rest(gram: Tensor, without: Sequence[int]) -> float:
    """norm/sqrt(Σ w_t²) of a micro-batch without these tokens, all of one weight; 0 without all of them.

    Tokens without a gradient do not count.
    """
    kept = (gram.diagonal() != 0).to(gram.dtype)
    kept[list(without)] = 0.0
    # If tokens cancel, rounding can make the squared norm negative.
    return math.sqrt(max(float(kept @ gram @ kept), 0.0) / max(float(kept.sum()), 1.0))
