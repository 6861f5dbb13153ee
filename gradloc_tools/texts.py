# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Events and clip lines without the texts of samples, for those who are to see figures only."""

from collections.abc import Iterable, Mapping
from typing import Any

from gradloc.judge.misfire import without_data_source

from .schema import CLIP, CLIPPED_TOKEN_FIELDS, CULPRIT_FIELDS, EVENT

# Of what the trainer adds to a token, what is no text; and the token alone.
_ADDED = ("token", "response_tokens_start", "reward")


def without_texts(line: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an event or a clip line with the actor's figures, and of texts the named tokens' own alone.

    Rewards are kept. Prompts, responses, contexts, ground truths, data sources, uids, and fields that the schema does
    not know, are left out.
    """
    if "culprits" in line:
        bare = _named(line, EVENT["properties"])
        for name in ("culprits", "suspected"):
            if name in line:
                bare[name] = [_named(token, (*CULPRIT_FIELDS, *_ADDED)) for token in line[name]]
        if bare.get("verdict") is not None:
            bare["verdict"] = without_data_source(bare["verdict"])
        return bare
    found = line["token_clip"]
    tokens = [_named(token, (*CLIPPED_TOKEN_FIELDS, *_ADDED)) for token in found["tokens"]]
    known = _named(found, CLIP["properties"]["token_clip"]["properties"]) | {"tokens": tokens}
    return _named(line, CLIP["properties"]) | {"token_clip": known}


def _named(of: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: of[name] for name in names if name in of}
