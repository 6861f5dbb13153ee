# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The agent loop of the `hf` rollout: the prompts of a step reach the server together and in the batch's order.

verl's own loops send a request for each row, which arrive in another order in each run and, on a busy machine, spread
over seconds. Which row then gets which random numbers, and how many are answered in one batch, would be left to chance.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

from .rollout import server_name

# A field of each prompt of verl's V1 trainer, made by v1_trainer.py: the batch, the row of its first answer, and the
# number of rows of the batch.
PLACE = "embedded_place"


@dataclass
class _Batch:
    """The prompts of a step by their rows, and the answers once they are asked for."""

    prompts: dict[int, list[int]] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Future[dict[int, TokenOutput]] | None = None


class WholeBatchAgentLoop(AgentLoopBase):
    """One turn for each row of a batch, answered with all other rows."""

    _open: dict[str, _Batch] = {}

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = self._prompt(kwargs)
        metrics: Any = {}  # verl's own loops give a dict, too
        with simple_timer("generate_sequences", metrics):
            output = await self._answer(prompt, sampling_params, kwargs)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            multi_modal_data={},
            num_turns=2,
            metrics=metrics,
            extra_fields=extra_fields(output),
        )

    def _prompt(self, row: dict[str, Any]) -> list[int]:
        """The token ids of a row's messages."""
        tokenizer: Any = self.tokenizer  # transformers declares its factory's type
        return tokenizer.apply_chat_template(
            list(row["raw_prompt"]),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self.apply_chat_template_kwargs,
        )

    async def _answer(
        self, prompt: list[int], sampling_params: dict[str, Any], row: dict[str, Any], turn: int = 1
    ) -> TokenOutput:
        """Answers a row's prompt, with all other rows of its batch.

        Args:
            prompt (list[int]): Its token ids.
            sampling_params (dict): verl's.
            row (dict): What `run` was given.
            turn (int): Which one it is of the row; all rows have equally many.
        """
        batch, place = await self._join(prompt, row.get(PLACE), row.get("session_id", 0), turn)
        if batch.answers is None:
            batch.answers = asyncio.ensure_future(self._ask(batch.prompts, sampling_params))
        return (await batch.answers)[place]

    async def _join(
        self, prompt: list[int], place: dict[str, Any] | None, session: int, turn: int
    ) -> tuple[_Batch, int]:
        """Adds a prompt to its batch, and waits until the batch is complete. Returns the batch and the prompt's row."""
        batches = WholeBatchAgentLoop._open
        name = f"{turn} {'' if place is None else place['batch']}"
        batch = batches.setdefault(name, _Batch())
        row = len(batch.prompts) if place is None else place["first_row"] + session
        batch.prompts[row] = prompt
        if place is None:
            # verl starts the loops of a batch in the order of its rows. All have come to this line before one goes on.
            await asyncio.sleep(0)
            batch.complete.set()
        elif len(batch.prompts) == place["rows"]:
            batch.complete.set()
        await batch.complete.wait()
        if batches.get(name) is batch:
            del batches[name]
        return batch, row

    async def _ask(self, prompts: dict[int, list[int]], sampling_params: dict[str, Any]) -> dict[int, TokenOutput]:
        """Deals the prompts out to the servers, in runs of equal length. All servers answer alike."""
        trainer, rollout = self.config.trainer, self.config.actor_rollout_ref.rollout
        servers = trainer.nnodes * trainer.n_gpus_per_node // rollout.tensor_model_parallel_size
        length = -(-len(prompts) // servers)
        ordered = [prompts[row] for row in range(len(prompts))]
        parts = [(first, ordered[first : first + length]) for first in range(0, len(ordered), length)]
        answers = await asyncio.gather(
            *[
                ray.get_actor(server_name(server)).generate_batch.remote(part, sampling_params, first)
                for server, (first, part) in enumerate(parts)
            ]
        )
        return dict(enumerate(output for part in answers for output in part))


def extra_fields(output: TokenOutput) -> dict[str, Any]:
    """What verl 0.9's own loops add: the steps whose weights gave the answer, and fields of tools. Nothing with 0.7."""
    if "extra_fields" not in TokenOutput.model_fields:
        return {}
    step = output.extra_fields.get("global_steps")  # type: ignore[attr-defined]  # 0.7's class
    steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), step)
    return {**steps, "turn_scores": [], "tool_rewards": []}
