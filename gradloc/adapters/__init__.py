# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""What a verl trainer needs to call GradLoc; all imports of verl are in this subpackage."""
