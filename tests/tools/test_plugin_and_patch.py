"""The patch for verl 0.9.1 and the plugin change the same modules, and call the same functions of gradloc/adapters."""

import re

import apply_patch
import trees

PLUGIN = trees.ROOT / "plugin/gradloc_verl"
OURS = re.compile(r"^ *from (?:verl\.utils\.)?gradloc\.adapters\.\w+ import ([\w, ]+)", re.M)
# What both do themselves: they call what counts spikes, and mark a class.
OWN = re.compile(r"\bspike_stop\.(\w+)\(|\.(is_\w+) = True$", re.M)
# The plugin cannot reach the loop in engine_workers, so it acts where verl makes the mini-batches of that loop; nor
# main_ppo that is run by `python -m`, so it acts after an import that only this makes.
ELSEWHERE = {
    "verl.workers.engine_workers": "verl.utils.tensordict_utils",
    "verl.trainer.main_ppo": "verl.trainer.constants_ppo",
}
# WatchedEngine, so that it makes sure that the trainer is extended, too; and the type of an attribute.
ONLY_PLUGIN = {"WatchedEngine", "SpikeStop"}


def own(text: str) -> set[str]:
    return {name for names in OWN.findall(text) for name in names if name}


def of_patch() -> tuple[set[str], set[str]]:
    """The modules, and files of the configuration, that are changed, and the names of gradloc/adapters used there."""
    places, names = set(), set()
    (target,) = apply_patch.narrowed(apply_patch.read_targets(), "0.9.1")
    for change in [*apply_patch.load_part(target.hooks), *apply_patch.load_part(target.fixes)]:
        hunks = [hunk for part in change.parts for hunk in part]
        texts = [b"".join(line for line in hunk.new if line not in hunk.old).decode() for hunk in hunks]
        if "/_generated_" in change.path:  # verl keeps the composed configuration as a file
            continue
        place = change.path.removesuffix(".py").removesuffix("/__init__")
        places.add(place if place.endswith(".yaml") else place.replace("/", "."))
        imported = {name for text in texts for line in OURS.findall(text) for name in re.findall(r"\w+", line)}
        names |= imported
        for text in texts if change.path.endswith(".py") else ():
            used = {name for name in imported if re.search(rf"\b{name}\b", text)} | own(text)
            assert used, (
                f"{place} adds something that is not in gradloc/adapters, where the plugin could call it:\n{text}"
            )
            names |= used | {
                f"{name}({base})" for name, base in re.findall(r"^class (\w+)\((\w+), \w+\):$", text, re.M)
            }
    return {ELSEWHERE.get(place, place) for place in places}, names


def of_plugin() -> tuple[set[str], set[str]]:
    """The same, from the table of hooks, the imports, and the classes and groups of the configuration."""
    hooks, trainer, config = ((PLUGIN / f"{name}.py").read_text() for name in ("hooks", "trainer", "config"))
    places = set(re.findall(r'^    "(verl[\w.]+)": Hook\(', hooks, re.M))
    for file in (PLUGIN / "conf").glob("*/gradloc_*.yaml"):
        places.add(f"verl/trainer/config/{file.parent.name}/{file.name.removeprefix('gradloc_')}")
    names = {name for line in OURS.findall(hooks + trainer) for name in re.findall(r"\w+", line)}
    names |= own(hooks + trainer)
    for name, keys in re.findall(r'^(\w+) = _with_keys\("\1"(?:, "(\w+)")?\)$', config, re.M):
        places.add(f"verl.workers.config.{'critic' if 'Critic' in name else 'actor'}")
        names |= {f"{name}({keys})", keys} if keys else {name}
    return places, names


def test_both_have_the_same_hooks() -> None:
    (patched, of_adapters), (extended, called) = of_patch(), of_plugin()
    assert patched == extended and called - of_adapters == ONLY_PLUGIN and of_adapters <= called
