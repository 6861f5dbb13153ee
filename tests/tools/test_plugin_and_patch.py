"""The patch for verl 0.9.1 and the plugin have the same hooks, which call the same functions of gradloc/adapters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import apply_patch
import trees

PLUGIN = trees.ROOT / "plugin/gradloc_verl"
OURS = re.compile(r"^from verl\.utils\.gradloc\.adapters\.\w+ import ([\w, ]+)", re.M)
SPIKE_STOP = re.compile(r"\bspike_stop\.(\w+)\(")
KEYS = re.compile(r'^(\w+) = _with_keys\("\1"(?:, "(\w+)")?\)$', re.M)
CLASS = re.compile(r"^class (\w+)\((\w+), \w+\):$", re.M)

Place = tuple[str, str]  # a module of verl, or a file of its configuration, and what of gradloc/adapters is used there

# The plugin cannot reach the loop in engine_workers, so it acts where verl makes the mini-batches of that loop; nor
# main_ppo that is run by `python -m`, so it acts after an import that only this makes.
ELSEWHERE = {
    "verl.workers.engine_workers": "verl.utils.tensordict_utils",
    "verl.trainer.main_ppo": "verl.trainer.constants_ppo",
}
GENERATED = "verl keeps the composed configuration as a file"
OLDER_TRAINER = "the plugin refuses runs of the older trainer"
ONLY_PATCH: dict[Place, str] = {
    **{
        (f"verl/trainer/config/_generated_ppo_{trainer}.yaml", "keys"): GENERATED
        for trainer in ("trainer", "megatron_trainer", "torchtitan_trainer", "veomni_trainer")
    },
    **{
        ("verl.trainer.ppo.ray_trainer", name): OLDER_TRAINER
        for name in ("start_spike_stop", "step_of", "is_due", "end_if_due")
    },
}
ONLY_PLUGIN: dict[Place, str] = {
    ("verl.trainer.ppo.ray_trainer", "refuse_v0"): OLDER_TRAINER,
    ("verl.workers.engine", "WatchedEngine"): "it makes sure that the trainer is extended, too, and that verl has one",
    ("verl.trainer.ppo.v1.trainer_base", "SpikeStop"): "the type of an attribute",
}


def sections() -> dict[str, list[apply_patch.Hunk]]:
    """The hunks of hooks and fixes, by file."""
    (target,) = apply_patch.narrowed(apply_patch.read_targets(), "0.9.1")
    found: dict[str, list[apply_patch.Hunk]] = {}
    for change in [*apply_patch.load_part(target.hooks), *apply_patch.load_part(target.fixes)]:
        found.setdefault(change.path, []).extend(hunk for part in change.parts for hunk in part)
    return found


def of_patch(files: dict[str, list[apply_patch.Hunk]]) -> set[Place]:
    places: set[Place] = set()
    for path, hunks in files.items():
        if path.endswith(".yaml"):
            places.add((path, "keys"))
            continue
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        texts = [b"".join(line for line in hunk.new if line not in hunk.old).decode() for hunk in hunks]
        names = {name for text in texts for line in OURS.findall(text) for name in re.findall(r"\w+", line)}
        for text in texts:
            used = {name for name in names if re.search(rf"\b{name}\b", text)} | set(SPIKE_STOP.findall(text))
            assert used, (
                f"{path} adds something that is not in gradloc/adapters, where the plugin could call it:\n{text}"
            )
            classes = {f"{name}({base})" for name, base in CLASS.findall(text)}
            places |= {(module, name) for name in used | classes}
    return places


def of_plugin(sources: dict[str, str]) -> set[Place]:
    """From the table of hooks, the functions in it and what these use; the classes of config.py; and the groups."""
    parsed = {name: ast.parse(sources[name]) for name in ("hooks", "trainer")}
    functions = {each.name: each for each in parsed["hooks"].body if isinstance(each, ast.FunctionDef)}
    (table,) = [
        each.value
        for each in parsed["hooks"].body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "HOOKS"
    ]
    assert isinstance(table, ast.Dict)
    places: set[Place] = set()
    for key, hook in zip(table.keys, table.values, strict=True):
        assert isinstance(key, ast.Constant) and isinstance(hook, ast.Call) and isinstance(hook.args[0], ast.Name)
        act = functions[hook.args[0].id]
        used = set(ours(act))
        if any(each.module == "trainer" for each in imports(act)):
            used |= {*ours(parsed["trainer"]), *SPIKE_STOP.findall(sources["trainer"])}
        places |= {(key.value, name) for name in used or {act.name}}
    for name, keys in KEYS.findall(sources["config"]):
        module = f"verl.workers.config.{'critic' if 'Critic' in name else 'actor'}"
        places |= {(module, f"{name}({keys})"), (module, keys)} if keys else {(module, name)}
    for file in (PLUGIN / "conf").glob("*/gradloc_*.yaml"):
        places.add((f"verl/trainer/config/{file.parent.name}/{file.name.removeprefix('gradloc_')}", "keys"))
    return places


def imports(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    return (each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom))


def ours(tree: ast.AST) -> list[str]:
    """What a piece of code imports from gradloc/adapters."""
    return [
        alias.name
        for each in imports(tree)
        if (each.module or "").startswith("gradloc.adapters.")
        for alias in each.names
    ]


def unmatched(patch: set[Place], plugin: set[Place]) -> set[Place]:
    """What one has and the other lacks."""
    moved = {(ELSEWHERE.get(module, module), name) for module, name in patch}
    return (moved - plugin - set(ONLY_PATCH)) | (plugin - moved - set(ONLY_PLUGIN))


SOURCES = {name: (PLUGIN / f"{name}.py").read_text() for name in ("hooks", "trainer", "config")}


def test_both_have_the_same_hooks() -> None:
    patch, plugin = of_patch(sections()), of_plugin(SOURCES)
    assert not unmatched(patch, plugin)
    assert set(ONLY_PATCH) <= patch - plugin and set(ONLY_PLUGIN) <= plugin - patch, "an exception has no reason now"
