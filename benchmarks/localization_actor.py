"""What the processes of `localization.py` do: real actors, planted spikes, brute force, and the costs.

Natural and coherent spikes are in `localization_natural.py`.

All ranks call every function here.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from published_schedule import Part, localize
from target_actor import ENGINE, actor_class, log_probs, stock_actor_class
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from verl import DataProto
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_clip_grad_norm_, get_fsdp_wrap_policy, get_shard_placement_fn
from verl.utils.gradloc.fsdp.state import unreduced
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig

# (rank, micro-batch, token): the token is an index into the micro-batch's response tokens, row by row.
Place = tuple[int, int, int]

PROMPT = 4
NEVER = 1e30

# The extra passes that an event may take, for each end of the search (`bisect_until`): verl's default, and as many as
# every token over τ may take.
BUDGETS = {"explained": 128, "exhaustive": 100_000}


@dataclass(frozen=True)
class Shape:
    """The size of a model, and the tokens of a micro-batch in rows of one length."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    rows: int
    length: int
    init: float = 0.02

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def tiny(tokens: int) -> Shape:
    """The model of the planted events; with such weights the gradient norms vary from token to token."""
    rows = max(2, tokens // 256)
    return Shape(32, 64, 2, 4, 2, 67, rows, tokens // rows, init=0.2)


@dataclass(frozen=True)
class Ranks:
    """Where this process runs.

    Args:
        device (torch.device): Its device.
        strategy (str): verl's name of the sharding: fsdp2 or fsdp.
    """

    device: torch.device
    strategy: str

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def clock(self) -> float:
        """The time at which all ranks have come here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()
        return time.perf_counter()


def build_model(shape: Shape, ranks: Ranks) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        initializer_range=shape.init,
        max_position_embeddings=PROMPT + shape.length,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    return model.to(ranks.device).train()  # type: ignore[arg-type]  # transformers' decorator hides that it is a method


def shard(model: LlamaForCausalLM, ranks: Ranks) -> torch.nn.Module:
    """Wraps a model as verl's worker does."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("fsdp",))
    if ranks.strategy == "fsdp":
        policy = get_fsdp_wrap_policy(model)
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=ranks.device, device_mesh=mesh)
    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=True)
    options = {"mesh": mesh, "mp_policy": precision, "shard_placement_fn": get_shard_placement_fn(mesh.size())}
    apply_fsdp2(model, {**options, "reshard_after_forward": True}, {})
    return model


def build_config(shape: Shape, micro_batches: int, ranks: Ranks, **gradloc: Any) -> FSDPActorConfig:
    return FSDPActorConfig(
        strategy=ranks.strategy,
        rollout_n=1,
        ppo_mini_batch_size=micro_batches * shape.rows,
        ppo_micro_batch_size_per_gpu=shape.rows,
        use_torch_compile=False,
        fsdp_config=FSDPEngineConfig(dtype="float32"),
        **gradloc,
    )


def build_actor(shape: Shape, micro_batches: int, ranks: Ranks, base_tree: Path | None = None, **gradloc: Any) -> Any:
    """A real actor, of the unpatched verl if `base_tree` has one.

    Its learning rate is 0, so that each update starts from the same weights.
    """
    config = build_config(shape, micro_batches, ranks, **gradloc)
    model = shard(build_model(shape, ranks), ranks)
    kind = actor_class() if base_tree is None else stock_actor_class(base_tree)
    return kind(config, model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0))


