# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The agent loop of the `hf` rollout: the prompts of a step reach the server together and in the batch's order.

verl's own loops send a request for each row, which arrive in another order in each run and, on a busy machine, spread
over seconds. Which row then gets which random numbers, and how many are answered in one batch, would be left to chance.
"""

import asyncio
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput


class _Batch:
    """The prompts of a step, and their answers once they are asked for."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.answers: asyncio.Future[list[TokenOutput]] | None = None


class WholeBatchAgentLoop(AgentLoopBase):
    """One turn for each row of a batch, answered with all other rows."""

    _open: _Batch | None = None

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        tokenizer: Any = self.tokenizer  # transformers declares its factory's type
        prompt = tokenizer.apply_chat_template(
            list(kwargs["raw_prompt"]), add_generation_prompt=True, tokenize=True, **self.apply_chat_template_kwargs
        )
        shared = WholeBatchAgentLoop
        batch = shared._open = shared._open or _Batch()
        row = len(batch.prompts)
        batch.prompts.append(prompt)
        # verl starts the loops of a batch in the order of its rows. All have come to this line before one goes on.
        await asyncio.sleep(0)
        if batch.answers is None:
            shared._open = None
            batch.answers = asyncio.ensure_future(self._ask(batch.prompts, sampling_params))
        metrics: Any = {}  # verl's own loops give a dict, too
        with simple_timer("generate_sequences", metrics):
            output = (await batch.answers)[row]
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            multi_modal_data={},
            num_turns=2,
            metrics=metrics,
        )

    async def _ask(self, prompts: list[list[int]], sampling_params: dict[str, Any]) -> list[TokenOutput]:
        """Deals the prompts out to the servers, in runs of equal length. All servers answer alike."""
        servers = self.server_manager.server_handles
        length = -(-len(prompts) // len(servers))
        parts = [(first, prompts[first : first + length]) for first in range(0, len(prompts), length)]
        answers = await asyncio.gather(
            *[
                server.generate_batch.remote(part, sampling_params, first)
                for server, (first, part) in zip(servers, parts, strict=False)
            ]
        )
        return [output for part in answers for output in part]
