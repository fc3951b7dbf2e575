"""glm5: GLM-5 (arXiv:2602.15763) as one Python package.

The public names are loaded on first use, so that `import glm5` (and `glm5 --help`) costs no torch import.
Read next: `glm5.model.config` for the shape of the model, `glm5.model.glm5` for its forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "ModelConfig": "glm5.model.config",
    "GLM5": "glm5.model.glm5",
    "load_model": "glm5.model.weights",
    "save_model": "glm5.model.weights",
    "load_tokenizer": "glm5.text.tokenizer",
}

__all__ = ["GLM5", "ModelConfig", "__version__", "load_model", "load_tokenizer", "save_model"]

if TYPE_CHECKING:
    from glm5.model.config import ModelConfig
    from glm5.model.glm5 import GLM5
    from glm5.model.weights import load_model, save_model
    from glm5.text.tokenizer import load_tokenizer


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'glm5' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
