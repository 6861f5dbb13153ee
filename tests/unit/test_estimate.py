"""The sums and estimates of the search, against every token added up again."""

import math
import random

import pytest
import torch

from gradloc.search.candidates import Candidates
from gradloc.search.few_tokens import estimate


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        Candidates("a", 2.0, torch.ones(2), torch.tensor([1.0, bad]))


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
                energy[t] *= max((norm * norm - known) / expected, 1e-6)
    return [e - tokens.tau**2 * square for e, square in zip(energy, tokens.square_of.tolist(), strict=True)]


@pytest.mark.parametrize("seed", range(12))
def test_the_estimate_is_that_of_scaling_every_token(seed: int) -> None:
    tokens, rests = candidates(seed)
    base = min((removed for removed, norm in rests.items() if math.isfinite(norm)), key=len)
    found, expected = estimate(tokens, rests), gains(tokens, rests, base)
    n = len(expected)
    found_gains = found.gains.tolist()
    assert found.base == base and found_gains == pytest.approx(expected, rel=1e-9, abs=1e-9)
    outside = math.fsum(gain for t, gain in enumerate(expected) if t not in base)
    assert found.excess == pytest.approx(outside, rel=1e-9, abs=1e-6)
    possible = [t for t in range(n) if t in tokens.over or t not in tokens.alone]
    assert found.in_base == sum(t in base for t in possible)
    assert found.order == sorted(possible, key=lambda t: (t not in base, -found_gains[t], t))


def test_an_estimate_stays_finite() -> None:
    tokens = Candidates("a", 2.0, torch.rand(200), torch.ones(200))
    rests = {frozenset(range(i)): 1e-150 if i % 2 else 1e150 for i in range(100)}
    found = estimate(tokens, rests)
    assert math.isfinite(found.excess) and found.gains.isfinite().all()


@pytest.mark.parametrize("seed", range(4))
def test_the_sums_of_token_sets_have_the_right_bits(seed: int) -> None:
    tokens, rests = candidates(seed)
    squares, priors = tokens.square_of.tolist(), tokens.prior_of.tolist()
    for removed in rests:
        rest = tokens.without(removed)
        kept = [t for t in range(len(squares)) if t not in removed]
        halves = tokens.halves(rest) if kept else ()
        assert list(rest.candidates) == kept
        assert sorted(t for piece in halves for t in piece.candidates) == (kept if halves else [])
        for piece in (rest, *halves):
            assert list(piece.candidates) == sorted(piece.candidates)
            assert piece.square == math.fsum(squares[t] for t in piece.candidates)
            assert piece.expected == math.fsum(priors[t] for t in piece.candidates)
        assert not rest.is_over(rest.threshold) and rest.is_over(math.nextafter(rest.threshold, math.inf))
