"""Log-probabilities in the three forms that clients read: OpenAI's for chat, its older one for text, and a prompt's.

One entry an id, always, a stop's included. Read next: `chat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glm5.serve.http.answers import Answer, logprob
from glm5.serve.request import TokenInfo
from glm5.text.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, id: int, as_id: bool = False) -> str:
    """How a token is written: its text, or `token_id:7`, which no two ids share."""
    return f"token_id:{id}" if as_id else tokenizer.decode([id])


def of_chat(
    tokenizer: Tokenizer, ids: Sequence[int], infos: Sequence[TokenInfo], as_id: bool = False
) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content`."""

    def entry(id: int, value: float) -> dict[str, Any]:
        data = list(tokenizer.decode_bytes([id]))
        return {"token": token_text(tokenizer, id, as_id), "logprob": logprob(value), "bytes": data}

    return [
        {**entry(id, info.logprob), "top_logprobs": [entry(other, value) for other, value in info.top]}
        for id, info in zip(ids, infos, strict=True)
    ]


def of_completion(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    infos: Sequence[TokenInfo | None],
    offset: int,
    skip_control: bool,
    as_id: bool = False,
) -> dict[str, Any]:
    """OpenAI's older form: four lists. A prompt's first id follows nothing and has null.

    Args:
        offset: where the text of the first id begins. skip_control: control tokens are no part of the text.
    """
    tokens = [token_text(tokenizer, id, as_id) for id in ids]
    offsets = []
    for id in ids:
        offsets.append(offset)
        offset += len(tokenizer.decode([id], skip_control))
    return {
        "tokens": tokens,
        "token_logprobs": [logprob(info.logprob) if info else None for info in infos],
        "top_logprobs": [
            {token_text(tokenizer, other, as_id): logprob(value) for other, value in info.top} if info else None
            for info in infos
        ],
        "text_offset": offsets,
    }


def of_prompt(tokenizer: Tokenizer, answer: Answer) -> list[dict[str, Any] | None]:
    """For each id of the prompt its log-probability and the likeliest ones; null for the first, after nothing."""
    out: list[dict[str, Any] | None] = []
    for id, info in zip(answer.request.input_ids, answer.prompt_info, strict=False):
        if info is None:
            out.append(None)
            continue
        values = {id: info.logprob, **dict(info.top)}
        out.append(
            {str(k): {"logprob": logprob(v), "decoded_token": token_text(tokenizer, k)} for k, v in values.items()}
        )
    return out
