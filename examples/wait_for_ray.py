# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Waits until a number of nodes have joined a Ray cluster. Run it on one of them."""

import argparse
import logging
import sys
import time

import ray


def alive(address: str) -> int:
    """The number of nodes in the cluster at this address; 0 while there is none."""
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError):  # Ray is still starting
            return 0
    return sum(node["Alive"] for node in ray.nodes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT", help="where Ray's head node listens")
    parser.add_argument("nodes", type=int, help="how many nodes the cluster should have")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to wait (default: %(default)s)")
    asked = parser.parse_args()
    deadline = time.monotonic() + asked.seconds
    while (joined := alive(asked.address)) < asked.nodes:
        if time.monotonic() > deadline:
            sys.exit(
                f"wait_for_ray.py: after {asked.seconds:g} s, {joined} of {asked.nodes} nodes have joined "
                f"{asked.address}: can all nodes reach this address?"
            )
        time.sleep(1)
    print(f"wait_for_ray.py: {joined} nodes have joined {asked.address}", flush=True)


if __name__ == "__main__":
    main()
