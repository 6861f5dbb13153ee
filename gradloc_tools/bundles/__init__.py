# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Opens bundles, which may come from anywhere, and reads what stands beside them."""
