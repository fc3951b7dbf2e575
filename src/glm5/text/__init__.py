"""Text to tokens and back. Read next: `tokenizer`."""

from glm5.text.stream import StreamDecoder
from glm5.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["StreamDecoder", "Tokenizer", "load_tokenizer"]
