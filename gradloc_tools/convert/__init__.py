# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Recorded bundles from what other trainers write: plain records, and slime's train data."""
