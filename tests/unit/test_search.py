"""The search on its own, against vectors whose norms are known."""

import math
import random
from typing import Any

import pytest
import torch

from gradloc.search.candidates import Candidates, TokenSet
from gradloc.search.search import Search

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

        # The norm of every set that has one of these tokens.
        self.broken: dict[int, float] = {}

    def norm(self, tokens: list[int], factors: torch.Tensor | None = None) -> float:
        scaled = self.weights[tokens] * (torch.ones(len(tokens)) if factors is None else factors).double()
        found = float((self.gradients[tokens] * scaled[:, None]).sum(0).norm())
        return next((bad for token, bad in self.broken.items() if token in tokens), found)

    def measure(self, probe: TokenSet) -> float:
        return self.norm(list(probe.candidates), probe.factors)

    def suspicion(self, helpful: bool | None) -> torch.Tensor:
        if helpful is None:
            return torch.ones_like(self.weights)
        true = self.gradients.norm(dim=1) * self.weights
        return true if helpful else 1 / true


def answer(search: Search, tokens: dict[Any, Tokens], probes: list[TokenSet]) -> None:
    search.add_measurements([(probe, tokens[probe.group].measure(probe)) for probe in probes])


def run(search: Search, tokens: dict[Any, Tokens], probes_a_pass: int, most: int = 10_000) -> tuple[int, int]:
    """Runs the search to its end, which has to come after `most` passes at the latest; returns passes and probes."""
    passes = probes = 0
    while found := search.next_probes(probes_a_pass):
        factors = [None if probe.factors is None else tuple(probe.factors.tolist()) for probe in found]
        distinct = {(probe.group, probe.candidates, of) for probe, of in zip(found, factors, strict=True)}
        assert len(distinct) == len(found) <= probes_a_pass and passes < most
        assert all(probe.candidates or tokens[probe.group].broken for probe in found)
        passes += 1
        probes += len(found)
        answer(search, tokens, found)
    return passes, probes


def start(
    tokens: dict[str, Tokens], helpful: bool | None = True, ordinary: float | None = None, until: str = "exhaustive"
) -> Search:
    search = Search(THRESHOLD, until, ordinary)
    for name, unit in tokens.items():
        search.add_group(name, unit.norm(list(range(len(unit.weights)))), unit.suspicion(helpful), unit.weights)
    return search


@pytest.mark.parametrize("ordinary", [1.0, None])
@pytest.mark.parametrize("helpful", [True, False])
@pytest.mark.parametrize("probes_a_pass", [1, 7])
@pytest.mark.parametrize("n", [1, 3, 64, 500])
def test_finds_exactly_the_planted_tokens(n: int, probes_a_pass: int, helpful: bool, ordinary: float | None) -> None:
    for seed in range(2):
        places = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: 1 + 2 * seed].tolist()
        # Two units; each planted token alone lifts any token set that holds it over that set's threshold.
        planted = {place: 3 * THRESHOLD * math.sqrt(n) * (i + 1) for i, place in enumerate(places)}
        tokens = {"a": Tokens(n, planted, seed, ragged=True), "b": Tokens(n, planted, seed + 100)}
        search = start(tokens, helpful, ordinary)
        run(search, tokens, probes_a_pass)
        assert sorted((c.group, c.candidate) for c in search.culprits) == sorted((u, p) for u in "ab" for p in planted)
        for group, candidate in search.culprits:
            assert search.groups[group].tokens.alone[candidate] == pytest.approx(tokens[group].norm([candidate]))
        assert search.open_sets == []


def test_tokens_whose_set_is_under_its_threshold_are_found() -> None:
    """One token takes the unit over its threshold; others, over τ but not over τ·sqrt(n), can hide among the rest."""
    n = 500
    hidden = {7: 10 * THRESHOLD, 123: 5 * THRESHOLD, 321: 4 * THRESHOLD}
    plain = unusual = 0
    for seed in range(10):
        tokens = {"a": Tokens(n, {250: 100 * THRESHOLD, **hidden}, seed)}
        searches = start(tokens), start(tokens, ordinary=1.0)
        for search in searches:
            while probes := search.next_probes(2):
                unusual += search.open_sets == []
                answer(search, tokens, probes)
            assert search.open_sets == [] and search.diffuse == []
        plain += len(searches[0].culprits)
        assert {c.candidate for c in searches[1].culprits} == {250, *hidden}
    assert plain < 40  # it is the ordinary level that finds them all
    assert unusual > 0  # a set that is not over its threshold is none of the open ones


