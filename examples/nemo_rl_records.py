# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes records for `gradloc convert` from what NeMo RL's GRPO logs.

python examples/nemo_rl_records.py train_data_step12.jsonl step12.jsonl

Names are those of nemo_rl/algorithms/grpo.py (`log_data`) and loss/loss_functions.py (`ClippedPGLossFn`) at
7ea279abfbeb698b092856d0dab61e7cf39bc909. docs/reference/other-trainers.md says which options fit the loss.
"""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

from gradloc.convert.records import RecordError, json_lines
from gradloc.tools.files import write_output

LISTS = ("token_ids", "token_loss_mask", "advantages", "prev_logprobs", "generation_logprobs")


def main(logged: Path, records: Path) -> None:
    """Each line of `logged` has lists of one entry; entry i of its log-probs is that of token i."""
    made = []
    for place, line in json_lines(logged):
        one = {key: value[0] for key, value in line.items() if isinstance(value, list)}
        shapes = {name: (len(one[name]),) for name in LISTS}
        for name, shape in shapes.items():
            if shape != shapes["token_ids"]:
                sys.exit(f"{place}: the shape of {name} is {shape}, token_ids' {shapes['token_ids']}")
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
        made.append(json.dumps(record) + "\n")
    if not made:
        sys.exit(f"{logged}: there is no response with tokens of the loss")
    write_output(records, "".join(made))
    number = re.search(r"step(\d+)", logged.name)
    of_step = f" --step {number[1]}" if number is not None else ""
    print(f"{len(made):,} records. Next: gradloc convert {shlex.quote(str(records))} --out spike{of_step}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logged", type=Path, help="train_data_step<N>.jsonl")
    parser.add_argument("records", type=Path, help="the file to write")
    options = parser.parse_args()
    try:
        main(options.logged, options.records)
    except (RecordError, OSError) as problem:
        sys.exit(str(problem))
    except (AttributeError, LookupError, TypeError, ValueError) as problem:
        sys.exit(f"{options.logged} is not consistent train data of NeMo RL: {problem!r:.200}")
