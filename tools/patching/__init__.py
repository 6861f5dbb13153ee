# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Behind make_patch.sh: parts.py (a patch, --release, --check), checkout.py (--init, --repo), scratch_git.py (git)."""
