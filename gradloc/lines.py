# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The lines of the evidence, and what each of their fields means.

A line is a plain dict, as in the file: nothing is converted when it is written or read, and mypy checks its keys. The
JSON Schemas in `gradloc.tools.schema` are made of these types, and the tables in docs/reference of the comments: each
is that of its field, and of the fields right above it that have none. A float that is NaN or infinite is a string in
the file.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

# The version of all lines; the reader takes these versions.
SCHEMA = 5
READABLE = (4, SCHEMA)

# Types with the restriction of their values that JSON Schema states.
Version = Annotated[int, ("enum", READABLE)]
Index = Annotated[int, ("minimum", 0)]
Count = Annotated[int, ("minimum", 1)]
Positive = Annotated[float, ("exclusiveMinimum", 0)]
Seconds = Annotated[float, ("minimum", 0)]
Source = Annotated[str, "the name of a rule"]
Number = float | None  # None: there is no data
_DIAGNOSES = ("tokens", "diffuse", "nonfinite", "overflow", "incomplete", "unsearched", "under")
Diagnosis = Annotated[str, ("enum", _DIAGNOSES)]


# Small parts, whose fields are explained where the parts are.
class Rest(TypedDict):
    tokens: Index
    norm: float
    threshold: float


class KlEstimates(TypedDict):
    k1: list[float]
    k2: list[float]
    k3: list[float]


class Trigger(TypedDict):
    kind: Annotated[str, ("enum", ("unit", "global"))]
    norm: float
    threshold: float


class MeasuredToken(TypedDict):
    row: Index
    position: Index
    grad_norm: float
    share: Number


class ClippedLayer(TypedDict):
    norm: float
    factor: float
    bound: Number


class PlantedToken(TypedDict):
    rank: Index
    row: Index
    position: Index


class Drill(TypedDict):
    planted: PlantedToken | None
    found: bool
    passes: Index


class BrokenParameters(TypedDict):
    count: Index
    of: Index
    names: list[str]


Shares = dict[str, Number]


class Comparison(TypedDict):
    ordinary: Shares


class _Said(TypedDict):
    sentence: str  # `claim`, `evidence` in brackets, what to do
    check: str  # how to check it; BUNDLE is the event's [bundle](../use/replay.md), if one was kept


class Said(_Said, total=False):
    """What a warning or a verdict says. Older lines lack `claim` and `evidence`."""

    claim: str  # what is wrong
    evidence: str  # its figures, for example of how many tokens it holds; may be empty


class _RunWarning(Said):
    name: str


_Return = TypedDict("_Return", {"return": float})  # a word that a class cannot have for a field


class Form(TypedDict):
    """What every line has."""

    schema: Version  # version of the form
    time: str  # UTC


class InStep(TypedDict):
    """The step of a line."""

    global_step: int | None  # the trainer's step


class Where(InStep):
    """A mini-batch of a run."""

    epoch: Index
    mini_batch: Index  # PPO epoch, and mini-batch in it, from 0


class MicroBatchRecord(TypedDict):
    """A micro-batch over its threshold."""

    rank: Index
    micro_batch: Index  # from 0
    rows: Index
    tokens: Index  # number of responses; of response tokens
    norm: float
    threshold: float  # of that rank's own gradient; τ·√Σw²
    token_equivalent: float  # norm/√Σw², comparable with τ
    layer_norms: dict[str, float]  # norm by layer


class Unit(MicroBatchRecord):
    """The same in an event."""

    broken_tokens: Index  # tokens with a NaN or infinite log-prob or coefficient
    rest: Rest | None  # without culprits: `tokens` left, their `norm` and `threshold`


class ShortTexts(TypedDict, total=False):
    """What the trainer adds to a token that a line names."""

    token: str | None
    context: str | None  # its text; the text around it, marked by «»
    data_source: str | None
    uid: str | None  # of its prompt
    reward: Number  # of its response


class Texts(ShortTexts, total=False):
    """What it adds to a culprit, and to a suspected token."""

    prompt: str | None
    response: str | None  # the texts
    response_tokens: list[str] | None  # up to 512 tokens around it, decoded one by one
    response_tokens_start: Index  # the position of the first of these
    ground_truth: Any  # of its prompt


class Place(TypedDict):
    """Where a token is."""

    rank: Index  # data-parallel rank, from 0
    micro_batch: Index  # its micro-batch, from 0
    row: Index  # response of the rank's mini-batch, from 0
    position: Index  # position in the response, from 0


