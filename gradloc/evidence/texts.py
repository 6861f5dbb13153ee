# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Events without the texts of samples, for those who are to see figures only."""

from collections.abc import Mapping
from typing import Any

from .schema import CULPRIT_FIELDS, EVENT

# Of what the trainer adds to a culprit, what is no text; and the token alone.
_ADDED = ("token", "response_tokens_start", "reward")


def without_texts(event: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an event whose culprits have the actor's figures, their tokens and rewards alone.

    Prompts, responses, contexts, ground truths, data sources, uids and fields that the schema does not know are left
    out.
    """
    culprits = [
        {name: culprit[name] for name in (*CULPRIT_FIELDS, *_ADDED) if name in culprit} for culprit in event["culprits"]
    ]
    return {name: event[name] for name in EVENT["properties"] if name in event} | {"culprits": culprits}
