# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Computes a bundle's micro-batches again, unsharded in one process, with transformers alone; and searches them, also
under torchrun.

`python -m verl.utils.gradloc.replay BUNDLE` in a patched verl. In a checkout of GradLoc itself,
`python -m gradloc.replay BUNDLE` does the same, and needs neither verl nor Ray.
"""
