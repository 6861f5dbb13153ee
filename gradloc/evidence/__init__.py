# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The findings of a search as events: token facts, what is usual, and the files' writer."""
