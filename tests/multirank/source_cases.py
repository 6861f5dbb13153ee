"""An actor whose batch has a token for each rule of `source`, beside ordinary tokens."""

import functools
import math

import reduced_meter_cases
import torch
import torch.distributed as dist
from actor_cases import train
from actors import PROMPT, RESPONSE, Case, build_model, on_device
from batches import build_batch, response_length
from mini_batches import token_weights
from oracle import log_probs_and_entropy
from verl import DataProto

# What LlamaConfig has as its eos_token_id.
END, NO_END = 2, 3
# Of every rule but `layer`, which depends on the model, the tokens for which it holds: (rank, row, position).
Place = tuple[int, int, int]
ADVANTAGE: Place = (0, 2, 4)
NONFINITE: Place = (1, 3, 2)
KL: Place = (1, 7, 1)
RATIO: Place = (1, 0, 5)
RARE: Place = (0, 7, 2)
# The rollout gave it 0.
RARE_WITHOUT_LOG_PROB: Place = (1, 6, 3)
ENDED_ROW, END_POSITION = (0, 5), 5
DRIFTED_ROW, MISALIGNED_ROW = (0, 6), (1, 4)
# With one token.
SHORT_ROWS = ((0, 8), (1, 9))

CASE = Case(rows=10, mini_batch=10, rollout=True, kl=True, loss_agg_mode="seq-mean-token-mean")


def places(rank: int, row: int, start: int = 0) -> set[Place]:
    return {(rank, row, position) for position in range(start, response_length(rank, row))}


def planted() -> dict[str, set[Place]]:
    """The tokens for which each rule holds, but for `unlikely` and `layer`, which also hold for ordinary tokens."""
    unsampled = places(*ENDED_ROW, END_POSITION + 1) | {RARE_WITHOUT_LOG_PROB}
    return {
        "nonfinite": {NONFINITE},
        "misaligned": places(*MISALIGNED_ROW),
        "unsampled": unsampled,
        "advantage": {ADVANTAGE},
        "weight": {(*row, 0) for row in SHORT_ROWS},
        "kl": {KL},
        # A rollout log-prob of 0 is far from that of the training.
        "token": {RATIO} | places(*MISALIGNED_ROW) | unsampled,
        "sequence": set().union(
            *(places(*r) for r in (DRIFTED_ROW, MISALIGNED_ROW, ENDED_ROW, RARE_WITHOUT_LOG_PROB[:2]))
        ),
    }


def plant(case: Case, batch: DataProto) -> torch.Tensor:
    """Changes a batch; returns its log-probs."""
    rank, tensors = dist.get_rank(), batch.batch
    mask = tensors["response_mask"]
    model = build_model(case).eval()

    def own(place: tuple[int, ...]) -> tuple[int, ...] | None:
        return place[1:] if place[0] == rank else None

    def put(row: int, position: int, token: int) -> None:
        tensors["responses"][row, position] = tensors["input_ids"][row, PROMPT + position] = token

    for name in ("responses", "input_ids"):
        tensors[name][tensors[name] == END] = NO_END
    if row := own(ENDED_ROW):
        put(*row, END_POSITION, END)
    for place in filter(None, map(own, (RARE, RARE_WITHOUT_LOG_PROB))):
        with torch.no_grad():
            names = ("input_ids", "attention_mask", "position_ids")
            inputs = on_device({name: tensors[name][place[:1]] for name in names})
            logits = model(**{name: tensor.reshape(1, -1) for name, tensor in inputs.items()}).logits[0]
        put(*place, int(logits[PROMPT + place[1] - 1].argmin()))
    with torch.no_grad():
        log_prob = log_probs_and_entropy(case, model, on_device(tensors))[0].float().cpu() * mask

    tensors["rollout_log_probs"] = log_prob.clone()
    if "ref_log_prob" in tensors.keys():
        tensors["ref_log_prob"] = log_prob.clone()
    changes = (
        ("advantages", ADVANTAGE, 30.0),
        ("advantages", NONFINITE, math.nan),
        ("advantages", KL, 0.01),
        ("ref_log_prob", KL, 1.0),
        ("rollout_log_probs", RATIO, -1.0),
        *(("rollout_log_probs", (*DRIFTED_ROW, p), -0.3) for p in range(response_length(*DRIFTED_ROW))),
        *(("rollout_log_probs", (*MISALIGNED_ROW, p), -2.0) for p in range(response_length(*MISALIGNED_ROW))),
    )
    for name, place, value in changes:
        if (here := own(place)) and name in tensors.keys():
            tensors[name][here] = value if name == "advantages" else tensors[name][here] + value
    for place in filter(None, map(own, planted()["unsampled"])):
        tensors["rollout_log_probs"][place] = 0.0
    return log_prob


@functools.cache
def every_source(case: Case = CASE) -> tuple[str, dict[str, float]]:
    """A run whose culprits are all tokens with a coefficient.

    Returns:
        tuple: Its events, and this rank's log-probs by "row position".
    """
    log_probs: dict[str, float] = {}

    def change(batch: DataProto) -> None:
        found = plant(case, batch)
        for row, position in batch.batch["response_mask"].nonzero().tolist():
            log_probs[f"{row} {position}"] = float(found[row, position])

    run = train(
        case,
        change_batch=change,
        spike_detection=True,
        grad_norm_threshold=1e-6,
        bisect_until="exhaustive",
        bisect_budget_steps=2000,
    )
    return run.events[0], log_probs


# Rows of the longest responses, with masked tokens between two turns. From the second turn of the first row on, the
# rollout's log-probs are of other tokens; of the second row, from the middle of the first turn on.
TURNS, GAP = ((0, 5), (1, 6)), range(3, 5)


def of_two_turns(case: Case) -> str:
    """The events of a run whose culprits are all tokens with a coefficient, where two rows have two turns."""
    rank = dist.get_rank()

    def change(batch: DataProto) -> None:
        tensors = batch.batch
        rollout = tensors["old_log_probs"].clone()
        for number, (at, row) in enumerate(TURNS):
            assert response_length(at, row) == RESPONSE
            if at == rank:
                rollout[row, 1 if number else GAP.stop :] -= 3.0
                for name in ("response_mask", "advantages", "old_log_probs"):
                    tensors[name][row, GAP.start : GAP.stop] = 0.0
                rollout[row, GAP.start : GAP.stop] = 0.0  # as verl's agent loops write them
        tensors["rollout_log_probs"] = rollout

    search = {"grad_norm_threshold": 1e-6, "bisect_until": "exhaustive", "bisect_budget_steps": 2000}
    return train(case, change_batch=change, spike_detection=True, **search).events[0]


def medians(case: Case, sequence_parallel_size: int) -> tuple[str, list[float], list[float]]:
    """A run whose search has one pass, and |A| and w of all response tokens of this rank's rows."""
    detection = {"grad_norm_threshold": 1e-6, "bisect_budget_steps": 1}
    rank = dist.get_rank() // sequence_parallel_size
    batch = build_batch(case, rank).batch
    if sequence_parallel_size > 1:
        events = reduced_meter_cases.train(case, sequence_parallel_size, **detection).events[0]
    else:
        events = train(case, spike_detection=True, **detection).events[0]
    mask = batch["response_mask"]
    factor = case.micro_batch / case.mini_batch
    weights = [token_weights(case, part, factor, {}) for part in mask.split(case.micro_batch)]
    return events, batch["advantages"].abs()[mask > 0].tolist(), torch.cat(weights)[mask > 0].tolist()
