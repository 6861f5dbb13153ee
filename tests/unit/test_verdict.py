"""The verdict on a spike: the shares of ordinary tokens against a plain loop, and what is its cause or a fact."""

import math
import random
from typing import Any

import pytest
import torch
from evidence import verdict_on
from notation import Caplog, cases
from torch import Tensor

from gradloc.evidence.ordinary import ordinary_counts, ordinary_shares, token_medians
from gradloc.evidence.token_facts import token_evidence
from gradloc.facts import TrainedRow
from gradloc.judge.identities import IDENTITIES
from gradloc.judge.rules import SOURCES
from gradloc.judge.verdict import CHECK_NATURAL, CHECK_UNKNOWN, CHECK_UNSEARCHED, verdict
from gradloc.measure.micro_batch import MicroBatch
from gradloc.sources import APART, HOLDS, classify, is_apart

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
    found: list[tuple[bool, list[str]]] = []
    apart: list[bool | None] = []
    rows = {place[:2] for place in culprits}
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
                found.append(((index, row) in rows, classify(facts, medians)))
                apart.append(is_apart(facts["rollout_log_prob"], facts["old_log_prob"]))
    shares: dict[str, float | None] = {}
    for rule in HOLDS:  # what a whole response has is compared with other responses
        of = [names for is_own, names in found if not is_own or rule not in ("advantage", "sequence", "misaligned")]
        shares[rule] = sum(rule in names for names in of) / len(of)
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
    assert without or all(found[rule] for rule in HOLDS if rule != "layer"), "each rule is tested"
    # With a limit for the advantage, it holds for fewer.
    if "advantage" not in without:
        limited = shares(culprits, {**medians, "least_advantage": 9.0})
        assert 0 < limited["advantage"] < found["advantage"]
        assert {**limited, "advantage": found["advantage"]} == found
    # Without ordinary tokens, nothing is known of them.
    for one in micro_batches:
        one.tokens["coefficient"][:] = 0.0
        one.tokens.pop("entropy_coefficient", None)
    assert shares(set(), medians) == dict.fromkeys([*HOLDS, APART])


NONE = dict.fromkeys(HOLDS, 0.0)
EVEN = dict.fromkeys("abcde", 1.0)
STATES = {identity.name: {"state": "held", "times": 0.5, "since": None, "missing": None} for identity in IDENTITIES}


def event(*sources: list[str], **changes: Any) -> dict[str, Any]:
    """An event with a culprit of each of these sources, in an update whose identities hold."""
    return {
        "culprits": [culprit(i, names) for i, names in enumerate(sources)],
        **{"ordinary_layer_norms": EVEN, "units": [], "diffuse": [], "identities": STATES, "micro_batches": 9},
        **{"epoch": 0, "mini_batch": 0, "diagnosis": "tokens" if sources else "diffuse", "world_size": 1},
        **changes,
    }


def culprit(row: int, sources: list[str]) -> dict[str, Any]:
    """Where a ratio is its source, the engines differ, and the loss reads that."""
    far = "token" in sources or "sequence" in sources
    size = {
        "grad_norm": 5.0,
        "threshold": 4.0,
        "advantage": 3.0,
        "share": 0.5,
        "weight": 0.25,
        "coefficient": -0.75,
        "ratio": 1.0,
    }
    size |= {"coefficient": -1.5} if far else {}
    size |= {"log_prob": -1.0, "rollout_log_prob": -0.05 if far else -1.0, "old_log_prob": -1.0, "ref_log_prob": -1.0}
    return {"rank": 0, "micro_batch": 0, "row": row, "sources": sources, "layer_norms": {"a": 9.0, "b": 0.1}, **size}


