# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a layer is, the reduced gradient's norm in each layer, and clipping by layer."""
