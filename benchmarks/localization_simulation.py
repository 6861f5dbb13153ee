"""GradLoc's search and the published schedule without a model, for sizes that no test machine holds.

Token gradients are vectors of 64 dimensions in random directions, all of weight 1. Ordinary norms are log-normal with
median `level`·τ and sigma 0.5 (drawn again when over τ/1.2); suspicion is norm·exp(0.16·z), z standard normal: a rank
correlation of about 0.95, as measured on a real model. A planted token's suspicion is that of its own norm (suspected)
or that of an ordinary token (unsuspected). Its norm is drawn log-uniformly: clear, 1.5 to 15 τ·sqrt(W N); hidden, 1.2 τ
to τ·sqrt(N)/1.2, in the micro-batch of a clear one. M = 4 micro-batches.

GradLoc's search is tried up to the ends asked for: `explained` or `exhaustive`. An event is explained when every
micro-batch is under its own threshold without the tokens found.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from published_schedule import Part, localize
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gradloc.search import Probe, Search

MICRO_BATCHES = 4
DIMENSIONS = 64
SIGMA = 0.5
# Of the logarithm of suspicion around that of the norm: a correlation of 0.954 of the logarithms, 0.95 of the ranks.
SUSPICION_NOISE = 0.157
LEVELS = (1 / 18, 1 / 5)

# Everything is in units of τ.
THRESHOLD = 1.0

WAYS = ("gradloc", "published")

# N, with --quick and without.
SIZES = {True: (512, 4096), False: (512, 4096, 32768)}

# (N, W, groups over their thresholds) of the largest searches that `time_planning` plans.
LONG = [(32768, 8, 1), (32768, 64, 1), (32768, 64, 64)]

Unit = tuple[int, int]


@dataclass(frozen=True)
class Result:
    """One event: each way's passes, how many planted tokens of each kind it found, and whether these explain it."""

    gradloc_passes: int
    published_passes: int
    planted: dict[str, int]
    gradloc: dict[str, int]
    published: dict[str, int]
    gradloc_explains: bool
    published_explains: bool
    wrong: int


class Event:
    """A batch with planted tokens in one or more units.

    Args:
        world_size (int), tokens (int): W and N.
        level (float): The median norm of ordinary tokens.
        names (list[str]): "clear" or "hidden", for each planted token.
        suspected (list[bool]): Whether suspicion sees it.
        generator (torch.Generator): Of all that is random.
    """

    def __init__(
        self,
        world_size: int,
        tokens: int,
        level: float,
        names: list[str],
        suspected: list[bool],
        generator: torch.Generator,
    ) -> None:
        self.world_size, self.tokens, self.level, self.generator = world_size, tokens, level, generator
        self.names: dict[tuple[Unit, int], str] = {}
        self.vectors: dict[Unit, Tensor] = {}
        self.suspicion: dict[Unit, Tensor] = {}
        unit: Unit = (0, 0)
        for i, (name, seen) in enumerate(zip(names, suspected, strict=True)):
            if i == 0 or name == "clear":
                unit = (self._integer(world_size), self._integer(MICRO_BATCHES))
            self._plant(unit, name, seen)
        # The sums of the units without planted tokens: independent entries, of the right squared norm on average.
        square = tokens * (level * math.exp(SIGMA**2)) ** 2
        shape = (world_size, MICRO_BATCHES, DIMENSIONS)
        self.sums = torch.randn(shape, generator=generator, dtype=torch.float64) * math.sqrt(square / DIMENSIONS)
        for (rank, micro_batch), vectors in self.vectors.items():
            self.sums[rank, micro_batch] = vectors.sum(0)

    def _integer(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.generator))

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _plant(self, unit: Unit, name: str, suspected: bool) -> None:
        n = self.tokens
        if unit not in self.vectors:
            norms = self.level * (SIGMA * self._normal(n)).exp()
            while (over := norms > THRESHOLD / 1.2).any():
                norms[over] = self.level * (SIGMA * self._normal(int(over.sum()))).exp()
            directions = self._normal(n, DIMENSIONS)
            self.vectors[unit] = directions * (norms / directions.norm(dim=1))[:, None]
            self.suspicion[unit] = norms * (SUSPICION_NOISE * self._normal(n)).exp()
        token = self._integer(n)
        while (unit, token) in self.names:
            token = self._integer(n)
        low, high = {
            "clear": (1.5 * math.sqrt(self.world_size * n), 15 * math.sqrt(self.world_size * n)),
            "hidden": (1.2, math.sqrt(n) / 1.2),
        }[name]
        size = low * (high / low) ** float(torch.rand((), generator=self.generator))
        vector = self.vectors[unit][token]
        ratio = size / float(vector.norm())
        self.vectors[unit][token] = vector * ratio
        if suspected:
            self.suspicion[unit][token] *= ratio
        self.names[unit, token] = name

    def solve(self, until: str) -> Result:
        gradloc_passes, gradloc = self._gradloc(until)
        published_passes, published = self._published()
        names = self.names.values()

        def count(found: set[tuple[Unit, int]]) -> dict[str, int]:
            return {name: sum(self.names.get(token) == name for token in found) for name in names}

        wrong = len((gradloc | published) - set(self.names))
        planted = count(set(self.names))
        return Result(
            gradloc_passes,
            published_passes,
            planted,
            count(gradloc),
            count(published),
            gradloc_explains=not self._over_threshold(gradloc),
            published_explains=not self._over_threshold(published),
            wrong=wrong,
        )

    def _over_threshold(self, without: Collection[tuple[Unit, int]] = ()) -> dict[Unit, float]:
        """The norms of the units that are over their thresholds without these tokens."""
        norms = {}
        for unit, vectors in self.vectors.items():
            kept = torch.ones(self.tokens, dtype=vectors.dtype)
            kept[[token for name, token in without if name == unit]] = 0.0
            norm = float((kept @ vectors).norm())
            if norm > THRESHOLD * math.sqrt(float(kept.sum())):
                norms[unit] = norm
        return norms

    def _gradloc(self, until: str) -> tuple[int, set[tuple[Unit, int]]]:
        norms = self._over_threshold()
        waiting = sorted(norms, key=lambda unit: -norms[unit])
        # What the micro-batches under their thresholds show: the root mean square of ordinary norms.
        search = Search(THRESHOLD, until=until, ordinary=self.level * math.exp(SIGMA**2))
        passes = 0
        while True:
            while waiting and search.has_room(self.world_size):
                unit = waiting.pop(0)
                search.add_group(unit, norms[unit], self.suspicion[unit], torch.ones(self.tokens))
            probes = search.next_probes(self.world_size)
            if not probes:
                found = {(culprit.group, culprit.candidate) for culprit in search.culprits}
                over = self._over_threshold(found)
                if until == "explained" and any(search.explained(unit) == (unit in over) for unit in norms):
                    raise RuntimeError("the search is mistaken about whether an event is explained")
                return passes, found
            passes += 1
            search.add_measurements([(probe, self._norm(probe)) for probe in probes])

    def _norm(self, probe: Probe) -> float:
        vectors = self.vectors[probe.group][list(probe.candidates)]
        if probe.factors is not None:
            vectors = vectors * torch.tensor(probe.factors)[:, None]
        return float(vectors.sum(0).norm())

    def _published(self) -> tuple[int, set[tuple[Unit, int]]]:
        passes = 0

        def over(part: Part) -> bool:
            nonlocal passes
            passes += 1
            if len(part.tokens) == self.tokens:
                total = self.sums[part.ranks.start : part.ranks.stop, part.micro_batch].sum(0)
            else:
                total = self.vectors[part.ranks[0], part.micro_batch][part.tokens.start : part.tokens.stop].sum(0)
            return float(total.norm()) > THRESHOLD * math.sqrt(len(part.ranks) * len(part.tokens))

        found = localize(over, self.world_size, MICRO_BATCHES, self.tokens)
        return passes + MICRO_BATCHES, {((rank, micro_batch), token) for rank, micro_batch, token in found}


