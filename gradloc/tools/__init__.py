# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What the commands share: bundles and their results, the form of the evidence, arguments of the command line."""
