# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A trainer of TRL that writes each step's responses to a file for each rank, for `gradloc convert`.

Names are those of trl/trainer/grpo_trainer.py at f2cd57710ae345ea6428ae95363267fcf38a3dc8.
docs/reference/other-trainers.md says which options fit the loss.
"""

import json
from typing import Any

from torch import Tensor
from trl import GRPOTrainer


class RecordingTrainer(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.last_logps = found[0].detach()
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        columns = {"response_ids": inputs["completion_ids"], "response_mask": mask, "log_probs": self.last_logps}
        for name, key in {
            "old_log_probs": "old_per_token_logps",
            "rollout_log_probs": "sampling_per_token_logps",
            "ref_log_probs": "ref_per_token_logps",
            "rollout_is_weights": "importance_sampling_ratio",
        }.items():
            if key in inputs:
                columns[name] = inputs[key].expand_as(mask)
        shapes = {name: tuple(values.shape) for name, values in columns.items()}
        for name, shape in shapes.items():
            if shape != shapes["response_mask"]:
                raise ValueError(f"the shape of {name} is {shape}, the mask's {shapes['response_mask']}")
        rank = self.accelerator.process_index
        with open(f"step{self.state.global_step + 1}-rank{rank}.jsonl", "a") as file:
            for i, length in enumerate(inputs["completion_mask"].sum(1).tolist()):
                prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]
                record = {name: values[i, :length].tolist() for name, values in columns.items()}
                advantages = inputs["advantages"][i]
                record["advantages"] = (advantages[:length] if advantages.dim() else advantages).tolist()
                file.write(json.dumps({"prompt_ids": prompt.tolist(), **record, "rank": rank}) + "\n")
        return loss