def build_batch(shape: Shape, micro_batches: int, ranks: Ranks, seed: int, sigma: float = 0.5) -> DataProto:
    """One rank's rows, without padding; advantages of either sign, log-normal with median 1 and this sigma."""
    generator = torch.Generator().manual_seed(1000 * seed + ranks.rank)
    rows = micro_batches * shape.rows
    tokens = torch.randint(0, shape.vocabulary, (rows, PROMPT + shape.length), generator=generator)
    noise = torch.randn(2, rows, shape.length, generator=generator)
    tensors = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "position_ids": torch.arange(tokens.shape[1]).expand_as(tokens).contiguous(),
        "responses": tokens[:, PROMPT:].contiguous(),
        "response_mask": torch.ones(rows, shape.length),
        # Not used by 0.7's actor in an on-policy update; for 0.9's engine, see `with_old_log_probs`.
        "old_log_probs": torch.zeros(rows, shape.length),
        "advantages": noise[0].sign() * (sigma * noise[1]).exp(),
    }
    return DataProto.from_dict(tensors, meta_info={"temperature": 1.0, "global_steps": 0})


def with_old_log_probs(actor: Any, shape: Shape, batch: DataProto) -> DataProto:
    """The batch with the actor's own log-probs as the old ones, as a trainer gives them.

    0.7's actor takes them from its forward in an on-policy update, 0.9's engine from the batch.
    """
    if not ENGINE:
        return batch
    batch = copy_batch(batch)
    parts = []
    with torch.no_grad():
        for start in range(0, len(batch), shape.rows):
            rows = {name: tensor[start : start + shape.rows] for name, tensor in batch.batch.items()}
            parts.append(log_probs(actor, rows, batch.meta_info["temperature"]))
    batch.batch["old_log_probs"] = torch.cat(parts)
    return batch


def copy_batch(batch: DataProto) -> DataProto:
    """A copy of a batch whose advantages can be changed."""
    tensors = {**batch.batch, "advantages": batch.batch["advantages"].clone()}
    return DataProto.from_dict(tensors, meta_info=dict(batch.meta_info))


def indices(place: Place, shape: Shape) -> tuple[int, int]:
    """A token's row in its rank's mini-batch, and its position."""
    _, micro_batch, token = place
    row, position = divmod(token, shape.length)
    return micro_batch * shape.rows + row, position


