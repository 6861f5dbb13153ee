"""The order of the package's subpackages: which may import which."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from gradloc.fsdp.torch_compat import REQUIRED

PACKAGE = Path(__file__).resolve().parents[2] / "gradloc"
# Imported where they are needed, so that the package does without them.
LAZY = {"bundles": {"safetensors"}}
# The files of the commands, which draw what others compute.
COMMANDS = {"command", "search_command", "__main__"}


def subpackages() -> list[str]:
    """The subpackages in the order that the package's docstring gives."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text()))
    return [name for line in re.findall(r"^- (.+?):", docstring, re.M) for name in line.split(", ")]


def subpackage_of(module: str) -> str:
    """The subpackage of a file; the files of commands are one of their own, wherever they lie."""
    parts = module.split(".")
    return "commands" if parts[-1] in COMMANDS and parts[0] != "plugin" else parts[0]


@cache
def modules() -> dict[str, ast.Module]:
    """The package's files by module name; a subpackage's own `__init__` goes by its name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text())
    del found[""]  # the package itself comes after all of them
    return found


def imports(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """The import statements of a file, and whether each runs with the file (and not in a function of it)."""
    lazy = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, node not in lazy


def own_imports(name: str, tree: ast.Module) -> set[str]:
    """The package's modules that a file imports."""
    known = modules()
    is_folder = (PACKAGE / name.replace(".", "/")).is_dir()
    found = set()
    for node, _ in imports(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = name.split(".")
            base = parts[: len(parts) - node.level + is_folder]
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                module = ".".join([*base, alias.name])
                found.add(module if module in known else ".".join(base))
    return found


def test_a_file_imports_only_from_subpackages_before_its_own() -> None:
    order = subpackages()
    for name, tree in modules().items():
        imported = own_imports(name, tree)
        assert imported <= set(modules()), f"{name} imports what is not there, or the package as a whole"
        place = order.index(subpackage_of(name))
        imported -= {"report.trackers"} if name == "adapters.spike_log" else set()
        assert {other for other in imported if order.index(subpackage_of(other)) > place} == set(), name
    # Every file is in one of them.
    assert {subpackage_of(name) for name in modules()} == set(subpackages())
    # No files import each other.
    graph = {name: own_imports(name, tree) for name, tree in modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


# Parts that run in training, packages that they know besides torch, and parts that read evidence afterwards.
OF_VERL = {"hydra", "omegaconf", "tensordict", "verl"}
KNOWS = {"adapters": OF_VERL, "plugin": OF_VERL | {"ray"}}
READERS = {"tools", "report", "replay", "convert", "check", "selftest", "commands"}


def test_what_runs_in_training_needs_only_torch_and_the_standard_library() -> None:
    for name, tree in modules().items():
        if (part := subpackage_of(name)) in READERS | {"rewards"}:
            continue
        for node, at_once in imports(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                continue
            allowed = {"torch", *sys.stdlib_module_names, *KNOWS.get(part, set())}
            if not at_once:
                allowed |= LAZY.get(part, set())
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for module in names:
                assert module.split(".")[0] in allowed, f"{name}, line {node.lineno} imports {module}"


def test_verl_is_known_to_the_adapters_and_the_plugin_alone() -> None:
    for name, tree in modules().items():
        if subpackage_of(name) in KNOWS or name == "replay.remedy_losses":  # remedies with verl's own losses
            continue
        for node, _ in imports(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert "verl" not in {module.split(".")[0] for module in names}, f"{name}, line {node.lineno}"


def test_training_imports_no_reader_of_evidence_but_the_trackers() -> None:
    importing = {
        (name, module)
        for name, tree in modules().items()
        if subpackage_of(name) not in READERS
        for module in own_imports(name, tree)
        if subpackage_of(module) in READERS
    }
    assert importing == {("adapters.spike_log", "report.trackers")}


def test_judge_report_and_convert_are_imported_without_torch_and_verl() -> None:
    code = """
import sys
sys.modules |= dict.fromkeys(("torch", "verl", "ray", "numpy", "transformers", "omegaconf", "hydra"))
import gradloc.judge, gradloc.rewards
from gradloc.__main__ import main
from gradloc.report import page, terminal
main(["--help"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0 and "gradloc report DIR" in done.stdout, done.stderr


# Private names of torch that are not there in every torch, or not at all times.
OPTIONAL = set(
    """
    _comm_ctx _cpu_grad _device_handle _fsdp_param_group _fsdp_param_groups _local_shard
    _post_backward_callback_queued _post_backward_called _post_backward_hook_state _post_forward_index
    _post_forward_indices _ran_pre_backward_hook _saved_grad_shard _state_ctx _training_state
    unsharded_accumulated_grad
    """.split()
)


def test_torch_compat_lists_every_private_name_of_torch() -> None:
    listed = {name for names in REQUIRED.values() for name in names} | OPTIONAL | {"_C"}
    used = set()
    for module, tree in modules().items():
        if module == "fsdp.torch_compat" or subpackage_of(module) not in ("fsdp", "layers", "token_clip", "measure"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and not ast.unparse(node).startswith(("self._", "cls._")):
                used |= {node.attr} if re.match("_[^_]", node.attr) else set()
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
                assert "._" not in node.module, f"{module} imports {node.module}"
    private = {name for name in listed if name.startswith("_")}
    assert used <= listed
    # Read by their names, or in that file itself.
    assert private - used <= {"_cpu_grad", "_fsdp_param_group", "_fsdp_param_groups", "_module_info"}
