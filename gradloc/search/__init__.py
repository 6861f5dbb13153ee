# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The search for the tokens behind a spike: what to measure next, and what the measurements mean."""
