# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The `hf` rollout: one Ray actor answers all requests of a step in one batch with transformers' `generate`."""

import asyncio
import os
from collections.abc import Generator
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, TopPLogitsWarper
from verl.utils import hf_tokenizer
from verl.utils.fs import copy_to_local
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

# A batch starts when no request has arrived for so long. The requests of a step arrive within milliseconds of each
# other, and a single batch is both fast and reproducible.
QUIET_SECONDS = 0.3


class _Sampler(LogitsProcessor):
    """Samples tokens and records their log-probs.

    Greedy decoding of log-probs plus Gumbel noise is the same as sampling from the softmax. Each row has a random
    generator of its own, so a response depends on its seed and not on the other rows of the batch.
    """

    def __init__(self, seeds: list[int], temperature: float, top_p: float):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.temperature = temperature
        self.top_p = TopPLogitsWarper(top_p) if top_p < 1.0 else None
        self.log_probs: list[torch.Tensor] = []
        self._pending: torch.Tensor | None = None

    def collect(self, input_ids: torch.Tensor) -> None:
        """Stores the log-prob of the last token in `input_ids`, which is known only one call after it was sampled."""
        if self._pending is not None:
            self.log_probs.append(self._pending.gather(1, input_ids[:, -1:]).squeeze(1))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.collect(input_ids)
        greedy = self.temperature <= 0
        scores = torch.log_softmax(scores.float() / (1.0 if greedy else self.temperature), dim=-1)
        self._pending = scores
        if greedy:
            return scores
        if self.top_p is not None:
            scores = self.top_p(input_ids, scores)
        noise = torch.stack([torch.empty(scores.shape[1]).exponential_(generator=g) for g in self.generators])
        return scores - noise.log_()


@ray.remote
class HFServer:
    """Holds a copy of the policy and generates responses with it. Requests that wait together form one batch."""

    def __init__(self, model_path: str, response_length: int, seed: int):
        # Training is idle during the rollout, so all cores are free.
        torch.set_num_threads(os.cpu_count() or 1)
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        tokenizer = hf_tokenizer(model_path)
        self.eos, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        self.response_length = response_length
        self.seed = seed
        self.version = 0
        self.waiting: list[tuple[list[int], dict[str, Any], asyncio.Future]] = []
        self.batcher: asyncio.Task | None = None

    async def update_weights(self, weights: dict[str, Any]) -> None:
        self.model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
        self.version += 1

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_media: Any
    ) -> TokenOutput:
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt_ids, sampling_params, answer))
        if self.batcher is None:
            self.batcher = asyncio.create_task(self._run_batch())
        return await answer

    async def _run_batch(self) -> None:
        arrived = 0
        while arrived < len(self.waiting):
            arrived = len(self.waiting)
            await asyncio.sleep(QUIET_SECONDS)
        batch, self.waiting, self.batcher = self.waiting, [], None
        batch.sort(key=lambda request: request[0])  # requests arrive in another order in each run
        try:
            # All requests of a batch come from one call of the trainer, so their sampling parameters are the same.
            outputs = await asyncio.to_thread(self._generate, [prompt for prompt, _, _ in batch], batch[0][1])
            for (_, _, answer), output in zip(batch, outputs, strict=True):
                answer.set_result(output)
        except Exception as error:
            for _, _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], params: dict[str, Any]) -> list[TokenOutput]:
        width = max(map(len, prompts))
        input_ids = torch.tensor([[self.pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        first = (self.seed * 100_003 + self.version) * 10_007
        sampler = _Sampler(
            seeds=list(range(first, first + len(prompts))),
            temperature=params.get("temperature", 1.0),
            top_p=params.get("top_p", 1.0),
        )
        sequences = self.model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=self.response_length,
            eos_token_id=self.eos,
            pad_token_id=self.pad,
            logits_processor=LogitsProcessorList([sampler]),
        )
        sampler.collect(sequences)
        log_probs = torch.stack(sampler.log_probs, dim=1).tolist()
        outputs = []
        for tokens, row_log_probs in zip(sequences[:, width:].tolist(), log_probs, strict=True):
            length = tokens.index(self.eos) + 1 if self.eos in tokens else len(tokens)
            outputs.append(
                TokenOutput(
                    token_ids=tokens[:length],
                    log_probs=row_log_probs[:length] if params.get("logprobs") else None,
                    stop_reason="completed",
                )
            )
        return outputs


def _server_name(replica_rank: int) -> str:
    return f"hf_server_{replica_rank}"


class HFRollout(BaseRollout):
    """The rollout in a training worker: it sends the weights to the server of its replica."""

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None], **kwargs: Any) -> None:
        first_of_replica = self.device_mesh["infer_tp"].get_local_rank() == 0
        collected = {}
        # Every rank iterates over all weights, because gathering a sharded weight is a collective operation.
        for name, weight in weights:
            if first_of_replica:
                collected[name] = weight.detach().cpu().numpy()
        if first_of_replica:
            server = ray.get_actor(_server_name(self.device_mesh["dp"].get_local_rank()))
            await server.update_weights.remote(collected)


class HFReplica(RolloutReplica):
    """One server for the `tensor_model_parallel_size` training workers of a replica."""

    def get_ray_class_with_init_args(self):
        raise NotImplementedError(
            "The hf rollout supports only the hybrid engine (actor_rollout_ref.hybrid_engine=True)."
        )

    async def launch_servers(self) -> None:
        server_class: Any = HFServer  # made a remote class by its decorator, which type checkers leave out
        server = server_class.options(name=_server_name(self.replica_rank)).remote(
            model_path=copy_to_local(self.model_config.path),
            response_length=self.config.response_length,
            seed=self.replica_rank,
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = _server_name(self.replica_rank)

    async def wake_up(self) -> None:
        await asyncio.gather(*[worker.wake_up.remote() for worker in self.workers])

    async def sleep(self) -> None:
        await asyncio.gather(*[worker.sleep.remote() for worker in self.workers])

    async def clear_kv_cache(self) -> None:
        """Does nothing: the cache exists only during a `generate` call."""
