# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Which tokens are behind a spike: what to measure next, and what the measurements say."""

from .probes import Probe, Segment
from .scheduler import Culprit, Search

__all__ = ["Culprit", "Probe", "Search", "Segment"]
