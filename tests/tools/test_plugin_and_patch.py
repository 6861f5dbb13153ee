"""The patch for verl 0.9.1 and the plugin change the same modules."""

import re

import apply_patch
import trees

PLUGIN = trees.ROOT / "gradloc/plugin"
# The plugin cannot reach the loop in engine_workers, so it acts where verl makes the mini-batches of that loop; nor
# main_ppo that is run by `python -m`, so it acts after an import that only this makes.
ELSEWHERE = {
    "verl.workers.engine_workers": "verl.utils.tensordict_utils",
    "verl.trainer.main_ppo": "verl.trainer.constants_ppo",
}


def of_patch() -> set[str]:
    """The modules, and files of the configuration, that are changed."""
    places = set()
    (target,) = apply_patch.narrowed(apply_patch.read_targets(), "0.9.1")
    for change in [*apply_patch.load_part(target.hooks), *apply_patch.load_part(target.fixes)]:
        if "/_generated_" not in change.path:  # where verl keeps the composed configuration
            place = change.path.removesuffix(".py").removesuffix("/__init__")
            places.add(place if place.endswith(".yaml") else place.replace("/", "."))
    return {ELSEWHERE.get(place, place) for place in places}


def of_plugin() -> set[str]:
    """The same, from the table of hooks, and the classes and groups of the configuration."""
    places = set(re.findall(r'^    "(verl[\w.]+)": Hook\(', (PLUGIN / "hooks.py").read_text(), re.M))
    for file in (PLUGIN / "conf").glob("*/gradloc_*.yaml"):
        places.add(f"verl/trainer/config/{file.parent.name}/{file.name.removeprefix('gradloc_')}")
    for name in re.findall(r'^(\w+) = _with_keys\("\1"', (PLUGIN / "config.py").read_text(), re.M):
        places.add(f"verl.workers.config.{'critic' if 'Critic' in name else 'actor'}")
    return places


def test_both_have_hooks_in_the_same_places() -> None:
    assert of_patch() == of_plugin()
