# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The identities on what trainers have written: records, batches, bundles and evidence."""
