"""What LayerClip and TokenClip cost: update_policy of verl's actor with and without them, interleaved in one run.

A random Llama of SmolLM2-135M's size (float32, AdamW) is trained by two ranks with FSDP2 on gloo, with the batch sizes
and lengths of the embedded profile: an optimizer step has 6 responses a rank, in micro-batches of 2, 80 tokens each.
Each round has one update with the stock clipping alone, one with LayerClip that finds nothing to scale, one in which
every layer is scaled, and one with TokenClip. Printed are medians over the rounds, of the slower rank, with the
smallest and the largest value: the update's seconds by the clock and in CPU time, its CPU time over that of the stock
update of its round, and what is done between the backward and the optimizer step, as a share of the update. TokenClip's
work is spread over the backward, so that only the ratio shows it; use an idle machine.

The patched verl must be importable; after `bash tests/run.sh`:

    PYTHONPATH=build/verl:. build/venv/bin/python benchmarks/clip_cost.py
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
from verl.utils.gradloc import LayerClip, TokenClip
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, LayerClipConfig, TokenClipConfig

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
    "TokenClip": TokenClipConfig(enable=True, warmup_steps=1),
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
    clips: dict[str, Any] = {}
    for name, settings in KINDS.items():
        clip_class = TokenClip if isinstance(settings, TokenClipConfig) else LayerClip
        clips[name] = None if settings is None else clip_class(model, settings)
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
            watch.layer_clip = clip if isinstance(clip, LayerClip) else None
            watch.token_clip = clip if isinstance(clip, TokenClip) else None
            actor.watch = None if clip is None else watch
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
    print("| | update, s | CPU s | CPU over stock's | before the step, s | share | share of CPU |")
    print("|---|---|---|---|---|---|---|")
    for name in KINDS:
        # Of the slower rank.
        update = {c: [max(rank[i][name]["update"][c] for rank in ranks) for i in rounds] for c in ("wall", "cpu")}
        step = {c: [max(rank[i][name]["clip"][c] for rank in ranks) for i in rounds] for c in ("wall", "cpu")}
        stock = [max(rank[i]["stock"]["update"]["cpu"] for rank in ranks) for i in rounds]
        shares = [
            spread([100 * part / whole for part, whole in zip(step[c], update[c], strict=True)], "%")
            for c in ("wall", "cpu")
        ]
        ratio = spread([own / of_stock for own, of_stock in zip(update["cpu"], stock, strict=True)])
        cells = [spread(update["wall"]), spread(update["cpu"]), ratio, spread(step["wall"]), *shares]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
