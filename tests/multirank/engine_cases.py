"""What only verl 0.9's engine has: updates cut up by the worker, evidence from the ranks, checkpoints of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from actors import Case, build_actor, build_model, make_unreadable
from batches import Words, build_batch, response_length, with_columns
from reduced_meter_cases import share_sequences, stand_in_for_a_gpu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig


def evidence(
    case: Case, directory: str, shuffle: bool, updates: int = 1, size: int = 1
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Updates whose evidence is written, of groups of `size` ranks that share their data and split its computation.

    Returns:
        tuple: For each planted token, its row's name, and its position and id; the metrics of each update.
    """
    options = {"spike_detection": True, "grad_norm_threshold": 1e3, "bisect_dump_dir": directory}
    if size > 1:
        options["ulysses_sequence_parallel_size"] = size
        stand_in_for_a_gpu(case, size)
    actor = build_actor(case, **options)
    if size > 1:
        share_sequences(actor, size)
    own_rank = dist.get_rank() // size
    actor.engine._evidence._tokenizer = Words()
    actor.dataloader = {"shuffle": shuffle}
    metrics, planted = [], []
    for seed in range(updates):
        with torch.random.fork_rng():
            batch = build_batch(case, own_rank, seed)
        with_columns(case, batch, own_rank)
        if seed == 0:
            for rank, row, position in case.planted:
                if rank == own_rank:
                    prompt = batch.batch["input_ids"][row, : -batch.batch["responses"].shape[1]]
                    prompt = prompt[batch.batch["attention_mask"][row, : len(prompt)].bool()]
                    planted.append(
                        {
                            "uid": f"{rank}/{row}",
                            "position": position,
                            "token": str(batch.batch["responses"][row, position].item()),
                            "prompt": " ".join(map(str, prompt.tolist())),
                            "response": " ".join(
                                map(str, batch.batch["responses"][row, : response_length(rank, row)].tolist())
                            ),
                            "reward": 100.0 * rank + row,
                            "ground_truth": str(row),
                            "data_source": "sums",
                        }
                    )
        metrics.append(actor.update_policy(batch))
    return planted, metrics


def step_of_two_updates(case: Case, directory: str) -> list[dict[str, Any]]:
    """The metrics of two updates that make up a step; both have the planted tokens."""
    actor = build_actor(case, spike_detection=True, grad_norm_threshold=1e3, bisect_dump_dir=directory)
    metrics = []
    for update in range(2):
        with torch.random.fork_rng():
            batch = build_batch(case, dist.get_rank())
        actor.update_of_step = update, 2
        metrics.append(actor.update_policy(batch))
    return metrics


def engine_as_the_worker_builds_it(directory: str, strategy: str, **options: Any) -> Any:
    """An engine with all its own parts, of a model that is loaded from disk."""
    from engine_actor import EngineRegistry

    config = FSDPEngineConfig(
        dtype="float32",
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_torch_compile=False,
        strategy=strategy,
    )
    actor = FSDPActorConfig(
        strategy=strategy,
        rollout_n=1,
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=2,
        use_torch_compile=False,
        fsdp_config=config,
        **options,
    )
    from verl.trainer.config import CheckpointConfig

    model = HFModelConfig(
        path=directory,
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=model,
        engine_config=config,
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, clip_grad=1.0),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine, actor


def resumed(directory: str, shared: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str], str]:
    """States of an engine that was trained and saved, of a new one, and of one that was loaded; the files saved.

    If the folder is not `shared`, rank 1 loads from its own, which lacks what rank 0 alone has written. Last, the error
    of an engine that was loaded from an unreadable state, as each rank sees it.
    """
    from functools import partial

    from engine_actor import _prompts
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import LayerClipConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding

    case = Case()
    path = Path(directory)
    if dist.get_rank() == 0:
        build_model(case).save_pretrained(path / "model")
    dist.barrier()
    options = {
        "spike_detection": True,
        "grad_norm_threshold": "auto",
        "layer_clip": LayerClipConfig(enable=True),
        "bisect_dump_dir": str(path / "dump"),
    }

    def trained(load: Path | None, seed: int) -> Any:
        engine, config = engine_as_the_worker_builds_it(str(path / "model"), "fsdp2", **options)
        if load is not None:
            engine.load_checkpoint(str(load))
        batch = build_batch(case, dist.get_rank(), seed)
        batch.batch["prompts"] = _prompts(batch.batch)
        data = left_right_2_no_padding(batch.to_tensordict())
        tu.assign_non_tensor(
            data,
            calculate_entropy=False,
            global_batch_size=8 * dist.get_world_size(),
            use_remove_padding=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
            use_fused_kernels=False,
            training_step=7,
        )
        with engine.train_mode():
            engine.train_batch(data, loss_function=partial(ppo_loss, config=config))
        return engine

    def state(engine: Any) -> dict[str, Any]:
        states = {name: part.state_dict() for name, part in engine.watch._parts().items()}
        states["gradloc"].pop("search_time")  # its clock goes on
        return {name: repr(state) for name, state in states.items()}

    first = trained(None, 0)
    first.save_checkpoint(str(path / "checkpoint"))
    dist.barrier()
    saved = sorted(os.listdir(path / "checkpoint"))
    folder = path / "checkpoint"
    if not shared and dist.get_rank() == 1:
        folder = shutil.copytree(folder, path / "other node")
        (folder / "gradloc_state.pt").unlink()
    norms = [trained(load, 1).watch.gradloc.state_dict()["token_norms"] for load in (None, folder)]
    make_unreadable(str(path / "checkpoint"))
    error = ""
    try:
        trained(folder, 1)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return (
        state(first),
        {"norms": first.watch.gradloc.state_dict()["token_norms"]},
        {"fresh": norms[0], "loaded": norms[1]},
        saved,
        error,
    )
