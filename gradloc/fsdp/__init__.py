# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""FSDP's state around extra passes, and the collective calls of the search."""
