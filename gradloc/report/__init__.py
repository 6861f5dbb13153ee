# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The report on the evidence of gradient spikes: a summary in the terminal, and one HTML file that opens offline.

`gradloc report` is its command line; it needs rich.
"""

from ..tools.reading import Evidence, read
from .build import build
from .page import write_page
from .summary import summarize

__all__ = ["Evidence", "build", "read", "summarize", "write_page"]
