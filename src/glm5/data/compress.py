"""What a general compressor makes of a text: the figure that a language model's bits per byte stands beside.

Read next: `glm5.data.loader`, which counts the bytes that a model's loss is divided by.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable

from glm5.data.corpus import Document
from glm5.utils.errors import DataError


def xz_bits_per_byte(documents: Iterable[Document]) -> float:
    """Compressed bits per byte of text, each document on its own as by `xz -9e`, weighted by size.

    The container's header and checksum count, as a model's end-of-text token does.

    Raises:
        DataError: there is no text.
    """
    compressed = size = 0
    for document in documents:
        data = document.text.encode()
        compressed += len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
        size += len(data)
    if not size:
        raise DataError("no text to compress", "Give at least one document that is not empty")
    return 8 * compressed / size
