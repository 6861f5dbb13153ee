# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The search for the tokens behind a spike: what to measure next, and what the measurements mean."""

from .codes import Probe, TokenSet
from .search import Culprit, Search

__all__ = ["Culprit", "Probe", "Search", "TokenSet"]
