# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The programs behind make_patch.sh and run_experiment.sh, and lock.py. Users of the patch need apply_patch.py only."""
