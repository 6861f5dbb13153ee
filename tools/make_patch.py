#!/usr/bin/env python3
# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the patches in patches/, with their checksums, from an edited verl checkout.

A target is a release of verl that there is a patch for. Its patch has three parts: the new files in patches/files (the
same for every target), VERSION/hooks.patch (calls of the package gradloc, in verl's own files) and VERSION/fixes.patch
(repairs of verl's own faults). The new files, VERSION/PIN and DEFAULT, the version that is meant where nothing says
which, are written by hand.

Usage:
  make_patch.sh --init DIR --target VERSION [--base-tree TREE]
      Prepare a development checkout in the new directory DIR: a git tree with the base tagged gradloc-base, and
      hooks and fixes, as far as there are any, as uncommitted edits. New files are links to patches/files.
  make_patch.sh --repo DIR [--fixes] [--base-tree TREE]
      Write what differs between the base and DIR, made by --init, to its target's hooks.patch and fixes.patch. New
      edits are hooks; with --fixes, they are fixes, and the hooks stay.
  make_patch.sh --release VERSION [--base-tree TREE]
      Write the target's patch with the package in it to dist/verl-VERSION-gradloc.patch: one `git apply` of that file
      on a checkout of verl gives what apply_patch.py --vendor does.
  make_patch.sh --check [--target VERSION] [--base-tree TREE]
      Check that the checksums match, and that for each target, hooks and fixes apply to the base without whitespace
      errors, are to the byte what --repo writes, and reverse to the base.

TREE is the unpatched verl of one target, the base; without it, that is build/VERSION/base, which tests/run.sh makes.
--check with TREE needs VERSION.

Exit codes: 0 done, 1 the check failed, 2 usage, 3 refused or failed (one sentence says why).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    import apply_patch
    from tools.patching import checkout, parts
    from tools.patching.scratch_git import Scratch
except ImportError as error:  # its exit code must not be the verdict of --check
    print(f"make_patch.sh: the project is not complete ({error}); restore it from version control", file=sys.stderr)
    sys.exit(3)

ACTIONS = ("init", "repo", "release", "check")
BELONGS_TO = {
    "target": ("init", "check"),
    "base_tree": ("init", "repo", "release", "check"),
    "fixes": ("repo",),
}


class Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        return f"{(__doc__ or '').strip()}\n"

    def error(self, message: str) -> NoReturn:
        print(f"make_patch.sh: {message} (--help shows the usage)", file=sys.stderr)
        sys.exit(2)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(allow_abbrev=False)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--init", type=Path)
    action.add_argument("--repo", type=Path)
    action.add_argument("--release")
    action.add_argument("--check", action="store_true")
    parser.add_argument("--target")
    parser.add_argument("--base-tree", type=Path)
    parser.add_argument("--fixes", action="store_true")
    args = parser.parse_args(arguments)
    if "" in (sys.argv[1:] if arguments is None else arguments):
        parser.error("a value is empty")
    args.action = next(name for name in ACTIONS if getattr(args, name))
    for option, actions in BELONGS_TO.items():
        if getattr(args, option) and args.action not in actions:
            names = " and ".join(f"--{action}" for action in actions)
            parser.error(f"--{option.replace('_', '-')} belongs to {names}")
    return args


def act(args: argparse.Namespace, scratch: Scratch) -> None:
    targets = apply_patch.narrowed(apply_patch.read_targets(), args.release or args.target)
    if args.action == "init":
        checkout.init(args.init, parts.one(targets), args.base_tree)
    elif args.action == "repo":
        checkout.regenerate(args.repo, targets, args.base_tree, args.fixes, scratch)
    elif args.action == "release":
        parts.write_release(targets[0], args.base_tree, scratch)
    else:
        parts.check(targets, args.base_tree, scratch)


def main(arguments: list[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # with its descriptor closed (>&-), there is none
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    args = parse_arguments(arguments)
    place = os.environ.get("TMPDIR") or "/tmp"
    try:
        with tempfile.TemporaryDirectory(dir=Path(place).resolve(strict=True), ignore_cleanup_errors=True) as folder:
            act(args, Scratch(Path(folder)))
    except apply_patch.Stop as stop:
        print(f"make_patch.sh: {stop}", file=sys.stderr)
        return stop.code
    except OSError as error:
        print(f"make_patch.sh: failed ({apply_patch.one_line(error)}); TMPDIR is {place}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    except Exception:  # a failure of the tool must not look like the verdict of --check
        traceback.print_exc()
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
