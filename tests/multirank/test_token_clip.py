"""TokenClip in the patched actor, against a plain computation on an unsharded copy.

The copy is cut into segments at the boundaries. Each segment starts from a leaf. Its backward is a call of its own,
with the gradient that has come so far, in which tokens may be zeroed.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from actor_cases import Run, compare_runs, stock_run, train
from actors import (
    IDENTITY_THRESHOLD,
    Case,
    build_actor,
    build_config,
    build_model,
    events_of,
    gathered,
    local,
    on_device,
    wrap,
)
from batches import build_batch
from mini_batches import loss_factor, split_rows, token_weights, whole_mini_batch
from oracle import log_probs_and_entropy, loss_of, step, take_gradients
from reduced_meter_cases import share_sequences, stand_in_for_a_gpu
from test_actor import MODES, ONE, Launch, on_engine, on_ranks
from verl import DataProto
from verl.workers.config import TokenClipConfig

from gradloc.judge import judged

FACTOR, BETA, WARMUP = 4.0, 0.9, 2
LOG_PROBS = "log_probs"
# The warm-up, the batch with the planted tokens, and one without a spike.
CALLS = (1, 2, 0, 4)
SPIKED = CALLS.index(0)
# The rank, row and position where `blow` acts. Its hidden state predicts the next token of the response.
BLOWN = (1, 3, 4)
BLOW = 1000.0


def amplified(hidden: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The same, with a backward that multiplies the gradient at some positions."""
    hidden = hidden.clone()
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: torch.where(where.unsqueeze(-1), BLOW * gradient, gradient))
    return hidden


