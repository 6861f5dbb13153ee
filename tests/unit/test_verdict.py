"""The verdict on a spike: the shares of ordinary tokens against a plain loop, and which cause is named."""

import itertools
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from evidence import verdict_on
from notation import Caplog, cases
from scripts import launch
from torch import Tensor

import gradloc.judge
from gradloc.evidence.ordinary import ordinary_counts, ordinary_shares, token_medians
from gradloc.evidence.token_facts import token_evidence
from gradloc.judge.rules import RARE_NORM, RULES, SOURCES
from gradloc.judge.verdict import CAUSES, CHECK_UNKNOWN, COMMON, EXPLAINED, LIFT, MOST_CULPRITS, find_cause
from gradloc.measure.micro_batch import MicroBatch
from gradloc.sources import APART, classify, is_apart

ROWS, LENGTH = 6, 14
OPTIONAL = ("advantage", "old_log_prob", "ref_log_prob", "rollout_log_prob", "kl_coefficient", "after_eos", "entropy")
UNUSUAL = {"advantage": 9.0, "weight": 8.0, "old_log_prob": -6.0, "rollout_log_prob": 0.0, "kl_coefficient": 3.0}


def micro_batch(seed: int, without: tuple[str, ...]) -> MicroBatch:
    """Tokens of which each rule holds for some, with numbers that are not finite, in the padding as well."""
    random.seed(seed)
    torch.manual_seed(seed)
    shape = (ROWS, LENGTH)
    lengths = torch.randint(0, LENGTH + 1, (ROWS, 1))
    log_prob = -torch.rand(shape) * 2
    position = torch.arange(LENGTH)
    # Rows of one turn, and of two with a gap.
    gap = (position >= 5) & (position < 5 + torch.randint(0, 3, (ROWS, 1)))
    second_turn = position >= 7
    tokens: dict[str, Tensor] = {
        "response_mask": ((position < lengths) & ~gap).float(),
        "token_id": torch.randint(0, 99, shape),
        "weight": torch.full(shape, 0.5),
        "coefficient": torch.randn(shape) * (torch.rand(shape) > 0.2),
        "advantage": torch.randn(shape),
        "log_prob": log_prob,
        "old_log_prob": log_prob + torch.randn(shape) / 4,
        "ref_log_prob": log_prob.clone(),
        "rollout_log_prob": log_prob + torch.randn(shape) * torch.randint(0, 3, (ROWS, 1)) / 2,
        "kl_coefficient": torch.randn(shape) / 5,
        "after_eos": torch.rand(shape) < 0.1,
        "entropy": torch.rand(shape),
        "entropy_coefficient": torch.where(torch.rand(shape) < 0.1, 9.0, 0.01),
    }
    for name, value in UNUSUAL.items():
        tokens[name][torch.rand(shape) < 0.1] = value
    tokens["log_prob"][torch.rand(shape) < 0.1] = -8.0
    retokenized = torch.rand(ROWS, 1) < 0.3
    log_ratio = torch.where(second_turn, -3.0, 0.1)
    tokens["rollout_log_prob"] = torch.where(retokenized, tokens["log_prob"] - log_ratio, tokens["rollout_log_prob"])
    tokens["entropy_coefficient"] *= tokens["coefficient"] != 0
    for name in ("log_prob", "coefficient", "advantage", "rollout_log_prob", "old_log_prob"):
        for value in (math.nan, math.inf, -math.inf):
            tokens[name][random.randrange(ROWS), random.randrange(LENGTH)] = value
    tokens["weight"][0, 0] = 0.0
    tokens["advantage"][1] = 0.0
    kept = {name: tensor for name, tensor in tokens.items() if name not in without}
    return MicroBatch({}, [*range(ROWS)], (torch.zeros(1), None), kept)