class Facts(TypedDict):
    """What is known of a token without its gradient."""

    token_id: int  # its id
    weight: float
    coefficient: float  # weight w_t in the loss; ∂L/∂log p_t
    suspicion: float  # |∂L/∂log p_t|·(1 − p_t), by which the search ranks tokens
    log_prob: float  # log p_t before the step
    advantage: Number  # its advantage
    kl_coefficient: Number  # the KL loss's part of `coefficient`
    old_log_prob: Number
    ref_log_prob: Number
    rollout_log_prob: Number  # of the old policy, reference and rollout
    entropy: Number  # of the policy at its position, in nats
    ratio: Number
    rollout_ratio: Number  # importance ratio to the old policy; to the rollout
    sequence_ratio: Number  # geometric mean of the response's ratios, to the rollout where it is known
    # share of its response's log-probs that are NaN or over 1 nat from the rollout's
    misaligned_share: Number
    after_eos: bool | None  # whether it is after the turn's end
    response_suspicion: list[float] | None  # suspicion of each of `response_tokens`
    response_kl: KlEstimates | None  # their KL to the reference: `k1`, `k2`, `k3`
    turn: int | None  # its run of tokens with response_mask 1, from 1; `null` if only one
    mismatch_start: int | None
    mismatch_turn: int | None  # position and turn where the mismatch to the rollout begins
    misplaced: bool | None  # whether its rollout or reference log-probs belong to other tokens
    shift: int | None  # by how many positions they are moved
    response_length: int | None  # tokens of its response
    entropy_coefficient: Number  # ∂L/∂H_t


class SuspectedToken(Place, Facts, Texts):
    """A token of a spike that was converted, and not searched."""

    source: Source  # the first of `sources`
    sources: list[Source]  # the rules that hold, the most specific first


class Culprit(SuspectedToken):
    """A token that was measured alone over τ."""

    grad_norm: float  # norm of its part of the gradient, divided by its weight
    threshold: Positive  # τ
    share: Number  # norm of that part over its micro-batch's
    layer_norms: dict[str, float]  # `grad_norm` by layer, of the 16 largest


class OpenPart(TypedDict):
    """A set of tokens whose search did not end."""

    rank: int | None
    micro_batch: Index
    tokens: Index
    threshold: float


class DiffusePart(OpenPart):
    """A set of tokens over its threshold that no few tokens explain."""

    norm: float
    rows: list[Index]
    largest_tokens: list[MeasuredToken]


class RunWarning(_RunWarning, total=False):
    """An identity that is broken, spike or not. Older lines lack `identity`, `since` and `times`."""

    identity: str  # the identity; `name` says how it is broken
    since: int | None  # the step since which it is broken
    times: Number  # its residual, in times of the usual; `null`: infinite
    column: str  # whose log-probs or advantages are off
    factor: float  # what the loss, or its KL part, is multiplied by


class _IdentityState(TypedDict):
    state: Annotated[str, ("enum", ("held", "broken", "unchecked"))]
    times: Number  # its largest residual, in times of the usual
    since: int | None  # the step since which it is broken
    missing: str | None  # why it cannot be checked


class IdentityState(_IdentityState, total=False):
    """Whether an identity holds."""

    late: bool  # of `rollout_log_probs`: true where the rollout may be late, and single tokens far apart by that


class StreakState(TypedDict):
    score: float
    since: int | None
    quiet: int


class RunRecord(TypedDict):
    step: int | None
    readings: dict[str, float]
    times: dict[str, float]
    streaks: dict[str, StreakState]


class RunRecords(TypedDict):
    """The records of a run in a checkpoint; their fields are those of `gradloc.judge.records`."""

    version: Annotated[int, ("enum", (3,))]
    records: list[RunRecord]


class Change(TypedDict):
    """Something that changed at a step, which need not be wrong."""

    what: str
    now: float
    before: float
    sentence: str


class Answer(TypedDict):
    """What the judge says of an update."""

    identities: dict[str, IdentityState]
    warnings: list[RunWarning]
    changes: list[Change]
    news: list[str]  # what a log is to say: what is checked, then what breaks, holds again, or changes


class Fact(TypedDict):
    """What most culprits have in common, and ordinary tokens far less often."""

    source: Source
    culprits: float
    ordinary: Number


class Verdict(Said, total=False):
    """What is known of a spike. Older lines have `culprits` and `ordinary` instead of `facts`."""

    # the name of what is broken; `null`: nothing that is known explains the spike
    cause: str | None
    # what half of the culprits have in common: `source`, its shares of `culprits` and of `ordinary` tokens
    facts: list[Fact]


