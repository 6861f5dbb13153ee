"""What GradLoc, LayerClip and TokenClip cost in an update, on models of Qwen2.5's sizes with random weights.

python tests/gpu/gpu_costs.py --output FILE         # what run.py starts, with its environment

An update has four micro-batches of four rows: one rank, bf16 with float32 master weights, sdpa, gradient checkpointing,
AdamW with a learning rate of 0, so that each update starts from the same weights. On a GPU, time is that between two
CUDA events around `update_policy`. FILE gets every measured value, and tables of medians with quartiles.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "multirank"))

import single_process  # noqa: E402
from actors import DEVICE, ENGINE, Case, build_config, dp_actor, events_of, stock_dp_actor, wrap  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.utils import torch_functional  # noqa: E402
from verl.workers.config import LayerClipConfig, TokenClipConfig  # noqa: E402

MICRO_BATCHES, ROWS = 4, 4
TEMPERATURE = 1.0
NEVER = 1e30
# A planted token's advantage is multiplied with this. τ is ten times the norm of ordinary tokens, and a unit's
# threshold τ times the square root of its tokens: 50 for the longest here.
SPIKE = 1e4


@dataclass(frozen=True)
class Model:
    """A model's size, as its config.json on the Hugging Face hub has it, and the tokens of a row."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 151936
    prompt: int = 64
    response: int = 448

    def build(self) -> Qwen2ForCausalLM:
        sizes = {name: value for name, value in asdict(self).items() if name not in ("name", "prompt", "response")}
        return Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True, attn_implementation="sdpa"))


SMALL = Model("Qwen2.5-0.5B", 896, 4864, 24, 14, 2)
LARGE = Model("Qwen2.5-1.5B", 1536, 8960, 28, 12, 2)
TINY = Model("tiny", 64, 96, 2, 4, 2, vocab_size=257, prompt=4, response=12)
TIMED: dict[str, dict[str, Any]] = {
    "unpatched": {},
    "off": {},
    "GradLoc": {"spike_detection": True, "grad_norm_threshold": NEVER},
    "LayerClip": {"layer_clip": LayerClipConfig(enable=True, warmup_steps=1)},
    "TokenClip": {"token_clip": TokenClipConfig(enable=True, warmup_steps=1)},
    "all": {
        "spike_detection": True,
        "grad_norm_threshold": NEVER,
        "layer_clip": LayerClipConfig(enable=True, warmup_steps=1),
        "token_clip": TokenClipConfig(enable=True, warmup_steps=1),
    },
}


