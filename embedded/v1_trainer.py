# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What makes runs of verl 0.9's V1 trainer repeatable: batches are answered and trained on in the order of their rows.

V1 starts each prompt's loops by itself, and takes the answers in the order in which they reach its TransferQueue.
"""

import itertools
from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict
from verl.experimental.agent_loop import AgentLoopManager
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils import tensordict_utils

from .agent_loop import PLACE


class OrderedAgentLoopManager(AgentLoopManagerTQ):
    """Tells each prompt its place in the batch, for the agent loops."""

    _batches = itertools.count(1)

    @classmethod
    def create(cls, *args: Any, config: DictConfig, **kwargs: Any) -> Any:
        # The older trainer (trainer.use_v1=False) waits for the answers, and has its own manager for that.
        if not config.trainer.use_v1:
            return AgentLoopManager.create(*args, config=config, **kwargs)  # type: ignore[attr-defined]  # not in 0.7
        return super().create(*args, config=config, **kwargs)

    def generate_sequences(self, prompts: TensorDict) -> None:
        rollout = self.config.actor_rollout_ref.rollout
        validate = tensordict_utils.get(prompts, "validate", default=False)
        answers = rollout.val_kwargs.n if validate else rollout.n
        batch, rows = next(self._batches), len(prompts) * answers
        places = [{"batch": batch, "first_row": row, "rows": rows} for row in range(0, rows, answers)]
        tensordict_utils.assign_non_tensor_stack(prompts, PLACE, places)
        super().generate_sequences(prompts)


class OrderedReplayBuffer(ReplayBuffer):
    """Gives the trainer a step's answers in the order of their prompts. For the synchronous trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, poll_interval=0.2)  # two seconds are a tiny model's whole step

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict) -> Any:
        order = {uid: place for place, uid in enumerate(self.prompt_global_steps[partition_id])}

        def place(key: str) -> tuple[int, int, int]:
            uid, answer, turn = key.split("_")
            return order.get(uid, len(order)), int(answer), int(turn)

        ordered = {key: partition_snapshot[key] for key in sorted(partition_snapshot, key=place)}
        return super()._materialize_batch(partition_id, selected_prompt_uids, ordered)
