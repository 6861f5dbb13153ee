"""The data of the tiny actors: ragged rows, with log-probs near those of the model, and planted spikes."""

import copy
import functools
import math

import numpy as np
import torch
from actors import (
    END,
    IMAGE,
    PROMPT,
    RESPONSE,
    SPIKE,
    TEMPERATURE,
    VISION_END,
    VISION_START,
    VOCABULARY,
    Case,
    build_model,
    on_device,
)
from oracle import log_probs_and_entropy
from verl import DataProto


def response_length(rank: int, row: int) -> int:
    """Ragged, with every length from 1 to RESPONSE; row 1 of rank 0 is fully masked."""
    return 0 if (rank, row) == (0, 1) else 1 + (7 * row + 3 * rank + 4) % RESPONSE


def build_batch(case: Case, rank: int, seed: int = 0) -> DataProto:
    """One rank's rows: left-padded prompts, right-padded responses, log-probs near those of the model."""
    batch, rng = _built(case, rank, seed)
    torch.set_rng_state(rng)  # as if it had been built each time
    return copy.deepcopy(batch)


@functools.cache
def _built(case: Case, rank: int, seed: int) -> tuple[DataProto, torch.Tensor]:
    """A batch, and the state of the random numbers after it: each run of a case needs it, and it takes a forward."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    special = VISION_END if case.model == "vision" else 0
    tokens = torch.randint(special + 1, VOCABULARY, (case.rows, PROMPT + RESPONSE), generator=random)
    if case.has_end and rank == 1:  # row 6 goes on behind its end
        tokens[6:7, PROMPT + 5] = END
    mask = torch.zeros_like(tokens)
    for row in range(case.rows):
        mask[row, row % 4 : PROMPT + response_length(rank, row)] = 1
    response_mask = mask[:, PROMPT:].float()
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    images = np.array([None] * case.rows, dtype=object)
    if case.model == "vision":
        # Positions in the text and on the three axes of an image: one token wide, it leaves all four alike.
        position_ids = position_ids.unsqueeze(1).expand(-1, 4, -1).clone()
        for row in range(0, case.rows, 3):
            # Four patches make one token; two rows of three have no image.
            start = PROMPT - 3
            if case.tool_images:
                start = PROMPT + 1
                assert response_length(rank, row) > 4
                response_mask[row, 1:4] = 0
            tokens[row, start : start + 3] = torch.tensor([VISION_START, IMAGE, VISION_END])
            patches = torch.randn(4, 3 * 2 * 4 * 4, generator=random)
            images[row] = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 2, 2]])}
    tensors = {
        "input_ids": tokens * mask,
        "attention_mask": mask,
        "position_ids": position_ids,
        "responses": (tokens * mask)[:, PROMPT:],
        "response_mask": response_mask,
    }

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(case.rows, RESPONSE, generator=random)

    others = {"multi_modal_inputs": images} if case.model == "vision" else {}
    with torch.no_grad():
        log_probs = log_probs_and_entropy(case, build_model(case).eval(), {**on_device(tensors), **others})[0]
    log_probs = log_probs.float().cpu()
    old_log_probs = log_probs + noise(0.05)
    advantages = torch.randn(case.rows, 1, generator=random).sign() + noise(0.2)
    # The first call of a run has the spikes; those after it are ordinary.
    for places, value, log_ratio in (
        (case.planted, SPIKE, 0),
        (case.clipped, SPIKE, 1),
        (case.dual_clipped, -SPIKE, 2),
        (case.nan, math.nan, 0),
    ):
        for _, row, position in [place for place in places if place[0] == rank and seed == 0]:
            assert response_mask[row, position] == 1, f"no response token at row {row}, position {position}"
            advantages[row, position] = value if row % 2 or log_ratio else -value
            old_log_probs[row, position] = log_probs[row, position] - log_ratio
    advantages[[row for at, row in case.still if at == rank]] = 0.0
    tensors["old_log_probs"] = old_log_probs * response_mask
    reference = (log_probs + noise(0.3)) * response_mask
    if case.reference or case.kl:
        tensors["ref_log_prob"] = reference
    tensors["advantages"] = advantages * response_mask
    if case.rollout:
        tensors["rollout_log_probs"] = (old_log_probs + noise(0.02)) * response_mask
    if case.rollout_weights:
        tensors["rollout_is_weights"] = noise(0.3).exp() * response_mask
    batch = DataProto.from_dict(tensors, others, meta_info={"temperature": TEMPERATURE, "global_steps": 7 + seed})
    return batch, torch.get_rng_state()


class Words:
    """A tokenizer whose words are the ids."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


def with_columns(case: Case, batch: DataProto, rank: int) -> None:
    """What a trainer knows of each row; a row's name is its rank and number."""
    rows = range(len(batch))
    columns = {
        "uid": [f"{rank}/{row}" for row in rows],
        "data_source": ["sums"] * len(batch),
        "reward_model": [{"ground_truth": str(row)} for row in rows],
    }
    for name, values in columns.items():
        batch.non_tensor_batch[name] = np.array(values, dtype=object)
    scores = torch.zeros_like(batch.batch["advantages"])
    scores[:, 0] = torch.arange(len(batch)) + 100.0 * rank
    name = "rm_scores" if case.nested else "token_level_scores"
    batch.batch[name] = scores * batch.batch["response_mask"]