class Amplifier:
    """Enlarges the gradient of single tokens behind the LM head, as a layer that explodes would.

    Neither log-probs nor ∂L/∂log p change, so suspicion cannot see such a token. A row is known by its prompt, which is
    random: that works for whatever part of a batch a forward is given.

    Args:
        model (nn.Module): A model on which it acts; more can be attached.

    Attributes:
        factors (dict): prompt -> {position in the response: factor}.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.factors: dict[tuple[int, ...], dict[int, float]] = {}
        self._input_ids = torch.empty(0)
        self.attach(model)

    def attach(self, model: torch.nn.Module) -> None:
        model.register_forward_pre_hook(self._see_input, with_kwargs=True)
        (head,) = [module for name, module in model.named_modules() if name.endswith("lm_head")]
        head.register_forward_pre_hook(self._before_head)

    def _see_input(self, _model: torch.nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
        self._input_ids = kwargs["input_ids"]

    def _before_head(self, _head: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        if not (self.factors and torch.is_grad_enabled()):
            return None
        factors = torch.ones(self._input_ids.shape)
        for row, ids in enumerate(self._input_ids[:, :PROMPT].tolist()):
            for position, factor in self.factors.get(tuple(ids), {}).items():
                # The hidden state that predicts a token is the one before it.
                if PROMPT + position - 1 < factors.shape[1]:
                    factors[row, PROMPT + position - 1] = factor
        factors = factors.to(inputs[0].device)[..., None]
        hidden = inputs[0].view_as(inputs[0])
        hidden.register_hook(lambda gradient: gradient * factors)
        return (hidden,)


@dataclass(frozen=True)
class Planted:
    """A token to plant.

    Args:
        name (str): "clear": it lifts its micro-batch over the threshold on its rank and in the mean over all ranks;
            "diluted": on its rank only; "hidden": neither, though it is over the token-level threshold.
        size (float): Its gradient norm in thresholds.
        suspected (bool): By a scaled advantage, which suspicion sees; otherwise by the amplifier, which it cannot see.
    """

    name: str
    size: float
    suspected: bool


class UnshardedCopy:
    """The truth by brute force: gradients of this rank's tokens on a model of its own, through the actor's loss.

    Args:
        shape (Shape): Of the model and the micro-batches (N).
        micro_batches (int): M.
        ranks (Ranks): The processes.
    """

    def __init__(self, shape: Shape, micro_batches: int, ranks: Ranks) -> None:
        self.model = build_model(shape, ranks)
        self._shape = shape
        self._ranks = ranks
        self._loss_config = build_config(shape, micro_batches, ranks)

    def token_norm(self, batch: DataProto, place: Place) -> float:
        """‖g_t‖ of one of this rank's tokens: the loss of that token alone."""
        row, position = indices(place, self._shape)
        rows = {name: tensor[row : row + 1].to(self._ranks.device) for name, tensor in batch.batch.items()}
        logits = self.model(input_ids=rows["input_ids"][:, : PROMPT + position], use_cache=False).logits[:, -1:]
        here = slice(position, position + 1)
        log_prob = logits.log_softmax(-1).gather(-1, rows["responses"][:, here, None])[..., 0]
        self.model.zero_grad()
        self._loss(log_prob, rows["advantages"][:, here], rows["response_mask"][:, here]).backward()
        squares = [p.grad.double().square().sum() for p in self.model.parameters() if p.grad is not None]
        return float(torch.stack(squares).sum().sqrt())

    def token_equivalent(self, batch: DataProto, micro_batch: int, without: Collection[int] = ()) -> float:
        """norm/sqrt(Σ w_t²) of one of this rank's micro-batches without some of its tokens; 0 without all of them.

        It is over its threshold where this is over τ. The weight of each token is 1/N, times what M and W add to it,
        which is left out of both sides. Tokens with a coefficient of zero do not count.
        """
        log_prob, coefficient = self._log_probs(batch, micro_batch)
        coefficient.view(-1)[list(without)] = 0.0
        kept = int(coefficient.count_nonzero())
        if kept == 0:
            return 0.0
        gradients = torch.autograd.grad(log_prob, list(self.model.parameters()), coefficient)
        return float(_flat(gradients).norm()) / math.sqrt(kept)

    def gram_matrix(self, batch: DataProto, micro_batch: int) -> Tensor:
        """⟨g_s, g_t⟩ of all tokens of one of this rank's micro-batches: float64, shape (N, N), on the CPU.

        The squared norm of a set's gradient is the sum of its block, over N² for the weights.
        """
        log_prob, coefficient = self._log_probs(batch, micro_batch)
        parameters = list(self.model.parameters())
        rows = []
        for value, factor in zip(log_prob.view(-1), coefficient.view(-1), strict=True):
            gradient = _flat(torch.autograd.grad(value, parameters, retain_graph=True))
            rows.append((gradient * factor).cpu())
        vectors = torch.stack(rows).double()
        return vectors @ vectors.T

    def _log_probs(self, batch: DataProto, micro_batch: int) -> tuple[Tensor, Tensor]:
        """The log-probs of a micro-batch's response tokens, and N·∂L/∂log p of each; shape (rows, length) both."""
        rows = slice(micro_batch * self._shape.rows, (micro_batch + 1) * self._shape.rows)
        tensors = {name: tensor[rows].to(self._ranks.device) for name, tensor in batch.batch.items()}
        logits = self.model(input_ids=tensors["input_ids"], use_cache=False).logits[:, PROMPT - 1 : -1]
        log_prob = logits.log_softmax(-1).gather(-1, tensors["responses"][..., None])[..., 0]
        leaf = log_prob.detach().requires_grad_()
        loss = self._loss(leaf, tensors["advantages"], tensors["response_mask"])
        (coefficient,) = torch.autograd.grad(loss, leaf)
        return log_prob, coefficient * self._shape.tokens

    def _loss(self, log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        loss, _ = get_policy_loss_fn("vanilla")(
            old_log_prob=log_prob.detach(),
            log_prob=log_prob,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode="token-mean",
            config=self._loss_config,
        )
        return loss


class Solver:
    """Solves a batch by GradLoc, in the real update_policy, and by the published schedule.

    Args:
        shape (Shape): Of the model and the micro-batches (N).
        micro_batches (int): M.
        ranks (Ranks): The processes (W).
        threshold (float): τ.
        untils (Sequence[str]): The ends of GradLoc's search: "explained", "exhaustive"; an actor for each.

    Attributes:
        models (list[nn.Module]): The actors' models.
    """

    def __init__(self, shape: Shape, micro_batches: int, ranks: Ranks, threshold: float, untils: Sequence[str]) -> None:
        self._shape = shape
        self._micro_batches = micro_batches
        self._ranks = ranks
        self._threshold = threshold
        self._loss_config = build_config(shape, micro_batches, ranks)
        gradloc: dict[str, Any] = {"spike_detection": True, "grad_norm_threshold": threshold}
        self._actors = {
            until: build_actor(
                shape,
                micro_batches,
                ranks,
                **gradloc,
                bisect_until=until,
                bisect_budget_steps=BUDGETS[until],
                bisect_budget_seconds=None,
            )
            for until in untils
        }
        self._actor = next(iter(self._actors.values()))
        self.models = [actor.actor_module for actor in self._actors.values()]
        self._rehearsed: set[str] = set()
        self._forwards = 0
        for model in self.models:
            model.register_forward_pre_hook(self._count_forward)

    def gradloc(self, batch: DataProto, until: str) -> dict[str, Any]:
        """Our search, up to this end.

        Returns:
            dict: `culprits`, their places and gradient norms; `rests`, the norms in thresholds, where measured, of the
                micro-batches over their thresholds without them; `passes`, without the rehearsal in the actor's first
                update and a diffuse event's pass without any token; `seconds`; whether the budget is spent
                (`budget_spent`); `tokens` and `units`, for comparisons: the culprits' places with their norms, and the
                micro-batches over their thresholds with their norms in thresholds; what the event says of itself:
                `complete`, `explained`, `diagnosis`, None where there is no event.
        """
        actor = self._actors[until]
        batch = with_old_log_probs(actor, self._shape, batch)
        self._forwards = 0
        actor.update_policy(batch)
        passes = self._forwards - self._micro_batches
        # One update is one mini-batch, which has one event at most.
        (event,) = actor.gradloc.events or [{}]
        if self._ranks.world_size > 1 and until not in self._rehearsed:
            self._rehearsed.add(until)
            passes -= 1
        if event.get("diagnosis") == "diffuse" and event["without_tokens"] is not None:
            passes -= 1
        culprits = {}
        for culprit in event.get("culprits", []):
            row = culprit["row"] - culprit["micro_batch"] * self._shape.rows
            place = culprit["rank"], culprit["micro_batch"], row * self._shape.length + culprit["position"]
            culprits[place] = culprit["grad_norm"]
        rests = {
            (unit["rank"], unit["micro_batch"]): unit["rest"]["norm"] / unit["rest"]["threshold"]
            for unit in event.get("units", [])
            if unit["rest"] and unit["rest"]["tokens"]
        }
        facts = {name: event.get(name) for name in ("complete", "explained", "diagnosis")}
        facts |= {"seconds": event.get("seconds", 0.0), "budget_spent": event.get("passes", 0) >= BUDGETS[until]}
        facts["tokens"] = sorted([*place, norm] for place, norm in culprits.items())
        facts["units"] = sorted(
            [unit["rank"], unit["micro_batch"], unit["norm"] / unit["threshold"]] for unit in event.get("units", [])
        )
        return {"culprits": culprits, "rests": rests, "passes": passes} | facts

    def published(self, batch: DataProto) -> dict[str, Any]:
        """The published schedule, with the actor's forward and loss, from a gradient that is there already.

        Returns:
            dict: `culprits`, a set of places; `passes`, `seconds`; `restored`, the relative error of the gradient after
                the recomputation.
        """
        self._actor.actor_optimizer.zero_grad()
        self._accumulate(batch)
        before = self._gradient()
        self._forwards = 0
        started = self._ranks.clock()

        def over(part: Part) -> bool:
            self._actor.actor_optimizer.zero_grad()
            self._forward_backward(batch, part)
            tokens = len(part.ranks) * len(part.tokens)
            # Each token's weight is 1/(M N), and the mean over the ranks gives it another 1/W.
            weight = 1 / (self._micro_batches * self._shape.tokens * self._ranks.world_size)
            return not self._reduced_norm() <= self._threshold * math.sqrt(tokens) * weight

        culprits = localize(over, self._ranks.world_size, self._micro_batches, self._shape.tokens)
        self._actor.actor_optimizer.zero_grad()
        self._accumulate(batch)
        seconds = self._ranks.clock() - started
        gaps = [float((a - b).norm() / b.norm()) for a, b in zip(self._gradient(), before, strict=True) if b.any()]
        self._actor.actor_optimizer.zero_grad()
        figures = {"passes": self._forwards, "seconds": seconds, "restored": max(gaps)}
        return {"culprits": set(culprits)} | figures

    def _accumulate(self, batch: DataProto) -> None:
        everything = range(self._ranks.world_size), range(self._shape.tokens)
        for micro_batch in range(self._micro_batches):
            self._forward_backward(batch, Part(micro_batch, *everything))

    def _forward_backward(self, batch: DataProto, part: Part) -> None:
        """One pass over a micro-batch, with all tokens outside of `part` detached."""
        shape = self._shape
        rows = slice(part.micro_batch * shape.rows, (part.micro_batch + 1) * shape.rows)
        tensors = {name: tensor[rows].to(self._ranks.device) for name, tensor in batch.batch.items()}
        keep = torch.zeros(shape.tokens, dtype=torch.bool)
        if self._ranks.rank in part.ranks:
            keep[part.tokens.start : part.tokens.stop] = True
        keep = keep.view(shape.rows, shape.length).to(self._ranks.device)
        log_prob = log_probs(self._actor, tensors, batch.meta_info["temperature"])
        loss, _ = get_policy_loss_fn("vanilla")(
            old_log_prob=log_prob.detach(),
            log_prob=torch.where(keep, log_prob, log_prob.detach()),
            advantages=tensors["advantages"],
            response_mask=tensors["response_mask"],
            loss_agg_mode="token-mean",
            config=self._loss_config,
        )
        (loss / self._micro_batches).backward()

    def _reduced_norm(self) -> float:
        """The norm that the actor clips, which an infinite bound leaves alone."""
        module = self._actor.actor_module
        if self._ranks.strategy == "fsdp":
            return float(module.clip_grad_norm_(math.inf))
        norm = fsdp2_clip_grad_norm_(module.parameters(), max_norm=math.inf)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _gradient(self) -> list[Tensor]:
        gradients = [p.grad for p in self._actor.actor_module.parameters() if p.grad is not None]
        return [_local(gradient).clone() for gradient in gradients]

    def _count_forward(self, *_: Any) -> None:
        self._forwards += 1


class Events:
    """Planted events of one (W, M, N), solved in both ways, with the truth from brute force.

    Args:
        shape (Shape): Of the model and the micro-batches (N).
        micro_batches (int): M.
        ranks (Ranks): The processes (W).
        untils (Sequence[str]): The ends of GradLoc's search.
        level (float): The median gradient norm of ordinary tokens, in thresholds: this sets the threshold.
        sample (int): How many ordinary tokens of each rank brute force measures; all where there are no more.
        seed (int): Of the data, the places and the sizes.
    """

    def __init__(
        self,
        shape: Shape,
        micro_batches: int,
        ranks: Ranks,
        untils: Sequence[str],
        level: float,
        sample: int,
        seed: int,
    ) -> None:
        self.shape = shape
        self.micro_batches = micro_batches
        self.ranks = ranks
        self.untils = untils
        self.batch = build_batch(shape, micro_batches, ranks, seed)
        self.random = random.Random(f"{seed} {ranks.world_size} {micro_batches} {shape.tokens}")
        self.copy = UnshardedCopy(shape, micro_batches, ranks)
        own = [(ranks.rank, m, t) for m in range(micro_batches) for t in range(shape.tokens)]
        own = random.Random(ranks.rank).sample(own, min(sample, len(own)))
        self.amplifier = Amplifier(self.copy.model)
        self.ordinary = self._norms(self.batch, own)
        self.threshold = median(self.ordinary.values()) / level
        self.solver = Solver(shape, micro_batches, ranks, self.threshold, untils)
        for model in self.solver.models:
            self.amplifier.attach(model)

    def solve(self, kind: str) -> Iterator[dict[str, Any]]:
        """Plants one event and solves it in both ways.

        Yields:
            dict: For each end of GradLoc's search: `planted`, the names of the planted tokens; for each way the names
                of the `missed`, how many were `found` and `wrong`, `passes`, `seconds`, and `explained_truth`, whether
                every micro-batch is under its threshold without those found; what GradLoc's event says of itself.
        """
        planted = self._draw(kind)
        spiked, norms = self._plant(planted)
        truth = {place for place, norm in (self.ordinary | norms).items() if norm > self.threshold}
        if not truth >= set(planted):
            raise RuntimeError(f"a planted token is not over the threshold of {self.threshold}: {norms}")
        own = [m for m in range(self.micro_batches) if self.copy.token_equivalent(spiked, m) > self.threshold]

        def judge(result: dict[str, Any]) -> dict[str, Any]:
            culprits = set(result.pop("culprits"))
            # Not every ordinary token was measured: the unexpected ones are measured now.
            measured = self._norms(spiked, culprits - truth)
            rests = [self.copy.token_equivalent(spiked, m, self._tokens_of(culprits, m)) for m in own]
            over = self.ranks.gather(sum(rest > self.threshold for rest in rests))
            return result | {
                "found": len(culprits),
                "wrong": sum(not norm > self.threshold for norm in measured.values()),
                "missed": sorted(planted[p].name if p in planted else "ordinary" for p in truth - culprits),
                "explained_truth": not any(over),
            }

        published = judge(self.solver.published(spiked))
        names = sorted(token.name for token in planted.values())
        for until in self.untils:
            record = {"kind": kind, "until": until, "planted": names, "culprits": len(truth)}
            result = self.solver.gradloc(spiked, until)
            del result["rests"]
            yield record | {"gradloc": judge(result), "published": published}

    def _draw(self, kind: str) -> dict[Place, Planted]:
        """What to plant where; the same on every rank."""
        world_size, n = self.ranks.world_size, self.shape.tokens
        sizes = {
            "clear": (1.5 * math.sqrt(world_size * n), 15 * math.sqrt(world_size * n)),
            "diluted": (1.1 * math.sqrt(n), 0.95 * math.sqrt(world_size * n)),
            "hidden": (1.2, math.sqrt(n) / 1.2),
        }
        if kind == "mixed":
            names = ["clear", "hidden", "hidden"] + ["diluted"] * (world_size > 1)
        else:
            names = ["clear"] * (self.random.randint(2, 5) if kind == "several" else 1)
        units = [(rank, m) for rank in range(world_size) for m in range(self.micro_batches)]
        first = self.random.choice(units)
        planted: dict[Place, Planted] = {}
        for number, name in enumerate(names):
            unit = first if number == 0 or name == "hidden" else self.random.choice(units)
            while name == "diluted" and unit == first:
                unit = self.random.choice(units)
            token = self.random.choice([t for t in range(n) if (*unit, t) not in planted])
            low, high = sizes[name]
            size = low * (high / low) ** self.random.random()
            suspected = kind != "unsuspected" and (kind == "suspected" or self.random.random() < 0.5)
            place: Place = (*unit, token)
            planted[place] = Planted(name, size, suspected)
        return planted

    def _plant(self, planted: dict[Place, Planted]) -> tuple[DataProto, dict[Place, float]]:
        """This rank's batch with the planted tokens, and their norms by brute force."""
        spiked = copy_batch(self.batch)
        self.amplifier.factors = {}
        own = {place: token for place, token in planted.items() if place[0] == self.ranks.rank}
        amplified = []
        for place, token in own.items():
            row, position = indices(place, self.shape)
            prompt = tuple(self.batch.batch["input_ids"][row, :PROMPT].tolist())
            if token.suspected:
                norm = self.copy.token_norm(self.batch, place)
                spiked.batch["advantages"][row, position] *= token.size * self.threshold / norm
            else:
                whole, head = (self._amplified_norm(place, prompt, factor) for factor in (1.0, 0.0))
                square = ((token.size * self.threshold) ** 2 - head**2) / (whole**2 - head**2)
                amplified.append((prompt, position, math.sqrt(square)))
        self.amplifier.factors = {}
        for prompt, position, factor in (entry for part in self.ranks.gather(amplified) for entry in part):
            self.amplifier.factors.setdefault(prompt, {})[position] = factor
        return spiked, self._norms(spiked, own)

    def _amplified_norm(self, place: Place, prompt: tuple[int, ...], factor: float) -> float:
        self.amplifier.factors = {prompt: {indices(place, self.shape)[1]: factor}}
        return self.copy.token_norm(self.batch, place)

    def _tokens_of(self, places: Collection[Place], micro_batch: int) -> list[int]:
        return [token for *unit, token in places if unit == [self.ranks.rank, micro_batch]]

    def _norms(self, batch: DataProto, places: Collection[Place]) -> dict[Place, float]:
        return token_norms(self.copy, batch, places, self.ranks)


def token_norms(copy: UnshardedCopy, batch: DataProto, places: Collection[Place], ranks: Ranks) -> dict[Place, float]:
    """The norms of tokens that all ranks name together, each measured on its own rank."""
    own = {place: copy.token_norm(batch, place) for place in places if place[0] == ranks.rank}
    return {place: norm for part in ranks.gather(own) for place, norm in part.items()}


def solve_events(
    ranks: Ranks,
    micro_batches: int,
    tokens: int,
    counts: dict[str, int],
    untils: Sequence[str],
    sample: int,
    level: float,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """The events of one (W, M, N); `counts` says how many of each kind."""
    cell = Events(tiny(tokens), micro_batches, ranks, untils, level, sample, seed)
    sizes = {"W": ranks.world_size, "M": micro_batches, "N": tokens, "ordinary_measured": len(cell.ordinary)}
    for kind, count in counts.items():
        for _ in range(count):
            for record in cell.solve(kind):
                yield {"part": "events"} | sizes | record


def measure_local_norms(
    ranks: Ranks, shape: Shape, micro_batches: int, rounds: int, base_tree: Path | None
) -> dict[str, Any]:
    """The time of update_policy without GradLoc, with it but without a spike, and of the unpatched actor.

    They take turns, in an order that changes from round to round. Their AdamW steps have a learning rate of 0. Beside
    the wall time there is the processor time of rank 0, on which other load of the machine tells less.
    """
    actors = {
        "off": build_actor(shape, micro_batches, ranks),
        "on": build_actor(shape, micro_batches, ranks, spike_detection=True, grad_norm_threshold=NEVER),
    }
    if base_tree is not None:
        actors["stock"] = build_actor(shape, micro_batches, ranks, base_tree)
    batch = with_old_log_probs(actors["off"], shape, build_batch(shape, micro_batches, ranks, seed=0))
    times: dict[str, list[float]] = {name: [] for name in actors}
    processor: dict[str, list[float]] = {name: [] for name in actors}
    for number in range(-1, rounds):  # the first round warms up
        for name in random.Random(number).sample(sorted(actors), len(actors)):
            started, used = ranks.clock(), time.process_time()
            actors[name].update_policy(batch)
            used, seconds = time.process_time() - used, ranks.clock() - started
            if number >= 0:
                times[name].append(seconds)
                processor[name].append(used)
    assert actors["on"].gradloc.events == []
    parameters = sum(p.numel() for p in build_model(shape, ranks).parameters())
    sizes = {"shape": asdict(shape), "parameters": parameters, "W": ranks.world_size, "M": micro_batches}
    return sizes | {"times": times, "processor": processor}


def measure_memory(ranks: Ranks, shape: Shape, micro_batches: int) -> dict[str, Any]:
    """The peak of update_policy over the memory held before it: without GradLoc, with it, and with a search.

    In bytes, of the rank where it is largest.
    """
    off = build_actor(shape, micro_batches, ranks)
    batch = with_old_log_probs(off, shape, build_batch(shape, micro_batches, ranks, seed=0))
    spiked = copy_batch(batch)
    spiked.batch["advantages"][0, 0] *= 1e6
    peaks: dict[str, int] = {}

    def measure(name: str, actor: Any, data: DataProto) -> dict[str, Any]:
        for _ in range(2):  # allocates the optimizer's state, and whatever libraries keep
            actor.update_policy(batch)
        peaks[name], metrics = _peak(ranks.device, lambda: actor.update_policy(data))
        return metrics

    measure("off", off, batch)
    never = build_actor(shape, micro_batches, ranks, spike_detection=True, grad_norm_threshold=NEVER)
    ordinary = measure("on", never, batch)["actor/gradloc/token_norm_max"]
    actor = build_actor(shape, micro_batches, ranks, spike_detection=True, grad_norm_threshold=10 * ordinary)
    measure("search", actor, spiked)
    passes = sum(event["passes"] for event in actor.gradloc.events)
    if not passes:
        raise RuntimeError("the planted spike set off no search")
    gradient = sum(_local(p).numel() * p.element_size() for p in actor.actor_module.parameters())
    everywhere = ranks.gather({**peaks, "sharded gradient": gradient})
    bytes_ = {name: max(part[name] for part in everywhere) for name in everywhere[0]}
    return {"shape": asdict(shape), "W": ranks.world_size, "M": micro_batches, "passes": passes, "bytes": bytes_}


def measure_reduction(ranks: Ranks, shape: Shape, rounds: int) -> dict[str, Any]:
    """The time of a whole micro-batch's pass, with and without FSDP's gradient reduction."""
    actor = build_actor(shape, 1, ranks)
    batch = build_batch(shape, 1, ranks, seed=0)
    tensors = {name: tensor.to(ranks.device) for name, tensor in batch.batch.items()}
    times: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(-1, rounds):
        for name in random.Random(number).sample(sorted(times), 2):
            with unreduced(actor.actor_module) if name == "without" else nullcontext():
                started = ranks.clock()
                log_probs(actor, tensors, temperature=1.0).sum().backward()
                seconds = ranks.clock() - started
            actor.actor_optimizer.zero_grad()
            if number >= 0:
                times[name].append(seconds)
    return {"shape": asdict(shape), "W": ranks.world_size, "times": times}


def _peak(device: torch.device, call: Callable[[], Any]) -> tuple[int, Any]:
    """The most memory that a call took at once, in bytes, and what it returned.

    On a CPU that is resident memory: right to a few pages only where malloc gives freed memory back at once.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        return torch.cuda.max_memory_allocated(device) - before, result
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    result = call()
    return _status("VmHWM") - before, result


def _status(name: str) -> int:
    """A figure of this process from Linux's /proc, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
