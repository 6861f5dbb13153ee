# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""GradLoc as a plugin of a verl that is not patched: does what patches/0.9.1/hooks.patch does, from outside.

verl imports this package in every process: through the entry point group `verl.plugins`, or because
VERL_USE_EXTERNAL_MODULES names it. vLLM's processes import it, too, so it only notes what is to be done once one of
verl's modules is imported.

- loading: acts right after an import
- hooks: what is done after which import
- status: whether it fits this verl, what went wrong, and the refusal of a run that would need it
- trainer: the trainer's part, as a mixin
- config, conf/: the configuration's keys
"""

from . import status


def _install() -> None:
    from .hooks import install

    install()


status.guard("anything", _install)
