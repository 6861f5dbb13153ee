"""The sums and estimates of the search, against every token added up again."""

import math
import random

import pytest
import torch

from gradloc.search.candidates import LEAST, Candidates, ExactSum
from gradloc.search.estimate import Estimate


@pytest.mark.parametrize("seed", range(6))
def test_a_sum_without_some_numbers_has_the_right_bits(seed: int) -> None:
    generator = random.Random(seed)
    size = generator.choice([1, 200, 3000])
    values = [generator.gauss(0, 1) * 10 ** generator.uniform(-10 * seed, 6 * seed) for _ in range(size)]
    values[0] = generator.choice([0.0, 5e-324, 1e290])
    removed = set(generator.sample(range(size), generator.randint(0, size)))
    rest = [value for i, value in enumerate(values) if i not in removed]
    tensor = torch.tensor(values, dtype=torch.float64)
    assert ExactSum(tensor).without(values[i] for i in removed) == math.fsum(rest)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_sum_of_numbers_that_are_not_finite_is_refused(bad: float) -> None:
    values = torch.ones(5, dtype=torch.float64)
    values[3] = bad
    with pytest.raises(ValueError, match="not finite"):
        ExactSum(values)


def candidates(seed: int) -> tuple[Candidates, dict[frozenset[int], float]]:
    """Random tokens, some measured alone, and random rests; many have equal suspicion."""
    generator = random.Random(seed)
    n = generator.randint(2, 60)
    suspicion = torch.tensor([generator.choice([1.0, 2.0, 0.0, generator.lognormvariate(0, 3)]) for _ in range(n)])
    weights = torch.tensor([generator.choice([0.1, 1.0, 3.0]) for _ in range(n)])
    tokens = Candidates("a", 2.0, suspicion, weights)
    rests = {frozenset(): generator.uniform(1, 100)}
    for _ in range(generator.randint(0, 6)):
        removed = frozenset(generator.sample(range(n), generator.randint(1, n)))
        rests[removed] = generator.choice([generator.uniform(0, 100), generator.uniform(0, 100), math.nan])
    alone = generator.sample(range(n), generator.randint(0, n // 2))
    tokens.alone |= {t: generator.choice([generator.uniform(0, 30), math.inf]) for t in alone}
    return tokens, rests


def gains(tokens: Candidates, rests: dict[frozenset[int], float], base: frozenset[int]) -> list[float]:
    """What the estimate says, with every token scaled and added up for every rest."""
    energy = [rests[base] ** 2 * float(part) for part in tokens.suspected]
    for token, norm in tokens.alone.items():
        energy[token] = norm * norm if math.isfinite(norm) else 0.0
    for removed, norm in rests.items():
        kept = [t for t in range(len(energy)) if t not in removed]
        free = [t for t in kept if t not in tokens.alone]
        expected = math.fsum(energy[t] for t in free)
        if math.isfinite(norm) and expected > 0:
            known = math.fsum(energy[t] for t in kept if t in tokens.alone)
            for t in free:
                energy[t] *= max((norm * norm - known) / expected, LEAST)
    return [e - tokens.tau**2 * square for e, square in zip(energy, tokens.square_of.tolist(), strict=True)]


@pytest.mark.parametrize("seed", range(30))
def test_the_estimate_is_that_of_scaling_every_token(seed: int) -> None:
    tokens, rests = candidates(seed)
    base = min((removed for removed, norm in rests.items() if math.isfinite(norm)), key=len)
    estimate, expected = Estimate(tokens, rests, base), gains(tokens, rests, base)
    n = len(expected)
    found_gains = estimate.gains([*range(n)])
    assert found_gains == pytest.approx(expected, rel=1e-9, abs=1e-9)
    outside = math.fsum(gain for t, gain in enumerate(expected) if t not in base)
    assert estimate.excess == pytest.approx(outside, rel=1e-9, abs=1e-6)
    possible = [t for t in range(n) if t in tokens.over or t not in tokens.alone]
    assert estimate.count == len(possible)
    assert estimate.count_in_base == sum(t in base for t in possible)
    order = sorted(possible, key=lambda t: (t not in base, -found_gains[t], t))
    assert estimate.sort(possible) == order
    for count in (1, 5, n):
        found = estimate.likeliest(count)
        assert found == order[: len(found)] and len(found) == min(estimate.count_in_base + count, len(order))


@pytest.mark.parametrize("seed", range(8))
def test_the_sums_of_token_sets_have_the_right_bits(seed: int) -> None:
    tokens, rests = candidates(seed)
    squares, priors = tokens.square_of.tolist(), tokens.prior_of.tolist()
    n = len(squares)
    for removed in rests:
        rest = tokens.without(removed)
        kept = [t for t in range(n) if t not in removed]
        assert list(rest.candidates) == kept
        halves = tokens.halves(rest) if kept else ()
        # Of a set whose left-out tokens are known, and of one that is only a list.
        apart = [tokens.apart(piece, kept[-1]) for piece in (rest, tokens.token_set(kept)) if kept]
        for pieces in (halves, *apart):
            assert sorted(t for piece in pieces for t in piece.candidates) == kept
        for alone, *_ in apart:
            assert alone.candidates == (kept[-1],)
        if kept:
            assert tokens.least_square_in(rest) == min(squares[t] for t in kept)
        for piece in (rest, *halves, *(piece for pieces in apart for piece in pieces)):
            assert list(piece.candidates) == sorted(piece.candidates)
            assert tokens.square_in(piece) == math.fsum(squares[t] for t in piece.candidates)
            assert tokens.expected(piece) == math.fsum(priors[t] for t in piece.candidates)
            assert {*tokens.left_out(piece)} == {*range(n)} - {*piece.candidates}
        threshold = tokens.tau * math.sqrt(tokens.square_in(rest))
        assert not tokens.is_over_without(removed, threshold)
        assert tokens.is_over_without(removed, math.nextafter(threshold, math.inf))
