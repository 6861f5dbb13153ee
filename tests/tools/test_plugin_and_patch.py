"""The patch for verl 0.9.1 and the plugin have the same hooks, which call the same functions of gradloc/adapters."""

import re

import apply_patch
import trees

PLUGIN = trees.ROOT / "plugin/gradloc_verl"
OURS = re.compile(r"^ *from (?:verl\.utils\.)?gradloc\.adapters\.\w+ import ([\w, ]+?)(?:  #.*)?$", re.M)
WITH_KEYS = re.compile(r'^(\w+) = _with_keys\("\1"(?:, "(\w+)")?\)$', re.M)
CLASS = re.compile(r"^class (\w+)\((\w+), \w+\):$", re.M)
# The plugin cannot reach the loop in engine_workers, so it acts where verl makes the mini-batches of that loop; nor
# main_ppo that is run by `python -m`, so it acts after an import that only this makes.
ELSEWHERE = {
    "verl.workers.engine_workers": "verl.utils.tensordict_utils",
    "verl.trainer.main_ppo": "verl.trainer.constants_ppo",
}
# It makes sure that the trainer is extended, too; and the type of an attribute.
ONLY_PLUGIN = {"WatchedEngine", "SpikeStop"}


def of_adapters(text: str) -> set[str]:
    """What a piece of code imports from gradloc/adapters."""
    return {name for names in OURS.findall(text) for name in names.split(", ")}


def added() -> dict[str, list[str]]:
    """What each hunk of hooks and fixes adds, by the module of verl; test_plugin.py compares configuration files."""
    (target,) = apply_patch.narrowed(apply_patch.read_targets(), "0.9.1")
    found: dict[str, list[str]] = {}
    for change in [*apply_patch.load_part(target.hooks), *apply_patch.load_part(target.fixes)]:
        if change.path.endswith(".py"):
            module = change.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            hunks = [hunk for part in change.parts for hunk in part]
            found.setdefault(module, []).extend(
                b"".join(line for line in hunk.new if line not in hunk.old).decode() for hunk in hunks
            )
    return found


def test_both_have_the_same_hooks() -> None:
    patch = added()
    hooks, trainer, config = ((PLUGIN / f"{name}.py").read_text() for name in ("hooks", "trainer", "config"))
    acts_after = set(re.findall(r'^    "(verl\.[\w.]+)": Hook\(', hooks, re.M))
    assert {ELSEWHERE.get(module, module) for module in patch if "config" not in module} == acts_after
    whole = "".join(text for texts in patch.values() for text in texts)
    classes = dict(WITH_KEYS.findall(config))
    assert dict(CLASS.findall(whole)) == {name: keys for name, keys in classes.items() if keys}
    ours = of_adapters(hooks + trainer) | {keys or name for name, keys in classes.items()}
    assert of_adapters(whole) == ours - ONLY_PLUGIN and ONLY_PLUGIN <= ours
    # Else the plugin could not call what the patch adds.
    for module, texts in patch.items():
        names = "|".join([*of_adapters("".join(texts)), r"spike_stop\.\w+\("])
        assert all(re.search(rf"\b({names})", text) for text in texts), module
