"""Our rendering against a published checkpoint's own template, where one is at hand.

Point `GLM_TOKENIZER` at a directory with GLM's `tokenizer.json` and `chat_template.jinja`; without it this skips, since
neither file is ours to ship.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from glm5.text import Tokenizer, load_tokenizer, messages_from_openai, render, tools_from_openai
from support.conversations import PLAIN, conversations, decoded, tool_lists

DIRECTORY = os.environ.get("GLM_TOKENIZER", "")
needs_checkpoint = pytest.mark.skipif(not DIRECTORY, reason="GLM_TOKENIZER names no published tokenizer")


@cache
def tokenizers() -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    return load_tokenizer(DIRECTORY), AutoTokenizer.from_pretrained(DIRECTORY)


def as_published(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What docs/chat.md lists as different, taken out: null and listed contents, OpenAI's newer names."""
    made = []
    for message in decoded(conversation):
        content = message["content"] or ""
        if not isinstance(content, str):
            content = "".join(part if isinstance(part, str) else part["text"] for part in content)
        role = "system" if message["role"] == "developer" else message["role"]
        message = {**message, "role": role, "content": content}
        if (reasoning := message.pop("reasoning", None)) is not None:
            message["reasoning_content"] = reasoning
        made.append(message)
    return made


@needs_checkpoint
@given(
    conversation=conversations(PLAIN),
    specs=tool_lists(PLAIN),
    modes=st.fixed_dictionaries(
        {"enable_thinking": st.booleans(), "clear_thinking": st.booleans(), "add_generation_prompt": st.booleans()}
    ),
)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
def test_published_template_gives_the_same_ids(
    conversation: list[dict[str, Any]], specs: list[dict[str, Any]], modes: dict[str, bool]
) -> None:
    ours, theirs = tokenizers()
    rendered = render(ours, messages_from_openai(conversation), tools_from_openai(specs), **modes)
    given = {"conversation": as_published(conversation), "tools": specs or None, **modes}
    assert ours.decode(rendered.ids) == theirs.apply_chat_template(tokenize=False, **given)
    assert list(rendered.ids) == theirs.apply_chat_template(tokenize=True, return_dict=False, **given)
