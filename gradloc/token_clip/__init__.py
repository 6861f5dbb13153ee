# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""TokenClip: takes single tokens with outlying backward signals out of the backward pass."""
