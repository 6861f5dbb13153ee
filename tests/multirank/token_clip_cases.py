"""TokenClip in the actor beside a plain computation of what it must do; they run inside the ranks of a cluster.

The plain computation has an unsharded copy of the model, cut into segments at the boundaries. Each segment starts from
a leaf. Its backward is a call of its own, with the gradient that has come so far, in which tokens may be zeroed.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from actor_cases import Run, compare_runs, stock_run, train
from actors import (
    Case,
    build_actor,
    build_config,
    build_model,
    events_of,
    local,
    on_device,
    wrap,
)
from batches import build_batch
from mini_batches import loss_factor, split_rows, token_weights, whole_mini_batch
from oracle import log_probs_and_entropy, loss_of, step, take_gradients
from reduced_meter_cases import share_sequences, stand_in_for_a_gpu
from verl import DataProto

FACTOR, BETA, WARMUP = 4.0, 0.9, 2
LOG_PROBS = "log_probs"
# The warm-up, the batch with the planted tokens, and one without a spike.
CALLS = (1, 2, 0, 4)
SPIKED = CALLS.index(0)
# Of rank 1, row 3: where `blow` acts. Its hidden state predicts the next token of the response.
BLOWN = (1, 3, 4)
BLOW = 1000.0


class Amplified(torch.autograd.Function):
    """The identity, with a backward that multiplies the gradient at some positions."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        ctx.where = where
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.where(ctx.where.unsqueeze(-1), BLOW * gradient, gradient), None


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
                return (Amplified.apply(args[0], where), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": Amplified.apply(kwargs["hidden_states"], where)}

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
    metrics: dict[str, Any]
    expected: list[Signal]
    events: list[dict[str, Any]]
    # By boundary, as the actor has them and as they have to be.
    averages: dict[str, float]
    expected_averages: dict[str, float]


def run(
    case: Case,
    action: str = "drop",
    blown_layer: int | None = None,
    change_model: Callable[[torch.nn.Module], None] = lambda _: None,
    calls: Sequence[int] = CALLS,
    max_share: float = 0.2,
    size: int = 1,
    factor: float = FACTOR,
    left_out: Sequence[tuple[int, int, int]] = (),
    **gradloc: Any,
) -> list[Outcome]:
    """Updates of the actor with TokenClip, each beside the plain computation.

    Args:
        case (Case): The actor.
        action (str): TokenClip's.
        blown_layer (int, optional): The layer that amplifies a token's signal.
        change_model (Callable): Another change to the model.
        calls (Sequence[int]): The batches.
        max_share (float): TokenClip's.
        size (int): How many neighbouring ranks share their sequences (Ulysses).
        factor (float): TokenClip's.
        left_out (Sequence): Tokens of batch 0 that the plain computation leaves out: rank, row and position.
        gradloc (Any): More of the actor's configuration.
    """

    def change(model: torch.nn.Module) -> None:
        if blown_layer is not None:
            amplify(case, blown_layer)(model)
        change_model(model)

    clip = {"enable": True, "action": action, "factor": factor, "beta": BETA, "warmup_steps": WARMUP}
    if size > 1:
        stand_in_for_a_gpu(case, size)
        gradloc["ulysses_sequence_parallel_size"] = size
    actor = build_actor(
        case, change_model=change, grad_clip=1e9, token_clip=token_clip_config(max_share=max_share, **clip), **gradloc
    )
    if size > 1:
        share_sequences(actor, size)
    gradients: list[list[torch.Tensor | None]] = []
    actor.actor_optimizer.register_step_pre_hook(
        lambda *_: gradients.append(
            [None if p.grad is None else local(p.grad) for p in actor.actor_module.parameters()]
        )
    )
    plain = Plain(case, change, action, max_share, size, factor)
    outcomes = []
    for seed in calls:
        plain.left_out = [place[1:] for place in left_out if seed == 0 and place[0] == dist.get_rank()]
        batch = build_batch(case, dist.get_rank() // size, seed)
        expected = plain.update(batch)
        gradients.clear()
        metrics = actor.update_policy(batch)
        (found,) = gradients
        watch = getattr(actor, "engine", actor).watch
        events = [] if watch.gradloc is None else events_of(actor)
        error = error_of(case, found, plain.gradients)
        state = watch.token_clip.state_dict()["boundaries"]
        averages = {name: of_boundary["average"] for name, of_boundary in state.items() if of_boundary["average"]}
        outcomes.append(Outcome(error, watch.clips, metrics, expected, events, averages, dict(plain.average)))
    return outcomes


def token_clip_config(**settings: Any) -> Any:
    from verl.workers.config import TokenClipConfig

    return TokenClipConfig(**settings)


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

    def __init__(
        self,
        case: Case,
        change: Callable[[torch.nn.Module], None],
        action: str,
        max_share: float,
        size: int,
        factor: float,
    ) -> None:
        # In float32 and with padding everything is computed by plain torch.
        self.given, self.action, self.max_share = case, action, max_share
        self.size, self.factor = size, factor
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
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, over)
        return [signal for of_rank in gathered[:: self.size] for signal in of_rank]

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
            if not values[row][column] <= self.factor * usual
        ]
        limit = max(1, int(self.max_share * self.tokens / dist.get_world_size()))
        limit = limit if name == LOG_PROBS else max(1, limit // self.size)
        if self.cut.get(name, 0) + len(over) <= limit and self.action != "log":
            self.cut[name] = self.cut.get(name, 0) + len(over)
            for row, column, multiple in over:
                left = min(max(2 - multiple / self.factor, 0.0), 1.0) if self.action == "smooth" else 0.0
                gradient[row, column] = gradient[row, column] * left if left else 0.0
        return [(row, column - start, multiple) for row, column, multiple in over]

    def _take_in(self, largest: dict[str, float], tokens: int) -> None:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (largest, tokens))
        self.tokens = sum(count for _, count in gathered)
        for name in largest:
            value = max(of_rank[name] for of_rank, _ in gathered)
            if value == 0:
                continue
            seen = self.seen.setdefault(name, [])
            seen.append(value)
            if len(seen) == WARMUP:
                self.average[name] = statistics.median(seen)
            elif len(seen) > WARMUP:
                # The bias-corrected average: the t-th value weighs (1 - beta) / (1 - beta^t).
                weight = (1 - BETA) / (1 - BETA ** len(seen))
                clipped = min(value, self.factor * self.usual[name])
                self.average[name] += weight * (clipped - self.average[name])
            if len(seen) >= WARMUP:
                percentile = sorted(seen)[math.floor(0.9 * (len(seen) - 1))]
                self.usual[name] = max(self.average[name], percentile / 2)


def checkpoint_reentrantly(model: torch.nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})


def harmless(case: Case, action: str) -> tuple[dict[str, bool], Run]:
    """A run in which nothing is over its bound, compared with the unpatched actor."""
    calls = (1, 2, 3)
    clip = token_clip_config(enable=True, factor=1e6, warmup_steps=1, action=action)
    run = train(case, calls=calls, token_clip=clip)
    return compare_runs(run, stock_run(case, calls)), run


def search(case: Case, blown_layer: int, threshold: float, clip: bool = False) -> dict[str, Any]:
    """The event of the spiked update, with TokenClip's signals or without them."""
    options = {"spike_detection": True, "grad_norm_threshold": threshold, "bisect_budget_steps": 100}
    if clip:
        options["token_clip"] = token_clip_config(enable=True, action="log", warmup_steps=WARMUP)
    actor = build_actor(case, change_model=amplify(case, blown_layer), grad_clip=1e9, **options)
    for seed in CALLS[: SPIKED + 1]:
        actor.update_policy(build_batch(case, dist.get_rank(), seed))
    (event,) = events_of(actor)
    return event
