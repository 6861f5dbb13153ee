# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The limits of replay bundles: how much one may hold, and all of a run's together."""

MICRO_BATCHES = 8
# Of a recorded spike: any of them may hold it.
RECORDED_MICRO_BATCHES = 64
MEASURED_TOKENS = 2048
LAYERS = 4096
ROWS = 65_536
MANIFEST_BYTES = 64 * 2**20
BUNDLE_BYTES = 2**28
TOTAL_BYTES = 2 * 2**30
