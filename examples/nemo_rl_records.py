# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes records for `gradloc convert` from what NeMo RL's GRPO logs.

python examples/nemo_rl_records.py train_data_step12.jsonl step12.jsonl

Names are those of nemo_rl/algorithms/grpo.py (`log_data`) and loss/loss_functions.py (`ClippedPGLossFn`) at
7ea279abfbeb698b092856d0dab61e7cf39bc909. docs/reference/other-trainers.md says which options fit the loss.
"""

import json
import sys

LISTS = ("token_ids", "token_loss_mask", "advantages", "prev_logprobs", "generation_logprobs")


def main(logged: str, records: str) -> None:
    """Each line of `logged` has lists of one entry; entry i of its log-probs is that of token i."""
    with open(logged) as lines, open(records, "w") as file:
        for line in lines:
            one = {key: value[0] for key, value in json.loads(line).items() if isinstance(value, list)}
            shapes = {name: (len(one[name]),) for name in LISTS}
            for name, shape in shapes.items():
                if shape != shapes["token_ids"]:
                    sys.exit(f"{logged}: the shape of {name} is {shape}, and that of token_ids {shapes['token_ids']}")
            stop = one["input_lengths"]
            if not one["sample_loss_mask"] or 1 not in one["token_loss_mask"][:stop]:
                continue
            start = one["token_loss_mask"].index(1)
            record = {
                "prompt_ids": one["token_ids"][:start],
                "response_ids": one["token_ids"][start:stop],
                "response_mask": one["token_loss_mask"][start:stop],
                "advantages": one["advantages"][start:stop],
                "old_log_probs": one["prev_logprobs"][start:stop],
                "rollout_log_probs": one["generation_logprobs"][start:stop],
            }
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
