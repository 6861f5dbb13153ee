# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The agent loops. That of the `hf` rollout: the prompts of a step reach the server together and in the batch's order.

verl's own loops send a request for each row, which arrive in another order in each run and, on a busy machine, spread
over seconds. Which row then gets which random numbers, and how many are answered in one batch, would be left to chance.
"""

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import ray
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

from .rollout import server_name

# A field of each prompt of verl's V1 trainer, made by v1_trainer.py: the batch's number, the row of its first answer,
# and the number of rows of the batch.
PLACE = "embedded_place"
# For the fault `retokenized`: the longest first turn, in tokens, and the user's words between the turns, in SmolLM2's
# chat template. The response mask leaves it out.
FIRST_TURN = 16
BETWEEN = "<|im_end|>\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n"


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
        mask = [1] * len(output.token_ids)
        if self.config.embedded.mask_unsampled and output.log_probs is not None:
            mask = [int(log_prob != 0.0) for log_prob in output.log_probs]
        return _of_turns(2, prompt, output.token_ids, mask, output.log_probs, metrics, output)

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


class RetokenizedAgentLoop(WholeBatchAgentLoop):
    """The fault `retokenized`: two turns for each row. The text of the second is encoded again, character by character.

    These are other tokens than the policy has sampled. The log-probs of the sampled tokens stay, in their order.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        tokenizer: Any = self.tokenizer
        prompt, end = self._prompt(kwargs), tokenizer.eos_token_id
        length = self.config.actor_rollout_ref.rollout.response_length
        metrics: Any = {}
        with simple_timer("generate_sequences", metrics):
            answer = await self._answer(prompt, sampling_params, kwargs)
            first = [token for token in answer.token_ids if token != end][:FIRST_TURN]
            between = tokenizer.encode(BETWEEN, add_special_tokens=False)
            second = await self._answer([*prompt, *first, *between], sampling_params, kwargs, turn=2)
        if answer.log_probs is None or second.log_probs is None:
            raise ValueError("the fault `retokenized` needs actor_rollout_ref.rollout.calculate_log_probs=True")
        text = tokenizer.decode([token for token in second.token_ids if token != end])
        encoded = [token for character in text for token in tokenizer.encode(character, add_special_tokens=False)]
        room = max(length - len(first) - len(between), 0)
        encoded = encoded[: min(len(second.token_ids), room)]
        mask = [1] * len(first) + [0] * len(between) + [1] * len(encoded)
        log_probs = [*answer.log_probs[: len(first)], *[0.0] * len(between), *second.log_probs[: len(encoded)]]
        return _of_turns(4, prompt, [*first, *between, *encoded], mask, log_probs, metrics, second)


class _Seeded(AgentLoopBase):
    """Each request has a seed, so that vLLM samples the same in each run, in whatever order; and `embedded.sampling`.

    The requests of several turns have the same.
    """

    _rows = itertools.count()

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        place, own = kwargs.get(PLACE), OmegaConf.to_container(self.config.embedded.sampling)
        seed = next(self._rows) if place is None else place["batch"] * 10_007 + place["first_row"]
        params: Any = {**sampling_params, **own, "seed": seed + kwargs.get("session_id", 0)}  # type: ignore[dict-item]
        return await super().run(params, **kwargs)  # type: ignore[safe-super]  # verl's own loop comes after this class


class SeededAgentLoop(_Seeded, SingleTurnAgentLoop):
    """verl's own loop with one turn."""


class SeededToolAgentLoop(_Seeded, ToolAgentLoop):
    """verl's own loop with tools."""


def _of_turns(
    turns: int,
    prompt: list[int],
    response: list[int],
    mask: list[int],
    log_probs: list[float] | None,
    metrics: Any,
    output: TokenOutput,
) -> AgentLoopOutput:
    extra_fields: dict[str, Any] = {}
    if "extra_fields" in TokenOutput.model_fields:
        # verl 0.9's own loops add the steps whose weights gave the answer, and fields of tools.
        step = output.extra_fields.get("global_steps")  # type: ignore[attr-defined]  # 0.7's class
        steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), step)
        extra_fields = {**steps, "turn_scores": [], "tool_rewards": []}
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask,
        response_logprobs=log_probs,
        multi_modal_data={},
        num_turns=turns,
        metrics=metrics,
        extra_fields=extra_fields,
    )
