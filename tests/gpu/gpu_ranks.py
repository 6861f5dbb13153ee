"""What GradLoc costs rank 0 of eight, on one GPU: a 7B and a mixture of experts, FSDP2, long micro-batches.

python tests/gpu/gpu_ranks.py --output FILE         # what run.py starts, with its environment

torch's `fake` process group makes this process one of eight: shards, streams, memory and computing are those of a real
rank, communication takes no time, and what the others would send is a copy. GradLoc takes itself for a single rank, so
that it has nobody to wait for. The steps are those of `gradloc selftest`. Then the model goes to the host and back,
and a search runs out of memory for real. FILE gets every figure, and a table.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gradloc import GradLoc
from gradloc.fsdp import collectives, failed_pass
from gradloc.layers import reduced_norms
from gradloc_tools.replay.sharding import shard
from gradloc_tools.selftest import loop as loop_module
from gradloc_tools.selftest.command import failures, sentence
from gradloc_tools.selftest.loop import Loop, Sizes
from gradloc_tools.selftest.measuring import SelfTest

DEVICE = torch.device(os.environ.get("GRADLOC_TEST_DEVICE", "cpu"))
RANKS = 8
SECONDS = 10.0
# Bytes that a search without memory may leave behind.
LEFT = 64 * 2**20
# Rows of a micro-batch and tokens of a row: 2k, 8k and 16k tokens.
LENGTHS = {2048: (1, 2048), 8192: (2, 4096), 16384: (4, 4096)}


def dense_7b() -> PreTrainedModel:
    """Qwen2.5-7B's sizes."""
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
    config = Qwen2Config(**sizes, num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False)
    return Qwen2ForCausalLM(config)


def mixture() -> PreTrainedModel:
    """Twelve of the 48 layers of Qwen3-30B-A3B."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12, "vocab_size": 151936}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, tie_word_embeddings=False))


def tiny() -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, initializer_range=0.1, **sizes))


@contextmanager
def one_of_eight() -> Iterator[None]:
    """A fake process group, in which GradLoc sees one rank, wherever it asks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    with ExitStack() as patches:
        patches.callback(dist.destroy_process_group)
        for module in (collectives, failed_pass, reduced_norms):
            patches.enter_context(mock.patch.object(module, "world_size", lambda: 1))
        own = torch.full((1,), math.nan)
        dist.reduce_scatter_tensor(own, torch.arange(float(RANKS)))
        if own.isnan():  # before torch 2.13 it leaves the gradient what memory happens to hold
            patches.enter_context(mock.patch.object(dist, "reduce_scatter_tensor", reduce_scatter))
        yield


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, *_: Any, **__: Any) -> None:
    """What rank 0 gets if the others have zeros."""
    output.copy_(input.view(-1)[: output.numel()].view_as(output))


def sharded(build: Any) -> nn.Module:
    torch.manual_seed(0)
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with DEVICE:
            model = build().train()
    finally:
        torch.set_default_dtype(before)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    shard(model, dtype, DEVICE, RANKS)
    whole = sum(parameter.numel() for parameter in model.parameters())
    own = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert own < 1.2 * whole / RANKS, "the model is not sharded"
    return model


def out_of_memory(test: SelfTest) -> dict[str, Any]:
    """A search whose passes have no memory left: its error, the bytes that stay, and whether the next one works."""
    original = GradLoc.locate

    def locate(gradloc: GradLoc, epoch: int, mini_batch: int) -> Any:
        with little_memory():
            return original(gradloc, epoch, mini_batch)

    free()
    before = allocated()
    with mock.patch.object(GradLoc, "locate", locate):
        failed = test.search(action="log")
    free()
    left = allocated() - before
    again = test.search(action="log")
    return {"error": failed["error"], "restored": failed["same_gradient"], "left": left, "found_later": again["found"]}


@contextmanager
def little_memory() -> Iterator[None]:
    """On a GPU, no more memory than is in use and 256 MiB; on a CPU, a forward that raises as if it had none."""
    if DEVICE.type == "cuda":
        free()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2**28) / total))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    with mock.patch.object(loop_module, "_log_probs", side_effect=torch.OutOfMemoryError("out of memory")):
        yield


def allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def offloaded(loop: Loop, test: SelfTest) -> dict[str, Any]:
    """A search after the parameters were on the host, as with `param_offload`."""
    loop.model.zero_grad()
    loop.model.to("cpu")
    free()
    loop.model.to(DEVICE)
    return test.search(action="log")


def free() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def measure(name: str, model: Any, tokens: int, seconds: float, is_first: bool) -> dict[str, Any]:
    rows, length = LENGTHS.get(tokens, (2, tokens // 2))
    sizes = Sizes(micro_batches=2, rows=rows, prompt=length // 8, response=length - length // 8)
    loop = Loop(model, sizes, model.config.vocab_size, DEVICE)
    test = SelfTest(loop, seconds)
    record: dict[str, Any] = {"model": name, "tokens": tokens, "sizes": asdict(sizes), **test.run()}
    if is_first:
        record["offloaded"] = offloaded(loop, test)
        record["out_of_memory"] = out_of_memory(test)
    print(f"{name}, {tokens} tokens: {sentence(record)}", flush=True)
    return record


def passed(record: dict[str, Any]) -> bool:
    if "out_of_memory" not in record:
        return not failures(record)
    memory = record["out_of_memory"]
    held = "memory" in (memory["error"] or "") and memory["restored"] and memory["found_later"]
    return not failures(record) and record["offloaded"]["found"] and held and memory["left"] < LEFT


def table_of(records: list[dict[str, Any]]) -> str:
    head = ["model", "tokens", "seconds", "of which the host", "detection", "passes", "search, steps", "GiB off"]
    head += ["detection", "search", "drop", "drill", "left after OOM, MiB"]
    lines = [head, ["---"] * len(head)]
    for record in records:
        search = record["search"]
        peaks = [*record["peak"].values(), *(record[name]["peak"] for name in ("search", "drop", "drill"))]
        left = record.get("out_of_memory", {}).get("left")
        lines.append(
            [
                record["model"],
                str(record["tokens"]),
                f"{record['step_seconds']:.3f}",
                f"{record['host_seconds']:.3f}",
                f"{record['detection']:+.2%}",
                str(search["passes"]),
                f"{search['seconds'] / record['step_seconds']:.2f}",
                *("" if peak is None else f"{peak / 2**30:.2f}" for peak in peaks),
                "" if left is None else f"{left / 2**20:.0f}",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="where the figures go, as JSON")
    output = parser.parse_args().output.resolve()
    quick = bool(os.environ.get("GRADLOC_GPU_QUICK"))
    # What takes longest comes last.
    plan = [("tiny", tiny, [64])] if quick else [("mixture", mixture, [8192]), ("7B", dense_7b, [*LENGTHS])]
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
    records: list[dict[str, Any]] = []
    with one_of_eight():
        for name, build, lengths in plan:
            model = sharded(build)
            for tokens in lengths:
                records.append(measure(name, model, tokens, 0.0 if quick else SECONDS, tokens == lengths[0]))
                # After each: a part that runs out of time leaves what it has measured.
                output.write_text(json.dumps({"records": records, "tables": [table_of(records)]}))
            del model
            free()
    print(f"\n{table_of(records)}")
    return 0 if all(map(passed, records)) else 1


if __name__ == "__main__":
    sys.exit(main())
