"""Checks and measures GradLoc on one GPU, without a network.

    bash tests/run.sh --gpu                     every part, on a GPU 25 minutes at most
    bash tests/run.sh --gpu --part costs        one part, on a GPU 10 minutes at most
    bash tests/run.sh --gpu --ranks 8           the cases with up to 8 ranks instead, a GPU for each, faults first

It takes the first python3 or python in PATH whose torch has a GPU, and what that lacks from a folder of wheels, which
`python tools/wheels.py build/wheels` downloads on a machine with a network. Its packages stay as they are: the wheels
go into a folder of build/gpu/, where verl is then patched. Ray has a stand-in if it is not installed. Parts:

    search      planted tokens against brute force; bit identity with unpatched verl; NaN, drop, skip, drill
    precision   the same in bf16, in fp16 with its gradient scaler and, where it is installed, with flash attention
    layer_clip  LayerClip's norms and factors, and its checkpoints
    replay      a spike's bundle replayed on the GPU
    costs       time and memory of an update without, with and during a search, on a Qwen2.5 of random weights
    ranks       the same of a plain loop as rank 0 of 8, on a 7B and on a mixture; a search without memory, an offload

The results are printed and written to build/gpu/results.json, what a part prints to build/gpu/PART.log. `--device cpu
--quick` runs the same code on a CPU, with few cases and a tiny model.

exit codes: 0  every part passed; or there is no GPU, and nothing was run
            1  a part failed or ran out of time
            2  wrong usage, or what is needed is missing
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = ("search", "precision", "layer_clip", "replay", "costs", "ranks")
# They print figures; the other parts are tests.
MEASUREMENTS = ("costs", "ranks")
# With --ranks: of tests/multirank, those that call most collective operations come first.
RANKS = "-on-ranks"
MULTIRANK = ("faults", "actor", "actions", "drill", "layer_clip", "token_clip", "replay_ranks", "critic")
# A GPU may be lent for so long. On a CPU, nothing is limited: how long a part takes depends on what else runs there.
PART_SECONDS, ALL_SECONDS = 570.0, 1470.0
FACTS = """
import json, platform, torch
gpu = torch.cuda.is_available()
print(json.dumps({
    "gpu": torch.cuda.get_device_name(0) if gpu else None,
    "memory_bytes": torch.cuda.get_device_properties(0).total_memory if gpu else None,
    "python": platform.python_version(),
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
}))
"""
PACKAGES = """
import importlib.metadata, importlib.util, json
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
names = ("verl", "transformers", "tensordict", "flash_attn", "ray")
print(json.dumps({name: version(name) if importlib.util.find_spec(name) else None for name in names}))
"""
HAS_RAY = "import importlib.util, json; print(json.dumps(bool(importlib.util.find_spec('ray'))))"
# Most of what the parts import, so that a package that is missing is told before anything runs.
IMPORTS = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests/multirank")!r}, {str(ROOT / "tests/support")!r}]
import test_actor
import test_replay_ranks
"""


class Problem(Exception):
    """Nothing can be run; the message says why."""


def say(text: str) -> None:
    print(f"gpu: {text}", flush=True)


