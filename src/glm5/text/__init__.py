"""Text to tokens and back, and conversations to ids and back. Read next: `tokenizer`, `messages`, `chat`, `parser`."""

from glm5.text.chat import Rendered, render, render_for_training
from glm5.text.messages import Message, Tool, ToolCall, messages_from_openai, messages_to_openai, tools_from_openai
from glm5.text.parser import Parsed, Parser, parse
from glm5.text.stream import StreamDecoder
from glm5.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Message",
    "Parsed",
    "Parser",
    "Rendered",
    "StreamDecoder",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "load_tokenizer",
    "messages_from_openai",
    "messages_to_openai",
    "parse",
    "render",
    "render_for_training",
    "tools_from_openai",
]
