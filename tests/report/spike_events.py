"""Prints the events of a tiny patched actor, one JSON object a line, as the trainer would write them.

One token has an advantage far above the others', and one a NaN. Run as a program: it makes a process group.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from verl import DataProto
from verl.utils.gradloc import record_events, text_evidence
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig

ROWS, PROMPT, RESPONSE, VOCABULARY = 4, 3, 8, 64


class Words:
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(f" w{i}" for i in ids)


def main(directory: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.cpu.current_device = lambda: "cpu"  # verl asks for it; torch's CPU module has none
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    settings = FSDPActorConfig(
        rollout_n=1,
        ppo_mini_batch_size=2,
        ppo_micro_batch_size_per_gpu=1,
        use_torch_compile=False,
        fsdp_config=FSDPEngineConfig(dtype="float32"),
        spike_detection=True,
        grad_norm_threshold=300.0,
    )
    actor = DataParallelPPOActor(settings, model, torch.optim.SGD(model.parameters(), lr=1e-4))
    ids = torch.randint(0, VOCABULARY, (ROWS, PROMPT + RESPONSE))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    advantages = torch.randn(ROWS, RESPONSE)
    advantages[1, 2] = 1000.0
    advantages[2, 5] = float("nan")
    tensors = {
        "responses": ids[:, PROMPT:],
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": torch.arange(PROMPT + RESPONSE).expand(ROWS, -1).contiguous(),
        "response_mask": mask[:, PROMPT:],
        "old_log_probs": torch.full((ROWS, RESPONSE), -4.2),
        "advantages": advantages,
    }
    batch = DataProto(TensorDict(tensors, batch_size=[ROWS]), meta_info={"temperature": 1.0, "global_steps": 7})
    actor.update_policy(batch)
    for event in actor.gradloc.events:
        for culprit in event["culprits"]:
            row = 2 * event["mini_batch"] + culprit["row"]
            response = ids[row, PROMPT:][mask[row, PROMPT:].bool()].tolist()
            culprit.update(text_evidence(Words(), ids[row, :PROMPT].tolist(), response, culprit["position"]))
            culprit.update(ground_truth="7", reward=0.0, data_source="math_verify", uid=f"row-{row}")
    record_events(directory, actor.gradloc.events)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(os.path.join(folder, "store"), 1), rank=0, world_size=1)
        main(sys.argv[1])
        dist.destroy_process_group()
