# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Shared by the commands: reading evidence, bundles and results; figures and text; files and the command line."""
