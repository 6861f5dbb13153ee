# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Extra passes over parts of micro-batches, and the norms of the gradients they compute."""
