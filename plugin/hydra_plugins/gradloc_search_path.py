# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Lets Hydra find the plugin's config groups."""

import importlib.util
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class GradLocSearchPath(SearchPathPlugin):
    """Appends the folder, so that no group of verl's own is hidden."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # By its path: Hydra loads this in programs that have nothing to do with verl, and pkg:// imports the plugin.
        spec = importlib.util.find_spec("gradloc_verl")
        if spec is not None and spec.origin is not None:
            search_path.append(provider="gradloc", path=f"file://{Path(spec.origin).parent / 'conf'}")
