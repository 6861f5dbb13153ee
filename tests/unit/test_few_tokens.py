"""The search for few tokens that explain a spike, against vectors whose norms are known; its sums against loops."""

import math
import random
import sys
from itertools import accumulate
from statistics import median

import pytest
import torch
from notation import cases
from test_search import THRESHOLD, Coherent, Tokens, answer, run, start

from gradloc.search.candidates import Candidates
from gradloc.search.few_tokens import estimate
from gradloc.search.search import MOST_GROUPS, Search


class Natural(Tokens):
    """Heavy-tailed norms that suspicion knows roughly; the unit is `excess` times over its threshold."""

    def __init__(self, n: int, excess: float, seed: int, ragged: bool = False) -> None:
        super().__init__(n, {}, seed, ragged)
        generator = torch.Generator().manual_seed(seed + 1)
        norms = torch.randn(n, generator=generator, dtype=torch.float64).exp()
        self.gradients *= (norms / self.gradients.norm(dim=1))[:, None]
        whole = self.norm(list(range(n))) / (THRESHOLD * float(self.weights.norm()))
        self.gradients *= excess / whole
        self.noise = (0.3 * torch.randn(n, generator=generator, dtype=torch.float64)).exp()

    def suspicion(self, helpful: bool | None) -> torch.Tensor:
        return self.gradients.norm(dim=1) * self.weights * self.noise

    @property
    def needed(self) -> int:
        """The fewest tokens, largest first, without which the rest is under its threshold."""
        order = (self.gradients.norm(dim=1) * self.weights).argsort(descending=True).tolist()
        return next(k for k in range(len(order) + 1) if not is_over(self, order[k:]))


def is_over(tokens: Tokens, rest: list[int]) -> bool:
    return not tokens.norm(rest) <= THRESHOLD * float(tokens.weights[rest].norm())


def explain(tokens: dict[str, Tokens], width: int, ordinary: float | None = 1.0) -> tuple[Search, int]:
    search = start(tokens, ordinary=ordinary, until="explained")
    passes, _ = run(search, tokens, width, most=100)
    return search, passes


def explained(search: Search, name: str) -> bool:
    """Whether the group without its culprits was measured under its threshold."""
    rest = search.groups[name].found.rest
    return rest is not None and not rest[0].is_over(rest[1])


def check(search: Search, tokens: dict[str, Tokens]) -> None:
    """What is called explained is, by the vectors themselves, and every culprit is over τ alone."""
    for name, unit in tokens.items():
        culprits = [culprit.candidate for culprit in search.culprits if culprit.group == name]
        for candidate in culprits:
            assert unit.norm([candidate]) > THRESHOLD * float(unit.weights[candidate])
        rest = [i for i in range(len(unit.weights)) if i not in culprits]
        if explained(search, name):
            assert not is_over(unit, rest)
            token_set, norm = search.groups[name].found.rest
            assert list(token_set.candidates) == rest and norm == pytest.approx(unit.norm(rest))
        else:
            assert any(found.group == name for found, _ in search.diffuse)
    assert search.open_sets == []


def test_a_lone_token_under_its_threshold_ends_the_search() -> None:
    """As where a probe's rounding is another than training's. Another group's search goes on."""
    tokens = {"one": Tokens(1, {0: 0.9999 * THRESHOLD}), "other": Natural(128, 1.5, 0)}
    search = start({"other": tokens["other"]}, ordinary=1.0, until="explained")
    search.add_group("one", 1.0001 * THRESHOLD, torch.ones(1), torch.ones(1, dtype=torch.float64))
    run(search, tokens, 2)
    assert not [culprit for culprit in search.culprits if culprit.group == "one"] and search.open_sets == []


@cases("excess width most", (1.1, 1, 4), (1.1, 2, 3), (1.1, 4, 2), (1.5, 1, 11), (1.5, 4, 4))
def test_a_natural_spike_is_soon_explained_by_few_tokens(excess: float, width: int, most: int) -> None:
    passes, named, needed = [], [], []
    for seed in range(8):
        tokens = {"a": Natural(128, excess, seed)}
        search, count = explain(tokens, width)
        check(search, tokens)
        assert explained(search, "a") or tokens["a"].needed > 128 / 8
        passes.append(count)
        named.append(len(search.culprits))
        needed.append(tokens["a"].needed)
    assert median(passes) <= most
    assert median(named) <= 2 * median(needed)