def log_probs_at_once(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Without flash attention, verl takes one token at a time in half precision: thousands of launches an update."""
    return torch.log_softmax(logits.float(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def case_of(wrapping: str) -> Case:
    rows = MICRO_BATCHES * ROWS
    return Case(wrapping, precision="bfloat16", rows=rows, mini_batch=rows, micro_batch=ROWS)


def build_actor(model: Model, wrapping: str, kind: str, **options: Any) -> Any:
    torch.manual_seed(1)
    with DEVICE:
        module = model.build()
    module.gradient_checkpointing_enable({"use_reentrant": False})
    sharded = wrap(case_of(wrapping), module.train())
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.0, weight_decay=0.0)
    actor = (stock_dp_actor() if kind == "unpatched" else dp_actor).DataParallelPPOActor
    return actor(build_config(case_of(wrapping), **{**TIMED.get(kind, {}), **options}), sharded, optimizer)


def build_batch(model: Model, actor: Any) -> DataProto:
    """Rows without padding, advantages of either sign, and the actor's own log-probs as the old ones.

    verl 0.7's actor takes the latter from its forward in an on-policy update.
    """
    generator = torch.Generator().manual_seed(0)
    rows, length = MICRO_BATCHES * ROWS, model.prompt + model.response
    tokens = torch.randint(0, model.vocab_size, (rows, length), generator=generator)
    tensors = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "position_ids": torch.arange(length).expand_as(tokens).contiguous(),
        "responses": tokens[:, model.prompt :].contiguous(),
        "response_mask": torch.ones(rows, model.response),
        "old_log_probs": torch.zeros(rows, model.response),
        "advantages": torch.randn(rows, 1, generator=generator).expand(-1, model.response).contiguous(),
    }
    if ENGINE:
        with torch.no_grad():
            for start in range(0, rows, ROWS):
                part = {name: tensor[start : start + ROWS].to(DEVICE) for name, tensor in tensors.items()}
                log_probs = actor.forward(part, TEMPERATURE)[0]
                tensors["old_log_probs"][start : start + ROWS] = log_probs.float().cpu()
    return DataProto.from_dict(tensors, meta_info={"temperature": TEMPERATURE, "global_steps": 0})


def copy_of(batch: DataProto) -> DataProto:
    """For an update, which may add columns, or for another spike."""
    return DataProto.from_dict({name: t.clone() for name, t in batch.batch.items()}, meta_info=dict(batch.meta_info))


def seconds_of(call: Callable[[], Any]) -> float:
    """The time of a call, in seconds: between CUDA events, on a CPU by the clock."""
    if DEVICE.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def free() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def time_updates(model: Model, wrapping: str, kinds: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of an update of each kind; they take turns, in an order drawn anew in each round."""
    actors = {kind: build_actor(model, wrapping, kind) for kind in kinds}
    batch = build_batch(model, actors[kinds[0]])
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(-2, rounds):  # the first two warm up
        for kind in random.Random(number).sample(kinds, len(kinds)):
            data = copy_of(batch)
            seconds = seconds_of(lambda actor=actors[kind], data=data: actor.update_policy(data))
            if number >= 0:
                times[kind].append(seconds)
    for actor in actors.values():
        assert not (getattr(actor, "gradloc", None) and events_of(actor)), "an event without a spike"
    return times


def synchronizations(actor: Any, batch: DataProto) -> int:
    """How often the host waits for the device in an update, by torch's own count."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            actor.update_policy(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def peak_of(call: Callable[[], Any]) -> dict[str, int]:
    """Bytes allocated before a call, and the most during it."""
    free()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return {"before": before, "peak": torch.cuda.max_memory_allocated()}


def measure_memory(model: Model, wrapping: str, threshold: float) -> dict[str, dict[str, int]]:
    """Of each kind alone on the device, after two updates: its peak, and how often the host waits."""
    found = {}
    for kind, options in {
        **{kind: {} for kind in TIMED},
        "search": {"spike_detection": True, "grad_norm_threshold": threshold},
    }.items():
        actor = build_actor(model, wrapping, kind, **options)
        batch = build_batch(model, actor)
        for _ in range(2):
            actor.update_policy(copy_of(batch))
        data = copy_of(batch)
        if kind == "search":
            data.batch["advantages"][0, 0] *= SPIKE
        found[kind] = peak_of(lambda actor=actor, data=data: actor.update_policy(data))
        if kind != "search":
            found[kind]["synchronizations"] = synchronizations(actor, copy_of(batch))
        del actor
        free()
    return found


def measure_searches(model: Model, wrapping: str, count: int) -> dict[str, Any]:
    """Updates with a planted token and without, in turns: their seconds, the events' own, and what was found."""
    actor = build_actor(model, wrapping, "GradLoc")
    batch = build_batch(model, actor)
    ordinary = actor.update_policy(copy_of(batch))["actor/gradloc/token_norm_max"]
    ordinary = max(ordinary) if isinstance(ordinary, list) else ordinary
    threshold = 10 * float(ordinary)
    del actor
    free()
    actor = build_actor(model, wrapping, "GradLoc", grad_norm_threshold=threshold)
    actor.update_policy(copy_of(batch))
    numbers, searches = random.Random(0), []
    for _ in range(count):
        row, position = numbers.randrange(MICRO_BATCHES * ROWS), numbers.randrange(model.response)
        spiked = copy_of(batch)
        spiked.batch["advantages"][row, position] *= SPIKE
        plain = copy_of(batch)
        step = seconds_of(lambda data=plain: actor.update_policy(data))
        with_search = seconds_of(lambda data=spiked: actor.update_policy(data))
        events = events_of(actor)
        places = [[culprit["row"], culprit["position"]] for event in events for culprit in event["culprits"]]
        searches.append(
            {
                "step_seconds": step,
                "seconds": with_search,
                "event_seconds": sum(event["seconds"] for event in events),
                "passes": sum(event["passes"] for event in events),
                "found": places == [[row, position]],
            }
        )
    return {"threshold": threshold, "searches": searches}


def needed_bytes(model: Model, actors: int) -> int:
    """Roughly, for so many actors at once: float32 weights and AdamW's state, one gradient, logits and activations."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in model.build().parameters())
    logits = ROWS * (model.prompt + model.response) * model.vocab_size * 4
    return parameters * (12 * actors + 8) + 6 * logits


def spread(values: list[float], form: str) -> str:
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return f"{format(middle, form)} ({format(low, form)} to {format(high, form)})"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables_of(records: list[dict[str, Any]]) -> list[str]:
    """For reading: medians with quartiles; additions are those of pairs from one round."""
    times, memory, searches = [], [], []
    for record in records:
        name = f"{record['model']}, {record['wrap']}"
        for kind, values in record["seconds"].items():
            pairs = zip(values, record["seconds"]["unpatched"], strict=True)
            added = spread([value / base - 1 for value, base in pairs], "+.1%") if kind != "unpatched" else ""
            times.append([name, kind, spread(values, ".3f"), added])
        for kind, figures in record.get("bytes", {}).items():
            cells = [f"{figures[of] / 2**20:.0f}" for of in ("before", "peak")]
            memory.append([name, kind, *cells, str(figures.get("synchronizations", ""))])
        found = record["search"]["searches"]
        searches.append(
            [
                name,
                f"{sum(search['found'] for search in found)} of {len(found)}",
                f"{median(search['passes'] for search in found):.0f}",
                spread([search["event_seconds"] for search in found], ".3f"),
                spread([search["seconds"] / search["step_seconds"] for search in found], ".2f"),
            ]
        )
    result = [
        table(["model", "update", "seconds", "added to the unpatched actor's"], times),
        table(["model", "found", "passes", "seconds of the event", "update with a search, in updates"], searches),
    ]
    if memory:
        heads = ["model", "update", "held before, MiB", "peak, MiB", "the host waits"]
        result.append(table(heads, memory))
    return result


def measure(model: Model, wrapping: str, kinds: list[str], rounds: int, searches: int) -> dict[str, Any]:
    record: dict[str, Any] = {"model": model.name, "wrap": wrapping, "sizes": asdict(model)}
    record |= {"micro_batches": MICRO_BATCHES, "rows": ROWS}
    record["seconds"] = time_updates(model, wrapping, kinds, rounds)
    free()
    record["search"] = measure_searches(model, wrapping, searches)
    free()
    if DEVICE.type == "cuda":
        record["bytes"] = measure_memory(model, wrapping, record["search"]["threshold"])
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="where the figures go, as JSON")
    output = parser.parse_args().output.resolve()
    pair = ["unpatched", "GradLoc"]
    plan = [(SMALL, "fsdp2", list(TIMED), 20, 8), (SMALL, "fsdp1", list(TIMED), 20, 8), (LARGE, "fsdp2", pair, 10, 5)]
    if os.environ.get("GRADLOC_GPU_QUICK"):
        plan = [(TINY, "fsdp2", list(TIMED), 2, 2), (TINY, "fsdp1", pair, 2, 1)]
    if not torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        torch_functional.logprobs_from_logits_v2 = log_probs_at_once  # of all actors, the unpatched one too
    records, left_out = [], []
    with tempfile.TemporaryDirectory() as folder, single_process.group(repeatable=False):
        os.chdir(folder)  # where evidence goes that nobody asked for
        for model, wrapping, kinds, rounds, searches in plan:
            needed = needed_bytes(model, len(kinds))
            if DEVICE.type == "cuda" and needed > torch.cuda.mem_get_info()[0]:
                left_out.append(f"{model.name}, {wrapping}: it needs about {needed / 2**30:.0f} GiB")
                continue
            records.append(measure(model, wrapping, kinds, rounds, searches))
            # After each: a part that runs out of time leaves what it has measured.
            tables = tables_of(records) + [f"Left out: {reason}." for reason in left_out]
            output.write_text(json.dumps({"records": records, "left_out": left_out, "tables": tables}))
            print("\n\n".join(tables), flush=True)
    found = [search["found"] for record in records for search in record["search"]["searches"]]
    return 0 if found and all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
