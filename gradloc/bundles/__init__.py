# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Bundles: what one process needs to replay the micro-batches behind an event, in safetensors and JSON."""