@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize("n", [1, 2, 5, 17, 200])
def test_whatever_the_spike_a_search_ends_explained_or_diffuse(n: int, width: int) -> None:
    for seed in range(3):
        tokens = {x: Natural(n, x, seed, ragged=seed > 0) for x in (1.01, 1.5, 3.0)}
        search, _ = explain(tokens, width, [None, 0.3, 3.0][seed % 3])
        check(search, tokens)


@pytest.mark.parametrize(("width", "most"), [(1, 10), (2, 6), (4, 4)])
def test_a_spike_of_many_tokens_is_soon_called_diffuse(width: int, most: int) -> None:
    natural, coherent = [], []
    for seed in range(8):
        tokens = {"a": Natural(128, 3.0, seed)}
        search, count = explain(tokens, width, THRESHOLD / 2)
        check(search, tokens)
        natural.append(count)
        tokens = {"a": Coherent(128, 0.5, {}, seed)}
        search, count = explain(tokens, width, THRESHOLD / 5)
        check(search, tokens)
        assert not explained(search, "a") and search.culprits == [] and search.given_up and search.more_over() == 0
        coherent.append(count)
    assert median(natural) <= most and median(coherent) <= most


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("width", [2, 4, 16])
def test_tokens_that_suspicion_does_not_expect_are_found(width: int, count: int) -> None:
    found = 0
    for seed in range(5):
        places = torch.randperm(256, generator=torch.Generator().manual_seed(seed))[:count].tolist()
        tokens = {"a": Tokens(256, {place: 30 * THRESHOLD * (1 + i) for i, place in enumerate(places)}, seed)}
        search = start(tokens, helpful=None, ordinary=1.0, until="explained")
        run(search, tokens, width, most=60)
        check(search, tokens)
        found += {culprit.candidate for culprit in search.culprits} == set(places)
    assert found >= 4


def test_a_token_is_named_only_if_it_is_needed() -> None:
    """The second token is over τ, but the first explains the spike by itself."""
    tokens = {"a": Tokens(100, {5: 300 * THRESHOLD, 50: 2 * THRESHOLD})}
    for width in (1, 4):
        search, _ = explain(tokens, width)
        assert [culprit.candidate for culprit in search.culprits] == [5] and explained(search, "a")
        assert search.more_over() == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("width", [1, 4])
def test_the_rest_of_a_unit_that_is_not_a_number_is_measured(bad: float, width: int) -> None:
    tokens, places = {"a": Tokens(100, {})}, {17, 60}
    tokens["a"].broken = dict.fromkeys(places, bad)
    search = start(tokens, helpful=None, ordinary=1.0, until="explained")
    run(search, tokens, width)
    assert {culprit.candidate for culprit in search.culprits} == places
    assert explained(search, "a") and search.broken == []
    assert search.loudest() is None and not search.may_have_more_than_tokens and search.more_over() == 0


def test_no_tokens_are_not_measured_and_no_broken_weights_taken() -> None:
    search = Search(THRESHOLD, "explained")
    search.add_group("a", 1e9, torch.zeros(0), torch.zeros(0))
    assert search.next_probes(4) == [] and "a" not in search.groups and search.more_over() is None
    for bad in (math.inf, math.nan):
        with pytest.raises(ValueError, match="not finite"):
            Candidates("a", 2.0, torch.ones(2), torch.tensor([1.0, bad]))


def test_tokens_that_cancel_out_explain_the_spike_together() -> None:
    """Two gradients of opposite signs, as a token has in a good and in a bad answer, and a third beside them."""
    for seed in range(4):
        for width in (1, 2, 4):
            tokens = {"a": Tokens(128, {6: 20 * THRESHOLD}, seed)}
            generator = torch.Generator().manual_seed(seed)
            direction = torch.randn(256, generator=generator, dtype=torch.float64)
            direction /= direction.norm()
            tokens["a"].gradients[52] = 60 * THRESHOLD * direction
            tokens["a"].gradients[98] = -45 * THRESHOLD * direction
            search, passes = explain(tokens, width, ordinary=0.5 * THRESHOLD)
            check(search, tokens)
            assert explained(search, "a") and passes <= 30