class WithoutTokens(TypedDict):
    """What is left of a gradient with all coefficients zero."""

    rank: int | None
    micro_batch: Index
    norm: float
    share: float
    layer_norms: dict[str, float]


class _Begun(Form, Where):
    passes: Index
    budget: Index  # extra passes: made; allowed
    threshold: Positive  # τ; in the warm-up, ten times the largest norm so far (or 1e30)
    # [above](#what-an-event-is)
    diagnosis: Diagnosis
    until: Annotated[str, ("enum", ("explained", "exhaustive"))]  # `bisect_until`
    explained: bool | None  # whether all `units` are under their thresholds without culprits
    more_tokens: Index | None  # estimated number of other tokens over τ
    complete: bool  # whether the search finished and nothing is diffuse
    error: str | None  # why the search was aborted
    units: list[Unit]  # the micro-batches over their thresholds: at most 64, the first with `layer_norms`
    # parts over their thresholds: `rank` (`null`: several), `micro_batch`, `rows`, count of `tokens`, `norm`,
    # `threshold`, `largest_tokens` (`row`, `position`, `grad_norm`, `share`)
    diffuse: list[DiffusePart]
    # parts left open: `rank`, `micro_batch`, `tokens`, `threshold`
    open_segments: list[OpenPart]
    median_advantage: Number
    median_weight: Number  # the mini-batch's medians: |advantage| where not zero; weight
    loss_scale: Positive  # fp16's loss scale, else 1; norms are without it
    world_size: Count  # W, the data-parallel ranks


class Begun(_Begun, total=False):
    """What an event has by the findings of a search, which of a converted one are none."""

    gradloc_version: str  # the version that wrote the line
    more_units: Index
    more_diffuse: Index  # how many more there are
    budget_seconds: Number  # seconds allowed; `null`: no limit
    out_of_time: bool  # whether they were used up
    # a micro-batch's gradient from no token: `rank`, `micro_batch`, `norm`, `share`, `layer_norms`
    without_tokens: WithoutTokens | None


class _Event(Begun):
    micro_batches: Index  # number of micro-batches with a gradient
    trigger: Trigger  # what started the search: `kind` (`unit` or `global`), `norm`, `threshold`
    global_norm: float
    global_threshold: float  # of the reduced gradient before clipping; τ·√Σw²/W
    # each layer's median norm/√Σw² without a spike, in this mini-batch or an earlier one
    ordinary_layer_norms: dict[str, float] | None
    culprits: list[Culprit]  # the largest `grad_norm` first
    action: Annotated[str, ("enum", ("log", "skip", "drop", "stop"))]  # `spike_action`
    applied: bool  # whether it could be carried out
    layer_clip: dict[str, ClippedLayer] | None  # LayerClip in this step, by layer: `norm`, `bound` and `factor`
    seconds: Seconds  # duration on the slowest rank
    # by each rank's own gradient (`local`) or the `reduced` one; `converted`: none; `replayed`: later
    search: Annotated[str, ("enum", ("local", "reduced", "converted", "replayed"))]


class Event(_Event, total=False):
    """A gradient spike and the tokens behind it. Older lines lack these fields, and drills some of them."""

    drill: Drill | None  # of a drill: what was `planted` (`rank`, `row`, `position`), `found`, `passes`
    fault: str | None  # what the embedded profile has planted
    replay: str | None  # the bundle's folder in `bisect_dump_dir`, on the node of rank 0
    # parameters with a NaN or infinite gradient: `count`, `of` all, up to 16 `names` in backward order
    broken_parameters: BrokenParameters | None
    steps_since_resume: Count | None  # steps since a checkpoint was loaded
    suspected: list[SuspectedToken]  # if `converted`: up to 16 tokens by `suspicion`, unmeasured
    suspected_ranks: list[Index]  # the ranks whose tokens these may be
    comparison: Comparison  # `ordinary`: each rule's share of ordinary tokens
    identities: dict[str, IdentityState]
    warnings: list[RunWarning]  # as in `steps.jsonl`
    # the [verdict](verdict.md#the-verdict-on-a-spike): `cause`, `facts`, and what a warning says
    verdict: Verdict | None
    summary: str  # what was found, and where


