# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The definition of a layer, the reduced gradient's norm in each layer, and clipping by layer."""
