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
LAZY = {"judging": {"gradloc_judge"}, "bundles": {"safetensors"}, "adapters": {"gradloc_tools"}}


def subpackages() -> list[str]:
    """The subpackages in the order that the package's docstring gives."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text()))
    return [name for line in re.findall(r"^- (.+?):", docstring, re.M) for name in line.split(", ")]


def subpackage_of(module: str) -> str:
    return module.split(".")[0]


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
        assert {other for other in imported if order.index(subpackage_of(other)) > place} == set(), name
    # Every file is in one of them.
    assert {subpackage_of(name) for name in modules()} == set(subpackages())
    # No files import each other.
    graph = {name: own_imports(name, tree) for name, tree in modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_file_needs_only_torch_and_the_standard_library() -> None:
    found = [(name, node, at_once) for name, tree in modules().items() for node, at_once in imports(tree)]
    for name, node, at_once in found:
        if isinstance(node, ast.ImportFrom) and node.level:
            continue
        allowed = {"torch", *sys.stdlib_module_names}
        if subpackage_of(name) == "adapters":
            allowed |= {"hydra", "omegaconf", "tensordict", "verl"}  # what verl is made of
        if not at_once:
            allowed |= LAZY.get(subpackage_of(name), set())
        names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        for module in names:
            assert module.split(".")[0] in allowed, f"{name}, line {node.lineno} imports {module}"
            assert not module.startswith("verl.utils.gradloc"), f"{name}, line {node.lineno}: its own are relative"
    # Of the readers, only the trackers are imported.
    imported = re.compile(r"^ *(from|import) gradloc_tools", re.M)
    importing = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if imported.search(path.read_text())]
    assert importing == ["adapters/spike_log.py"]


def test_the_judge_needs_only_the_standard_library_and_plain_parts_of_the_package() -> None:
    plain = "gradloc.guarded gradloc.judging gradloc.lines gradloc.saved gradloc.sources gradloc.sums gradloc.version"
    allowed = {"gradloc", *plain.split()}
    for path in (PACKAGE.parent / "gradloc_judge").glob("*.py"):
        for node, _ in imports(ast.parse(path.read_text())):
            if isinstance(node, ast.Import) or not node.level:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
                assert {name for name in names if name.split(".")[0] not in sys.stdlib_module_names} <= allowed, path


def test_the_report_imports_neither_torch_nor_verl_nor_ray() -> None:
    code = """
import sys
sys.modules |= dict.fromkeys(("torch", "verl", "ray", "numpy", "transformers"))
from gradloc_tools.__main__ import main
from gradloc_tools.report import page, terminal
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
