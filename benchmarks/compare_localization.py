# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the searches of two runs of `localization.py --json FILE` event by event, as those of two verl releases.

With the same options, both runs have the same events. For each kind of event the table gives in how many events both
searches took the same passes, named the same tokens, and said the same of the event; the passes of both; and the
largest relative difference between norms of the same token or micro-batch. Every event that differs is listed. Exit
code: 0 if passes, tokens and diagnoses are the same in all events, 1 if not, 2 if the runs do not have the same events.

Usage: python benchmarks/compare_localization.py FIRST SECOND
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from localization import table

# What makes an event the same in both runs.
EVENT = ("part", "kind", "x", "loud", "seed", "W", "M", "N", "until", "planted")
SAYINGS = ("complete", "explained", "diagnosis")


def searches(file: Path) -> list[dict[str, Any]]:
    records = map(json.loads, file.read_text().splitlines())
    return [record for record in records if record["part"] in ("natural", "events")]


def norms(result: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The norm of each named token and each loud micro-batch."""
    return {tuple(place): norm for *place, norm in result["tokens"] + result["units"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    args = parser.parse_args()
    first, second = searches(args.first), searches(args.second)
    events = [[record.get(name) for name in EVENT] for record in first]
    if not events or events != [[record.get(name) for name in EVENT] for record in second]:
        print("The runs do not have the same events: give both the same options.", file=sys.stderr)
        sys.exit(2)
    rows: dict[tuple[Any, ...], list[Any]] = {}
    differing = []
    for one, other in zip(first, second, strict=True):
        ours, theirs = one["gradloc"], other["gradloc"]
        places = [{tuple(place) for *place, _ in result["tokens"]} for result in (ours, theirs)]
        same = [ours["passes"] == theirs["passes"], places[0] == places[1]]
        same.append(all(ours[name] == theirs[name] for name in SAYINGS))
        one_norms, other_norms = norms(ours), norms(theirs)
        gaps = [abs(other_norms[place] / one_norms[place] - 1) for place in one_norms.keys() & other_norms.keys()]
        row = rows.setdefault((one["kind"], one["until"], one["W"]), [0, 0, 0, 0, 0, 0, 0.0])
        for index, value in enumerate([1, *same, ours["passes"], theirs["passes"]]):
            row[index] += value
        row[-1] = max([row[-1], *gaps])
        if not all(same):
            passes = f"{ours['passes']} and {theirs['passes']}"
            named = f"{len(places[0])} and {len(places[1])}"
            where = ", ".join(f"{name} {one[name]}" for name in EVENT if one.get(name) is not None)
            differing.append(f"{where}: {passes} passes, {named} tokens, {len(places[0] & places[1])} of them the same")
    releases = [" and ".join(sorted({record["verl"] for record in run})) for run in (first, second)]
    print(f"The first run is of verl {releases[0]}, the second of verl {releases[1]}.\n")
    heads = ["events", "until", "W", "number", "same passes", "same tokens", "same diagnosis"]
    heads += ["passes: first", "second", "norms"]
    table(heads, [[*map(str, (*key, *row[:-1])), f"{row[-1]:.1e}"] for key, row in rows.items()])
    print("\n".join(differing) or "All events have the same passes, tokens and diagnoses.")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
