# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What events and the sums of each step mean: identities, verdicts, sentences. No torch, no collective calls.

It is asked in training, through gradloc/judging.py, and later, by those who read the evidence.
"""

from .run import Run as Run
from .run import of_one_step as of_one_step
from .verdict import judged as judged
