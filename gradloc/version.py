# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The version of the package, which every event carries; CHANGELOG.md says what each changed."""

__version__ = "0.2.0"
# The version of the calls in verl's files: verl/utils/spikes.py of the patch has the same number.
HOOKS = 1