def amplify(case: Case, layer: int) -> Callable[[torch.nn.Module], None]:
    """A change to a model: one token's signal grows a thousandfold where it leaves a layer, on its way back."""
    batch = build_batch(dataclasses.replace(case, packed=False, fused=False), BLOWN[0], 0)
    response = batch.batch["responses"][BLOWN[1]]
    trigram = response[BLOWN[2] - 2 : BLOWN[2] + 1].tolist()

    def change(model: torch.nn.Module) -> None:
        ids: list[torch.Tensor] = []

        def keep(_module: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            ids[:] = [kwargs["input_ids"]]

        def enter(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            where = torch.ones_like(ids[0], dtype=torch.bool)
            for shift, token in enumerate(reversed(trigram)):
                where &= ids[0].roll(shift, -1) == token
            if args:
                return (amplified(args[0], where), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": amplified(kwargs["hidden_states"], where)}

        model.register_forward_pre_hook(keep, with_kwargs=True)
        model.model.layers[layer].register_forward_pre_hook(enter, with_kwargs=True)

    return change


@dataclasses.dataclass
class Signal:
    """A token's backward signal at a boundary, over the bound."""

    boundary: str
    rank: int
    micro_batch: int
    row: int
    position: int
    multiple: float


@dataclasses.dataclass
class Outcome:
    """What the actor did in one update, and what it had to do."""

    # The largest error of a parameter's gradient, relative to the norm of the whole.
    error: float
    clips: list[dict[str, Any]]
    expected: list[Signal]
    events: list[dict[str, Any]]
    # By boundary, as the actor has them and as they have to be.
    averages: dict[str, float]
    expected_averages: dict[str, float]


def run(
    case: Case,
    blown_layer: int | None = None,
    size: int = 1,
    left_out: Sequence[tuple[int, int, int]] = (),
    clip: dict[str, Any] | None = None,
    **gradloc: Any,
) -> list[Outcome]:
    """Updates of the actor with TokenClip, each beside the plain computation.

    Args:
        case (Case): The actor.
        blown_layer (int, optional): The layer that amplifies a token's signal.
        size (int): How many neighbouring ranks share their sequences (Ulysses).
        left_out (Sequence): Tokens of batch 0 that the plain computation leaves out: rank, row and position.
        clip (dict, optional): Settings of TokenClip.
        gradloc (Any): More of the actor's configuration.
    """
    settings = {"action": "drop", "factor": FACTOR, "beta": BETA, "warmup_steps": WARMUP, "max_share": 0.2}
    config = TokenClipConfig(enable=True, **settings | (clip or {}))
    change = (lambda _: None) if blown_layer is None else amplify(case, blown_layer)
    if size > 1:
        stand_in_for_a_gpu(case, size)
        gradloc["ulysses_sequence_parallel_size"] = size
    actor = build_actor(case, change_model=change, grad_clip=1e9, token_clip=config, **gradloc)
    if size > 1:
        share_sequences(actor, size)
    gradients: list[list[torch.Tensor | None]] = []
    actor.actor_optimizer.register_step_pre_hook(
        lambda *_: gradients.append(
            [None if p.grad is None else local(p.grad) for p in actor.actor_module.parameters()]
        )
    )
    plain = Plain(case, change, config, size)
    outcomes = []
    for seed in CALLS:
        plain.left_out = [place[1:] for place in left_out if seed == 0 and place[0] == dist.get_rank()]
        batch = build_batch(case, dist.get_rank() // size, seed)
        expected = plain.update(batch)
        gradients.clear()
        actor.update_policy(batch)
        (found,) = gradients
        watch = getattr(actor, "engine", actor).watch
        events = [] if watch.gradloc is None else events_of(actor)
        error = error_of(case, found, plain.gradients)
        state = watch.token_clip.state_dict()["boundaries"]
        averages = {name: of_boundary["average"] for name, of_boundary in state.items() if of_boundary["average"]}
        outcomes.append(Outcome(error, watch.clips, expected, events, averages, dict(plain.average)))
    return outcomes


def error_of(case: Case, found: list[torch.Tensor | None], expected: list[torch.Tensor]) -> float:
    """The expected gradients are sharded as parameters of a model of their own."""
    model = build_model(case)
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            parameter.copy_(gradient)
    shards = [local(parameter) for parameter in wrap(case, model).parameters()]
    scale = torch.stack([gradient.norm() for gradient in expected]).norm()
    errors = [
        (shard if gradient is None else shard - gradient.float()).norm()
        for gradient, shard in zip(found, shards, strict=True)
        if shard.numel()
    ]
    return (torch.stack(errors).norm() / scale).item() if errors else 0.0


class Plain:
    """The plain computation: its model, the usual signals, and the gradients of the last update."""

    def __init__(self, case: Case, change: Callable[[torch.nn.Module], None], clip: TokenClipConfig, size: int) -> None:
        # In float32 and with padding everything is computed by plain torch.
        self.given, self.clip, self.size = case, clip, size
        self.case = dataclasses.replace(case, packed=False, fused=False, checkpointing=False)
        self.model = build_model(dataclasses.replace(self.case, model="llama" if case.model == "tiled" else case.model))
        change(self.model)
        self.model.gradient_checkpointing_disable()
        self.masters = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.seen: dict[str, list[float]] = {}
        self.usual: dict[str, float] = {}
        self.average: dict[str, float] = {}
        self.tokens = 0
        self.left_out: list[tuple[int, ...]] = []
        self.gradients: list[torch.Tensor] = []
        self.segments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        modules = {"embed_tokens": base.model.embed_tokens}
        modules |= {f"layers.{i}": layer for i, layer in enumerate(base.model.layers)}
        for name, module in modules.items():
            module.register_forward_hook(self._start_a_segment(name))

    def _start_a_segment(self, name: str) -> Callable[..., Any]:
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            if not torch.is_grad_enabled():
                return output
            leaf = hidden.detach().requires_grad_()
            self.segments[name] = hidden, leaf
            return (leaf, *output[1:]) if isinstance(output, tuple) else leaf

        return hook

    def update(self, batch: DataProto) -> list[Signal]:
        """One update; the signals over their bounds, of all ranks."""
        case, config = self.case, build_config(self.given)
        config.global_batch_info.update(whole_mini_batch(case, batch))
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.data = master.to(case.dtype)
        total = [torch.zeros_like(master) for master in self.masters]
        largest: dict[str, float] = {}
        over: list[Signal] = []
        self.cut: dict[str, int] = {}
        for index, rows in enumerate(split_rows(case, config, batch)):
            others = {name: values[rows] for name, values in batch.non_tensor_batch.items()}
            tensors = {**on_device(batch.batch[rows]), **others}
            weights = token_weights(case, tensors["response_mask"], loss_factor(case, rows), config.global_batch_info)
            self.model.zero_grad()
            self.segments.clear()
            log_prob, entropy = log_probs_and_entropy(case, self.model, tensors)
            leaf = log_prob.detach().requires_grad_()
            loss = loss_factor(case, rows) * loss_of(case, config, tensors, leaf, entropy)
            (case.loss_scale * loss).backward(retain_graph=True)
            of_row = weights.amax(1)
            start = tensors["input_ids"].shape[1] - leaf.shape[1]
            for row, position in self.left_out:
                if row in rows:
                    leaf.grad[rows.index(row), position] = 0
            found = self._cut(LOG_PROBS, leaf.grad, leaf.grad.abs(), of_row, 0, largest)
            over += [Signal(LOG_PROBS, dist.get_rank() // self.size, index, rows[r], p, m) for r, p, m in found]
            log_prob.backward(leaf.grad)
            for name, (hidden, of_segment) in reversed(self.segments.items()):
                gradient = of_segment.grad
                if gradient is None or not hidden.requires_grad:
                    continue
                found = self._cut(name, gradient, gradient.float().norm(dim=-1), of_row, start - 1, largest)
                over += [Signal(name, dist.get_rank() // self.size, index, rows[r], p, m) for r, p, m in found]
                hidden.backward(gradient)
            for part, gradient in zip(total, take_gradients(case, [*self.model.parameters()]), strict=True):
                part += gradient
        self._take_in(largest, int(batch.batch["response_mask"].sum()))
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            parameter.data = master
        step(self.model, total, 1e9)
        self.gradients = total
        return [signal for of_rank in gathered(over)[:: self.size] for signal in of_rank]

    def _cut(
        self,
        name: str,
        gradient: torch.Tensor,
        norms: torch.Tensor,
        of_row: torch.Tensor,
        start: int,
        largest: dict[str, float],
    ) -> list[tuple[int, int, float]]:
        """Cuts a gradient in place; the row, position and multiple of what was over the bound."""
        values = (norms / self.case.loss_scale / torch.where(of_row > 0, of_row, 1.0).unsqueeze(1)).tolist()
        flat = [value for row in values for value in row if math.isfinite(value)]
        largest[name] = max(largest.get(name, 0.0), *flat)
        if name not in self.usual:
            return []
        usual = self.usual[name]
        over = [
            (row, column, values[row][column] / usual)
            for row in range(len(values))
            for column in range(len(values[0]))
            if not values[row][column] <= self.clip.factor * usual
        ]
        limit = max(1, int(self.clip.max_share * self.tokens / dist.get_world_size()))
        limit = limit if name == LOG_PROBS else max(1, limit // self.size)
        if self.cut.get(name, 0) + len(over) <= limit and self.clip.action != "log":
            self.cut[name] = self.cut.get(name, 0) + len(over)
            for row, column, multiple in over:
                left = min(max(2 - multiple / self.clip.factor, 0.0), 1.0) if self.clip.action == "smooth" else 0.0
                gradient[row, column] = gradient[row, column] * left if left else 0.0
        return [(row, column - start, multiple) for row, column, multiple in over]

    def _take_in(self, largest: dict[str, float], tokens: int) -> None:
        of_ranks = gathered((largest, tokens))
        self.tokens = sum(count for _, count in of_ranks)
        for name in largest:
            value = max(of_rank[name] for of_rank, _ in of_ranks)
            if value == 0:
                continue
            seen = self.seen.setdefault(name, [])
            seen.append(value)
            if len(seen) == WARMUP:
                self.average[name] = statistics.median(seen)
            elif len(seen) > WARMUP:
                # The bias-corrected average: the t-th value weighs (1 - beta) / (1 - beta^t).
                weight = (1 - BETA) / (1 - BETA ** len(seen))
                clipped = min(value, self.clip.factor * self.usual[name])
                self.average[name] += weight * (clipped - self.average[name])
            if len(seen) >= WARMUP:
                percentile = sorted(seen)[math.floor(0.9 * (len(seen) - 1))]
                self.usual[name] = max(self.average[name], percentile / 2)


# In one row, so in one micro-batch.
TWO = ((1, 3, 0), (1, 3, 6))
OTHER_RANK = ((0, 2, 0), (0, 2, 6))
# The norm of a gradient's difference, which has rounding errors of both computations.
EXACT = 2e-5


def check(outcomes: list[list[Outcome]], case: Case) -> list[dict[str, Any]]:
    """Compares every step of every rank; returns the tokens that the spiked step's line has."""
    for of_step in zip(*outcomes, strict=True):
        assert len({json.dumps([of_all_ranks(line) for line in outcome.clips]) for outcome in of_step}) == 1
    check_errors(outcomes, case)
    if case.precision == "float32":
        for outcome in outcomes[0]:
            compare_line(outcome)
            # FSDP1 gives frozen parameters a gradient, too, where they share a flat parameter with others.
            seen = {name: outcome.averages[name] for name in outcome.expected_averages}
            assert seen == pytest.approx(outcome.expected_averages, rel=1e-4)
    (line,) = outcomes[0][SPIKED].clips
    return line["token_clip"]["tokens"]


def of_all_ranks(line: dict[str, Any]) -> dict[str, Any]:
    """A line without what rank 0 alone adds: what the data say of its tokens."""
    found = line["token_clip"]
    tokens = [{name: token[name] for name in ("rank", "micro_batch", "row", "position")} for token in found["tokens"]]
    return {**line, "time": None, "token_clip": {**found, "tokens": tokens}}


def check_errors(outcomes: list[list[Outcome]], case: Case) -> None:
    assert all(outcome.error < max(EXACT, case.tolerance) for of_rank in outcomes for outcome in of_rank)


def compare_line(outcome: Outcome) -> None:
    """The line of an update's only mini-batch, with the tokens that the plain computation has found over a bound."""
    if not outcome.expected:
        assert outcome.clips == []
        return
    (line,) = outcome.clips
    found = line["token_clip"]
    counts = {name: 0 for name in found["over"]}
    first: dict[tuple[int, int, int], Any] = {}
    for signal in outcome.expected:
        counts[signal.boundary] += 1
        first.setdefault((signal.rank, signal.row, signal.position), signal)
    assert found["over"] == counts
    tokens = {(token["rank"], token["row"], token["position"]): token for token in found["tokens"]}
    assert tokens.keys() == first.keys()
    for place, token in tokens.items():
        assert token["boundary"] == first[place].boundary
        assert token["micro_batch"] == first[place].micro_batch
        assert token["multiple"] == pytest.approx(first[place].multiple, rel=1e-4, nan_ok=True)


@on_ranks(
    (2, Case(planted=ONE)),
    (1, Case("none", planted=((0, 2, 6),))),
    (2, Case("fsdp1-orig", checkpointing=True, tied=True, planted=ONE)),
    (2, Case(loss_agg_mode=MODES[2], dynamic=True, kl=True, entropy=True, planted=ONE)),
    (2, Case("fsdp1", model="lora", planted=ONE)),
    (2, Case(model="frozen", planted=ONE)),
    on_engine(2, Case("fsdp1", precision="float16", loss_scale=8.0, planted=ONE)),
    (4, Case(hsdp=True, planted=ONE)),
    on_engine(2, Case(packed=True, dynamic=True, micro_batch=1, deferred=True, planted=ONE)),
    on_engine(2, Case("fsdp1-orig", fused=True, planted=ONE)),
    on_engine(2, Case(nan=ONE, nested=True, packed=True)),
)
def test_an_outlier_at_the_log_probs_leaves_the_backward_pass(launch: Launch, world: int, case: Case) -> None:
    (token,) = check(launch(world, run, case), case)
    rank, row, position = (case.planted or case.nan)[0]
    assert (token["rank"], token["row"], token["position"]) == (rank, row, position)
    assert token["boundary"] == LOG_PROBS and token["cut"]
    assert token["multiple"] > 10 * FACTOR or math.isnan(token["multiple"])


@on_ranks(
    (2, Case("fsdp1", checkpointing=True)),
    (2, Case(checkpointing=True, reentrant=True)),
    (2, Case("fsdp1", packed=True, dynamic=True)),
    on_engine(2, Case(tied=True, deferred=True, nested=True)),
    (2, Case(model="moe", micro_batch=8)),
    (2, Case(model="tiled", micro_batch=8)),
    (2, Case(activation_offload=True, checkpointing=True)),
)
def test_an_outlier_of_a_layer_is_cut_where_it_leaves_it(launch: Launch, world: int, case: Case) -> None:
    tokens = check(launch(world, partial(run, case, blown_layer=1)), case)
    (token,) = tokens
    rank, row, position = BLOWN
    # Its hidden state predicts the next token.
    assert (token["rank"], token["row"], token["position"]) == (rank, row, position + 1)
    assert token["boundary"] == "layers.0" and token["cut"]


@on_ranks(on_engine(4, Case(packed=True, planted=((1, 3, 6),))))
def test_ranks_that_share_their_sequences_cut_the_same_token(launch: Launch, world: int, case: Case) -> None:
    (token,) = check(launch(world, partial(run, case, size=2)), case)
    assert (token["rank"], token["row"], token["position"]) == case.planted[0]


def test_log_only_writes_down(launch: Launch) -> None:
    case = Case("fsdp1", packed=True)
    outcomes = launch(2, partial(run, case, 1, clip={"action": "log"}))
    tokens = check(outcomes, case)
    assert tokens and not any(token["cut"] for token in tokens)
    assert not any(outcomes[0][SPIKED].clips[0]["token_clip"]["cut"].values())


def test_smooth_leaves_a_part_of_what_is_a_little_over(launch: Launch) -> None:
    """With a bound that ordinary tokens reach, many are between it and its double."""
    case = Case("fsdp1", packed=True)
    outcomes = launch(2, partial(run, case, clip={"action": "smooth", "max_share": 1.0, "factor": 1.05}))
    check_errors(outcomes, case)
    multiples = [signal.multiple for outcome in outcomes[0] for signal in outcome.expected]
    assert any(1.05 < multiple < 2.1 for multiple in multiples)


def test_more_than_the_largest_share_are_left(launch: Launch) -> None:
    """Two tokens of a micro-batch are over the bound, and one of some forty may be cut: there, none is."""
    case = Case("fsdp1", packed=True, micro_batch=1, planted=(*TWO, (1, 6, 9)))
    outcomes = launch(2, partial(run, case, clip={"max_share": 0.02}))
    check(outcomes, case)
    (line,) = outcomes[0][SPIKED].clips
    found = line["token_clip"]
    assert LOG_PROBS in found["refused"]
    assert [(t["row"], t["position"]) for t in found["tokens"] if t["cut"]] == [p[1:] for p in case.planted[2:]]
    assert "more than max_share" in judged(line)["summary"]


@on_ranks(
    (2, Case("fsdp1", packed=True, checkpointing=True), "drop"),
    (2, Case(dynamic=True), "smooth", pytest.mark.target(version="0.9.1")),
    names="world case action",
)
def test_with_nothing_over_its_bound_training_is_as_without(
    launch: Launch, world: int, case: Case, action: str
) -> None:
    def harmless() -> tuple[dict[str, bool], Run]:
        calls = (1, 2, 3)
        clip = TokenClipConfig(enable=True, factor=1e6, warmup_steps=1, action=action)
        run = train(case, calls=calls, token_clip=clip)
        return compare_runs(run, stock_run(case, calls)), run

    for same, run in launch(world, harmless):
        assert all(same.values()), same
        assert not any(run.clips)


def test_gradloc_sees_what_token_clip_leaves(launch: Launch) -> None:
    """With action log GradLoc finds the token; with drop there is no spike left for it."""
    options = {"spike_detection": True, "grad_norm_threshold": IDENTITY_THRESHOLD, "bisect_budget_steps": 100}
    for action in ("log", "drop"):
        clip = TokenClipConfig(enable=True, warmup_steps=2, max_share=0.2, action=action)
        trained = partial(train, calls=CALLS, token_clip=clip, **options)
        run, _ = launch(2, trained, Case("fsdp1", packed=True, planted=ONE))
        events = list(map(json.loads, run.events))
        assert [len(of_update) for of_update in run.clips] == [seed == 0 for seed in CALLS]
        assert [len(of_update) for of_update in events] == [action == "log" and seed == 0 for seed in CALLS]
        if action == "log":
            (event,) = events[SPIKED]
            assert [(c["rank"], c["row"], c["position"]) for c in event["culprits"]] == list(ONE)


def test_the_passes_of_drop_are_cut_as_training_was(launch: Launch) -> None:
    """TokenClip cuts an outlier that a layer makes; two planted tokens are too many for it, and GradLoc drops them."""
    case = Case("fsdp1", packed=True, checkpointing=True, planted=OTHER_RANK)
    options = {"spike_detection": True, "grad_norm_threshold": IDENTITY_THRESHOLD, "spike_action": "drop"}
    for outcomes in launch(2, partial(run, case, 1, left_out=OTHER_RANK, clip={"max_share": 0.02}, **options)):
        outcome = outcomes[SPIKED]
        (event,) = outcome.events
        assert event["applied"] and len(event["culprits"]) == 2
        assert [token["cut"] for token in outcome.clips[0]["token_clip"]["tokens"] if token["rank"] == 1] == [True]
        assert outcome.error < EXACT


def test_the_search_starts_at_a_token_whose_signal_stands_out(launch: Launch) -> None:
    """The token's log-prob and coefficient are ordinary, so that suspicion alone does not expect it."""
    case = Case(rows=64, mini_batch=64, micro_batch=32)

    def search() -> list[dict[str, Any]]:
        found = []
        clip = TokenClipConfig(enable=True, action="log", warmup_steps=WARMUP)
        for options in ({}, {"token_clip": clip}):
            options |= {"spike_detection": True, "grad_norm_threshold": 300.0, "bisect_budget_steps": 100}
            actor = build_actor(case, change_model=amplify(case, 1), grad_clip=1e9, **options)
            for seed in CALLS[: SPIKED + 1]:
                actor.update_policy(build_batch(case, dist.get_rank(), seed))
            found += events_of(actor)
        return found

    alone, known = launch(2, search)[0]
    rank, row, position = BLOWN
    for event in (alone, known):
        assert [(c["rank"], c["row"], c["position"]) for c in event["culprits"]] == [(rank, row, position + 1)]
    assert known["passes"] < alone["passes"]
