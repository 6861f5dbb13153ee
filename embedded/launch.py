# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""`run_experiment.sh --embedded`: reads the command line, sets everything up, and hands over to run.py.

It runs before anything is installed, so it needs Python 3.10 and its standard library only.
"""

import argparse
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from processes import exit_on_signals  # type: ignore[import-not-found]  # this file's folder is on the path
from set_up import is_patched, locked, refuse, requirements_of, set_up_venv  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = ROOT / "embedded"
CONFIG = EMBEDDED / "config"
FAULTS = {
    file.stem: re.search(r"^  fault: (.*)$", file.read_text(), re.M)[1]  # type: ignore[index]
    for file in sorted(CONFIG.glob("fault/*.yaml"))
}
DEFAULT_FAULT = "failed_request"
# Of the faults that are in a rollout: in which one.
ROLLOUT_OF = {
    name: place[1]
    for name in FAULTS
    if (place := re.search(r"^  rollout_of_fault: (.*)$", (CONFIG / f"fault/{name}.yaml").read_text(), re.M))
}
SETTINGS = re.findall(r"^([A-Z][A-Z_]+):", (CONFIG / "embedded.yaml").read_text(), re.M)
DIRECTORIES = ("OUTPUT_DIR", "BISECT_DUMP_DIR")
# vLLM's rollout: with which verl, and the gigabytes of memory that it takes, also with --tiny.
VLLM_TARGET, VLLM_GIGABYTES, VLLM_TINY_GIGABYTES = "0.9.1", 19, 10
PLUGIN = ("actor@actor_rollout_ref.actor=gradloc_dp_actor", "critic=gradloc_dp_critic")
SWITCHES = {
    "tiny": "a random model of two layers: seconds per step, and no spike by failed_request",
    "remedy": "turn on truncated importance sampling, the sequence mask, TokenClip and LayerClip",
    "drill": "plant a spike beside training in step 2, and find it (default with --fault none)",
    "plugin": "verl 0.9.1 is not patched and has GradLoc as a plugin",
    "dry-run": "print the command and stop",
}
HELP = """\
Trains SmolLM2-135M on a CPU, for a few minutes, and installs what that needs under .embedded/.

  bash run_experiment.sh --embedded                      # a spike: the fault failed_request, planted on purpose
  bash run_experiment.sh --embedded --fault unsampled    # another fault: docs/lab/faults.md
  bash run_experiment.sh --embedded --drill              # no fault, but a drill

NAME=value, as an argument or in the environment, sets one of {settings}.
What else has a = or starts with ~ is a Hydra override; the settings are in embedded/config/.

