# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Tells in a few minutes whether GradLoc works with a model on this machine, and what it costs here.

    gradloc selftest --model MODEL                                # on one GPU, or on a CPU
    torchrun --nproc-per-node 8 --no-python gradloc selftest --model MODEL

It trains nothing and needs no data: the model, sharded by FSDP2, gets random tokens in a plain loop without verl. In
one copy of a step a token's advantage is multiplied, and the search must name that token and leave the gradient as it
was. The same steps with and without detection take turns. MODEL is a folder or a name on the hub, with weights.

exit codes: 0  it works here
            1  a token was not found, or the gradient is not what it should be
            2  wrong usage, the model cannot be loaded, or FILE cannot be written
            3  nothing could be measured: not enough memory, or gradients that are not finite
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from ..replay.model import ATTENTIONS, FLASH, CannotReplayError, find_model, first_line
from ..replay.search_command import process_group
from ..tools.command_line import AT_LEAST_ONE, NOT_NEGATIVE, in_a_sentence, output_file
from ..tools.command_line import parser as new_parser
from ..tools.files import write_output
from .measuring import EXCHANGED, Loop, SelfTest, Sizes, UnusableError, build_model

# Rounding in half precision changes less than this part of the gradient's norm.
_DIFFERENCE = 0.05


def sentence(result: Mapping[str, Any]) -> str:
    """What was found, in a sentence or two."""
    failed = failures(result)
    if failed:
        return f"GradLoc does NOT work here: {'; '.join(failed)}."
    search, peak = result["search"], result["peak"]
    parts = [
        f"detection {result['detection']:+.1%} (median of {result['steps']} pairs of steps)",
        f"a search of {search['passes']} passes takes {search['seconds'] / result['step_seconds']:.1f} steps",
    ]
    if result["exchange_seconds"] is not None:
        parts.append(f"the ranks exchange {EXCHANGED >> 20} MiB of objects in {result['exchange_seconds']:.2g} s")
    if peak["off"] is not None:
        peaks = {"detection": peak["detection"], **{name: result[name]["peak"] for name in ("search", "drop", "drill")}}
        figures = ", ".join(f"{name} {max(0, most - peak['off']) / 2**30:.1f}" for name, most in peaks.items())
        parts.append(f"GiB more than training at the peak: {figures}")
    return f"GradLoc works here: {'; '.join(parts)}."


def failures(result: Mapping[str, Any]) -> list[str]:
    """What does not work; empty if everything does."""
    found = []
    for name in ("search", "drop", "drill"):
        if not result[name]["found"]:
            found.append(
                f"{name}: the planted token was not found ({result[name]['error'] or 'another one was named'})"
            )
    if not result["search"]["same_gradient"]:
        found.append("the search has changed the gradient")
    if result["drop"]["found"] and not result["drop"]["difference"] < _DIFFERENCE:
        far = f"{result['drop']['difference']:.1%}"
        found.append(f"what spike_action=drop leaves differs by {far} from the gradient without the token")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = new_parser("selftest", str(__doc__))
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--random-weights", action="store_true", help="read the model's configuration alone")
    parser.add_argument("--attention", choices=ATTENTIONS, help=f"default: {FLASH} where it is installed")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run")
    for name, default in asdict(Sizes()).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=AT_LEAST_ONE, default=default, help="default: %(default)s")
    how_long = "how long to measure detection (default: %(default)g)"
    parser.add_argument("--seconds", type=NOT_NEGATIVE, default=120.0, help=how_long)
    parser.add_argument("--output", type=output_file, metavar="FILE", help="write all figures as JSON")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        try:
            path = find_model(options.model)
            device = stack.enter_context(process_group(alone=True))
        except CannotReplayError as error:
            print(f"selftest: {error}", file=sys.stderr)
            return 2
        attention = options.attention or (FLASH if device.type == "cuda" and find_spec("flash_attn") else "sdpa")
        try:
            model = build_model(path, options.random_weights, attention, device, options.trust_remote_code)
        except Exception as error:
            print(f"selftest: {options.model} cannot be loaded: {first_line(error):.300}", file=sys.stderr)
            return 2
        try:
            sizes = Sizes(**{name: getattr(options, name) for name in asdict(Sizes())})
            loop = Loop(model, sizes, model.config.vocab_size, device)
            result = {
                "model": options.model,
                "ranks": dist.get_world_size(),
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "torch": torch.__version__,
                "attention": attention,
                "sizes": asdict(sizes),
                **SelfTest(loop, options.seconds).run(),
            }
        except (UnusableError, torch.OutOfMemoryError) as error:
            memory = "" if isinstance(error, UnusableError) else "Out of memory; smaller --rows or --response may fit. "
            print(f"selftest: {memory}{error}", file=sys.stderr)
            return 3
    if int(os.environ.get("RANK", 0)) == 0:
        print(sentence(result))
        if options.output is not None:
            try:
                write_output(options.output, json.dumps(result, indent=2) + "\n")
            except OSError as error:
                print(f"selftest: {in_a_sentence(error, options.output)}", file=sys.stderr)
                return 2
    return 1 if failures(result) else 0