def shares_of_a_loop(
    micro_batches: list[MicroBatch], culprits: set[tuple[int, int, int]], medians: Any, scale: float
) -> dict[str, float | None]:
    """The shares, one token at a time, by the rules for culprits."""
    found: list[list[str]] = []
    apart: list[bool | None] = []
    for index, one in enumerate(micro_batches):
        tokens = one.portable(scale, inputs=False).tokens
        for row in range(ROWS):
            for position in range(LENGTH):
                coefficient = float(tokens["coefficient"][row, position])
                moves = coefficient != 0 and tokens["weight"][row, position] != 0
                if not (tokens["response_mask"][row, position] and moves) or (index, row, position) in culprits:
                    continue
                facts = token_evidence(tokens, row, position)
                if facts["advantage"] == 0:
                    continue
                is_finite = math.isfinite(coefficient) and math.isfinite(facts["log_prob"])
                facts |= {"grad_norm": 1.0 if is_finite else math.nan, "layer_norms": {"a": 1.0}}
                found.append(classify(facts, medians))
                apart.append(is_apart(facts["rollout_log_prob"], facts["old_log_prob"]))
    shares = {rule.name: sum(rule.name in names for names in found) / len(found) for rule in RULES}
    known = [each for each in apart if each is not None]
    return {**shares, APART: sum(known) / len(known) if known else None}


@cases(
    "without scale", ((), 1024.0), *(((name,), 1.0) for name in OPTIONAL), (("old_log_prob", "rollout_log_prob"), 1.0)
)
def test_shares_of_ordinary_tokens_are_those_of_a_plain_loop(without: tuple[str, ...], scale: float) -> None:
    micro_batches = [micro_batch(seed, without) for seed in range(5)]
    for one in micro_batches:
        for name in {"coefficient", "entropy_coefficient"} & one.tokens.keys():
            one.tokens[name] *= scale
    culprits = {(index, row, position) for index in (0, 3) for row in range(0, ROWS, 2) for position in range(4)}
    medians = token_medians(micro_batches)

    def shares(culprits: set[tuple[int, int, int]], medians: Any) -> dict[str, float | None]:
        return ordinary_shares([ordinary_counts(micro_batches, culprits, medians, scale)])

    found = shares(culprits, medians)
    assert found == {**shares_of_a_loop(micro_batches, culprits, medians, scale), "layer": None}
    assert without or all(found[rule.name] for rule in RULES if rule.name != "layer"), "each rule is tested"
    # With a limit for the advantage, it holds for fewer.
    if "advantage" not in without:
        limited = shares(culprits, {**medians, "least_advantage": 9.0})
        assert 0 < limited["advantage"] < found["advantage"]
        assert {**limited, "advantage": found["advantage"]} == found
    # Without ordinary tokens, nothing is known of them.
    for one in micro_batches:
        one.tokens["coefficient"][:] = 0.0
        one.tokens.pop("entropy_coefficient", None)
    assert shares(set(), medians) == dict.fromkeys([*(rule.name for rule in RULES), APART])


NONE = dict.fromkeys([rule.name for rule in RULES], 0.0)
EVEN = dict.fromkeys("abcde", 1.0)


