# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The `hf` rollout: a Ray actor answers all prompts of a step in one batch, with transformers' `generate`."""

import asyncio
import os
import warnings
from collections.abc import Generator
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, TopPLogitsWarper
from verl.utils import hf_tokenizer
from verl.utils.fs import copy_to_local
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

# Parameters; below, one thread is faster than several.
TINY = 10_000_000


class Sampler(LogitsProcessor):
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


class HFServer:
    """A Ray actor that holds a copy of the policy and generates responses with it.

    A response depends on the weights, its prompt and its row only: seeds count rows and updates of the weights.
    """

    sampler_class: type[Sampler] = Sampler

    def __init__(self, model_path: str, response_length: int):
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        # Training is idle during the rollout, so all cores are free. A tiny model's threads would only wait.
        tiny = self.model.num_parameters() < TINY
        torch.set_num_threads(1 if tiny else len(os.sched_getaffinity(0)))
        tokenizer = hf_tokenizer(model_path)
        self.eos, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        self.response_length = response_length
        self.version = 0
        self.global_step: int | None = None

    def update_weights(self, weights: dict[str, Any], global_step: int | None = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's arrays are read-only, and load_state_dict only reads them
            tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
        self.model.load_state_dict(tensors)
        self.version += 1
        self.global_step = global_step

    @torch.no_grad()
    def generate_batch(self, prompts: list[list[int]], params: dict[str, Any], first_row: int) -> list[TokenOutput]:
        """Answers prompts.

        Args:
            prompts (list[list[int]]): Token ids.
            params (dict): verl's sampling parameters, the same for all.
            first_row (int): The row of the first prompt in the trainer's batch; the others follow it.
        """
        width = max(map(len, prompts))
        input_ids = torch.tensor([[self.pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        first_seed = self.version * 10_007 + first_row
        sampler = self.sampler_class(
            seeds=list(range(first_seed, first_seed + len(prompts))),
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
        # verl 0.9 asks by which step's weights an answer was given; 0.7 does not have the field.
        step = {} if self.global_step is None else {"global_steps": self.global_step}
        extra_fields: dict[str, Any] = {"extra_fields": step} if "extra_fields" in TokenOutput.model_fields else {}
        outputs = []
        for tokens, row_log_probs in zip(sequences[:, width:].tolist(), log_probs, strict=True):
            length = tokens.index(self.eos) + 1 if self.eos in tokens else len(tokens)
            outputs.append(
                TokenOutput(
                    token_ids=tokens[:length],
                    log_probs=row_log_probs[:length] if params.get("logprobs") else None,
                    stop_reason="completed",
                    **extra_fields,
                )
            )
        return outputs


def server_name(replica_rank: int) -> str:
    """The name by which Ray knows the server of a replica."""
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
                collected[name] = weight.detach().float().cpu().numpy()  # it may be bfloat16, which numpy lacks
        if first_of_replica:
            server = ray.get_actor(server_name(self.device_mesh["dp"].get_local_rank()))
            await server.update_weights.remote(collected, kwargs.get("global_steps"))


class HFReplica(RolloutReplica):
    """One server for the `tensor_model_parallel_size` training workers of a replica."""

    server_class: type[HFServer] = HFServer

    def get_ray_class_with_init_args(self):
        raise NotImplementedError(
            "The hf rollout supports only the hybrid engine (actor_rollout_ref.hybrid_engine=True)."
        )

    async def launch_servers(self) -> None:
        server_class: Any = ray.remote(self.server_class)
        server = server_class.options(name=server_name(self.replica_rank)).remote(
            model_path=copy_to_local(self.model_config.path), response_length=self.config.response_length
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = server_name(self.replica_rank)

    async def wake_up(self) -> None:
        await self._tell_workers("wake_up")

    async def sleep(self) -> None:
        await self._tell_workers("sleep")

    async def _tell_workers(self, method: str) -> None:
        """verl 0.7's workers send their weights when they are woken up. 0.9's trainer asks for that itself."""
        await asyncio.gather(*[getattr(each, method).remote() for each in self.workers if hasattr(each, method)])

    async def _do_nothing(self, *_args: Any, **_kwargs: Any) -> None:
        """The server has no cache beyond a `generate` call, and a call cannot be interrupted."""

    clear_kv_cache = release_kv_cache = resume_kv_cache = _do_nothing
    abort_all_requests = resume_generation = _do_nothing
