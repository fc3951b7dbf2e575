"""The chat format as a Jinja template, which every saved tokenizer carries for other programs.

The text is in `chat_template.jinja` beside this file. Our own programs render with `glm5.text.chat`; a test holds both
to the same bytes. Read next: `chat`.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def chat_template() -> str:
    """The template's text."""
    return files("glm5.text").joinpath("chat_template.jinja").read_text(encoding="utf-8")