@cases(
    "culprits ordinary cause",
    ({}, {}, None),
    ({"advantage": MOST_CULPRITS}, {}, "advantage"),
    ({"advantage": MOST_CULPRITS - 0.01}, {}, None),
    # What a quarter of ordinary tokens have as well is no cause.
    ({"unlikely": 1.0}, {"unlikely": COMMON}, None),
    ({"unlikely": 1.0}, {"unlikely": COMMON - 0.01}, "unlikely"),
    ({"unlikely": 0.6}, {"unlikely": 0.6 / LIFT}, "unlikely"),
    ({"unlikely": 0.6}, {"unlikely": 0.6 / LIFT + 0.01}, None),
    # One NaN makes the whole gradient NaN.
    ({"nonfinite": 0.1, "unlikely": 1.0}, {}, "nonfinite"),
    ({"nonfinite": 0.1, "unlikely": 1.0}, {"nonfinite": 0.05}, "unlikely"),
    # The most specific of those that hold for about as many culprits.
    ({"unsampled": 0.95, "unlikely": 1.0}, {}, "unsampled"),
    ({"unsampled": 1.0, "token": 1.0}, {"unsampled": 0.3}, "token"),
    # The turns of a response are compared with each other, not with ordinary tokens, which may have the same fault.
    ({"retokenized": 0.9, "misaligned": 1.0}, {"retokenized": 0.6, "misaligned": 0.2}, "retokenized"),
    # Nothing is known of ordinary tokens.
    ({"advantage": 1.0}, {"advantage": None}, None),
    ({"layer": 1.0}, {"layer": None}, "layer"),
)
def test_a_cause_is_specific(culprits: dict[str, float], ordinary: dict[str, float | None], cause: str | None) -> None:
    assert find_cause({**NONE, **culprits}, {**NONE, **ordinary}, 20) == CAUSES.get(cause)
    # What few culprits would have by chance is no cause.
    for count, of_ordinary, found in ((1, 0.09, "token"), (1, 0.11, None), (2, 0.2, "token")):
        assert find_cause({**NONE, "token": 1.0}, {**NONE, "token": of_ordinary}, count) == CAUSES.get(found)


