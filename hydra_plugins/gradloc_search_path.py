# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Lets Hydra find the plugin's config groups, and the keys that it shares with the patch."""

import importlib.util
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class GradLocSearchPath(SearchPathPlugin):
    """Appends the folders, so that no group of verl's own is hidden."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # By its path: Hydra loads this in programs that have nothing to do with verl, and pkg:// imports the package.
        spec = importlib.util.find_spec("gradloc")
        if spec is None or spec.origin is None:
            return
        here = Path(spec.origin).parent
        folders = [here / "plugin/conf"]
        if not (folders[0] / "gradloc").is_dir():  # a checkout has the keys in another folder
            folders.append(here.parent / "patches/files/verl/trainer/config")
        for folder in folders:
            search_path.append(provider="gradloc", path=f"file://{folder}")
