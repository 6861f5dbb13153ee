# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What events and the sums of each step mean: rules, verdicts, warnings, sentences. No torch, no collective calls."""
