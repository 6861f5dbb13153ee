# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The fault `retokenized`: responses of two turns, of which the second is decoded and encoded again."""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.profiler import simple_timer

from .agent_loop import WholeBatchAgentLoop, extra_fields

# The longest first turn, in tokens.
FIRST_TURN = 16
# What the user says between the turns, in the form of SmolLM2's chat template. The response mask leaves it out.
BETWEEN = "<|im_end|>\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n"


class RetokenizedAgentLoop(WholeBatchAgentLoop):
    """Two turns for each row. Of the second, the text is kept, but encoded character by character.

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
        text = tokenizer.decode([token for token in second.token_ids if token != end])
        encoded = [token for character in text for token in tokenizer.encode(character, add_special_tokens=False)]
        room = max(length - len(first) - len(between), 0)
        encoded = encoded[: min(len(second.token_ids), room)]
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[*first, *between, *encoded],
            response_mask=[1] * len(first) + [0] * len(between) + [1] * len(encoded),
            response_logprobs=[
                *_log_probs(answer, len(first)),
                *[0.0] * len(between),
                *_log_probs(second, len(encoded)),
            ],
            multi_modal_data={},
            num_turns=4,
            metrics=metrics,
            extra_fields=extra_fields(second),
        )


def _log_probs(output: Any, length: int) -> list[float]:
    if output.log_probs is None:
        raise ValueError("the fault `retokenized` needs actor_rollout_ref.rollout.calculate_log_probs=True")
    return output.log_probs[:length]
