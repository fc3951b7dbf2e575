"""An engine that runs until it has nothing left to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from glm5.serve.engine import Engine
from glm5.serve.llm import Answer
from glm5.serve.request import Request


def drained(engine: Engine) -> dict[tuple[str, int], Answer]:
    """All answers that it gives, by their request's id and their number; its pages are right after every step."""
    found: dict[tuple[str, int], Answer] = defaultdict(Answer)
    while engine.has_work:
        for delta in engine.advance(lambda: None) if engine.overlap else engine.step():
            found[delta.rid, delta.index].add(delta)
        engine.scheduler.check()
    return found


def answered(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """Each request's first answer, when the engine has run all of them."""
    for request in requests:
        engine.add(request)
    found = drained(engine)
    return [found[request.rid, 0] for request in requests]
