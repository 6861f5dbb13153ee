# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The task of stability.py: a Llama of three layers that adds two-digit numbers, and its rewards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

PLUS, EQUALS, END, PAD = 10, 11, 12, 13
PROMPT, RESPONSE = 6, 4  # "12+34=", and up to three digits with an end


def numbers_of(values: Tensor, digits: int) -> Tensor:
    """Each number's last digits, shape (len(values), digits)."""
    return torch.stack([values // 10**i % 10 for i in reversed(range(digits))], 1)


def prompts_and_answers(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of sums, (count, PROMPT) and (count, RESPONSE), the answers padded after their end."""
    count = len(pairs)

    def column(token: int) -> Tensor:
        return torch.full((count, 1), token)

    prompts = torch.cat([numbers_of(pairs[:, 0], 2), column(PLUS), numbers_of(pairs[:, 1], 2), column(EQUALS)], 1)
    answers = torch.full((count, RESPONSE), PAD)
    for i, total in enumerate(pairs.sum(1).tolist()):
        tokens = [*map(int, str(total)), END]
        answers[i, : len(tokens)] = torch.tensor(tokens)
    return prompts, answers


def all_pairs(seed: int) -> tuple[Tensor, Tensor]:
    """The sums to train on, and 128 others."""
    pairs = torch.cartesian_prod(torch.arange(100), torch.arange(100))
    pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))]
    return pairs[128:], pairs[:128]


def answer_mask(answers: Tensor) -> Tensor:
    """1 up to the first end, that included; 0 after it."""
    ended = (answers == END).long().cumsum(1) - (answers == END).long()
    return (ended == 0).long()


@torch.no_grad()
def reward_of(model: LlamaForCausalLM, pairs: Tensor) -> float:
    """The probability that a sampled answer is right, averaged over sums."""
    prompts, answers = prompts_and_answers(pairs)
    logits = model(input_ids=torch.cat([prompts, answers], 1)).logits[:, PROMPT - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)
    return (log_probs * answer_mask(answers)).sum(1).exp().mean().item()


def tiny_llama(seed: int, vocabulary: int, width: int, length: int, **changes: Any) -> LlamaForCausalLM:
    """One of three layers unless the changes say otherwise. Its weights depend on the seed alone."""
    torch.manual_seed(seed)
    layers = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, **changes}
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": length}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes, **layers))


def new_model(seed: int) -> LlamaForCausalLM:
    return tiny_llama(seed, 14, 64, 16, pad_token_id=PAD, eos_token_id=END, bos_token_id=None)


def learn_from_examples(seed: int, skill: float) -> dict[str, Tensor]:
    """Trains a model on examples until its reward is `skill`; returns its weights."""
    model = new_model(seed)
    train, test = all_pairs(seed)
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(20000):
        pairs = train[torch.randint(len(train), (128,), generator=order)]
        prompts, answers = prompts_and_answers(pairs)
        logits = model(input_ids=torch.cat([prompts, answers], 1)).logits[:, PROMPT - 1 : -1]
        labels = answers.masked_fill(answer_mask(answers) == 0, -100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19 and reward_of(model, test) >= skill:
            return {name: value.clone() for name, value in model.state_dict().items()}
    raise RuntimeError(f"the model did not reach a reward of {skill} from examples (seed {seed})")


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Answers at temperature 1 and their tokens' log-probs, each of shape (len(prompts), RESPONSE).

    Args:
        random (Tensor): Uniform random numbers of that shape.
    """
    tokens, past = prompts, None
    answers, log_probs = [], []
    for i in range(RESPONSE):
        output = model(input_ids=tokens, past_key_values=past, use_cache=True)
        past = output.past_key_values
        probabilities = output.logits[:, -1].softmax(-1)
        tokens = (probabilities.cumsum(-1) < random[:, i : i + 1]).sum(-1, keepdim=True).clamp(max=PAD)
        answers.append(tokens)
        log_probs.append(probabilities.gather(-1, tokens).log())
    found = torch.cat(answers, 1)
    return found.masked_fill(answer_mask(found) == 0, PAD), torch.cat(log_probs, 1)
