"""An engine in a program of one's own: `LLM(path).generate([...])`. Read next: `engine`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from glm5.model.weights import load_model
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.fold import Folded
from glm5.serve.request import Delta, Request, SamplingParams
from glm5.text.tokenizer import Tokenizer, load_tokenizer
from glm5.utils.devices import resolve_device
from glm5.utils.errors import UserError
from glm5.utils.progress import Progress


@dataclass
class Answer(Folded):
    """One answer to one prompt.

    Args:
        text: of the ids, without control tokens and cut at a stop string.
    """

    text: str = ""


class LLM:
    """A checkpoint, ready to answer many prompts at a time.

    Args:
        path: the checkpoint's directory. device, dtype: as `glm5.load_model`; auto is a GPU if there is one.
        settings: fields of `EngineConfig`.

    Raises:
        UserError: the checkpoint or a setting cannot be used.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "auto",
        dtype: torch.dtype | str | None = None,
        **settings: object,
    ) -> None:
        unknown = settings.keys() - EngineConfig.__dataclass_fields__.keys()
        if unknown:
            raise UserError(
                f"{sorted(unknown)[0]}: no such setting", f"Known: {', '.join(EngineConfig.__annotations__)}"
            )
        self.tokenizer: Tokenizer = load_tokenizer(path)
        model = load_model(path, device=resolve_device(device), dtype=dtype)
        self.engine = Engine(model, replace(EngineConfig(), **settings), self.tokenizer)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[list[Answer]]:
        """Answer every prompt.

        Args:
            prompts: texts, which get GLM's prefix `[gMASK]<sop>`, or ids, which are taken as they are.
            params: for all, or one for each.
            progress: show a bar.

        Returns:
            For each prompt in order its n answers.

        Raises:
            UserError: a prompt or setting cannot be served; nothing has run then.
        """
        if isinstance(prompts, str):
            raise UserError("prompts: one text", "Give a list of prompts")
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else params
        if len(each) != len(prompts):
            raise UserError(f"params: {len(each)} for {len(prompts)} prompts", "Give one for all, or one for each")
        requests = [Request(self._ids(prompt), p) for prompt, p in zip(prompts, each, strict=True)]
        answers = {request.rid: [Answer() for _ in range(request.params.n)] for request in requests}
        added: list[str] = []
        try:
            for request in requests:
                self.engine.add(request)
                added.append(request.rid)
            ended, total = 0, sum(p.n for p in each)
            with Progress("generate", total) if progress else nullcontext() as bar:
                for delta in self._deltas(set(answers)):
                    answers[delta.rid][delta.index].add(delta)
                    ended += delta.finish is not None
                    if bar is not None:
                        bar.update(ended)
        except BaseException:
            for rid in added:
                self.engine.abort(rid)
            raise
        for request in requests:
            for answer in answers[request.rid]:
                self._spell(answer, request.params)
        return [answers[request.rid] for request in requests]

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return [*self.tokenizer.prefix_ids, *self.tokenizer.encode(prompt)]
        try:
            return list(prompt)
        except TypeError:
            raise UserError(f"prompts: {prompt!r} is no prompt", "Give texts, or sequences of ids") from None

    def _deltas(self, rids: set[str]) -> Iterator[Delta]:
        step = (lambda: self.engine.advance(_nothing)) if self.engine.overlap else self.engine.step
        while self.engine.has_work:
            for delta in step():
                if delta.rid in rids:
                    yield delta

    def _spell(self, answer: Answer, params: SamplingParams) -> None:
        ids = answer.ids
        if answer.finish is not None and ids and answer.finish.matched == ids[-1] and not params.no_stop_trim:
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_control=True)
        answer.text = text[: len(text) - answer.trim]


def _nothing() -> None:
    """Whoever calls `advance` again at once need not be told that a step has run."""
