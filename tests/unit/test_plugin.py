"""The plugin's groups of the configuration, which need no verl."""

from pathlib import Path

import pytest
import yaml

import trees

CONF = trees.ROOT / "gradloc/plugin/conf"


@pytest.mark.parametrize("group", sorted(CONF.glob("*/gradloc_*.yaml")), ids=lambda file: file.stem)
def test_a_config_group_writes_no_key_of_its_own(group: Path) -> None:
    """They are in the groups that it names: all that is left is which classes have them."""
    ours = yaml.safe_load(group.read_text())
    assert ours.pop("defaults")[0] == group.stem.removeprefix("gradloc_")
    for section in (ours, *(ours.pop(name) for name in ("layer_clip", "token_clip") if name in ours)):
        assert section.pop("_target_").startswith("gradloc.plugin.config.") and not section
