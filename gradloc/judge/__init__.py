# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What events and the sums of each step mean: rules, verdicts, warnings, sentences. No torch, no collective calls.

It is asked in training, through gradloc/judging.py, and later, by those who read the evidence.
"""

from .alignment import alignment_warning as alignment_warning
from .judgement import judged_in_training as judged_in_training
from .rows import row_warnings as row_warnings
from .run_checks import RunChecks as RunChecks
