"""Corpora to batches: collect, deduplicate, tokenize, pack, load. Needs numpy and no torch. Read next: `corpus`."""

from glm5.data.compress import xz_bits_per_byte
from glm5.data.corpus import Corpus, Document, collect_files, read_jsonl, split_held_out, stdlib_sources
from glm5.data.filters import drop_copies_of, drop_exact_copies, drop_near_copies
from glm5.data.loader import Batch, Loader, TokenDataset
from glm5.data.shards import TokenStore, write_tokens

__all__ = [
    "Batch",
    "Corpus",
    "Document",
    "Loader",
    "TokenDataset",
    "TokenStore",
    "collect_files",
    "drop_copies_of",
    "drop_exact_copies",
    "drop_near_copies",
    "read_jsonl",
    "split_held_out",
    "stdlib_sources",
    "write_tokens",
    "xz_bits_per_byte",
]
