"""The search on its own, against vectors whose norms are known."""

import math

import pytest
import torch

from gradloc.search import Search, Segment

THRESHOLD = 10.0


class Tokens:
    """n token gradients in random directions: ordinary ones of norm about 1, and planted ones."""

    def __init__(self, n: int, planted: dict[int, float], seed: int = 0, ragged: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        norms = torch.rand(n, generator=generator, dtype=torch.float64) + 0.5
        for token, norm in planted.items():
            norms[token] = norm
        directions = torch.randn(n, 256, generator=generator, dtype=torch.float64)
        self.gradients = directions / directions.norm(dim=1, keepdim=True) * norms[:, None]
        self.weights = torch.full((n,), 1 / n, dtype=torch.float64)
        if ragged:
            self.weights *= 1 + 4 * torch.rand(n, generator=generator, dtype=torch.float64)

    def norm(self, tokens: list[int]) -> float:
        return float((self.gradients[tokens] * self.weights[tokens][:, None]).sum(0).norm())

    def suspicion(self, helpful: bool) -> torch.Tensor:
        true = self.gradients.norm(dim=1) * self.weights
        return true if helpful else 1 / true


def run(search: Search, tokens: dict[str, Tokens], probes_a_pass: int) -> tuple[int, int]:
    """Runs the search to its end; returns passes and probes."""
    passes = probes = 0
    while segments := search.next(probes_a_pass):
        assert len(set(segments)) == len(segments) <= probes_a_pass
        passes += 1
        probes += len(segments)
        search.record([(s, tokens[s.unit].norm(search.candidates(s))) for s in segments])
    return passes, probes


def start(tokens: dict[str, Tokens], helpful: bool = True) -> Search:
    search = Search(THRESHOLD)
    for name, unit in tokens.items():
        search.add_unit(name, unit.norm(list(range(len(unit.weights)))), unit.suspicion(helpful), unit.weights)
    return search


@pytest.mark.parametrize("helpful", [True, False])
@pytest.mark.parametrize("probes_a_pass", [1, 2, 4, 7])
@pytest.mark.parametrize("n", [1, 2, 3, 64, 500])
@pytest.mark.parametrize("count", [1, 3])
def test_finds_exactly_the_planted_tokens(n: int, count: int, probes_a_pass: int, helpful: bool) -> None:
    for seed in range(5):
        places = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:count].tolist()
        # Two units; each planted token alone lifts any segment that holds it over the segment's threshold.
        planted = {place: 3 * THRESHOLD * math.sqrt(n) * (i + 1) for i, place in enumerate(places)}
        tokens = {"a": Tokens(n, planted, seed, ragged=True), "b": Tokens(n, planted, seed + 100)}
        search = start(tokens, helpful)
        run(search, tokens, probes_a_pass)
        assert sorted((c.unit, c.candidate) for c in search.culprits) == sorted((u, p) for u in "ab" for p in planted)
        for culprit in search.culprits:
            assert culprit.norm == pytest.approx(tokens[culprit.unit].norm([culprit.candidate]))
        assert search.open_segments == []


@pytest.mark.parametrize("n", [64, 1024])
def test_a_helpful_prior_needs_two_probes_and_a_misleading_one_stays_logarithmic(n: int) -> None:
    for seed in range(5):
        tokens = {"a": Tokens(n, {n // 3: 1000 * THRESHOLD}, seed)}
        passes, probes = run(start(tokens), tokens, 2)
        assert (passes, probes) == (1, 2)
        _, probes = run(start(tokens, helpful=False), tokens, 1)
        # Two siblings a level; log2(10 n) levels at most.
        assert probes <= 2 * (math.log2(10 * n) + 1)


def test_what_a_sibling_cannot_account_for_is_split_without_a_probe() -> None:
    tokens = {"a": Tokens(8, {5: 1000 * THRESHOLD})}
    search = Search(THRESHOLD)
    search.add_unit("a", tokens["a"].norm(list(range(8))), torch.ones(8), tokens["a"].weights)
    first = search.next(1)[0]
    assert 5 not in search.candidates(first)
    search.record([(first, tokens["a"].norm(search.candidates(first)))])
    assert all(segment.size < 8 - first.size for segment in search.open_segments)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_token_is_a_culprit(bad: float) -> None:
    tokens = Tokens(100, {})
    search = Search(THRESHOLD)
    suspicion = torch.ones(100)
    suspicion[17] = math.nan
    search.add_unit("a", math.nan, suspicion, tokens.weights)
    while segments := search.next(2):
        search.record([(s, bad if 17 in search.candidates(s) else tokens.norm(search.candidates(s))) for s in segments])
    assert [c.candidate for c in search.culprits] == [17] and search.broken == []


def test_a_unit_that_is_not_finite_without_any_token_is_broken_and_costs_one_pass() -> None:
    search = Search(THRESHOLD)
    search.add_unit("a", math.nan, torch.ones(100), torch.full((100,), 0.01))
    segments = search.next(2)
    assert segments[0].size == 0
    search.record([(segment, math.nan) for segment in segments])
    assert search.broken == ["a"] and search.culprits == [] and search.next(2) == []


def test_thresholds_are_the_published_ones_for_equal_weights() -> None:
    search = Search(THRESHOLD)
    search.add_unit("a", 1e9, torch.ones(64), torch.full((64,), 1 / 64))
    assert search.threshold(Segment("a", 0, 64)) == pytest.approx(THRESHOLD / math.sqrt(64))
    assert search.threshold(Segment("a", 3, 4)) == pytest.approx(THRESHOLD / 64)


def test_a_spike_of_many_small_tokens_has_no_culprit_and_ends() -> None:
    n = 256
    tokens = Tokens(n, {})
    tokens.gradients = torch.ones(n, 4, dtype=torch.float64)  # all aligned: each of norm 2, together 2 n w
    search = start({"a": tokens})
    run(search, {"a": tokens}, 4)
    assert search.culprits == [] and search.open_segments == []
    assert search.diffuse
    for segment, norm in search.diffuse:  # over its threshold, and its halves are not
        assert norm > search.threshold(segment)
        assert segment.size <= 2 * (THRESHOLD / 2) ** 2


def test_a_unit_without_candidates_has_nothing_to_measure() -> None:
    search = Search(THRESHOLD)
    search.add_unit("a", 1e9, torch.zeros(0), torch.zeros(0))
    assert search.next(4) == []
