"""Actors that set their threshold themselves: tiny ones with checkpoints, and the embedded profile's model."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from actor_cases import Run, train
from actors import Case, build_actor, checkpoints, dp_actor, events_of
from batches import build_batch
from verl import DataProto
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, PolicyLossConfig

AUTO = {"spike_replay": 0, "spike_detection": True, "grad_norm_threshold": "auto", "bisect_budget_steps": 50}
PROMPT_LENGTH, ANSWER_LENGTH = 40, 12
ROWS = 22


def resume(case: Case, folder: str) -> tuple[list[float | None], list[float | None], list[float | None], str]:
    """Thresholds after a checkpoint, of the run that went on, of one resumed from it, and of one that begins anew.

    Returns:
        tuple: The three lists, and the events of the run that went on, whose last update has a spike.
    """

    def start() -> tuple[Any, Any]:
        actor = build_actor(case, **AUTO)
        return actor, checkpoints(actor, torch.optim.lr_scheduler.ConstantLR(actor.actor_optimizer, factor=1.0))

    def update(actor: Any, seeds: list[int]) -> list[float | None]:
        batches = [build_batch(case, dist.get_rank(), seed) for seed in seeds]
        return [actor.update_policy(batch).get("actor/gradloc/threshold") for batch in batches]

    actor, manager = start()
    update(actor, list(range(1, 7)))
    manager.save_checkpoint(folder)
    # The batch of seed 0 has the planted tokens.
    straight = update(actor, [7, 8, 0])
    events = json.dumps(events_of(actor))
    actor, manager = start()
    manager.load_checkpoint(folder)
    resumed = update(actor, [7, 8, 0])
    actor, _ = start()
    return straight, resumed, update(actor, [7, 8, 0]), events


def real_gradients(model_folder: str, data_file: str) -> dict[str, Any]:
    """The embedded model's answers to sums, one mini-batch each; then once more, with one token's advantage planted.

    Returns:
        dict: `clean`, the events of the clean updates; `thresholds` after them; `planted`, those of the last update,
            and `place`, where it is.
    """
    import pandas
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    torch.cpu.current_device = lambda: "cpu"  # verl asks for it; torch's CPU module has none
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    questions = [list(prompt) for prompt in pandas.read_parquet(data_file)["prompt"][:ROWS]]
    texts = [tokenizer.apply_chat_template(q, add_generation_prompt=True, tokenize=False) for q in questions]
    prompts = tokenizer(texts, padding="max_length", max_length=PROMPT_LENGTH, truncation=True, return_tensors="pt")
    with torch.no_grad():
        whole = model.generate(**prompts, do_sample=True, max_new_tokens=ANSWER_LENGTH, min_new_tokens=ANSWER_LENGTH)
    answers = whole[:, PROMPT_LENGTH:]
    ended = (answers == tokenizer.eos_token_id).cumsum(1)
    response_mask = (ended - (answers == tokenizer.eos_token_id).long() == 0).long()
    mask = torch.cat([prompts["attention_mask"], response_mask], 1)
    tensors = {
        "input_ids": whole,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "responses": answers,
        "response_mask": response_mask,
        # GRPO's advantages where about half of the answers are right.
        "advantages": torch.randn(ROWS, 1).sign().expand(-1, ANSWER_LENGTH) * response_mask,
    }
    settings = FSDPActorConfig(
        rollout_n=1,
        ppo_mini_batch_size=1,
        ppo_micro_batch_size_per_gpu=1,
        use_torch_compile=False,
        policy_loss=PolicyLossConfig(loss_mode="gpg"),
        fsdp_config=FSDPEngineConfig(dtype="float32"),
        **AUTO,
    )
    actor = dp_actor.DataParallelPPOActor(settings, model, torch.optim.SGD(model.parameters(), lr=1e-5))
    # The loss is advantage times log-prob, without a ratio.
    tensors["old_log_probs"] = torch.zeros(ROWS, ANSWER_LENGTH)
    data = DataProto.from_dict(tensors, meta_info={"temperature": 1.0})
    metrics = actor.update_policy(data)
    clean = list(actor.gradloc.events)
    row = int(response_mask.sum(1).argmax())
    place = (row, 2)
    spiked = data.select_idxs([row])
    spiked.batch["advantages"][0, 2] *= 300
    actor.update_policy(spiked)
    return {
        "clean": clean,
        "threshold": metrics["actor/gradloc/threshold"],
        "token_norm_max": metrics["actor/gradloc/token_norm_max"],
        "planted": actor.gradloc.events,
        "place": place,
    }


def warm_up(case: Case) -> Run:
    return train(case, calls=2, **AUTO)
