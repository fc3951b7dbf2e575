"""The engine and its server: a prompt becomes tokens. Read next: `request`, `engine`.

The public names are loaded on first use, since the server's front needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "LLM": "glm5.serve.llm",
    "Engine": "glm5.serve.engine",
    "EngineConfig": "glm5.serve.config",
    "Request": "glm5.serve.request",
    "SamplingParams": "glm5.serve.request",
}

__all__ = ["LLM", "Engine", "EngineConfig", "Request", "SamplingParams"]

if TYPE_CHECKING:
    from glm5.serve.config import EngineConfig
    from glm5.serve.engine import Engine
    from glm5.serve.llm import LLM
    from glm5.serve.request import Request, SamplingParams


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'glm5.serve' has no attribute {name!r}")
