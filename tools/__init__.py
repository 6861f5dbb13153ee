# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What maintainers of the patch run; users of it need apply_patch.py only."""
