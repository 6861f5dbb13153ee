"""What LayerClip costs: update_policy of verl's actor with and without LayerClip, interleaved in one run.

A random Llama of SmolLM2-135M's size (float32, AdamW) is trained by two ranks with FSDP2 on gloo, with the batch sizes
and lengths of the embedded profile: an optimizer step has 6 answers a rank, in micro-batches of 2, 80 tokens each. Each
round has one update with the stock clipping alone, one with LayerClip that finds nothing to scale, and one in which
every layer is scaled. Printed are medians over the rounds, of the slower rank, with the smallest and the largest value:
the update's seconds, LayerClip's own seconds in it, and their share, by the clock and in CPU time. Use the
shares: on a machine with other load, updates differ from each other by more than LayerClip takes.

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/layer_clip_cost.py
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from verl import DataProto
from verl.utils.fsdp_utils import apply_fsdp2
from verl.utils.gradloc import LayerClip
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, LayerClipConfig

RANKS = 2
PROMPT, RESPONSE, ROWS, MICRO_BATCH = 48, 32, 6, 2
SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
TINY = {**SMOLLM2_135M, "vocab_size": 256, "hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2}
# None: stock clipping alone. Otherwise a warm-up that never ends (nothing is scaled), or a bound that all exceed.
KINDS = {
    "stock": None,
    "LayerClip, nothing to scale": LayerClipConfig(enable=True, warmup_steps=10**6),
    "LayerClip, all layers scaled": LayerClipConfig(enable=True, rule="fixed", max_norm=1e-6),
}


def build_batch(rank: int) -> DataProto:
    random = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 256, (ROWS, PROMPT + RESPONSE), generator=random)
    tensors = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(PROMPT + RESPONSE).repeat(ROWS, 1),
        "responses": ids[:, PROMPT:],
        "response_mask": torch.ones(ROWS, RESPONSE),
        "old_log_probs": torch.zeros(ROWS, RESPONSE),  # not used: one mini-batch is on-policy
        "advantages": torch.randn(ROWS, 1, generator=random).repeat(1, RESPONSE),
    }
    return DataProto.from_dict(tensors, meta_info={"temperature": 1.0})


def measure(rank: int, folder: str, rounds: int, sizes: dict[str, Any]) -> None:
    """One rank: trains, and writes the seconds of each round's updates, and LayerClip's in them, to a file."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "CPU Autocast only supports")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa"))
    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=True)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    apply_fsdp2(model, {"mesh": mesh, "mp_policy": precision, "reshard_after_forward": True}, {})
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=ROWS,
        ppo_micro_batch_size_per_gpu=MICRO_BATCH,
        use_torch_compile=False,
        fsdp_config=FSDPEngineConfig(dtype="float32"),
        layer_clip=LayerClipConfig(enable=True),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        actor = DataParallelPPOActor(config, model, torch.optim.AdamW(model.parameters(), lr=1e-6))
    clips = {name: None if config is None else LayerClip(model, config) for name, config in KINDS.items()}
    spent = {"wall": 0.0, "cpu": 0.0}

    watch: Any = actor.watch
    before_step = watch.before_step

    def timed(*arguments: int) -> tuple[bool, float | None]:
        dist.barrier()  # waiting for a slower rank is not part of the clipping
        started = clocks()
        found = before_step(*arguments)
        spent.update(since(started))
        return found

    watch.before_step = timed
    batch = build_batch(rank)
    actor.watch = None
    actor.update_policy(batch)  # creates the optimizer's state
    found = []
    for i in range(rounds):
        figures = {}
        for name, clip in clips.items():
            watch.layer_clip, actor.watch = clip, None if clip is None else watch
            spent.update(wall=0.0, cpu=0.0)
            dist.barrier()
            started = clocks()
            actor.update_policy(batch)
            figures[name] = {"update": since(started), "clip": dict(spent)}
            if clip is not None and name.endswith("all layers scaled"):
                assert all(layer["factor"] < 1 for layer in clip.last_step.values())
        found.append(figures)
        if rank == 0:
            print(f"round {i + 1} of {rounds}: {figures}", file=sys.stderr)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def clocks() -> dict[str, float]:
    return {"wall": time.perf_counter(), "cpu": time.process_time()}


def since(started: dict[str, float]) -> dict[str, float]:
    return {name: now - started[name] for name, now in clocks().items()}


def spread(values: list[float], unit: str = "") -> str:
    return f"{median(values):.3f}{unit} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="rounds (default: 10)")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers: shows that it runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = TINY if arguments.tiny else SMOLLM2_135M
        multiprocessing.spawn(measure, (folder, arguments.rounds, sizes), nprocs=RANKS)
        rounds = range(arguments.rounds)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    print("| | update, s | LayerClip in it, s | share | update, CPU s | share of CPU |\n|---|---|---|---|---|---|")
    for name in KINDS:
        cells = []
        for clock in ("wall", "cpu"):
            # Of the slower rank.
            pairs = [max((r[i][name]["clip"][clock], r[i][name]["update"][clock]) for r in ranks) for i in rounds]
            cells.append(spread([update for _, update in pairs]))
            if clock == "wall":
                cells.append(spread([clip for clip, _ in pairs]))
            cells.append(spread([100 * clip / update for clip, update in pairs], "%"))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
