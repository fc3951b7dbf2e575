"""A small checkpoint for servers in processes of their own, and asking them."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from glm5.model.glm5 import GLM5
from glm5.model.presets import nano
from glm5.model.weights import save_model
from glm5.text.tokenizer import Tokenizer


def save_small(path: Path) -> Path:
    """Two narrow layers of `nano`, random, with a tokenizer of 320 ids."""
    tokenizer = Tokenizer.train([f"def hello(name):\n    print(name, {n})\n" for n in range(400)], 320)
    shape = nano(vocab_size=320, num_hidden_layers=2, hidden_size=32, max_position_embeddings=512)
    save_model(GLM5(shape, seed=0), path)
    tokenizer.save(path)
    return path


def ask(address: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """What the server answers, as JSON; an empty answer is None."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310
        return json.loads(answer.read() or b"null")
