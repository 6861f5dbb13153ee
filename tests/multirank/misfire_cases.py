"""An update whose spikes are in responses with one reward, as the trainer's columns tell; its evidence is written."""

from __future__ import annotations

import types

import numpy as np
import torch
import torch.distributed as dist
from actors import ENGINE, Case, build_actor
from batches import build_batch

# In responses of four prompts of each mini-batch, on both ranks.
PLANTED = ((0, 2, 0), (0, 6, 0), (1, 0, 0), (1, 5, 0), (0, 14, 0), (0, 20, 0), (1, 13, 0), (1, 17, 0))
ANSWERS = 2


def written(case: Case, directory: str, with_uids: bool = True) -> None:
    """Writes the evidence of an update. The planted tokens' responses have the reward -3, the others 0 and 1."""
    rank = dist.get_rank()
    actor = build_actor(case, spike_detection=True, grad_norm_threshold=1e3, bisect_dump_dir=directory)
    batch = build_batch(case, rank)
    rows = range(len(batch))
    columns = {"data_source": ["sums" for _ in rows], "reward_model": [{"ground_truth": "1"} for _ in rows]}
    if with_uids:
        columns["uid"] = [f"{rank}/{row // ANSWERS}" for row in rows]
    for name, values in columns.items():
        batch.non_tensor_batch[name] = np.array(values, dtype=object)
    scores = torch.zeros_like(batch.batch["advantages"])
    scores[:, 0] = torch.tensor([-3.0 if (rank, row, 0) in PLANTED else float(row % 2) for row in rows])
    batch.batch["rm_scores" if case.nested else "token_level_scores"] = scores
    batch.batch["advantages"][:, 1:] *= 0.5  # a row's largest one counts
    metrics = actor.update_policy(batch)
    if not ENGINE:  # what its worker calls
        from verl.utils.gradloc.adapters.dp_actor import write_evidence

        write_evidence(actor, batch, types.SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids))), metrics)