def ask(python: str, code: str, **environment: str) -> Any:
    """What a program prints as JSON; None if it fails."""
    done = subprocess.run([python, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def find_python(named: str | None, device: str) -> tuple[str, dict[str, Any]] | None:
    """The interpreter and what it says of torch and the GPU; None if none has torch and such a device."""
    for name in [named] if named else ["python3", "python"]:
        path = shutil.which(name)
        facts = ask(path, FACTS) if path is not None else None
        if path is not None and facts is not None and (device == "cpu" or facts["gpu"] is not None):
            return path, facts
    return None


def install(python: str, wheels: Path, target: str, place: Path) -> None:
    """The wheels in place/site, with verl patched, and verl as released in place/base."""
    verl = wheels / f"verl-{target}-py3-none-any.whl"
    if not verl.is_file():
        raise Problem(f"{verl} is missing; this downloads it: python tools/wheels.py {wheels} --target {target}")
    pin = (ROOT / f"patches/{target}/PIN").read_text().splitlines()
    if f"WHEEL_SHA256={hashlib.sha256(verl.read_bytes()).hexdigest()}" not in pin:
        raise Problem(f"{verl} is not the verl that the patch is for")
    files = [verl, *(file for file in sorted(wheels.glob("*.whl")) if not file.name.startswith("verl-"))]
    parts = ("package.patch", f"{target}/hooks.patch", f"{target}/fixes.patch")
    wanted = hashlib.sha256(b"".join((ROOT / "patches" / part).read_bytes() for part in parts))
    wanted.update("\n".join([python, *(file.name for file in files)]).encode())
    ready = place / "ready"
    if ready.is_file() and ready.read_text() == wanted.hexdigest():
        return
    say(f"installing {len(files)} wheels into {place / 'site'}")
    shutil.rmtree(place, ignore_errors=True)
    (place / "base").mkdir(parents=True)
    with zipfile.ZipFile(verl) as archive:
        archive.extractall(place / "base")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    for command in (
        [*pip, "--target", str(place / "site"), *map(str, files)],
        [python, str(ROOT / "apply_patch.py"), "--target", target, "--repo", str(place / "site")],
    ):
        if subprocess.run(command).returncode != 0:
            raise Problem(f"this failed: {' '.join(command[:4])} …")
    ready.write_text(wanted.hexdigest())


def environment(python: str, place: Path, options: argparse.Namespace) -> dict[str, str]:
    """What the parts run with, after checking that they find what they import."""
    paths = [str(place / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {
        "PYTHONPATH": os.pathsep.join(paths),
        "GRADLOC_BASE_TREE": str(place / "base"),
        "GRADLOC_TEST_DEVICE": options.device,
        "GRADLOC_GPU_QUICK": "1" if options.quick else "",
        "GRADLOC_GPU_RANKS": str(options.ranks or "") if options.device == "cuda" else "",
        # One process talks to itself, and a machine without a network may have no other interface.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    if not options.ranks:
        found["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    if options.device == "cpu" and not options.target.startswith("0.7."):
        found["VERL_USE_EXTERNAL_MODULES"] = "embedded"  # which makes the CPU one of verl 0.9's devices
    if not ask(python, HAS_RAY, **found):
        found["PYTHONPATH"] += os.pathsep + str(HERE / "stand_ins")
    done = subprocess.run([python, "-c", IMPORTS], env=os.environ | found, capture_output=True, text=True)
    if done.returncode != 0:
        raise Problem(
            f"{(done.stderr.strip() or 'an import failed').splitlines()[-1]} (if a package is missing, "
            f"tools/wheels.py {options.wheels} --also NAME==VERSION adds it)"
        )
    return found


def run_part(part: str, python: str, found: dict[str, str], build: Path, seconds: float | None) -> dict[str, Any]:
    """Runs a part in a process of its own: `passed`, `seconds`, and what its tests or measurements say.

    Args:
        seconds (float, optional): How long it may take.
    """
    report = build / f"{part}.{'json' if part in MEASUREMENTS else 'xml'}"
    report.unlink(missing_ok=True)
    if part in MEASUREMENTS:
        command = [python, str(HERE / f"gpu_{part}.py"), "--output", str(report)]
        settings = {}
    elif part.endswith(RANKS):
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command.append(str(ROOT / f"tests/multirank/test_{part.removesuffix(RANKS)}.py"))
        # What asks whether there is a GPU must not start it: the ranks' server forks.
        settings = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    else:
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command.append(str(HERE / f"gpu_{part}.py"))
        # Kernels that give the same bits each time; see single_process.py.
        settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
    say(part if seconds is None else f"{part} (at most {seconds:.0f} s)")
    started = time.monotonic()
    log = build / f"{part}.log"
    with log.open("w") as output:
        try:
            code: int | str = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | found | settings,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {seconds:.0f} s"
    result: dict[str, Any] = {"passed": code == 0, "exit": code, "seconds": round(time.monotonic() - started, 1)}
    if report.is_file():
        result |= json.loads(report.read_text()) if part in MEASUREMENTS else {"tests": read_tests(report)}
    if not result["passed"]:
        print("\n".join(log.read_text(errors="replace").splitlines()[-80:]), flush=True)
    return result


def read_tests(report: Path) -> dict[str, Any]:
    """How many tests of a part passed, which failed or were skipped, and why."""
    passed = 0
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for test in ElementTree.parse(report).iter("testcase"):
        name = test.get("name", "")
        outcome = next((part for part in test if part.tag in ("failure", "error", "skipped")), None)
        if outcome is None:
            passed += 1
        else:
            kind = skipped if outcome.tag == "skipped" else failed
            kind[name] = outcome.get("message", "").partition("\n")[0][:300]
    return {"passed": passed, "failed": failed, "skipped": skipped}


def print_results(results: dict[str, Any]) -> None:
    machine = results["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "gpu" and value is not None)
    print(f"\n{machine['gpu'] or 'no GPU, on a CPU'}; {versions}")
    print("\n| part | result | seconds | tests |\n|---|---|---|---|")
    for name, part in results["parts"].items():
        tests = part.get("tests", {})
        count = ", ".join(f"{n if isinstance(n, int) else len(n)} {what}" for what, n in tests.items())
        print(f"| {name} | {'passed' if part['passed'] else 'FAILED'} | {part['seconds']} | {count} |")
    for part in results["parts"].values():
        for table in part.get("tables", []):
            print(f"\n{table}")


def main() -> int:
    options = parse()
    build = options.build.resolve()
    build.mkdir(parents=True, exist_ok=True)
    chosen = find_python(options.python, options.device)
    if chosen is None:
        say("no Python with a torch that sees a GPU was found: nothing was run (--python names one)")
        return 0
    python, machine = chosen
    place = build / options.target
    started = time.monotonic()
    try:
        install(python, options.wheels.resolve(), options.target, place)
        found = environment(python, place, options)
    except Problem as problem:
        say(str(problem))
        return 2
    machine |= ask(python, PACKAGES, **found) or {}
    results: dict[str, Any] = {"machine": machine, "device": options.device, "quick": options.quick, "parts": {}}
    parts = [f"{part}{RANKS}" for part in MULTIRANK] if options.ranks else options.part or PARTS
    for part in parts:
        left = None if options.device == "cpu" or options.ranks else ALL_SECONDS - (time.monotonic() - started)
        if left is not None and left < 1:
            results["parts"][part] = {"passed": False, "exit": "no time was left", "seconds": 0.0}
        else:
            results["parts"][part] = run_part(part, python, found, build, left and min(PART_SECONDS, left))
        (build / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print_results(results)
    say(f"the results: {build / 'results.json'}")
    return 0 if all(part["passed"] for part in results["parts"].values()) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    targets = sorted(file.stem.removeprefix("requirements-") for file in ROOT.glob("embedded/requirements-*.in"))
    parser.add_argument("--part", action="append", choices=PARTS, help="run this part alone; may be repeated")
    parser.add_argument("--ranks", type=int, metavar="N", help="the cases with ranks instead, with a GPU for each")
    parser.add_argument("--target", choices=targets, default="0.9.1", help="the verl (default: 0.9.1)")
    parser.add_argument("--python", help="the interpreter with torch (default: python3 or python in PATH)")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build/wheels", help="default: build/wheels")
    parser.add_argument("--build", type=Path, default=ROOT / "build/gpu", help="where it works (default: build/gpu)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few cases, a tiny model: shows that it runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
