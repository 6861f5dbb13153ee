# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What was found, as events: facts, rules, the form of the file and its writer."""