faults:
{faults}"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FIND_VERL = """
import importlib.util as util
spec = util.find_spec("verl")
print(spec.submodule_search_locations[0] if spec else "")
"""
_PRINT_MISSING = """
import sys
from importlib.metadata import distributions
there = {each.name.lower().replace("_", "-") for each in distributions()}
print(*(name for name in sys.argv[1:] if name.lower() not in there))
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line. What is neither an option nor an override ends the program."""
    parser = argparse.ArgumentParser(
        prog="run_experiment.sh --embedded",
        usage="bash run_experiment.sh --embedded [options] [NAME=value ...] [Hydra overrides ...]",
        description=HELP.format(
            settings=", ".join(SETTINGS), faults="\n".join(f"  {name}: {fault}" for name, fault in FAULTS.items())
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    targets = sorted(
        pin.parent.name for pin in ROOT.glob("patches/*/PIN") if (CONFIG / f"verl/{pin.parent.name}.yaml").is_file()
    )
    parser.add_argument("--embedded", action="store_true", help=argparse.SUPPRESS)
    for name, what in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=what)
    parser.add_argument(
        "--fault",
        choices=(*FAULTS, "none"),
        metavar="NAME",
        help=f"the fault that is planted on purpose (see above), or none (default: {DEFAULT_FAULT}; none with --drill)",
    )
    parser.add_argument(
        "--rollout",
        choices=("hf", "vllm"),
        default="hf",
        help=f"what generates: transformers, or vLLM by verl's own rollout ({VLLM_GIGABYTES} GB of memory)",
    )
    parser.add_argument("--target", choices=targets, metavar="VERSION", help=f"the verl: {', '.join(targets)}")
    parser.add_argument("--python", help="a Python that has verl and all that is needed, instead of one made here")
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    asked = parser.parse_intermixed_args(arguments)
    if asked.fault is None and not asked.drill:
        asked.fault, asked.drill = (DEFAULT_FAULT, False) if asked.rollout == "hf" else (None, True)
    elif asked.fault == "none":
        asked.fault, asked.drill = None, True
    if (rollout := ROLLOUT_OF.get(asked.fault, asked.rollout)) != asked.rollout:
        parser.error(f"the fault {asked.fault} is one of the rollout {rollout}: give --rollout {rollout}")
    for word in asked.overrides:
        if "=" not in word and not word.startswith("~"):
            parser.error(f"'{word}' is neither an option nor a Hydra override: write overrides as key=value")
    return asked


def overrides_of(asked: argparse.Namespace, target: str, environment: Mapping[str, str]) -> list[str]:
    """The Hydra overrides of a run, in the order in which they win."""
    own = [f"{name}={value}" for name in SETTINGS if (value := environment.get(name))]
    given = [_as_hydra_takes_it(word) for word in (*own, *asked.overrides)]
    if not any(word.startswith("OUTPUT_DIR=") for word in given):
        given.insert(0, _as_hydra_takes_it(f"OUTPUT_DIR=outputs/embedded-{time.strftime('%Y%m%d-%H%M%S')}"))
    workers = workers_of(given)
    for name in DIRECTORIES:
        for value in [word.partition("=")[2] for word in (*own, *asked.overrides) if word.startswith(f"{name}=")][-1:]:
            check_directory(name, Path(os.path.realpath(value)))
    return [
        f"verl={target}",
        *(PLUGIN if asked.plugin else ()),
        *([f"rollout_engine={asked.rollout}"] if asked.rollout != "hf" else []),
        *(["size=tiny"] if asked.tiny else []),
        *(["remedy=all"] if asked.remedy else []),
        *([f"fault={quoted(asked.fault)}"] if asked.fault else []),  # nan would be a number
        *(["SPIKE_DRILL_STEP=2"] if asked.drill else []),
        f"embedded.root={quoted(str(ROOT))}",
        f"embedded.prepared={quoted(str(state_of(asked, target) / ('tiny' if asked.tiny else 'smollm2')))}",
        # Unix sockets lie in Ray's directory, and their names may have no more than 107 characters: keep it short.
        f"+ray_kwargs.ray_init._temp_dir={free_path(f'/tmp/gradloc-{os.getpid()}')}",
        # The numbers tell Ray how much may run at once; nothing is reserved.
        f"ray_kwargs.ray_init.num_cpus={3 * workers + 6}",
        f"+ray_kwargs.ray_init.num_gpus={workers}",
        f"+ray_kwargs.ray_init.resources.cpu={workers}",
        *given,
    ]


def free_path(first: str) -> str:
    """The path, or with a number where a killed run has left one: process ids come again."""
    paths = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return next(path for path in paths if not os.path.lexists(path))


def quoted(text: str) -> str:
    """The text as a quoted value of Hydra."""
    return "'" + text.replace("'", "\\'") + "'"


def _as_hydra_takes_it(word: str) -> str:
    """NAME=value with a list in brackets and a directory as an absolute path; any other override as it is."""
    name, _, value = word.partition("=")
    if name in DIRECTORIES:
        return f"{name}={quoted(os.path.realpath(value))}"
    return f"{name}=[{value}]" if name in SETTINGS and "," in value and value[0] not in "['\"" else word


def workers_of(overrides: Sequence[str]) -> int:
    given = [word.partition("=")[2] for word in overrides if word.startswith("GPUS_PER_NODE=")]
    workers = given[-1] if given else "2"
    if not re.fullmatch("[1-9][0-9]?", workers):
        refuse(f"GPUS_PER_NODE is the number of workers on this CPU: give one from 1 to 99, not {workers}")
    return int(workers)


def check_directory(name: str, path: Path) -> None:
    """Refuses a directory that cannot be made or written to."""
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not (there.is_dir() and os.access(there, os.W_OK)):
        refuse(f"{name} cannot be {path}: {there} is {'not writable' if there.is_dir() else 'no directory'}")


def state_of(asked: argparse.Namespace, target: str) -> Path:
    """What the set-up writes for this verl."""
    return ROOT / ".embedded" / (target + "-vllm" * (asked.rollout == "vllm") + "-plugin" * asked.plugin)


def added_environment(
    environment: Mapping[str, str], workers: int = 2, fault: str | None = None, rollout: str = "hf"
) -> dict[str, str]:
    """The variables that a run gets on top of the given environment."""

    def before(first: str, separator: str, name: str) -> str:
        return separator.join(filter(None, [first, environment.get(name)]))

    modules, own = ["embedded"], dict[str, str]()
    if rollout == "vllm":
        modules.append("embedded.vllm_on_cpu")
        # Gigabytes for a cache, and threads that leave other cores alone.
        own |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if fault is not None:
        modules.append("embedded.faults")
        own["EMBEDDED_FAULT"] = fault
    return own | {
        "VERL_USE_EXTERNAL_MODULES": before(",".join(modules), ",", "VERL_USE_EXTERNAL_MODULES"),
        "PYTHONPATH": before(str(ROOT), ":", "PYTHONPATH"),
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // workers)),
        # Freed tensors go back to the system, which saves a third of the memory; huge pages make that cheap.
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_MMAP_THRESHOLD_": "4000000",
        "MALLOC_TRIM_THRESHOLD_": "64000000",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        # Answers that are late on a busy machine are not wrong.
        "VERL_MATH_VERIFY_TIMEOUT": environment.get("VERL_MATH_VERIFY_TIMEOUT") or "100",
        # How long Ray waits for its own start: 30 s are not enough on a busy machine.
        "RAY_raylet_start_wait_time_s": environment.get("RAY_raylet_start_wait_time_s") or "300",
        "RAY_worker_niceness": environment.get("RAY_worker_niceness") or "0",  # Ray's own, 15, waits for all others
        "RAY_DEDUP_LOGS": "0",  # Ray would drop the log lines of fast steps as duplicates
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(["-1"] * workers),  # as many as Ray is told of, and none that CUDA would find
    }


def check_machine(tiny: bool, cpus: str, memory: str) -> None:
    """Refuses a machine that vLLM cannot run on, by what Linux says in /proc/cpuinfo and /proc/meminfo."""
    if not re.search(r"^flags\b.*\bavx2\b", cpus, re.M):
        refuse("--rollout vllm needs a CPU with AVX2, which this one lacks: leave --rollout out")
    needed = VLLM_TINY_GIGABYTES if tiny else VLLM_GIGABYTES
    free = int(re.search(r"^MemAvailable: *(\d+)", memory, re.M)[1]) / 1024**2  # type: ignore[index]
    if free < needed:
        refuse(f"--rollout vllm needs {needed} GB of memory, and {free:.1f} GB are free: leave --rollout out")


def find_verl(python: str) -> Path:
    """The verl that this Python would import; refuses one without a verl."""
    if shutil.which(python) is None:
        refuse(f"there is no Python at {python}: give another with --python")
    done = subprocess.run([python, "-c", _FIND_VERL], stdout=subprocess.PIPE, text=True)
    if done.returncode or not done.stdout.strip():
        refuse(f"{python} has no verl: install it there, or leave --python out")
    return Path(done.stdout.rstrip("\n"))


def check_python(python: str, verl: Path, target: str, plugin: bool, rollout: str) -> None:
    """Refuses a Python of the user's whose verl is not patched (with the plugin: is), or that lacks packages."""
    patched = is_patched(verl)
    if plugin and patched:
        refuse(f"the verl in {verl} is patched: give --plugin one that is not")
    if not plugin and not patched:
        refuse(f"the verl in {verl} is not patched: run {python} {ROOT}/apply_patch.py --installed")
    pins, *no_deps = requirements_of(target, ROOT, rollout)
    of_verl = requirements_of(target, ROOT)[0]
    files = (EMBEDDED / "requirements.in", *(each.with_suffix(".in") for each in {of_verl, pins}), *no_deps)
    lines = [line for file in files for line in file.read_text().splitlines()]
    # A checkout of verl need not be installed.
    needed = [name[0] for line in lines if (name := _NAME.match(line)) and name[0] != "verl"]
    missing = subprocess.run([python, "-c", _PRINT_MISSING, *needed], stdout=subprocess.PIPE, text=True, check=True)
    if names := missing.stdout.split():
        refuse(
            f"{python} lacks packages that --embedded needs: {', '.join(names)}. Install them there (versions that "
            f"work: {pins}, and with --no-deps {', '.join(map(str, no_deps))}), or leave --python out"
        )


