# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The program behind make_patch.sh: --init and --repo in checkout.py, --check in check.py; what all of them use in
parts.py (the parts of a patch), sources.py (the package) and scratch_git.py (git without anybody's settings).
"""