def solve(
    world_size: int, tokens: int, level: float, count: int, seed: int, kind: str, until: str = "explained"
) -> list[Result]:
    """`count` events of one kind: one suspected or unsuspected token, or several, or with hidden ones."""
    results = []
    for number in range(count):
        generator = torch.Generator().manual_seed(seed + 1000 * number + 7 * world_size + tokens)
        names = ["clear"]
        if kind == "several":
            names = ["clear"] * int(torch.randint(2, 6, (), generator=generator))
        if kind == "hidden":
            names = ["clear", "hidden", "hidden", "hidden"]
        suspected = [kind == "suspected"]
        if kind in ("several", "hidden"):
            suspected = (torch.rand(len(names), generator=generator) < 0.5).tolist()
        results.append(Event(world_size, tokens, level, names, suspected, generator).solve(until))
    return results


def simulate(quick: bool, seed: int, untils: Sequence[str]) -> None:
    """Prints the tables."""
    count = 5 if quick else 20
    print(f"Rank correlation of suspicion and norm of ordinary tokens: {_rank_correlation(seed):.2f}\n")
    for until in untils:
        _print_single(quick, count, seed, until)
        _print_recall(quick, count, seed, until)


def time_planning(quick: bool, seed: int) -> None:
    """Prints the CPU time that planning takes in a pass: `next_probes` and `add_measurements`."""
    torch.set_num_threads(1)  # as Ray sets it for its workers
    print("CPU time of planning in a pass, mean (worst), for 20 passes, ordinary tokens at τ/18, M = 1\n")
    print("| N | W | loud groups | until | planning [s] | adding the groups [s] |")
    print("|---|---|---|---|---|---|")
    for tokens, width, groups in [(4096, 8, 1)] if quick else [(4096, 8, 1), *LONG]:
        for until in ("explained", "exhaustive"):
            adding, times = _planning_times(tokens, width, groups, until, seed)
            figures = f"{statistics.mean(times):.3f} ({max(times):.3f}) | {adding:.3f}"
            print(f"| {tokens} | {width} | {groups} | {until} | {figures} |", flush=True)


