# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""A tool for verl's agent loop, and a parser that takes every answer for a call of it: a random model makes none."""

from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool  # type: ignore[import-not-found]  # verl 0.9


@function_tool
def count_letters(text: str) -> str:
    """Counts the letters of a text.

    Args:
        text: The text.
    """
    return f"{sum(letter.isalpha() for letter in text)} letters"


@ToolParser.register("always")
class AlwaysParser(ToolParser):
    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        return text, [FunctionCall(name="count_letters", arguments='{"text": "three"}')]
