# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Computes a bundle's micro-batches again, unsharded in one process, with transformers alone; and searches them, also
under torchrun.

`gradloc replay BUNDLE` is its command line. It needs neither verl nor Ray, but for the rows of losses among the
remedies, which are verl's own.
"""
