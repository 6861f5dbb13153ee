"""A rollout in which one answer to each sum is right: a random model would never earn a reward. And a critic without
flash attention, which verl's loader asks for.

verl loads this module when VERL_USE_EXTERNAL_MODULES names it behind `embedded`.
"""

import re
from typing import Any

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput

from embedded.rollout import HFReplica, HFServer

SAMPLES = 4  # to each prompt
RIGHT = 2  # the place of the right one among them


class AnsweringServer(HFServer):
    def __init__(self, model_path: str, response_length: int) -> None:
        super().__init__(model_path, response_length)
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)

    def generate_batch(self, prompts: list[list[int]], params: dict[str, Any], first_row: int) -> list[TokenOutput]:
        outputs = super().generate_batch(prompts, params, first_row)
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), first_row):
            if row % SAMPLES == RIGHT:
                output.token_ids = self.answer(prompt)
                output.log_probs = self.log_probs(prompt, output.token_ids)
        return outputs

    def answer(self, prompt: list[int]) -> list[int]:
        first, sign, second = re.findall(r"(\d+) ([+-]) (\d+)", self.tokenizer.decode(prompt))[-1]
        result = int(first) + int(sign + second)
        return [*self.tokenizer.encode(f"The answer is {result}.", add_special_tokens=False), self.eos]

    @torch.no_grad()
    def log_probs(self, prompt: list[int], answer: list[int]) -> list[float]:
        logits = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1).tolist()


class AnsweringReplica(HFReplica):
    server_class = AnsweringServer


RolloutReplicaRegistry.register("hf", lambda: AnsweringReplica)
load_critic = AutoModelForTokenClassification.from_pretrained


def load_with_sdpa(*arguments: Any, **options: Any) -> Any:
    return load_critic(*arguments, **{**options, "attn_implementation": "sdpa"})


AutoModelForTokenClassification.from_pretrained = load_with_sdpa