def changed(found: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The event with each of its culprits changed."""
    return {**found, "culprits": [{**each, **changes} for each in found["culprits"]]}


FACTS = ("advantage", "weight", "kl", "entropy", "unlikely", "punished", "layer")


@cases(
    "culprits ordinary cause",
    ({"unsampled": 2}, {}, "unsampled"),
    ({"unsampled": 1}, {}, None),  # of four
    ({"unsampled": 2}, {"unsampled": 0.12}, "unsampled"),
    ({"unsampled": 2}, {"unsampled": 0.13}, None),
    ({"unsampled": 4, "token": 4}, {"unsampled": 0.3}, "token"),
    ({"retokenized": 2, "misaligned": 4, "token": 4}, {}, "retokenized"),
    ({"misaligned": 4}, {"misaligned": None}, "misaligned"),  # nothing is known of ordinary tokens
    ({"token": 4}, {APART: 0.03}, "token"),
    # The engines differ for all tokens, if for ever so few nats.
    ({"token": 4}, {APART: 0.05}, None),
    ({"sequence": 4}, {APART: 0.3}, None),
    ({"misaligned": 4}, {APART: 0.3}, None),
    # One NaN makes the whole gradient NaN.
    ({"nonfinite": 1, "unlikely": 4}, {}, "nonfinite"),
    ({"nonfinite": 1, "unlikely": 4}, {"nonfinite": 0.1}, None),
    *(({name: 4}, {}, None) for name in FACTS),
)
def test_equalities_that_culprits_alone_break_are_causes(
    culprits: dict[str, int], ordinary: dict[str, float | None], cause: str | None
) -> None:
    spike = event(*([name for name, count in culprits.items() if i < count] for i in range(4)))
    found = verdict_on(spike, {**NONE, **ordinary})
    assert found["cause"] == cause
    if cause:
        rule = SOURCES[cause]
        assert found["sentence"].startswith(rule.claim) and found["check"] == rule.check
        assert f"true of {'all 4' if culprits[cause] == 4 else f'{culprits[cause]} of 4'} culprits" in found["evidence"]


def test_a_ratio_that_steps_have_made_is_a_fact_and_no_cause() -> None:
    """The engines agree; so they do in verl's bypass mode, whose old log-probs are the rollout's."""
    steps = changed(event(["token"], ["token"]), rollout_log_prob=-2.0, old_log_prob=-2.0)
    for spike, cause in (({**steps, "mini_batch": 1}, None), ({**steps, "epoch": 1}, None), (steps, "token")):
        found = verdict_on(spike, NONE)
        assert found["cause"] == cause and [fact["source"] for fact in found["facts"]] == ["token"]
    assert verdict_on(changed(steps, rollout_log_prob=None), NONE)["cause"] is None


@cases("rule", "token", "sequence")
def test_a_ratio_without_which_a_token_would_be_over_its_threshold_is_a_fact_and_no_cause(rule: str) -> None:
    """It is not in the loss, it makes the gradient smaller, or the token would be over 4 without its factor of 2."""
    spike = event(*[[rule]] * 4)
    for coefficient, norm, cause in (
        (-1.5, 5.0, rule),
        (-0.75, 5.0, None),
        (-0.3, 5.0, None),
        (-1.5, 8.1, None),
        (-1.5, math.inf, rule),
    ):
        found = verdict_on(changed(spike, coefficient=coefficient, grad_norm=norm), NONE)
        assert found["cause"] == cause and [fact["source"] for fact in found["facts"]] == [rule]


@cases("rule", "token", "sequence", "misaligned")
def test_a_ratio_that_a_late_rollout_may_have_made_is_no_cause(rule: str) -> None:
    late = STATES | {"rollout_log_probs": STATES["rollout_log_probs"] | {"late": True}}
    for states, cause in ((STATES, rule), (late, None)):
        spike = changed(event(*[[rule]] * 4, identities=states), misplaced=rule == "misaligned")
        assert verdict_on(spike, NONE)["cause"] == cause


@pytest.mark.parametrize("name", FACTS)
def test_what_culprits_have_in_common_is_a_fact(name: str) -> None:
    spike = event([name], [name], [name, "other"], ["other"])
    found = verdict_on(spike, {**NONE, name: 0.1})
    assert found["facts"] == [{"source": name, "culprits": 0.75, "ordinary": 0.1}]
    claim = SOURCES[name].claim
    said = f"{claim[0].lower()}{claim[1:]} (true of 3 of 4 culprits, and of 10% of the other tokens)"
    assert found["sentence"] == f"All 11 identities that could be checked hold. A natural spike: {said}."
    assert found["check"] == CHECK_NATURAL and found["evidence"] == ""
    # It is none if a fifth of ordinary tokens have it, too, or if few culprits have it.
    assert not verdict_on(spike, {**NONE, name: 0.2})["facts"]
    few = verdict_on(event([name], ["other"], ["other"]), NONE)
    assert not few["facts"] and few["sentence"].endswith("A natural spike: nothing that stands out.")
    assert verdict_on(spike, {**NONE, name: None})["facts"][0]["ordinary"] is None


def test_a_layer_that_carries_the_norms_of_ordinary_tokens_is_no_fact() -> None:
    spike = event(["layer"], ["layer"], ordinary_layer_norms={"a": 100.0, "b": 1.0})
    assert verdict_on(spike, {**NONE, "layer": None})["facts"] == []


def test_a_reward_that_culprits_have_and_few_others_is_said() -> None:
    spike = event(["unlikely"], ["unlikely"], ["other"])
    rows = {(0, i): TrainedRow(f"uid {i}", score=0.5 if i < 2 else float(i % 2), largest=1.0) for i in range(40)}
    spike |= {"comparison": {"ordinary": NONE}, "warnings": []}
    sentence = verdict(spike, rows)["sentence"]
    assert "the reward is 0.5 (true of 2 of 3 responses with culprits, and of 5% of all with an advantage)" in sentence
    many = {
        place: TrainedRow(row.uid, score=0.5 if i < 12 else 0.0, largest=1.0)
        for i, (place, row) in enumerate(rows.items())
    }
    unscored = {place: TrainedRow(row.uid, largest=1.0) for place, row in rows.items()}
    without_advantages = {place: TrainedRow(row.uid, score=row.score) for place, row in rows.items()}
    for others in ({}, many, unscored, without_advantages):
        assert "reward" not in verdict(spike, others)["sentence"]


def test_identities_that_were_not_checked_are_counted() -> None:
    unchecked = {name: {**state, "state": "unchecked"} for name, state in STATES.items()}
    some = {**unchecked, **{name: STATES[name] for name in ("finite", "loss")}}
    said = verdict_on(event(["unlikely"], identities=some), NONE)["sentence"]
    assert said.startswith("All 2 identities that could be checked hold, and 9 could not be. A natural spike: ")
    for nothing in (unchecked, {}):
        said = verdict_on(event(["unlikely"], identities=nothing), NONE)["sentence"]
        assert said.startswith("No identity could be checked. What the culprits have in common: the tokens are rare")


WARNING = {"name": "stale_weights", "identity": "rollout_log_probs", "since": 5, "times": 70.0, "column": "rollout"}
WARNING |= {"claim": "The rollout is late", "evidence": "70 times the usual since step 5", "check": "`look` shows it."}
WARNING |= {"sentence": "The rollout is late (70 times the usual since step 5). Send weights."}


@pytest.mark.parametrize("sources", [["advantage"], ["token"], ["nonfinite"], ["unsampled"]])
def test_the_first_identity_that_is_broken_is_the_cause(sources: list[str]) -> None:
    # The loss reads the rollout's log-probs: the coefficient is another one.
    spike = changed(event(sources, sources), coefficient=-0.8)
    found = verdict_on(spike, NONE, [WARNING, {**WARNING, "name": "advantages"}])
    since = "70 times the usual since step 5"
    assert (found["cause"], found["evidence"], found["check"]) == ("stale_weights", since, WARNING["check"])
    assert found["claim"] == "The data path is broken: the rollout is late"
    # A warning of an older release has a sentence alone.
    old = verdict_on(spike, NONE, [{"name": "reward_scale", "sentence": "It is late.", "check": "Look."}])
    assert (old["cause"], old["sentence"]) == ("reward_scale", "The data path is broken: it is late.")
    assert found["sentence"] == f"{found['claim']} ({since}). Send weights. Also broken: advantages."


@cases(
    "column changes cause",
    # Columns that a loss does not read make no norm, however wrong they are.
    ("rollout", {}, None),
    ("reference", {}, None),
    ("rollout", {"old_log_prob": -4.0, "ratio": math.exp(3)}, None),  # bypass mode: the ratio is to the policy's own
    # It reads training's log-probs, and here a correction or a KL loss.
    ("old", {}, "stale_weights"),
    (None, {}, "stale_weights"),
    ("rollout", {"coefficient": -1.2}, "stale_weights"),
    ("rollout", {"coefficient": math.nan}, "stale_weights"),
    ("rollout", {"advantage": None}, "stale_weights"),
)
def test_log_probs_that_the_loss_does_not_read_are_no_cause(
    column: str | None, changes: dict[str, Any], cause: str | None
) -> None:
    spike = changed(event(["advantage"], ["advantage"]), rollout_log_prob=-4.0)
    warning = {name: value for name, value in {**WARNING, "column": column}.items() if value is not None}
    found = verdict_on(changed(spike, **changes), NONE, [warning])
    assert found["cause"] == cause
    if cause is None:
        start = "The loss does not read what is broken (the rollout is late). What the culprits have in common: the "
        assert found["sentence"].startswith(start)
    # Without a culprit, nothing tells what the loss reads.
    assert verdict_on(event(), NONE, [warning])["cause"] == "stale_weights"


@cases(
    "sources diagnosis check why",
    ([], "diffuse", CHECK_UNKNOWN, " hold."),
    ([], "incomplete", CHECK_UNKNOWN, " hold."),
    ([], "overflow", CHECK_UNKNOWN, " hold."),
    ([], "unsearched", CHECK_UNSEARCHED, " hold."),
    ([["other"]], "tokens", CHECK_NATURAL, ": nothing that stands out."),
)
def test_without_a_cause_none_is_guessed(sources: list[list[str]], diagnosis: str, check: str, why: str) -> None:
    found = verdict_on(event(*sources, diagnosis=diagnosis), NONE)
    assert (found["cause"], found["facts"], found["check"]) == (None, [], check)
    assert found["sentence"].endswith(why)


@cases(
    "broken_tokens names said",
    (3, ["lm_head.weight"], "NaN or Inf is in the log-probs or gradients of all tokens."),
    (0, ["lm_head.weight", "norm.weight"], "no log-prob and no advantage is: the backward makes it. Look for a"),
    (0, None, "the backward makes it. Look for a division"),
)
def test_what_breaks_the_gradient_of_all_tokens_is_said(broken_tokens: int, names: list[str] | None, said: str) -> None:
    spike = event(diagnosis="nonfinite", units=[{"broken_tokens": broken_tokens}])
    spike["broken_parameters"] = names and {"count": len(names), "of": 30, "names": names}
    found = verdict_on(spike, NONE)
    assert found["cause"] == "nonfinite" and said in found["sentence"]
    # It is the cause even if all tokens are culprits.
    assert verdict_on(event(["nonfinite"], ["other"]), dict.fromkeys(NONE))["cause"] == "nonfinite"


@cases(
    "columns said",
    ({"rollout_log_prob": math.nan}, "`rollout_log_prob` of single tokens is NaN or infinite (true of "),
    ({"rollout_log_prob": math.nan, "old_log_prob": -math.inf}, "`old_log_prob` of single"),
    ({"ref_log_prob": math.inf, "advantage": math.nan}, "`advantage` of single"),
    ({"log_prob": math.nan}, "Single tokens have NaN or infinite gradients"),
)
def test_a_broken_token_is_told_with_its_column(columns: dict[str, float], said: str) -> None:
    spike = event(["nonfinite"], ["unlikely"])
    spike["culprits"][0] |= {"grad_norm": math.nan, **columns}
    spike["culprits"][1] |= {"old_log_prob": math.inf}  # of another token
    found = verdict_on(spike, NONE)
    assert found["cause"] == "nonfinite" and found["sentence"].startswith(said)


def test_a_verdict_that_cannot_be_made_costs_no_event(caplog: Caplog) -> None:
    assert verdict_on({}, NONE) is None
    assert "no verdict on an event could be made" in caplog.text
