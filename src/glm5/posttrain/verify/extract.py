"""Where in a response the final answer is. Read next: `maths`, `short`."""

from __future__ import annotations

import re

_SAYS = re.compile(r"(?:final\s+answer|answer)\s*(?:is|:|=)+\s*:?\s*", re.IGNORECASE)
_BOX_TOKENS = re.compile(r"<\|begin_of_box\|>(.*?)<\|end_of_box\|>", re.DOTALL)
LONGEST = 400  # characters: what is longer is no answer but a text


def without_thinking(response: str) -> str:
    """What follows the last `</think>`, if there is one."""
    return response.rpartition("</think>")[2]


def final_answer(response: str) -> str | None:
    r"""The answer that a response ends on, or None where it names none.

    The last `\boxed{…}`, or what GLM's last box tokens hold. Where there is no box: what stands behind the last "answer
    is", to the end of its sentence; else the whole response, if it is one short line. A number somewhere in a text is
    no answer: whoever takes the last one rewards lists of guesses.
    """
    text = without_thinking(response)
    boxed = last_box(text)
    if boxed is not None:
        return _tidy(boxed)
    said = [m.end() for m in _SAYS.finditer(text)]
    if said:
        rest = text[said[-1] :].lstrip().splitlines()
        return _tidy(re.split(r"[.!?](?=\s|$)", rest[0])[0]) if rest else None
    whole = text.strip()
    return _tidy(whole) if whole and "\n" not in whole and len(whole) <= LONGEST else None


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` or box tokens; braces may nest. An open box is none."""
    found: list[tuple[int, str]] = [(m.start(), m.group(1)) for m in _BOX_TOKENS.finditer(text)]
    for match in re.finditer(r"\\f?boxed\s*\{", text):
        depth, at = 1, match.end()
        while at < len(text) and depth:
            if text[at] == "\\":
                at += 1
            elif text[at] in "{}":
                depth += 1 if text[at] == "{" else -1
            at += 1
        if not depth:
            found.append((match.start(), text[match.end() : at - 1]))
    return max(found)[1] if found else None


def _tidy(text: str) -> str | None:
    text = text.strip().strip("*").strip()
    return text if 0 < len(text) <= LONGEST else None
