# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The names of a bundle's files, and what they say they are."""

FORMAT = 1
KIND = "gradloc replay bundle"
RESULT_KIND = "gradloc replay result"

MANIFEST = "manifest.json"
# In the form of sha256sum.
CHECKSUM = "manifest.json.sha256"
FOLDER = "replay"
# What a replay writes beside the bundle of this name.
RESULT_SUFFIX = ".result.json"
# What a search writes beside it.
EVENT_SUFFIX = ".event.json"
