# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A training loop without verl and without an optimizer, and a model that is sharded as in verl."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from gradloc.fsdp import collectives
from gradloc.gradloc import GradLoc
from gradloc.measure.pass_recorder import unchanged

from ..replay.model import loaded_in
from ..replay.searched_model import shard


@dataclass(frozen=True)
class Sizes:
    """The data of a step on each rank.

    Args:
        micro_batches (int): How many micro-batches.
        rows (int): The rows of each.
        prompt (int): The tokens of a prompt.
        response (int): The tokens of a response.
    """

    micro_batches: int = 2
    rows: int = 2
    prompt: int = 512
    response: int = 3584


class Loop:
    """A training loop without an optimizer: what a step of verl's actor does between two optimizer steps.

    Args:
        model (nn.Module): It returns an object with `logits` for `input_ids`.
        sizes (Sizes): Of a step.
        vocabulary (int): How many tokens there are.
    """

    def __init__(self, model: nn.Module, sizes: Sizes, vocabulary: int, device: torch.device) -> None:
        self.model, self.sizes, self.device = model, sizes, device
        # Those that an optimizer has: a forward without a backward leaves gathered ones in the place of FSDP2's.
        self._parameters = [*model.parameters()]
        generator = torch.Generator().manual_seed(collectives.rank())
        shape = (sizes.micro_batches, sizes.rows, sizes.prompt + sizes.response)
        self.ids = torch.randint(vocabulary, shape, generator=generator)
        self.advantages = torch.randn(*shape[:2], 1, generator=generator).expand(-1, -1, sizes.response).contiguous()

    def forward(self, inputs: Mapping[str, Tensor], rows: Sequence[int], response_length: int) -> tuple[None, Tensor]:
        """See `GradLoc`."""
        sizes = self.sizes
        ids = inputs["ids"][list(rows), : sizes.prompt + response_length].to(self.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[:, sizes.prompt - 1 : -1]
        # One row at a time, and again in the backward: in float32, the logits are the largest tensor by far.
        log_probs = [
            checkpoint(_log_probs, *pair, use_reentrant=False)
            for pair in zip(logits, ids[:, sizes.prompt :], strict=True)
        ]
        return None, torch.stack(log_probs)

    def step(self, gradloc: GradLoc | None, advantages: Tensor, global_step: int = 0) -> None:
        """The passes of a mini-batch, and what GradLoc does before its optimizer step."""
        sizes = self.sizes
        for parameter in self._parameters:
            parameter.grad = None
        weight = torch.full((sizes.rows, sizes.response), 1 / (sizes.micro_batches * sizes.rows * sizes.response))
        weight, mask = weight.to(self.device), torch.ones_like(weight, device=self.device)
        if gradloc is not None:
            gradloc.start_update(global_step)
        for index in range(sizes.micro_batches):
            inputs, advantage = {"ids": self.ids[index]}, advantages[index].to(self.device)
            if gradloc is not None:
                gradloc.begin_pass(inputs, range(index * sizes.rows, (index + 1) * sizes.rows))
            _, log_prob = self.forward(inputs, range(sizes.rows), sizes.response)
            loss = -(weight * advantage * torch.exp(log_prob - log_prob.detach())).sum()
            if gradloc is not None:
                ids = self.ids[index][:, sizes.prompt :].to(self.device)
                noted = {"log_prob": log_prob, "weight": weight, "response_mask": mask, "token_id": ids}
                noted |= {"advantage": advantage, "old_log_prob": log_prob}
                gradloc.observe(partial(dict, noted), {"coefficient": (log_prob, unchanged)})
            loss.backward()
            if gradloc is not None:
                gradloc.end_pass()


def _log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """The log-probs of the ids (length,) by the logits (length, vocabulary), in float32."""
    logits = logits.float()
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def build_model(name: str, random_weights: bool, attention: str, device: torch.device, trust: bool) -> Any:
    """A model as verl's actor trains it: sharded by FSDP2, float32 parameters, computing in bfloat16 on a GPU.

    Its type is transformers' own.

    Args:
        name (str): A folder, or a name on the hub.
        random_weights (bool): Whether to read the configuration alone.
        attention (str): transformers' name for an implementation of attention.
        trust (bool): Whether the model's own code may run.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    half = torch.bfloat16 if device.type != "cpu" else torch.float32
    options = {**loaded_in(half), "attn_implementation": attention, "trust_remote_code": trust}
    if random_weights:
        with device:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust)
            model: Any = AutoModelForCausalLM.from_config(config, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, **options)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    shard(model.train(), half, init_device_mesh(device.type, (dist.get_world_size(),)))
    return model
