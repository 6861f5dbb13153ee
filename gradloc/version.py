# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The version of the package, which every event carries; CHANGELOG.md says what each changed."""

__version__ = "0.2.0"
# Of what the hooks in verl's files call: verl/utils/spikes.py of the patch has the same number.
HOOKS = 1
