#!/usr/bin/env python3
# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the patches in patches/, with their checksums, from the sources and an edited verl checkout.

A target is a release of verl that there is a patch for. Its patch has three parts, applied in this order:
package.patch (new files, the same for every target, from the sources: gradloc/, rewards/ and config/gradloc/),
VERSION/hooks.patch (calls into the package, in verl's own files) and VERSION/fixes.patch (repairs of verl's own
faults). VERSION/PIN and DEFAULT, the version that is meant where nothing says which, are written by hand.

Usage:
  make_patch.sh --sources
      Write package.patch from the sources. This is all that an edit there needs.
  make_patch.sh --init DIR [--target VERSION] [--base SRC]
      Prepare a development checkout in the new directory DIR: a git tree with the base commit tagged
      gradloc-base and the target's patch, as far as there is one, applied as uncommitted edits. SRC is a
      verl clone that has the pinned commit, a wheel or a plain tree, and says which target is meant;
      without it the wheel is downloaded with pip (and kept in build/).
  make_patch.sh --repo DIR [--fixes] [--target VERSION] [--base REV] [--head REV] [--output FILE] [--force]
      Write the difference between REV (default: the tag gradloc-base, else the pinned commit) and DIR's
      working tree (or --head REV), new files included, to package.patch and to the target's hooks.patch
      and fixes.patch. DIR knows which target it was made for. New edits of verl's own files are hooks;
      with --fixes, they are fixes, and the hooks stay. The sources and DIR are brought together first:
      gradloc/ with DIR's verl/utils/gradloc, rewards/ with what is ours in its verl/utils/reward_score,
      config/gradloc/ with its verl/trainer/config/gradloc. A file changed on one side is taken from that
      side, and one changed on both stops the run.
      With --output FILE, only FILE and FILE.sha256 are written, from DIR as it is.
      --force goes on although hooks or fixes have changed since DIR was last brought together with them.
  make_patch.sh --release VERSION [--base-tree TREE] [--output FILE]
      Write the target's patch in one file, for a release page or a URL, to FILE (default:
      build/gradloc-VERSION.patch) and FILE.sha256.
  make_patch.sh --check [--target VERSION] [--base-tree TREE]
      Check that patches/ is what the sources produce: the checksums match; package.patch is the sources to
      the byte; and for each target, the three parts apply to the base without whitespace errors, are to the
      byte what --repo writes, and reverse to the base.

TREE is the unpatched verl of one target; for the others, and without it, build/VERSION/base or the wheel is
used. If no base can be had, --check checks only the checksums and package.patch, and the exit code is 3;
but a target without a wheel, if --target does not name it, is left out with a message.

config/gradloc/ holds .yaml files. The other sources hold Python files, and .html, .css and .js files, which
become one module page_files.py for each folder of verl; edits of its texts in DIR come back to the files. A
README.md in the sources stays where it is and is not part of the patch.

Exit codes: 0 done, 1 the check failed, 2 usage, 3 refused or failed (one sentence says why).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    import apply_patch
    from tools.patching import check, new_checkout, parts, regenerate, sources
    from tools.patching.messages import OutOfDate, Refused
    from tools.patching.project import ROOT, work_tree
    from tools.patching.released_verl import NoWheel, find_base
    from tools.patching.scratch_git import GitFailed, Scratch
except ImportError as error:  # its exit code must not be the verdict of --check
    print(f"make_patch.sh: the project is not complete ({error}); restore it from version control", file=sys.stderr)
    sys.exit(3)


class Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        return f"{(__doc__ or '').strip()}\n"

    def error(self, message: str) -> NoReturn:
        print(f"make_patch.sh: {message} (--help shows the usage)", file=sys.stderr)
        sys.exit(2)


ONE = "give one of --sources, --init, --repo, --release and --check"


BELONGS_TO = {
    "target": ("init", "repo", "check"),
    "base": ("init", "repo"),
    "head": ("repo",),
    "output": ("repo", "release"),
    "base_tree": ("release", "check"),
    "fixes": ("repo",),
    "force": ("repo",),
}


