# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what GradLoc wrote in training: the command `gradloc`.

- schema: the form of the evidence; files and JSON of strangers
- bundles: opens the bundle of a spike, and reads the results of replays beside it
- report: the evidence in the terminal, and as a page; needs no torch
- trackers: sends each spike to the loggers of verl's `Tracking`, with the report as a page
- replay: a bundle's micro-batches again, in one process; remedies, and the search for the tokens
- convert: bundles from the records of other trainers
- selftest: whether GradLoc works with a model on a machine, and what it costs there

In training nothing imports it, but for the trackers, where it is installed beside the driver. The
package gradloc_judge says what facts mean.
"""
