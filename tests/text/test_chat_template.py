"""The Jinja template of a saved checkpoint and our renderer say the same, byte for byte and id for id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from glm5.text import load_tokenizer, messages_from_openai, render, tools_from_openai
from glm5.text.template import chat_template
from support.conversations import HOSTILE, PLAIN, conversations, decoded, function, tokenizer, tool_lists

MODES = st.fixed_dictionaries(
    {"enable_thinking": st.booleans(), "clear_thinking": st.booleans(), "add_generation_prompt": st.booleans()}
)
TOOLS_BLOCK = """<|system|>
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "ping", "description": "ping, 数据", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}}
</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"""  # noqa: E501
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Ping "}, {"type": "text", "text": "twice."}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "\nTwice, then.\n",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "ping", "arguments": {}}},
            {
                "id": "b",
                "type": "function",
                "function": {"name": "ping", "arguments": {"n": 2, "s": "数 ", "o": [None, 1.5]}},
            },
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "pong"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "pong 2"}]},
    {"role": "assistant", "content": " Done. ", "reasoning_content": "Both came."},
    {"role": "user", "content": "Thanks"},
]
CALLS = (
    "<tool_call>ping</tool_call><tool_call>ping<arg_key>n</arg_key><arg_value>2</arg_value><arg_key>s</arg_key>"
    "<arg_value>数 </arg_value><arg_key>o</arg_key><arg_value>[null, 1.5]</arg_value></tool_call>"
    "<|observation|><tool_response>pong</tool_response><tool_response>pong 2</tool_response>"
)
START = "[gMASK]<sop>" + TOOLS_BLOCK + "<|system|>Be brief.<|user|>Ping twice.<|assistant|>"


@pytest.fixture(scope="module")
def transformers_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer().save(directory)
    assert (directory / "chat_template.jinja").read_text(encoding="utf-8") == chat_template()
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        # The thinking of turns before the last user's message is left out.
        ({}, START + "</think>" + CALLS + "<|assistant|></think>Done.<|user|>Thanks"),
        (
            {"clear_thinking": False, "add_generation_prompt": True},
            START + "<think>Twice, then.</think>" + CALLS + "<|assistant|><think>Both came.</think>Done.<|user|>Thanks"
            "<|assistant|><think>",
        ),
        (
            {"enable_thinking": False, "add_generation_prompt": True},
            START + "</think>" + CALLS + "<|assistant|></think>Done.<|user|>Thanks<|assistant|></think>",
        ),
    ],
)
def test_known_conversation(
    transformers_tokenizer: PreTrainedTokenizerBase, modes: dict[str, bool], expected: str
) -> None:
    specs = [function("ping", n={"type": "integer"})]
    rendered = render(tokenizer(), messages_from_openai(TALK), tools_from_openai(specs), **modes)
    assert tokenizer().decode(rendered.ids) == expected
    assert transformers_tokenizer.apply_chat_template(TALK, tools=specs, tokenize=False, **modes) == expected


@given(conversation=conversations(HOSTILE), specs=tool_lists(HOSTILE), modes=MODES)
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_template_and_renderer_give_the_same_bytes(
    transformers_tokenizer: PreTrainedTokenizerBase,
    conversation: list[dict[str, Any]],
    specs: list[dict[str, Any]],
    modes: dict[str, bool],
) -> None:
    ours = render(tokenizer(), messages_from_openai(conversation), tools_from_openai(specs), **modes)
    theirs = transformers_tokenizer.apply_chat_template(
        decoded(conversation), tools=specs or None, tokenize=False, **modes
    )
    assert tokenizer().decode_bytes(ours.ids) == theirs.encode()


@given(conversation=conversations(PLAIN), specs=tool_lists(PLAIN), modes=MODES)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_they_give_the_same_ids_where_no_text_spells_a_special_token(
    transformers_tokenizer: PreTrainedTokenizerBase,
    conversation: list[dict[str, Any]],
    specs: list[dict[str, Any]],
    modes: dict[str, bool],
) -> None:
    ours = render(tokenizer(), messages_from_openai(conversation), tools_from_openai(specs), **modes)
    theirs = transformers_tokenizer.apply_chat_template(
        decoded(conversation), tools=specs or None, tokenize=True, return_dict=False, **modes
    )
    assert list(ours.ids) == theirs


def test_template_does_not_depend_on_how_its_blanks_are_trimmed() -> None:
    given = {"messages": decoded(TALK), "tools": [function("ping")], "add_generation_prompt": True}
    made = set()
    for trim in (True, False):
        environment = Environment(trim_blocks=trim, lstrip_blocks=trim)
        environment.filters["tojson"] = lambda value, ensure_ascii: (
            f"<{sorted(value) if isinstance(value, dict) else value}>"
        )
        made.add(environment.from_string(chat_template()).render(**given))
    assert len(made) == 1


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "robot", "content": "x"}, "role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "not text"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
            "Decode the arguments",
        ),
    ],
)
def test_template_refuses_what_it_cannot_render(
    transformers_tokenizer: PreTrainedTokenizerBase, message: dict[str, Any], expected: str
) -> None:
    with pytest.raises(Exception, match=expected):
        transformers_tokenizer.apply_chat_template([message], tokenize=False)


def test_template_travels_with_a_checkpoint(tmp_path: Path) -> None:
    tokenizer().save(tmp_path / "a")
    load_tokenizer(tmp_path / "a").save(tmp_path / "b")
    assert (tmp_path / "b/chat_template.jinja").read_bytes() == (tmp_path / "a/chat_template.jinja").read_bytes()