class Once(argparse.Action):
    """Takes one of the actions, and no value that is empty."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if namespace.action is not None:
            parser.error(ONE)
        namespace.action = self.dest
        setattr(namespace, self.dest, True if values == [] else values)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    def given(value: str) -> str:
        if not value:
            raise argparse.ArgumentTypeError("the value is empty")
        return value

    def path(value: str) -> Path:
        return Path(given(value))

    parser = Parser(allow_abbrev=False)
    parser.set_defaults(action=None)
    parser.add_argument("--sources", nargs=0, action=Once)
    parser.add_argument("--init", type=path, action=Once)
    parser.add_argument("--repo", type=path, action=Once)
    parser.add_argument("--release", type=given, action=Once)
    parser.add_argument("--check", nargs=0, action=Once)
    parser.add_argument("--target", type=given)
    parser.add_argument("--base", type=given)
    parser.add_argument("--head", type=given)
    parser.add_argument("--output", type=path)
    parser.add_argument("--base-tree", type=path)
    parser.add_argument("--fixes", action="store_true")
    parser.add_argument("--force", action="store_true")
    args = parser.parse_args(arguments)
    if args.action is None:
        parser.error(ONE)
    for option, actions in BELONGS_TO.items():
        if getattr(args, option) and args.action not in actions:
            names = " and ".join(f"--{action}" for action in actions)
            parser.error(f"--{option.replace('_', '-')} belongs to {names}")
    if args.fixes and args.output:
        parser.error("--fixes is for patches/, not for --output")
    return args


@contextlib.contextmanager
def scratch_repository() -> Iterator[Scratch]:
    place = os.environ.get("TMPDIR") or "/tmp"
    try:
        folder = Path(tempfile.mkdtemp(dir=Path(place).resolve(strict=True)))
    except OSError:
        raise Refused(
            f"no temporary folder can be made in {place}; set TMPDIR to a folder that can be written"
        ) from None
    try:
        yield Scratch(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def act(args: argparse.Namespace, scratch: Scratch) -> None:
    targets = apply_patch.read_targets()
    named = apply_patch.narrowed(targets, args.release or args.target)
    if args.action == "sources":
        regenerate.from_sources(targets, scratch)
    elif args.action == "release":
        write_release(named[0], args.base_tree, args.output, scratch)
    elif args.action == "init":
        new_checkout.init(args.init, Path(args.base) if args.base else None, named, scratch.folder)
    elif args.action == "check":
        try:
            check.check(args.base_tree, named, scratch, named=args.target is not None)
        except OutOfDate:
            if not scratch.room_left():
                raise Refused(f"the disk of {scratch.folder} is full; set TMPDIR to another") from None
            raise
    else:
        checkout = regenerate.find_checkout(args.repo, args.base, args.head, targets, args.target)
        regenerate.refuse_changes_outside(checkout)
        if args.output:
            regenerate.write_elsewhere(checkout, args.output, scratch)
        else:
            regenerate.regenerate(checkout, targets, args.fixes, args.force, scratch)


def write_release(target: apply_patch.Target, tree: Path | None, output: Path | None, scratch: Scratch) -> None:
    try:
        base = work_tree(scratch, tree or find_base(target, scratch.folder), "verl", {})
    except NoWheel as error:
        raise Refused(f"{error}; give a tree with --base-tree") from None
    if output is None:
        output = ROOT / "build" / f"gradloc-{target.version}.patch"
        output.parent.mkdir(exist_ok=True)
    parts.write(output, parts.release(target, base, scratch))


def main(arguments: list[str] | None = None) -> int:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # with its descriptor closed (>&-), there is none
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        args = parse_arguments(arguments)
        if not shutil.which("git"):
            raise Refused("git is not on PATH; install it")
        with scratch_repository() as scratch:
            act(args, scratch)
    except OutOfDate as verdict:
        print(f"make_patch.sh: {verdict}", file=sys.stderr)
        return 1
    except (Refused, GitFailed, apply_patch.Stop, sources.Misplaced) as refusal:
        print(f"make_patch.sh: {refusal}", file=sys.stderr)
        return 3
    except OSError as error:
        print(f"make_patch.sh: failed ({apply_patch.one_line(error)})", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    except Exception:  # a failure of the tool must not look like the verdict of --check
        traceback.print_exc()
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