@pytest.mark.parametrize("n", [64, 1024])
def test_right_suspicion_needs_two_probes_and_wrong_a_logarithm(n: int) -> None:
    for seed in range(5):
        tokens = {"a": Tokens(n, {n // 3: 1000 * THRESHOLD}, seed)}
        passes, probes = run(start(tokens), tokens, 2)
        assert (passes, probes) == (1, 2)
        _, probes = run(start(tokens, helpful=False), tokens, 1)
        # Two siblings a level; log2(10 n) levels at most.
        assert probes <= 2 * (math.log2(10 * n) + 1)


@pytest.mark.parametrize("n", [64, 512, 4096])
@pytest.mark.parametrize(("probes_a_pass", "most"), [(1, 4), (2, 2), (4, 2), (64, 2)])
def test_codes_find_a_culprit_that_suspicion_misses(probes_a_pass: int, most: int, n: int) -> None:
    """Passes for two digits, one for the token alone and (in the same where two probes fit) for all beside it."""
    for seed in range(3):
        place = (311 * seed) % n
        tokens = {"a": Tokens(n, {place: 20 * THRESHOLD * math.sqrt(n)}, seed)}
        search = start(tokens, helpful=False, ordinary=1.0)
        passes, _ = run(search, tokens, probes_a_pass)
        assert [c.candidate for c in search.culprits] == [place]
        assert passes <= most


class Coherent(Tokens):
    """Tokens under τ that share a direction: (cosine between any two) is about `cosine`."""

    def __init__(self, n: int, cosine: float, planted: dict[int, float], seed: int) -> None:
        super().__init__(n, planted, seed)
        common = torch.randn(256, generator=torch.Generator().manual_seed(seed + 1000), dtype=torch.float64)
        norms = self.gradients.norm(dim=1, keepdim=True)
        mixed = math.sqrt(1 - cosine) * self.gradients / norms + math.sqrt(cosine) * common / common.norm()
        size = 0.99 * THRESHOLD / mixed.norm(dim=1).max()
        alone = torch.tensor([place in planted for place in range(n)])
        self.gradients = torch.where(alone[:, None], self.gradients, size * mixed)


@pytest.mark.parametrize("cosine", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("n", [64, 1000])
def test_a_diffuse_micro_batch_is_given_up_after_a_few_passes(n: int, cosine: float) -> None:
    tokens = {"a": Coherent(n, cosine, {}, seed=n)}
    search = start(tokens)
    passes, _ = run(search, tokens, 2)
    assert search.culprits == [] and search.open_sets == []
    assert passes <= 30
    assert search.diffuse and all(norm > token_set.threshold for token_set, norm in search.diffuse)
    # Sets that are left unmeasured are listed.
    given_up = [candidate for token_set in search.given_up for candidate in token_set.candidates]
    assert len(given_up) == len(set(given_up)) > 0 and not search.groups["a"].tokens.alone.keys() & set(given_up)


@pytest.mark.parametrize("helpful", [True, None])
@pytest.mark.parametrize("n", [64, 500])
def test_a_loud_token_is_found_among_aligned_ones(n: int, helpful: bool | None) -> None:
    """What it adds is half of what all others do together; the prior knows it, or nothing."""
    for seed in range(5):
        place = seed * n // 5
        tokens = {"a": Coherent(n, 0.9, {place: n * THRESHOLD / 2}, seed)}
        search = start(tokens, helpful)
        run(search, tokens, 2)
        assert [c.candidate for c in search.culprits] == [place]


def test_many_aligned_tokens_over_tau_are_all_found() -> None:
    """A response that repeats itself: every token is a culprit."""
    tokens = {"a": Coherent(64, 0.9, {}, seed=1)}
    tokens["a"].gradients *= 1.2
    search = start(tokens)
    run(search, tokens, 2)
    over = (tokens["a"].gradients.norm(dim=1) > THRESHOLD).sum()
    assert over > 40 and len(search.culprits) == over


@pytest.mark.parametrize("probes_a_pass", [1, 4])
@pytest.mark.parametrize("cosine", [0.3, 0.8])
def test_evenly_spaced_parallel_culprits_are_found(cosine: float, probes_a_pass: int) -> None:
    """The last tokens of 24 responses: until a token set has only one of them, none stands out more than the whole."""
    n = 24 * 160
    places = list(range(159, n, 160))
    tokens = {"a": Coherent(n, cosine, {}, seed=2)}
    common = tokens["a"].gradients[places] / tokens["a"].gradients[places].norm(dim=1, keepdim=True)
    tokens["a"].gradients = Tokens(n, {}, seed=2).gradients
    tokens["a"].gradients[places] = common * 1.3 * THRESHOLD * math.sqrt(n)
    search = start(tokens, helpful=None, ordinary=1.0)
    passes = 0
    while passes < 128 and (probes := search.next_probes(probes_a_pass, 128 - passes)):
        passes += 1
        answer(search, tokens, probes)
    found = {culprit.candidate for culprit in search.culprits}
    assert found <= set(places)
    assert found == set(places) if probes_a_pass == 4 else search.open_sets and len(found) > 2


def test_wide_passes_give_up_as_soon_as_narrow_ones() -> None:
    """In a wide pass something always stands out by chance, and readings of numbers join what is followed.

    All tokens pull exactly the same way, with norms that differ as log-normal numbers do.
    """
    tokens = {seed: Tokens(8192, {}, seed) for seed in range(4)}
    for seed, unit in tokens.items():
        normal = torch.randn(8192, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        unit.gradients = 2 * torch.exp(0.5 * normal)
    search = start(tokens, helpful=None)
    passes, _ = run(search, tokens, 128)
    assert passes < 40 and search.diffuse and search.given_up


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_token_is_a_culprit(bad: float) -> None:
    tokens = Tokens(100, {})
    tokens.broken[17] = bad
    search, suspicion = Search(THRESHOLD, "exhaustive"), torch.ones(100)
    suspicion[17] = math.nan
    search.add_group("a", math.nan, suspicion, tokens.weights)
    run(search, {"a": tokens}, 2)
    assert [c.candidate for c in search.culprits] == [17] and search.broken == []


def test_an_overflow_of_the_loss_scale_blames_no_token() -> None:
    search, ones = Search(THRESHOLD, "exhaustive"), torch.ones(100)
    search.add_group("a", math.inf, ones, ones, may_overflow=True)
    assert search.next_probes(2) == [] and search.culprits == search.broken == []
    search.add_group("b", 1e9, ones, ones, may_overflow=True)
    assert {probe.group for probe in search.next_probes(2)} == {"b"} and search.loudest() == ("b", 1e9)


def test_a_wide_pass_does_not_give_up_a_promising_probe() -> None:
    """Most of its probes point at no token, as most tokens pull the same way; one of them holds what is broken."""
    tokens = {"a": Coherent(500, 0.9, {}, seed=3)}
    tokens["a"].broken[17] = math.nan
    search = start(tokens, helpful=None)
    run(search, tokens, 64)
    assert [c.candidate for c in search.culprits] == [17]


@pytest.mark.parametrize("seed", [94, 144])
def test_parts_over_the_threshold_are_searched_as_long_as_others(seed: int) -> None:
    """Tokens that are only in parts over their threshold: they are found late, after probes that point at nothing."""
    choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n, width = choice.choice([20, 40, 64, 128]), choice.choice([1, 2, 4, 8])
    unit = Tokens(n, {})
    unit.weights = (torch.rand(n, generator=generator) + 0.1).double()
    norms = 0.15 * (0.8 * torch.randn(n, generator=generator, dtype=torch.float64)).exp()
    unit.gradients = torch.randn(n, 64, generator=generator, dtype=torch.float64) / 8 * norms[:, None]
    for _ in range(choice.choice([1, 1, 2, 3, 5])):
        token = choice.randrange(n)
        unit.gradients[token] *= choice.choice([3, 8, 20]) / norms[token]
    noise = (torch.randn(n, generator=generator) * choice.choice([0.3, 1, 3])).exp()
    search = Search(1.0, "exhaustive", 0.2)
    search.add_group("a", unit.norm(list(range(n))), unit.gradients.norm(dim=1) * unit.weights * noise, unit.weights)
    run(search, {"a": unit}, width)
    assert {c.candidate for c in search.culprits} == set((unit.gradients.norm(dim=1) > 1).nonzero().flatten().tolist())


class Drawn(Tokens):
    """Tokens of any kind: norms with heavy tails, some coherent, planted ones of any size, now and then a NaN."""

    def __init__(self, choice: random.Random) -> None:
        n = choice.choice([1, 2, 3, 5, 17, 64, 200])
        self.planted = {choice.randrange(n) for _ in range(choice.choice([0, 1, 1, 2, 3, 5]))}
        super().__init__(n, {}, seed=choice.randrange(10**6), ragged=choice.random() < 0.5)
        generator = torch.Generator().manual_seed(choice.randrange(10**6))
        common = torch.randn(256, generator=generator, dtype=torch.float64)
        mixed = self.gradients + choice.choice([0, 0, 0.5, 3]) * common / common.norm()
        norms = (choice.choice([0.1, 0.5, 1.0]) * torch.randn(n, generator=generator, dtype=torch.float64)).exp()
        norms = (norms * choice.choice([0.1, 1.0, 3.0])).clamp(max=0.95 * THRESHOLD)
        for place in self.planted:
            norms[place] = THRESHOLD * math.exp(choice.uniform(0.1, math.log(20 * math.sqrt(n) + 2)))
        self.gradients = mixed / mixed.norm(dim=1, keepdim=True) * norms[:, None]
        self.broken = {choice.randrange(n): math.nan} if choice.random() < 0.1 else {}
        self.kind = choice.choice(["good", "bad", "flat", "zero"])

    def suspicion(self, helpful: bool | None) -> torch.Tensor:
        flat = {"flat": 1.0, "zero": 0.0}
        return torch.full_like(self.weights, flat[self.kind]) if self.kind in flat else super().suspicion(helpful)


@pytest.mark.parametrize("seed", range(2))
def test_random_searches_end_and_find_what_stands_out(seed: int) -> None:
    choice = random.Random(seed)
    for _ in range(100):
        tokens = {name: Drawn(choice) for name in range(choice.choice([1, 1, 2, 4]))}
        search = Search(THRESHOLD, "exhaustive", choice.choice([None, 0.1, 1.0, 3.0]))
        known = choice.random() < 0.8
        for name, unit in tokens.items():
            norm = unit.measure(Candidates(name, THRESHOLD, unit.weights, unit.weights).without([]))
            over = not norm <= THRESHOLD * float(unit.weights.norm())
            if over or not known:
                search.add_group(name, norm if known else None, unit.suspicion(unit.kind == "good"), unit.weights)
        width = choice.choice([1, 2, 3, 4, 8, 64])
        run(search, tokens, width, most=1000)
        found = [(culprit.group, culprit.candidate) for culprit in search.culprits]
        assert len(set(found)) == len(found) and search.open_sets == []
        for name, unit in tokens.items():
            norms = unit.gradients.norm(dim=1) * unit.weights
            here = {candidate for other, candidate in found if other == name}
            assert all(i in unit.broken or norms[i] > THRESHOLD * unit.weights[i] for i in here)
            assert unit.broken.keys() <= here
            if not unit.broken:
                clear = {i for i in unit.planted if norms[i] > 3 * THRESHOLD * unit.weights.norm()}
                assert clear <= here