@pytest.mark.parametrize("count", [2, 3])
def test_one_rank_soon_calls_several_micro_batches_diffuse(count: int) -> None:
    passes = []
    for seed in range(8):
        tokens: dict[str, Tokens] = {f"{i}": Natural(128, 3.0, 100 * seed + i) for i in range(count)}
        search, needed = explain(tokens, 1, ordinary=THRESHOLD / 2)
        check(search, tokens)
        assert search.diffuse
        passes.append(needed)
    assert max(passes) <= 20


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("helpful", [True, False])
def test_a_clear_token_beside_a_diffuse_unit_is_found(helpful: bool, width: int) -> None:
    tokens = {"diffuse": Natural(128, 3.0, seed=1), "clear": Tokens(128, {77: 300 * THRESHOLD})}
    for names in (["diffuse", "clear"], ["clear", "diffuse"]):
        search = start({name: tokens[name] for name in names}, helpful, THRESHOLD / 2, "explained")
        run(search, tokens, width, most=40)
        assert explained(search, "clear") and not explained(search, "diffuse")
        assert [culprit.candidate for culprit in search.culprits if culprit.group == "clear"] == [77]


def test_micro_batches_are_measured_ahead_only_within_the_budget() -> None:
    """Each of ten units is explained by eleven tokens, in 12 passes; the budget is 40."""
    tokens = {i: Tokens(128, dict.fromkeys(range(12), 8 * THRESHOLD), seed=i) for i in range(10)}
    search, waiting, passes = Search(THRESHOLD, "explained", THRESHOLD / 5), list(tokens), 0
    while passes < 40:
        while waiting and search.has_room(1, 40 - passes):
            name = waiting.pop(0)
            unit = tokens[name]
            search.add_group(name, unit.norm(list(range(128))), unit.suspicion(True), unit.weights)
        passes += 1
        search.add_measurements([(p, tokens[p.group].measure(p)) for p in search.next_probes(1, 41 - passes)])
    assert sum(explained(search, name) for name in tokens if name in search.groups) == 3
    assert len(waiting) == 6


def test_a_rest_takes_no_memory_for_the_tokens_that_it_has() -> None:
    """What is left of a large set by difference would keep the memory of all."""
    search, _ = explain({"a": Natural(4096, 1.5, 0)}, width=8)
    lacking = [*search.groups["a"].search._rests]
    assert len(lacking) > 2 and all(sys.getsizeof(each) < 1000 + 100 * len(each) for each in lacking)


def test_of_many_groups_a_few_are_searched_at_once() -> None:
    """As in a collapse on many ranks, where each has several."""
    tokens = {i: Tokens(64, {5: 40 * THRESHOLD}, seed=i) for i in range(3 * MOST_GROUPS)}
    search, waiting, searched = Search(THRESHOLD, "explained", THRESHOLD / 5), list(tokens), []
    while True:
        while waiting and search.has_room(256):
            name = waiting.pop(0)
            unit = tokens[name]
            search.add_group(name, unit.norm(list(range(64))), unit.suspicion(True), unit.weights)
        if not (probes := search.next_probes(256)):
            break
        searched.append(len({probe.group for probe in probes}))
        answer(search, tokens, probes)
    assert searched == [MOST_GROUPS] * 3 and all(explained(search, name) for name in tokens)


@pytest.mark.parametrize("equal", [True, False])
def test_halves_have_about_half_of_the_prior_each(equal: bool) -> None:
    """The first of the cuts that are nearest, by sums that every rank adds in the same order."""
    for n in (2, 3, 4, 7, 100):
        suspicion = torch.ones(n) if equal else torch.rand(n, generator=torch.Generator().manual_seed(n)) ** 4
        tokens = Candidates("a", THRESHOLD, suspicion, torch.ones(n))
        ranked = tokens.likeliest(torch.arange(n)).tolist()
        sums = list(accumulate(tokens.prior_of[ranked].tolist()))
        cut = 1 + min(range(n - 1), key=lambda i: abs(sums[i] - sums[-1] / 2))
        first, second = tokens.halves(tokens.without([]))
        assert [*first.candidates] == sorted(ranked[:cut]) and [*second.candidates] == sorted(ranked[cut:])


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
    # The sums of token sets have the right bits, so that every rank makes the same decisions.
    squares, priors = tokens.square_of.tolist(), tokens.prior_of.tolist()
    for removed in rests:
        rest = tokens.without(removed)
        halves = tokens.halves(rest) if rest.candidates else ()
        for piece in (rest, *halves):
            assert piece.square == math.fsum(squares[t] for t in piece.candidates)
            assert piece.expected == math.fsum(priors[t] for t in piece.candidates)
