"""How often each rule of `source` holds: for culprits of natural spikes, and for ordinary tokens beside them.

The model is the embedded profile's: SmolLM2-135M-Instruct on sums of two digits. It samples answers at temperature 1,
these get their real rewards and GRPO advantages, and verl's real actor makes its updates from them on one process,
with GradLoc on. Nothing is planted. The culprits are those of the events. The ordinary tokens are response tokens with
a coefficient, drawn at random from the mini-batches with a spike, each measured alone and under τ. For each rule the
table gives

- named: the share of culprits for which it is `source`, the most specific rule that holds;
- culprits, ordinary: the shares for which it holds;

and below it the quantiles of what the rules look at; the null distribution, which is how often rules hold for all
ordinary tokens of all mini-batches, with and without a spike (rule_shares.py); and the verdicts of the spikes. Rollout
and training are one model in one precision here, so the ratios are 1 at the first mini-batch of a step, and only the
update between two mini-batches moves them.

Usage: PYTHONPATH=<patched verl>:. python benchmarks/causes.py DIR [--seed SEED ...] [--steps N] [--json FILE] ...
           DIR is what `python embedded/prepare.py DIR` has made
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
import torch.distributed as dist
from rule_shares import RuleShares, print_null
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils.gradloc import Located, record_events
from verl.utils.gradloc.adapters.rows import select_rows
from verl.utils.gradloc.evidence.sources import SOURCES, classify
from verl.utils.gradloc.evidence.token_facts import token_evidence
from verl.utils.gradloc.evidence.writer import jsonable
from verl.utils.gradloc.layers.layer_names import layer_name
from verl.utils.gradloc.measure.micro_batch import MicroBatch
from verl.utils.reward_score import default_compute_score
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig

# Limits that the rule `unlikely` might have.
PROBABILITIES = (1e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2)
# The figures that the rules look at.
FIGURES = ("grad_norm", "log_prob", "advantage", "weight", "ratio", "sequence_ratio", "largest_layer_share")


@dataclass(frozen=True)
class Sampled:
    """Answers to prompts. `prompts` are padded on the left, `responses` on the right.

    Args:
        prompts (Tensor): Token ids, shape (rows, prompt length).
        prompt_mask (Tensor): Same shape.
        responses (Tensor): Token ids, shape (rows, response length).
        response_mask (Tensor): Same shape; the end token is the last that counts.
        log_probs (Tensor): Same shape; 0 in the padding.
    """

    prompts: Tensor
    prompt_mask: Tensor
    responses: Tensor
    response_mask: Tensor
    log_probs: Tensor


@torch.no_grad()
def sample(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], length: int, generator: torch.Generator
) -> Sampled:
    """Samples an answer to each prompt at temperature 1."""
    width = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    alive = torch.ones(len(prompts), 1, dtype=torch.long)
    seen, inputs, cache = mask, ids, None
    tokens, log_probs, counts = [], [], []
    model.eval()
    for _ in range(length):
        positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
        out = model(
            inputs, attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache = out.past_key_values
        log_p = torch.log_softmax(out.logits[:, -1].float(), -1)
        inputs = torch.multinomial(log_p.exp(), 1, generator=generator)
        log_probs.append(log_p.gather(1, inputs) * alive)
        inputs = torch.where(alive.bool(), inputs, tokenizer.pad_token_id)
        tokens.append(inputs)
        counts.append(alive)
        seen = torch.cat([seen, alive], 1)
        alive = alive * (inputs != tokenizer.eos_token_id)
        if not alive.any():
            break
    model.train()
    return Sampled(ids, mask, torch.cat(tokens, 1), torch.cat(counts, 1), torch.cat(log_probs, 1))


def build_batch(sampled: Sampled, tokenizer: Any, samples: Sequence[Mapping[str, Any]], step: int) -> DataProto:
    """What the trainer would send to the actor: answers with their rewards' GRPO advantages."""
    texts = [
        tokenizer.decode(ids[mask.bool()], skip_special_tokens=True)
        for ids, mask in zip(sampled.responses, sampled.response_mask, strict=True)
    ]
    rewards = torch.zeros(sampled.responses.shape)
    for row, (text, one) in enumerate(zip(texts, samples, strict=True)):
        score = default_compute_score(one["data_source"], text, one["reward_model"]["ground_truth"])
        rewards[row, int(sampled.response_mask[row].sum()) - 1] = score["score"] if isinstance(score, dict) else score
    index = np.array([one["extra_info"]["index"] for one in samples])
    advantages, _ = compute_grpo_outcome_advantage(rewards, sampled.response_mask.float(), index)
    attention = torch.cat([sampled.prompt_mask, sampled.response_mask], 1)
    tensors = {
        "input_ids": torch.cat([sampled.prompts, sampled.responses], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "responses": sampled.responses,
        "response_mask": sampled.response_mask.float(),
        "old_log_probs": sampled.log_probs,
        "rollout_log_probs": sampled.log_probs,
        "advantages": advantages,
    }
    return DataProto.from_dict(tensors, meta_info={"temperature": 1.0, "global_steps": step})


class OrdinaryTokens:
    """Measures tokens of the mini-batches with a spike that are no culprits, before the optimizer step.

    Args:
        actor (DataParallelPPOActor): The actor, with GradLoc on.
        count (int): How many tokens of a mini-batch.
        seed (int): Of the draw.
    """

    def __init__(self, actor: Any, count: int, seed: int) -> None:
        self.found: list[dict[str, Any]] = []
        self._actor, self._count = actor, count
        self._random = random.Random(seed)
        self._locate = actor.gradloc.locate
        actor.gradloc.locate = self._look

    def _look(self, epoch: int, mini_batch: int) -> Located:
        gradloc = self._actor.gradloc
        micro_batches, events = list(gradloc._recorder.micro_batches), len(gradloc.events)
        located = self._locate(epoch, mini_batch)
        for event in gradloc.events[events:]:
            self._measure_some(event, micro_batches)
        return located

    def _measure_some(self, event: Mapping[str, Any], micro_batches: Sequence[MicroBatch]) -> None:
        culprits = {(c["micro_batch"], c["row"], c["position"]) for c in event["culprits"]}
        portable = [micro_batch.portable(1.0) for micro_batch in micro_batches]
        places = [
            (number, row, position)
            for number, micro_batch in enumerate(portable)
            for row, position in (micro_batch.tokens["coefficient"] != 0).nonzero().tolist()
            if (number, micro_batch.rows[row], position) not in culprits
        ]
        for number, row, position in self._random.sample(places, min(self._count, len(places))):
            tokens = portable[number].tokens
            facts = token_evidence(tokens, row, position)
            layers = self._gradient_norms(portable[number], row, position)
            size = abs(facts["coefficient"] / facts["weight"])
            facts["layer_norms"] = {name: size * norm for name, norm in layers.items()}
            facts["grad_norm"] = math.hypot(*facts["layer_norms"].values())
            if facts["grad_norm"] <= event["threshold"]:
                self.found.append({**facts, "sources": classify(facts, event)})

    def _gradient_norms(self, micro_batch: MicroBatch, row: int, position: int) -> dict[str, float]:
        """‖∇ log p‖ of a token by layer. It leaves the gradient of the mini-batch alone."""
        inputs = select_rows(micro_batch.inputs, [row], position + 1, "cpu")
        _, log_prob = self._actor._forward_micro_batch(inputs, temperature=1.0, calculate_entropy=False)
        named = dict(self._actor.actor_module.named_parameters())
        gradients = torch.autograd.grad(log_prob[0, position], list(named.values()))
        squares: dict[str, float] = {}
        for name, gradient in zip(named, gradients, strict=True):
            layer = layer_name(name)
            squares[layer] = squares.get(layer, 0.0) + float(gradient.double().square().sum())
        return {name: math.sqrt(square) for name, square in squares.items()}


@dataclass(frozen=True)
class Found:
    """What runs gave.

    Args:
        events (list): Their events.
        ordinary (list): The ordinary tokens beside culprits that were measured alone.
        log_probs (list): Of all tokens with an advantage.
        mini_batches (list): What `RuleShares` found.
    """

    events: list[dict[str, Any]]
    ordinary: list[dict[str, Any]]
    log_probs: list[float]
    mini_batches: list[dict[str, Any]]


def run(args: argparse.Namespace, seed: int) -> Found:
    """One run. Runs of different seeds have different prompts."""
    torch.manual_seed(seed)
    torch.cpu.current_device = lambda: "cpu"  # verl asks for it; torch's CPU has none
    tokenizer = AutoTokenizer.from_pretrained(args.directory / "model")
    model = AutoModelForCausalLM.from_pretrained(args.directory / "model", dtype=torch.float32)
    rows = args.prompts * args.answers
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=args.answers,
        ppo_mini_batch_size=rows // args.mini_batches,
        ppo_micro_batch_size_per_gpu=args.micro_batch,
        loss_agg_mode=args.loss_agg_mode,
        clip_ratio_high=0.28,
        use_torch_compile=False,
        fsdp_config=FSDPEngineConfig(dtype="float32"),
        spike_detection=True,
        grad_norm_threshold=args.threshold,
        bisect_budget_steps=args.budget,
        bisect_budget_seconds=None,
        bisect_until=args.until,
    )
    actor: Any = DataParallelPPOActor(config, model, torch.optim.AdamW(model.parameters(), lr=args.lr))
    ordinary, shares = OrdinaryTokens(actor, args.ordinary, seed), RuleShares(actor)
    data = pandas.read_parquet(args.directory / "train.parquet").to_dict("records")
    generator = torch.Generator().manual_seed(seed)
    found_so_far = Found([], ordinary.found, [], shares.found)
    for step in range(args.steps):
        started = time.perf_counter()
        first = (seed * args.steps + step) * args.prompts
        chosen = [data[(first + i) % len(data)] for i in range(args.prompts)]
        samples = [one for one in chosen for _ in range(args.answers)]
        prompts = [tokenizer.apply_chat_template(list(one["prompt"]), add_generation_prompt=True) for one in samples]
        sampled = sample(model, tokenizer, prompts, args.length, generator)
        batch = build_batch(sampled, tokenizer, samples, step)
        found_so_far.log_probs.extend(sampled.log_probs[batch.batch["advantages"] != 0].tolist())
        actor.update_policy(batch)
        found = actor.gradloc.events
        for event in found:
            start = event["mini_batch"] * (rows // args.mini_batches)
            for culprit in event["culprits"]:
                culprit["token"] = tokenizer.decode([culprit["token_id"]])
                culprit["response"] = tokenizer.decode(sampled.responses[start + culprit["row"]])
        found_so_far.events.extend(found)
        print(
            f"seed {seed}, step {step}: token_norm_max {actor.gradloc.metrics()['actor/gradloc/token_norm_max']:.3g}, "
            f"{len(found)} spikes, {sum(len(e['culprits']) for e in found)} culprits, "
            f"{sum(e['passes'] for e in found)} passes, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        if args.evidence:
            record_events(str(args.evidence), found)
    return found_so_far


def write(file: Path, found: Found) -> None:
    """Writes a line for each culprit, each ordinary token and each mini-batch, and one with all log-probs."""
    lines = [{"kind": "culprit", **culprit} for event in found.events for culprit in event["culprits"]]
    lines += [{"kind": "ordinary", **token} for token in found.ordinary]
    lines += [{"kind": "mini-batch", **one} for one in found.mini_batches]
    lines += [{"kind": "all", "log_probs": found.log_probs}]
    file.write_text("".join(json.dumps(jsonable(line)) + "\n" for line in lines))


def figures(token: Mapping[str, Any]) -> dict[str, float]:
    squares = [norm**2 for norm in token["layer_norms"].values()]
    return {**token, "largest_layer_share": max(squares) / math.fsum(squares)}


def print_tables(found: Found) -> None:
    events, ordinary = found.events, found.ordinary
    culprits = [culprit for event in events for culprit in event["culprits"]]
    diagnoses = Counter(event["diagnosis"] for event in events)
    print(f"\n{len(events)} spikes ({dict(diagnoses)}), {len(culprits)} culprits, {len(ordinary)} ordinary tokens\n")
    print("| source | named | culprits | ordinary |\n|---|---|---|---|")
    for name in SOURCES:
        named = _share(culprit["source"] == name for culprit in culprits)
        print(f"| `{name}` | {named} | {_holds(culprits, name)} | {_holds(ordinary, name)} |")
    print("\n| p under | culprits | ordinary | all tokens with an advantage |\n|---|---|---|---|")
    for limit in PROBABILITIES:
        shares = (
            _share(log_prob < math.log(limit) for log_prob in tokens)
            for tokens in ([c["log_prob"] for c in culprits], [t["log_prob"] for t in ordinary], found.log_probs)
        )
        print(f"| {limit:g} | {' | '.join(shares)} |")
    print("\n| figure | | 10% | 50% | 90% |\n|---|---|---|---|---|")
    for name in FIGURES:
        for kind, tokens in (("culprits", culprits), ("ordinary", ordinary)):
            values = [abs(v) if name == "advantage" else v for t in tokens if (v := figures(t)[name]) is not None]
            if values:
                quantiles = " | ".join(f"{value:.3g}" for value in np.quantile(values, (0.1, 0.5, 0.9)))
                print(f"| `{name}` | {kind} | {quantiles} |")
    print()
    print_null({"natural": found.mini_batches})
    for event in events:
        where = f"step {event['global_step']}, mini-batch {event['mini_batch']}"
        print(f"{where}: {event['verdict']['sentence']} {event['summary']}")


def _holds(tokens: Sequence[Mapping[str, Any]], source: str) -> str:
    return _share(source in token["sources"] for token in tokens)


def _share(holds: Any) -> str:
    values = list(holds)
    return f"{sum(values) / len(values):.0%}" if values else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=6, help="in a step")
    parser.add_argument("--answers", type=int, default=4, help="to each prompt")
    parser.add_argument("--mini-batches", type=int, default=2, help="of a step")
    parser.add_argument("--micro-batch", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=32, help="longest answer, in tokens")
    parser.add_argument("--threshold", type=float, default=90.0, help="τ")
    parser.add_argument("--until", default="explained", choices=["explained", "exhaustive"])
    parser.add_argument("--budget", type=int, default=40, help="passes of an event")
    parser.add_argument("--ordinary", type=int, default=20, help="tokens measured beside the culprits of an event")
    parser.add_argument("--loss-agg-mode", default="token-mean")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="one for each run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--evidence", type=Path, metavar="DIR", help="write the events as a run would")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write culprits and ordinary tokens")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    whole = Found([], [], [], [])
    for seed in args.seed:
        found = run(args, seed)
        for field in dataclasses.fields(Found):
            getattr(whole, field.name).extend(getattr(found, field.name))
        if args.json:
            write(args.json, whole)
    dist.destroy_process_group()
    print_tables(whole)


if __name__ == "__main__":
    main()