@cases(
    "usual cause",
    # "a" has a thirteenth of an ordinary token: 81% has 51 times the odds, and 13 times those of a quarter.
    ({"a": 1.0, "b": 2.0, "c": 2.0, "d": 2.0}, "layer"),
    ({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, None),
    # Ordinary tokens have it as well.
    ({"a": 100.0, "b": 1.0}, None),
    (None, None),
)
def test_a_layer_counts_with_far_more_than_is_ordinary(usual: dict[str, float] | None, cause: str | None) -> None:
    found = changed(event(["layer"], ["layer"]), layer_norms={"a": 0.9, "b": math.sqrt(0.19)})
    assert verdict_on({**found, "ordinary_layer_norms": usual}, {**NONE, "layer": None})["cause"] == cause


def event(*sources: list[str], **changes: Any) -> dict[str, Any]:
    return {
        "culprits": [culprit(names) for names in sources],
        "ordinary_layer_norms": EVEN,
        **dict.fromkeys(("median_advantage", "median_weight"), 1.0),
        "global_norm": 100.0,
        "world_size": 1,
        "units": [],
        "micro_batches": 9,
        "diagnosis": "tokens" if sources else "diffuse",
        **changes,
    }


def changed(found: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The event with each of its culprits changed."""
    return {**found, "culprits": [{**each, **changes} for each in found["culprits"]]}


def culprit(sources: list[str]) -> dict[str, Any]:
    """A culprit that its advantage of 3 medians explains."""
    layers = {"a": 9.0, "b": 0.1}
    size = {"grad_norm": 5.0, "threshold": 2.0, "advantage": 3.0, "share": 0.5, "weight": 1.0, "coefficient": -3.0}
    size |= {"kl_coefficient": -2.0, "entropy_coefficient": 0.0, "entropy": 1.0, "log_prob": -1.0}
    # 13 times as far from 1 as in the rollout, with a third of the coefficient.
    far = "token" in sources or "sequence" in sources
    size |= {"rollout_log_prob": -0.05 if far else -1.0, "old_log_prob": -1.0}
    return {"rank": 0, "micro_batch": 0, "sources": sources, "layer_norms": layers, **size}


@cases(
    "rule changes cause",
    ("advantage", {}, "advantage"),
    # With the median advantage it would still be over the threshold.
    ("advantage", {"advantage": -2.5}, "advantage"),
    ("advantage", {"advantage": -2.4}, None),
    ("advantage", {"grad_norm": 6.1}, None),
    ("unlikely", {"grad_norm": 2.0 * RARE_NORM}, "unlikely"),
    ("unlikely", {"grad_norm": 2.0 * RARE_NORM + 1}, None),
    # With the rollout's log-prob its norm would be 1.2, or over the threshold of 2.
    ("token", {}, "token"),
    ("sequence", {"grad_norm": 8.5}, "sequence"),
    ("token", {"rollout_log_prob": -1.7}, None),
    # The loss multiplies by the ratio, also where that makes the norm infinite.
    ("token", {"grad_norm": math.inf, "rollout_log_prob": -57.0, "coefficient": -1e25}, "token"),
    # Of a coefficient that is the KL loss's alone, no ratio makes the norm; without an advantage, it is not known.
    ("token", {"coefficient": -2.0}, None),
    ("token", {"advantage": None}, "token"),
    ("token", {"rollout_log_prob": None, "old_log_prob": -math.inf, "advantage": 3.0, "coefficient": -9.0}, "token"),
    ("token", {"rollout_log_prob": 800.0}, "token"),  # positive log-probs are none
    # A norm that is not known is under no threshold.
    ("weight", {"grad_norm": math.nan}, None),
)
def test_what_a_rule_finds_has_to_suffice_for_the_norm(rule: str, changes: dict[str, float], cause: str | None) -> None:
    assert verdict_on(changed(event([rule], [rule]), **changes), NONE)["cause"] == cause


def test_culprits_that_make_little_of_the_norm_are_no_cause() -> None:
    found = event(["token"], ["token"], ["nonfinite"])
    found["culprits"][0]["share"] = found["culprits"][1]["share"] = 0.4 * EXPLAINED
    found["culprits"][2] |= {"micro_batch": 1, "share": math.nan}
    assert verdict_on(found, NONE)["cause"] == "nonfinite"
    del found["culprits"][2]
    assert "the culprits make under 10% of the norm of their micro-batches" in verdict_on(found, NONE)["sentence"]
    found["culprits"][1]["share"] = 0.6 * EXPLAINED
    assert verdict_on(found, NONE)["cause"] == "token"
    # Of a norm that is not known, no share is either.
    found["culprits"][0]["share"] = found["culprits"][1]["share"] = None
    assert verdict_on(found, NONE)["cause"] == "token"


def test_the_verdict_says_cause_shares_advice_and_check() -> None:
    spike = event(["advantage", "unlikely"], ["advantage"], ["unlikely"])
    found = verdict_on(changed(spike, advantage=9.0), {**NONE, "advantage": 0.05})
    advice = SOURCES["advantage"].advice
    assert found == {
        "cause": "advantage",
        "culprits": 2 / 3,
        "ordinary": 0.05,
        "claim": "Advantages are outliers",
        "evidence": "likely: true of 2 of 3 culprits, and of 5% of the other tokens",
        "sentence": "Advantages are outliers (likely: true of 2 of 3 culprits, and of 5% of the other tokens): "
        f"l{advice[1:]}",
        "check": CAUSES["advantage"].check,
    }
    # One that groups of ordinary rewards give is natural: one right answer of eight has 2.5, the others have 0.35.
    for advantage, median in ((7.5, 1.0), (5.5, 0.5)):
        found = verdict_on(changed(event(["advantage"], median_advantage=median), advantage=advantage), NONE)
        assert found["cause"] == "advantage" and found["sentence"].startswith("A natural spike of tokens")


@cases(
    "sources ordinary shares",
    ([["token"]], 0.0, "(possible: true of the one culprit, and of 0% of the other tokens)"),
    ([["token"]] * 199 + [["other"]], 0.2, "(possible: true of over 99% of 200 culprits, and of 20% of the "),
    # A share that is not known is left out.
    ([["layer"]], None, "(possible: true of the one culprit): "),
)
def test_shares_are_never_rounded_to_none_or_all(sources: list[list[str]], ordinary: float | None, shares: str) -> None:
    name = sources[0][0]
    found = verdict_on(event(*sources), {**NONE, name: ordinary})
    assert (found["cause"], found["ordinary"]) == (name, ordinary) and shares in found["sentence"]


def test_what_the_search_picks_by_causes_no_unexplained_spike() -> None:
    for name in ("advantage", "unlikely", "punished"):
        spike = event([name], [name], diagnosis="diffuse")
        assert verdict_on(spike, {**NONE, name: 0.02})["cause"] is None
        assert verdict_on(spike, {**NONE, name: 0.02}, measured={**NONE, name: 0.9})["cause"] is None
        assert verdict_on(spike, {**NONE, name: 0.02}, measured={**NONE, name: 0.05})["cause"] == name


@pytest.mark.parametrize(("kl", "cause"), [(-2.0, "kl"), (-1.7, None)])
def test_a_part_of_the_loss_is_the_cause_if_the_rest_is_under(kl: float, cause: str | None) -> None:
    """Of all tokens or not: 3 of the coefficient, of which 2 leave a third of a norm of 5 of 2."""
    assert verdict_on(changed(event(["kl"], ["kl"]), kl_coefficient=kl), {**NONE, "kl": 0.4})["cause"] == cause


@cases("median norm cause", (40.0, 90.0, "reward_scale"), (40.0, 110.0, None), (5.0, 9.0, None), (math.nan, 9.0, None))
def test_advantages_large_for_all_tokens_are_the_last_cause(median: float, norm: float, cause: str | None) -> None:
    """Unless the norm would be over its threshold of 1 with ordinary ones, or spikes are rare, as with a fitting τ."""
    large = {"median_advantage": median, "units": [{"layer_norms": EVEN, "norm": norm, "threshold": 1.0}]}
    spike = event(["other"], **large)
    assert verdict_on(spike, NONE, unusual="there were others")["cause"] == cause
    assert verdict_on(spike, NONE)["cause"] is None


def test_a_weight_makes_the_whole_gradient_large_and_no_token() -> None:
    assert verdict_on(event(["weight"]), NONE)["cause"] is None
    for norm, cause in ((170.0, "weight"), (300.0, None), (math.nan, None)):
        found = verdict_on(changed(event(["weight"], global_norm=norm), weight=32.0), NONE)
        assert found["cause"] == cause
        assert cause is None or "one token weighs as much as 32 ordinary tokens: " in found["sentence"]
    assert verdict_on(changed(event(["weight"]), weight=32.0, grad_norm=math.inf), NONE)["cause"] is None


def test_a_layer_that_carries_the_norm_of_all_tokens_is_named() -> None:
    """Also where no token tells it: every micro-batch is over its threshold, and the layer was an ordinary one."""

    def cause(found: dict[str, Any], units: list[dict[str, Any]]) -> str | None:
        return verdict_on({**found, "units": units}, NONE)["cause"]

    spike, units = event(["unlikely"]), [{"layer_norms": {**EVEN, "c": 9.0 + i}} for i in range(3)]
    found = verdict_on({**spike, "units": units}, {**NONE, "unlikely": 0.1})
    assert found["cause"] == "layer" and found["sentence"].startswith("The layer c carries 95% of the squared norm")
    # Not those of all are listed.
    for changes in ({"units": [*units, {"layer_norms": {}}]}, {"units": units, "more_units": 1}):
        said = verdict_on({**spike, **changes}, NONE)["sentence"]
        assert "of the squared norm or more in each of 3 micro-batches over its threshold" in said
    for other in (EVEN, {**EVEN, "c": math.nan}):
        assert cause(spike, [*units, {"layer_norms": other}]) == "unlikely"
    # A rule that tells the culprits comes first, unless that is a matter of the run.
    assert cause(event(["unsampled"], ["unsampled"]), units) == "unsampled"
    assert verdict_on({**event(["token"], ["token"]), "units": units}, {**NONE, APART: 0.3})["cause"] == "layer"
    # Where nothing is known of ordinary tokens, no layer is unusual.
    assert cause(event(["other"], ordinary_layer_norms=None), units) is None


@pytest.mark.parametrize("rule", ["token", "misaligned"])
def test_a_mismatch_of_all_tokens_is_no_matter_of_single_ones(rule: str) -> None:
    spike = event([rule], [rule])
    assert verdict_on(spike, {**NONE, APART: 0.2})["cause"] == rule
    # Late weights make some ratios far from 1.
    assert verdict_on(spike, {**NONE, rule: 0.011, APART: 0.04})["cause"] == rule
    found = verdict_on(spike, {**NONE, rule: 0.011, APART: 0.06})
    assert found["cause"] is None and "and so do some other tokens" in found["sentence"]
    found = verdict_on(spike, {**NONE, APART: 0.3})
    assert found["cause"] is None
    assert "rollout and training differ by over 0.1 nat for 30% of all tokens" in found["sentence"]


@pytest.mark.parametrize("name", ["advantage", "unlikely"])
def test_a_natural_spike_is_one_in_an_otherwise_usual_run(name: str) -> None:
    spike = event([name], [name])
    assert verdict_on(spike, NONE)["cause"] == name
    found = verdict_on(spike, NONE, [{**WARNING, "name": "engines_apart"}])
    assert found["cause"] is None and found["sentence"].endswith("But note: The rollout is late.")
    found = verdict_on(spike, NONE, unusual="other mini-batches had spikes, too")
    assert found["cause"] is None and found["sentence"] == "No known cause: other mini-batches had spikes, too."
    assert verdict_on(spike, NONE, [{**WARNING, "name": "reference"}])["cause"] == name
    for units, more, of, cause in ((9, 0, 9, None), (9, 3, 12, None), (9, 3, 13, name), (1, 0, 1, name)):
        all_over = {"units": [{"layer_norms": EVEN}] * units, "more_units": more, "micro_batches": of}
        assert verdict_on({**spike, **all_over}, NONE)["cause"] == cause
    assert verdict_on(spike, {**NONE, APART: 0.25})["cause"] is None
    # Over the threshold without the KL loss, too.
    found = verdict_on(changed(spike, sources=["kl", name], kl_coefficient=-1.7), {**NONE, "kl": 0.4})
    assert found["cause"] is None and "the KL loss or the entropy bonus" in found["sentence"]
    # The ratios are far from 1, which does not explain the norms.
    spike = changed(spike, sources=["token", name])
    assert "of most culprits the rule `token` holds" in verdict_on(spike, NONE)["sentence"]
    assert verdict_on(spike, {**NONE, "token": 0.9})["cause"] == name


@cases(
    "sources diagnosis ordinary why",
    ([["other"]], "tokens", NONE, "no rule tells the culprits from other tokens"),
    ([["token"]], "tokens", dict.fromkeys(NONE), "there are no ordinary tokens to compare the culprits with"),
    ([], "diffuse", NONE, "no token stands out"),
    ([], "incomplete", NONE, "the search ended without a result"),
    ([], "overflow", NONE, "the scaled fp16 gradients overflowed, and the gradient scaler takes a smaller scale"),
)
def test_without_a_cause_none_is_guessed(
    sources: list[list[str]], diagnosis: str, ordinary: dict[str, float | None], why: str
) -> None:
    found = verdict_on(event(*sources, diagnosis=diagnosis), ordinary)
    assert found.pop("sentence").startswith(f"No known cause: {why}")
    unknown = {"cause": None, "culprits": None, "ordinary": None, "claim": "No known cause", "evidence": ""}
    assert found == {**unknown, "check": CHECK_UNKNOWN}


@cases(
    "broken_tokens names said",
    (3, ["lm_head.weight"], "NaN or Inf is in the log-probs or gradients of all tokens."),
    (0, ["lm_head.weight", "norm.weight"], "no log-prob and no advantage is: the backward makes it, first at lm_h"),
    (0, None, "the backward makes it. Look for a division"),
)
def test_what_breaks_the_gradient_of_all_tokens_is_said(broken_tokens: int, names: list[str] | None, said: str) -> None:
    spike = event(diagnosis="nonfinite", units=[{"broken_tokens": broken_tokens}])
    spike["broken_parameters"] = names and {"count": len(names), "of": 30, "names": names}
    found = verdict_on(spike, NONE)
    assert found["cause"] == "nonfinite" and said in found["sentence"]
    # A column that is not finite makes it, too.
    warning = {**WARNING, "name": "nonfinite"}
    assert verdict_on(spike, NONE, [warning])["sentence"] == warning["sentence"]
    # Where all tokens are culprits, it is still the cause.
    assert verdict_on(event(["nonfinite"], ["other"]), dict.fromkeys(NONE))["cause"] == "nonfinite"


@cases(
    "columns said",
    ({"rollout_log_prob": math.nan}, "`rollout_log_probs` of single tokens is NaN or infinite (possible: "),
    ({"rollout_log_prob": math.nan, "old_log_prob": -math.inf}, "`old_log_probs` of single"),
    ({"ref_log_prob": math.inf, "advantage": math.nan}, "`advantages` of single"),
    ({"log_prob": math.nan}, "Single tokens have NaN or infinite gradients"),
)
def test_a_broken_token_is_told_with_its_column(columns: dict[str, float], said: str) -> None:
    spike = event(["nonfinite"], ["unlikely"])
    spike["culprits"][0] |= {"grad_norm": math.nan, **columns}
    spike["culprits"][1] |= {"old_log_prob": math.inf}  # of another token
    found = verdict_on(spike, NONE)
    assert found["cause"] == "nonfinite" and found["sentence"].startswith(said)


WARNING = {"name": "stale_weights", "sentence": "The rollout is late.", "check": "`look` shows it."}


def test_what_is_wrong_with_the_run_comes_before_tokens() -> None:
    spike = event(["advantage"], ["advantage"], ["token"], ["other"])
    for culprit, rollout in zip(spike["culprits"], (-1.5, -1.05, math.nan, None), strict=True):
        culprit["rollout_log_prob"] = rollout
    shares = {**NONE, APART: 0.2}
    want = {"cause": "stale_weights", "culprits": 2 / 3, "ordinary": 0.2, "check": WARNING["check"]}
    said = {"claim": "It is late", "evidence": "by 2"}
    assert verdict_on(spike, shares, [{**WARNING, **said}]) == {**want, **said, "sentence": WARNING["sentence"]}
    assert verdict_on({**spike, "culprits": []}, {**NONE, APART: None}, [WARNING])["culprits"] is None
    assert verdict_on(spike, shares)["cause"] == "advantage"
    unsampled = {**WARNING, "name": "unsampled"}
    assert verdict_on(event(["advantage"]), NONE, [unsampled, WARNING])["cause"] == "stale_weights"
    # Of most tokens, culprits among them.
    assert verdict_on(event(["unsampled"], ["other"]), {**NONE, "unsampled": 0.6}, [unsampled])["cause"] == "unsampled"
    assert verdict_on(event(), NONE, [unsampled])["cause"] is None
    # A rule says more of the culprits than the warning.
    assert verdict_on(event(["unsampled"]), NONE, [unsampled])["culprits"] == 1.0


@cases(
    "sources share warning of_responses cause",
    # Log-probs of other tokens come before every rule on ratios; in few responses, if the culprits are in them.
    (["token"], 0.0, "misaligned", 0.9, "misaligned"),
    (["token"], 0.0, "misaligned", 0.1, "token"),
    (["misaligned", "token"], 0.0, "misaligned", 0.1, "misaligned"),
    # A column that is not finite is named for a gradient that is not, which old weights do not explain.
    (["nonfinite"], 0.0, "nonfinite", 0.1, "nonfinite"),
    (["token"], 0.0, "nonfinite", 0.1, "token"),
    (["nonfinite"], 0.0, "stale_weights", None, "nonfinite"),
    # A gap that has grown is no cause, nor is what is wrong with some tokens.
    (["token"], 0.0, "engines_apart", None, "token"),
    (["token"], 0.05, "engines_apart", None, None),
    # Tokens that were not sampled come before another temperature.
    (["retokenized"], 0.0, "other_log_probs", None, "retokenized"),
    (["token"], 0.0, "other_log_probs", None, "other_log_probs"),
    (["other"], 0.0, "stale_weights", None, "stale_weights"),
    # Of weights that are old for some responses, no rule says for which.
    (["token"], 0.0, "partly_stale", 0.3, "partly_stale"),
)
def test_a_warning_is_the_cause_where_it_explains_the_culprits(
    sources: list[str], share: float, warning: str, of_responses: float | None, cause: str | None
) -> None:
    spike, said = changed(event(sources, sources), row=1, mismatch_turn=2), {**WARNING, "name": warning}
    if of_responses is not None:
        said["share"] = of_responses
    found = verdict_on(spike, {**NONE, "token": share}, [said])
    assert found["cause"] == cause
    assert (found["sentence"] == said["sentence"]) == (cause == warning)
    if cause is None:
        assert found["sentence"].endswith("But note: The rollout is late.")


@cases(
    "column coefficient ratio cause",
    # What a loss does not read makes no norm, however wrong it is.
    ("rollout", -0.75, 1.0, "advantage"),
    ("reference", -0.75, 1.0, "advantage"),
    # It reads training's log-probs, and here a correction or a KL loss.
    ("policy", -0.75, 1.0, "misaligned"),
    ("rollout", -1.2, 1.0, "misaligned"),
    (None, -0.75, 1.0, "misaligned"),
)
def test_log_probs_that_the_loss_does_not_read_are_no_cause(
    column: str | None, coefficient: float, ratio: float, cause: str
) -> None:
    numbers = {"weight": 0.25, "advantage": 3.0, "coefficient": coefficient, "ratio": ratio}
    spike = changed(event(["advantage"], ["advantage"]), **numbers, old_log_prob=-1.0, rollout_log_prob=-4.0)
    said = {**WARNING, "name": "misaligned", **({} if column is None else {"column": column})}
    assert verdict_on(spike, {**NONE, "advantage": 0.0}, [said])["cause"] == cause
    bypass = changed(spike, old_log_prob=-4.0)
    assert verdict_on(bypass, {**NONE, "advantage": 0.0}, [said])["cause"] == ("misaligned" if ratio != 1.0 else cause)


def test_what_is_far_from_training_need_not_be_of_other_tokens() -> None:
    far = event(["misaligned"], ["misaligned"])
    assert verdict_on(far, NONE)["sentence"].startswith("Log-probs of whole responses are over 1 nat from")
    assert verdict_on(changed(far, misplaced=True), NONE)["sentence"].startswith("Log-probs do not belong")


def test_a_verdict_that_cannot_be_made_costs_no_event(caplog: Caplog) -> None:
    assert verdict_on({}, NONE) is None
    assert "no verdict on an event could be made" in caplog.text


def test_a_verdict_soon_after_a_resume_says_so() -> None:
    for sources, steps in itertools.product((["advantage"], ["other"]), (3, 4)):
        sentence = verdict_on(event(sources, steps_since_resume=steps), NONE)["sentence"]
        assert sentence.endswith(" This is step 3 after a checkpoint was loaded.") == (steps == 3)


def test_faults_that_a_check_plants_exist() -> None:
    source = "".join(path.read_text() for path in Path(gradloc.judge.__file__).parent.rglob("*.py"))
    planted = set(re.findall(r'(?:--fault |(?:EXAMPLE|SEE)\.format\(")([a-z_]+)', source))
    assert len(planted) > 8 and planted <= set(launch.FAULTS)