class ClippedToken(ShortTexts):
    """A token over one of TokenClip's bounds."""

    rank: Index
    micro_batch: Index
    row: Index
    token_id: int | None  # as of a culprit
    position: int  # position in the response, from 0; negative in the prompt
    boundary: str  # where it was first over its bound on the way back from the loss
    multiple: float  # its signal there over the usual largest one
    cut: bool  # whether it was cut there
    weight: Number
    advantage: Number
    log_prob: Number
    old_log_prob: Number
    rollout_log_prob: Number  # as of a culprit; `null` in the prompt


class Clipped(TypedDict):
    """What TokenClip found in a mini-batch."""

    action: Annotated[str, ("enum", ("log", "drop", "smooth"))]  # `token_clip.action`
    factor: Positive  # `token_clip.factor`
    over: dict[str, Index]
    cut: dict[str, Index]  # by boundary, number of signals over the bound; of those cut
    refused: list[str]  # boundaries where some were not cut, because they were more than `max_share`
    largest: dict[str, float]  # by boundary, the largest signal
    usual: dict[str, Number]  # by boundary, the usual largest; `null` in the warm-up
    tokens: list[ClippedToken]  # at most 64 tokens, the largest multiple first


class ClipLine(Form, Where):
    """The tokens whose backward signals were over TokenClip's bounds."""

    token_clip: Clipped  # what TokenClip has found and cut
    summary: str  # the line in one sentence


class CriticMicroBatch(MicroBatchRecord):
    """A micro-batch of a critic's."""

    error: Number


class CriticValue(Place, ShortTexts, _Return):
    """A value of a critic's, before and after this step."""

    value: float
    old_value: float
    error: float
    weight: float


class CriticSpike(Form, Where):
    """A spike of the critic's gradient."""

    gradloc_version: str
    world_size: Index  # as of an event
    threshold: Positive  # τ for one value
    token_norm: float  # the largest norm/√Σw² of a micro-batch
    global_norm: float  # norm of the reduced gradient
    ordinary_token_norm: Number  # `token_norm` of the last mini-batch without a spike
    error: Number
    ordinary_error: Number  # root mean square of v − R, now; in that mini-batch
    layer_norms: dict[str, float]  # `global_norm` by layer
    ordinary_layer_norms: dict[str, float] | None  # the same in that mini-batch, over √Σw²
    micro_batches: list[CriticMicroBatch]  # at most 8 over their thresholds, with their `error`
    # the four largest errors: `value` v, `old_value` before the update, `return` R, `error` v − R, `weight`; place and
    # texts as of a culprit
    values: list[CriticValue]
    # `errors`: at least twice the usual, and grown at least a third as much as the norm; else `network`; `null`: the
    # usual is not known
    cause: Annotated[str, ("enum", ("errors", "network"))] | None
    summary: str  # the line in a few sentences


class _Step(Form, InStep):
    threshold: Number  # τ in the mini-batch with the largest norm; `null` in the warm-up
    # largest norm/√Σw² of all micro-batches (of the reduced gradient with `spike_trigger=global`)
    token_norm_max: Number
    spike_margin: Number  # largest token-equivalent norm/τ: 1 is the threshold
    ratio_max: Number  # largest importance ratio to the old policy
    # largest ratio between a token's probabilities in training and in the rollout, either way round
    rollout_ratio_max: Number
    unlikely_share: Number  # share of tokens with a probability under 0.05
    triggered: Number  # number of events


class Step(_Step, total=False):
    """The figures of a step. Older lines lack these."""

    # by [identity](verdict.md#identities): `state` (`held`, `broken`, `unchecked`), largest residual in `times` of the
    # usual, `since` which step it is broken, what is `missing`, whether the rollout may be `late`
    identities: dict[str, IdentityState]
    # of each broken one: `identity`, `name`, `since`, `times`, `sentence`, `claim`, `evidence`, `check`, `column`,
    # `factor` of the loss
    warnings: list[RunWarning]
    # [what changed](verdict.md#changes): `what`, `now`, `before`, `sentence`
    changes: list[Change]
    misplaced_share: Number  # share of responses whose log-probs belong to other tokens


class Note(Form, InStep):
    """What was left out of a file at this place."""

    # `text_limit`: the texts of the event above; `rate_limit`: this step's after the 16th; `size_limit`: all events
    # from here on; `unwritable`: an event over 16 MiB
    note: Annotated[str, ("enum", ("text_limit", "rate_limit", "size_limit", "unwritable"))]
    count: Count  # how many of these
    message: str  # the note in a sentence


def kind_of(line: Mapping[str, Any]) -> str:
    """What a line of an update is: "spike", "clip" (see TokenClip) or "critic"."""
    return "clip" if "token_clip" in line else "critic" if "values" in line else "spike"
