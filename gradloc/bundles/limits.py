# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The names of a bundle's files, what they say they are, and how much they may hold."""

FORMAT = 1
KIND = "gradloc replay bundle"

MANIFEST = "manifest.json"
# In the form of sha256sum.
CHECKSUM = "manifest.json.sha256"
FOLDER = "replay"

# The limits of a bundle; `TOTAL_BYTES` is that of all of a run's.
MICRO_BATCHES = 8
# A converted spike may be in any micro-batch.
CONVERTED_MICRO_BATCHES = 64
MEASURED_TOKENS = 2048
LAYERS = 4096
ROWS = 65_536
MANIFEST_BYTES = 64 * 2**20
BUNDLE_BYTES = 2**28
TOTAL_BYTES = 2 * 2**30
