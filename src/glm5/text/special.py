"""GLM's special tokens and the regular expression that splits text before BPE.

Source: the tokenizer that GLM-4.5, GLM-4.7 and GLM-5 share. There the 36 tokens below follow 154,820 ordinary
ones, in this order, which gives the public `eos_token_id` [154820, 154827, 154829] of GLM-5's config
(`<|endoftext|>`, `<|user|>`, `<|observation|>`); the embedding is padded to 154,880 rows. A tokenizer trained
here keeps the order but puts them first, so that their ids do not depend on the vocabulary's size. Nothing may
rely on either layout: ask the tokenizer. Read next: `tokenizer`.
"""

from __future__ import annotations

# Tokens that no text contains: prefixes, roles, modalities. A decoder may skip these.
CONTROL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
)
# Tokens that structure an answer. Published as not special, because whoever reads the answer needs them.
STRUCTURE_TOKENS = (
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
SPECIAL_TOKENS = CONTROL_TOKENS + STRUCTURE_TOKENS

# Merges never cross a boundary of this split. It is GLM's (cl100k's shape): leftmost alternative first.
SPLIT = "|".join(
    (
        r"'(?i:s|t|m|d|re|ve|ll)",  # an English contraction
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with the one space or sign before it
        r"\p{N}{1,3}",  # digits, at most three, counted from the left
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs, with the space before and the line ends after them
        r"\s*[\r\n]+",  # blank up to and with line ends
        r"\s+(?!\S)",  # blank, all but the one character that belongs to the next word
        r"\s+",
    )
)
