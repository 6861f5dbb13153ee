# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes records for `gradloc convert` from a step of prime-rl's token exports (`enable_token_export`).

python examples/prime_rl_records.py token_exports/step_12 step12.jsonl

The coefficients are those of prime-rl's default loss (DPPO with KL). Names are those of src/prime_rl/trainer/rl/
(`token_export.py`, `loss.py`) at 559b44772e471d1538537b8805cc77f3824a5e64. See docs/reference/other-trainers.md.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradloc.convert.records import RecordError, json_lines
from gradloc.tools.files import write_output

LISTS = ("token_ids", "loss_mask", "advantages", "inference_logprobs", "trainer_logprobs", "is_masked")
RATIOS = ("importance_ratio", "log_importance_ratio")


def responses(step: Path) -> Iterator[tuple[str, dict[str, Any], list[float]]]:
    """Each response that has tokens of the loss, after its place; and the weight of each token in the loss's sum."""
    files = sorted(step.glob("rank_*.jsonl"))
    if not files:
        sys.exit(f"{step} has no file rank_*.jsonl")
    for path in files:
        for place, one in json_lines(path):
            count = len(one["token_ids"])
            given = one.get("rl_weights") or [None] * count
            for name, values in {**{name: one[name] for name in LISTS + RATIOS}, "rl_weights": given}.items():
                if len(values) != count:
                    sys.exit(f"{place}: the shape of {name} is ({len(values)},), token_ids' ({count},)")
            if any(weight for name in ("ce_weights", "ref_kl_weights") for weight in one.get(name) or ()):
                sys.exit(f"{place}: it is also trained by another loss (ce or ref_kl): give coefficients yourself")
            pairs = zip(given, one["loss_mask"], strict=True)
            weights = [(1.0 if weight is None else weight) if mask else 0.0 for weight, mask in pairs]
            if any(weights):
                if any(each is None for each in one["is_masked"]):
                    sys.exit(f"{place}: its loss is not prime-rl's default one: give coefficients yourself")
                yield place, one, weights


def main(step: Path, records: Path, adv_tau: float = 1.0, kl_tau: float = 1e-3) -> None:
    """Writes a record for each response; the files of all ranks count, because the loss is a mean over all tokens."""
    tokens = sum(sum(weight != 0 for weight in weights) for _, _, weights in responses(step))
    lines = []
    for place, one, weights in responses(step):
        start = next(index for index, weight in enumerate(weights) if weight)
        if not start:
            sys.exit(f"{place}: it has no prompt")
        # ∂/∂log p of −adv_tau · A · ratio, without the tokens that DPPO masks, and of kl_tau · (log ratio)².
        slopes = [
            None
            if None in (advantage, ratio, log_ratio)
            else 2 * kl_tau * log_ratio - (0.0 if masked else adv_tau * advantage * ratio)
            for advantage, masked, ratio, log_ratio in zip(
                one["advantages"], one["is_masked"], *(one[name] for name in RATIOS), strict=True
            )
        ]
        record = {
            "prompt_ids": one["token_ids"][:start],
            "response_ids": one["token_ids"][start:],
            "response_mask": [int(weight != 0) for weight in weights[start:]],
            "advantages": one["advantages"][start:],
            "log_probs": one["trainer_logprobs"][start:],
            "old_log_probs": one["inference_logprobs"][start:],
            "rollout_log_probs": one["inference_logprobs"][start:],
            "weights": [weight / tokens for weight in weights[start:]],
            "coefficients": [
                None if slope is None else slope * weight / tokens
                for slope, weight in zip(slopes[start:], weights[start:], strict=True)
            ],
            "rank": one["rank"],
            "micro_batch": one["micro_step"],
        }
        lines.append(json.dumps(record) + "\n")
    if not lines:
        sys.exit(f"{step}: there is no response with tokens of the loss")
    write_output(records, "".join(lines))
    number = re.search(r"\d+$", step.name)
    of_step = f" --step {number[0]}" if number is not None else ""
    print(f"{len(lines):,} records. Next: gradloc convert {shlex.quote(str(records))} --out spike{of_step}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", type=Path, help="the folder step_N")
    parser.add_argument("records", type=Path, help="the file to write")
    parser.add_argument("--adv-tau", type=float, default=1.0, help="trainer.loss.adv_tau (1)")
    parser.add_argument("--kl-tau", type=float, default=1e-3, help="trainer.loss.kl_tau (0.001)")
    options = parser.parse_args()
    try:
        main(options.step, options.records, options.adv_tau, options.kl_tau)
    except (RecordError, OSError) as problem:
        sys.exit(str(problem))
    except (AttributeError, LookupError, TypeError, ValueError) as problem:
        sys.exit(f"{options.step} is not a consistent export of prime-rl: {problem!r:.200}")