def _planning_times(tokens: int, width: int, groups: int, until: str, seed: int) -> tuple[float, list[float]]:
    """The CPU seconds for adding groups of heavy-tailed norms, and for each pass after it."""
    generator = torch.Generator().manual_seed(seed)
    search = Search(THRESHOLD, until, ordinary=LEVELS[0])
    vectors: list[Tensor] = []
    adding, times = 0.0, []
    for group in range(groups):
        norms = torch.randn(tokens, generator=generator, dtype=torch.float64).exp()
        directions = torch.randn(tokens, 16, generator=generator, dtype=torch.float64)
        vectors.append(directions / directions.norm(dim=1, keepdim=True) * norms[:, None])
        vectors[-1] *= 1.5 * THRESHOLD * math.sqrt(tokens) / float(vectors[-1].sum(0).norm())
        noise = (2 * SUSPICION_NOISE * torch.randn(tokens, generator=generator, dtype=torch.float64)).exp()
        suspicion, norm = vectors[-1].norm(dim=1) * noise, float(vectors[-1].sum(0).norm())
        begun = time.process_time()
        search.add_group(group, norm, suspicion, torch.ones(tokens))
        adding += time.process_time() - begun
    for _ in range(20):
        begun = time.process_time()
        search.has_room(width)
        probes = search.next_probes(width)
        times.append(time.process_time() - begun)
        if not probes:
            break
        norms_of = [float((vectors[p.group][list(p.candidates)] * _factors(p)).sum(0).norm()) for p in probes]
        begun = time.process_time()
        search.add_measurements(list(zip(probes, norms_of, strict=True)))
        times[-1] += time.process_time() - begun
    return adding, times


def _factors(probe: Probe) -> Tensor:
    return torch.ones(1) if probe.factors is None else torch.tensor(probe.factors, dtype=torch.float64)[:, None]


def _print_single(quick: bool, count: int, seed: int, until: str) -> None:
    print(
        f"GradLoc until {until}: passes for one culprit, median (worst), M = 4, ordinary tokens at τ/18; ratio to the"
    )
    print("published schedule\n")
    print("| W | N | suspected | unsuspected | published | ratio |")
    print("|---|---|---|---|---|---|")
    for world_size in [1, 8, 64] if quick else [1, 2, 4, 8, 64, 1024]:
        for tokens in SIZES[quick]:
            kinds = "suspected", "unsuspected"
            runs = [solve(world_size, tokens, LEVELS[0], count, seed, kind, until) for kind in kinds]
            ours = [[result.gradloc_passes for result in results] for results in runs]
            published = [result.published_passes for results in runs for result in results]
            ratios = [statistics.median(published) / statistics.median(passes) for passes in ours]
            cells = [f"{statistics.median(passes):g} ({max(passes)})" for passes in (*ours, published)]
            print(f"| {world_size} | {tokens} | {' | '.join(cells)} | {ratios[0]:.0f}×, {ratios[1]:.1f}× |", flush=True)
    print()


def _print_recall(quick: bool, count: int, seed: int, until: str) -> None:
    print(
        f"GradLoc until {until}: recall, median (worst) passes, events explained; half of the planted are suspected\n"
    )
    print("`several`: 2 to 5 clear tokens anywhere. `hidden`: one clear and three hidden in one micro-batch.\n")
    heads = ["ordinary tokens", "W", "N", "event", "clear: GradLoc", "published", "hidden: GradLoc", "published"]
    heads += ["passes: GradLoc", "published", "explained: GradLoc", "published"]
    print(f"| {' | '.join(heads)} |")
    print(f"{'|---' * len(heads)}|")
    for level in LEVELS:
        for world_size in [8] if quick else [1, 8, 64]:
            for tokens in SIZES[quick]:
                for kind in ("several", "hidden"):
                    results = solve(world_size, tokens, level, count, seed, kind, until)
                    recalls = [_recall(results, name, way) for name in ("clear", "hidden") for way in WAYS]
                    passes = [[getattr(result, f"{way}_passes") for result in results] for way in WAYS]
                    cells = recalls + [f"{statistics.median(p):g} ({max(p)})" for p in passes]
                    explained = [sum(getattr(result, f"{way}_explains") for result in results) for way in WAYS]
                    cells += [f"{number} of {count}" for number in explained]
                    print(f"| τ/{1 / level:g} | {world_size} | {tokens} | {kind} | {' | '.join(cells)} |", flush=True)
                    if any(result.wrong for result in results):
                        raise RuntimeError("a token under the threshold was named")
    print()


def _recall(results: list[Result], name: str, way: str) -> str:
    planted = sum(result.planted.get(name, 0) for result in results)
    found = sum(getattr(result, way).get(name, 0) for result in results)
    return f"{found / planted:.2f}" if planted else "–"


def _rank_correlation(seed: int) -> float:
    event = Event(1, 4096, LEVELS[0], ["clear"], [True], torch.Generator().manual_seed(seed))
    ((unit, vectors),) = event.vectors.items()
    ranks = torch.stack(
        [values.argsort().argsort().double() for values in (vectors.norm(dim=1), event.suspicion[unit])]
    )
    return float(torch.corrcoef(ranks)[0, 1])
