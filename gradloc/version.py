# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The version of the package, which every event carries; CHANGELOG.md says what each version changed."""

__version__ = "0.2.0.dev0"
# Of what training hands to the package gradloc_judge: sums.py, and fields in lines.py that it reads.
FACTS = 1