def main(arguments: Sequence[str]) -> int:
    exit_on_signals()
    asked = parse(arguments)
    default = VLLM_TARGET if asked.rollout == "vllm" else (ROOT / "patches/DEFAULT").read_text().strip()
    target = asked.target or default
    python = str(state_of(asked, target) / "venv/bin/python")
    if asked.python is not None:
        verl, python = find_verl(asked.python), asked.python
        target = (verl / "version/version").read_text().strip()
        if asked.target not in (None, target):
            refuse(f"--target is {asked.target}, and the verl in {verl} is {target}: leave --target out")
        if not (CONFIG / f"verl/{target}.yaml").is_file():
            refuse(f"--embedded has no settings for verl {target}, in {verl}: see --target in --help")
    if asked.plugin and target != "0.9.1":
        refuse(f"--plugin needs verl 0.9.1 and this is for {target}: give --target 0.9.1, or leave --plugin out")
    if asked.rollout == "vllm" and target != VLLM_TARGET:
        refuse(f"--rollout vllm needs verl {VLLM_TARGET} and this is for {target}: leave --rollout out")
    overrides = overrides_of(asked, target, os.environ)
    added = added_environment(os.environ, workers_of(overrides), asked.fault, asked.rollout)
    command = [python, "-m", "verl.trainer.main_ppo", "--config-dir", str(CONFIG), "--config-name", "embedded"]
    if asked.dry_run:
        start = shlex.join(["env", *(f"{name}={value}" for name, value in added.items()), *command])
        print(" \\\n    ".join([start, *map(shlex.quote, overrides)]), flush=True)
        return 0
    if asked.rollout == "vllm":
        check_machine(asked.tiny, Path("/proc/cpuinfo").read_text(), Path("/proc/meminfo").read_text())
    environment = {name: value for name, value in (os.environ | added).items() if name != "RAY_ADDRESS"}
    if asked.python is not None:
        check_python(python, verl, target, asked.plugin, asked.rollout)
    else:
        os.environ.pop("PYTHONPATH", None)  # only what is installed here counts
        state = state_of(asked, target)
        state.mkdir(parents=True, exist_ok=True)
        with locked(state / "lock"):
            set_up_venv(state / "venv", target, ROOT, plugin=asked.plugin, rollout=asked.rollout)
    os.execve(shutil.which(python) or python, [python, str(EMBEDDED / "run.py"), *command, *overrides], environment)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # the command has said itself what is wrong
