"""The processes of `localization.py`: real actors, 0.7's own or 0.9's FSDP engine, and the truth by brute force.

All ranks call every function here.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sums_task import tiny_llama
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaForCausalLM
from verl import DataProto
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.fsdp_utils import apply_fsdp2, get_shard_placement_fn
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig

from gradloc.fsdp import collectives

# Whether an engine trains the actor, as since verl 0.8. Its calls are those of the tests.
ENGINE = importlib.util.find_spec("verl.workers.actor") is None
if ENGINE:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/multirank"))
    from engine_actor import EngineActor as Actor
else:
    from verl.workers.actor.dp_actor import DataParallelPPOActor as Actor

# (rank, micro-batch, token): the token is an index into the micro-batch's response tokens, row by row.
Place = tuple[int, int, int]

PROMPT, VOCABULARY = 4, 67

# The extra passes that an event may take, for each end of the search (`bisect_until`): verl's default, and as many as
# every token over τ may take.
BUDGETS = {"explained": 128, "exhaustive": 100_000}


@dataclass(frozen=True)
class Shape:
    """A micro-batch's rows, and the tokens of each."""

    rows: int
    length: int

    @classmethod
    def of(cls, tokens: int) -> Shape:
        rows = max(2, tokens // 256)
        return cls(rows, tokens // rows)

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def gather(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def build_model(shape: Shape) -> LlamaForCausalLM:
    """With such weights the gradient norms vary from token to token."""
    heads = {"num_hidden_layers": 2, "num_key_value_heads": 2}
    changes = {"initializer_range": 0.2, "attn_implementation": "sdpa"}
    return tiny_llama(1, VOCABULARY, 32, PROMPT + shape.length, **heads, **changes).train()


def shard(model: LlamaForCausalLM) -> torch.nn.Module:
    """Wraps a model as verl's worker does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=True)
    options = {"mesh": mesh, "mp_policy": precision, "shard_placement_fn": get_shard_placement_fn(mesh.size())}
    apply_fsdp2(model, {**options, "reshard_after_forward": True}, {})
    return model


def build_config(shape: Shape, micro_batches: int, **gradloc: Any) -> FSDPActorConfig:
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=micro_batches * shape.rows,
        ppo_micro_batch_size_per_gpu=shape.rows,
        use_torch_compile=False,
        fsdp_config=FSDPEngineConfig(dtype="float32"),
        **gradloc,
    )


def build_actor(shape: Shape, micro_batches: int, **gradloc: Any) -> Any:
    """A real actor. Its learning rate is 0, so that each update starts from the same weights."""
    config = build_config(shape, micro_batches, **gradloc)
    model = shard(build_model(shape))
    return Actor(config, model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0))


def build_batch(shape: Shape, micro_batches: int, seed: int, sigma: float) -> DataProto:
    """One rank's rows, without padding; advantages of either sign, log-normal with median 1 and this sigma."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    rows = micro_batches * shape.rows
    tokens = torch.randint(0, VOCABULARY, (rows, PROMPT + shape.length), generator=generator)
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
            parts.append(actor.forward(rows, batch.meta_info["temperature"])[0])
    batch.batch["old_log_probs"] = torch.cat(parts)
    return batch


def copy_batch(batch: DataProto) -> DataProto:
    """A copy of a batch whose advantages can be changed."""
    tensors = {**batch.batch, "advantages": batch.batch["advantages"].clone()}
    return DataProto.from_dict(tensors, meta_info=dict(batch.meta_info))


class UnshardedCopy:
    """The truth by brute force: gradients of this rank's tokens on a model of its own, through the actor's loss.

    Args:
        shape (Shape): Of the model and the micro-batches (N).
        micro_batches (int): M.
    """

    def __init__(self, shape: Shape, micro_batches: int) -> None:
        self.model = build_model(shape)
        self._shape = shape
        self._loss_config = build_config(shape, micro_batches)

    def token_norm(self, batch: DataProto, place: Place) -> float:
        """‖g_t‖ of one of this rank's tokens: the loss of that token alone."""
        _, micro_batch, token = place
        row, position = divmod(token, self._shape.length)
        row += micro_batch * self._shape.rows
        rows = {name: tensor[row : row + 1] for name, tensor in batch.batch.items()}
        logits = self.model(input_ids=rows["input_ids"][:, : PROMPT + position], use_cache=False).logits[:, -1:]
        here = slice(position, position + 1)
        log_prob = logits.log_softmax(-1).gather(-1, rows["responses"][:, here, None])[..., 0]
        self.model.zero_grad()
        self._loss(log_prob, rows["advantages"][:, here], rows["response_mask"][:, here]).backward()
        squares = [p.grad.double().square().sum() for p in self.model.parameters() if p.grad is not None]
        return float(torch.stack(squares).sum().sqrt())

    def token_equivalent(self, batch: DataProto, micro_batch: int) -> float:
        """norm/sqrt(Σ w_t²) of one of this rank's micro-batches.

        It is over its threshold where this is over τ. The weight of each token is 1/N, times what M and W add to it,
        which is left out of both sides. Tokens with a coefficient of zero do not count.
        """
        log_prob, coefficient = self._log_probs(batch, micro_batch)
        gradients = torch.autograd.grad(log_prob, list(self.model.parameters()), coefficient)
        return float(_flat(gradients).norm()) / math.sqrt(int(coefficient.count_nonzero()))

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
        tensors = {name: tensor[rows] for name, tensor in batch.batch.items()}
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
    """Searches a batch's tokens, in the real update_policy.

    Args:
        shape (Shape): Of the model and the micro-batches (N).
        micro_batches (int): M.
        threshold (float): τ.
        untils (Sequence[str]): The ends of GradLoc's search: "explained", "exhaustive"; an actor for each.
    """

    def __init__(self, shape: Shape, micro_batches: int, threshold: float, untils: Sequence[str]) -> None:
        self._shape = shape
        self._micro_batches = micro_batches
        self._actors = {
            until: build_actor(
                shape,
                micro_batches,
                spike_detection=True,
                grad_norm_threshold=threshold,
                bisect_until=until,
                bisect_budget_steps=BUDGETS[until],
                bisect_budget_seconds=None,
            )
            for until in untils
        }
        self._rehearsed: set[str] = set()
        self._forwards = 0
        for actor in self._actors.values():
            actor.actor_module.register_forward_pre_hook(self._count_forward)

    def search(self, batch: DataProto, until: str) -> dict[str, Any]:
        """The search, up to this end.

        Returns:
            dict: `culprits`, their places and gradient norms; `rests`, the norms in thresholds, where measured, of the
                micro-batches over their thresholds without them; `passes`, without the rehearsal in the actor's first
                update and a diffuse event's pass without any token; `seconds`; whether the budget is spent
                (`budget_spent`); `tokens`, for comparisons: the culprits' places with their norms; what the event says
                of itself: `complete`, `explained`, `diagnosis`, None where there is no event.
        """
        actor = self._actors[until]
        batch = with_old_log_probs(actor, self._shape, batch)
        self._forwards = 0
        actor.update_policy(batch)
        passes = self._forwards - self._micro_batches
        # One update is one mini-batch, which has one event at most.
        (event,) = collectives.broadcast(lambda: actor.gradloc.events, 0) or [{}]  # whole on rank 0 alone
        if dist.get_world_size() > 1 and until not in self._rehearsed:
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
        return {"culprits": culprits, "rests": rests, "passes": passes} | facts

    def _count_forward(self, *_: Any) -> None:
        self._forwards += 1


def token_norms(copy: UnshardedCopy, batch: DataProto, places: Collection[Place]) -> dict[Place, float]:
    """The norms of tokens that all ranks name together, each measured on its own rank."""
    own = {place: copy.token_norm(batch, place) for place in places if place[0] == dist.get_rank()}
    return {place: norm for part in gather(own) for place, norm in part.items()}


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
