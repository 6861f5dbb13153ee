# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The programs behind make_patch.sh, and what pins and downloads requirements."""
