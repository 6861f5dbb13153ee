"""Plants a gradient spike: an advantage estimator that makes the advantage of one token of a rewarded answer, if there
is one, huge in one step.

Each answer's advantage is +1 or -1 at random otherwise, so that the search must tell the token from its neighbours.
Where the spike was planted is written as JSON to the file that PLANTED_SPIKE_FILE names.
"""

import json
import os

import numpy as np
import torch
from verl.trainer.ppo.core_algos import register_adv_est

STEP = 2
FACTOR = 1000.0
calls = 0


@register_adv_est("planted_spike")
def planted_spike(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, **_kwargs
) -> tuple[torch.Tensor, torch.Tensor]:
    global calls
    calls += 1
    signs = torch.randint(0, 2, (len(response_mask), 1), generator=torch.Generator().manual_seed(calls)) * 2.0 - 1.0
    advantages = signs * response_mask
    if calls == STEP:
        rewarded = token_level_rewards.sum(-1).nonzero()
        row = int(rewarded[-1]) if len(rewarded) else len(index) - 2
        position = int(response_mask[row].sum()) // 2
        advantages[row, position] *= FACTOR
        planted = {"global_step": STEP, "batch_row": row, "uid": index[row], "position": position}
        planted["advantage"] = float(advantages[row, position])
        with open(os.environ["PLANTED_SPIKE_FILE"], "w") as file:
            json.dump(planted, file)
    return advantages, advantages
