"""Teachers of distillation that engines serve, as the report has them: ids in, log-probabilities out.

    EngineTeacher     an engine in this process, of a checkpoint
    ServedTeacher     one elsewhere, behind `glm5 serve` or whatever speaks SGLang's `/generate`

An engine tells of every id of a text how likely the model found it, and of the K likeliest ids there; both of the
model's own distribution, at temperature 1 over all ids. On several ranks each asks about its share of the texts.
Source: report, section 3.5 (inference engines of the earlier stages). Read next: `distill`.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.posttrain.rows import PolicyRows
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.request import Request, SamplingParams
from glm5.text.tokenizer import Tokenizer
from glm5.train.ranks import Ranks
from glm5.utils.errors import ConfigError, UserError

KEY = "GLM5_TEACHER_KEY"  # the environment variable with a server's key
MOST = 64  # ids that an engine names at a place
PROBE = "Ids: 0123456789 def f(x): return [x] # Größe, 数据 \n\t"


@dataclass(frozen=True)
class Told:
    """Of a text of L ids, for all but its first: log-probabilities [L - 1], and of the K likeliest ids at each place
    ids and log-probabilities [L - 1, K]."""

    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @classmethod
    def of(cls, logprobs: Sequence[float], top: Sequence[Sequence[tuple[int, float]]]) -> Told:
        """From figures of each place. Copies: the tensors lie on the CPU."""
        pairs = torch.tensor(top, dtype=torch.float64).view(len(logprobs), len(top[0]) if top else 0, 2)
        return cls(torch.tensor(logprobs, dtype=torch.float32), pairs[..., 0].long(), pairs[..., 1].float())


class Teacher(Protocol):
    """Whoever tells log-probabilities.

    Attributes:
        context: a text must have fewer ids; None where that is not known.
        beat: called again and again while it tells.
    """

    context: int | None
    beat: Callable[[], None]

    def tell(self, texts: Sequence[Sequence[int]], top: int) -> list[Told]:
        """Of each text, which has at least two ids. top: how many of the likeliest ids.

        Raises:
            UserError: nobody answers, or the weights are not those that it began with.
        """
        ...


class EngineTeacher:
    """An engine in this process with a checkpoint's weights."""

    def __init__(self, model: GLM5, tokenizer: Tokenizer, memory_gib: float) -> None:
        self.engine = Engine(model.eval(), EngineConfig(memory_gib=memory_gib, overlap=False), tokenizer)
        self.context: int | None = self.engine.context
        self.beat: Callable[[], None] = lambda: None

    def tell(self, texts: Sequence[Sequence[int]], top: int) -> list[Told]:
        params = SamplingParams(max_new_tokens=1, temperature=0.0, prompt_logprobs=top)
        for number, ids in enumerate(texts):
            self.engine.add(Request(ids, params, rid=str(number)))
        found: dict[int, Told] = {}
        while self.engine.has_work:
            self.beat()
            for delta in self.engine.step():
                if delta.prompt_info:
                    known = [info for info in delta.prompt_info if info is not None]
                    found[int(delta.rid)] = Told.of([x.logprob for x in known], [x.top for x in known])
                if delta.finish is not None and delta.finish.type == "error":
                    raise UserError(f"a teacher's engine failed: {delta.finish.message}", "Look at its checkpoint")
        return [found[number] for number in range(len(texts))]


class Refused(UserError):
    """A server that is there does not do what it is asked."""


class ServedTeacher:
    """An engine behind an address.

    Args:
        url: of the server. timeout_s: of each request. tries: of each, with growing pauses. batch: texts of a request.
        at_once: requests at a time.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 600.0, tries: int = 6, batch: int = 16, at_once: int = 4
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("teachers", url, "must be http://HOST:PORT")
        self.url, self.timeout_s, self.tries = url.rstrip("/"), timeout_s, tries
        self.batch, self.at_once = batch, at_once
        self.version: str | None = None  # of the weights, once it is known
        self.context: int | None = None  # likewise, if the server tells
        self.identity: dict[str, str] = {}  # likewise, see `check`
        self.beat: Callable[[], None] = lambda: None

    def check(self, tokenizer: Tokenizer) -> dict[str, str]:
        """Who it is: the `model`'s name, the `version` of its weights, and a checksum of all `weights`, empty where the
        server has none. All it tells later must come from the same.

        Raises:
            UserError: nobody answers. ConfigError: it reads other ids than this tokenizer.
        """
        said = self._ask("/tokenize", {"prompt": PROBE, "add_special_tokens": False})
        ids, self.context = said["tokens"], said.get("max_model_len")
        if ids != tokenizer.encode(PROBE):
            raise ConfigError("teachers", self.url, "its tokenizer is not the policy's: ids would differ")
        self.tell([[*tokenizer.prefix_ids, *ids][:8]], 0)
        self.identity = self._introduced()
        return self.identity

    def _introduced(self) -> dict[str, str]:
        """Who it says it is. A server of another kind may know neither route."""
        found = {"model": "", "version": self.version or "", "weights": ""}
        with suppress(Refused):
            found["model"] = str(self._ask("/get_model_info", None, anew=False).get("model_path", ""))
        with suppress(Refused):
            sums = self._ask("/weights_checker", {"action": "checksum"}, anew=False).get("checksums")
            if sums:
                lines = "".join(f"{name} {value}\n" for name, value in sorted(sums.items()))
                found["weights"] = hashlib.sha256(lines.encode()).hexdigest()
        return found

    def tell(self, texts: Sequence[Sequence[int]], top: int) -> list[Told]:
        parts = [texts[at : at + self.batch] for at in range(0, len(texts), self.batch)]
        with ThreadPoolExecutor(self.at_once) as threads:
            return [told for part in threads.map(lambda part: self._tell(part, top), parts) for told in part]

    def _tell(self, texts: Sequence[Sequence[int]], top: int) -> list[Told]:
        asked = {
            "input_ids": [list(ids) for ids in texts],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top,
        }
        found = []
        for ids, answer in zip(texts, self._ask("/generate", asked), strict=True):
            meta = answer["meta_info"]
            version = str(meta.get("weight_version", ""))
            if self.version is None:
                self.version = version
            if version != self.version:
                what = f"the teacher at {self.url} has weights {version!r} now, and had {self.version!r}"
                raise UserError(what, "Bring them back, and start again: the run goes on from its last checkpoint")
            pairs = meta["input_token_logprobs"][1:]
            if [id for _, id, *_ in pairs] != list(ids[1:]):
                raise UserError(f"the teacher at {self.url} tells of other ids than it was asked about", "Look at it")
            likeliest = meta["input_top_logprobs"][1:] if top else [[] for _ in pairs]
            tops = [[(id, value) for value, id, *_ in place] for place in likeliest]
            found.append(Told.of([value for value, *_ in pairs], tops))
        return found

    def _ask(self, path: str, body: dict[str, Any] | None, *, anew: bool = True) -> Any:
        """An answer's JSON; tries again where nobody answers or the server is busy. Without a body it is a GET.

        Args:
            anew: ask who it is where it was not there for a while: another may have been started in its place.
        """
        data, key = None if body is None else json.dumps(body).encode(), os.environ.get(KEY, "")
        was_gone = False
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        for attempt in range(self.tries):
            self.beat()
            request = urllib.request.Request(self.url + path, data, headers)  # noqa: S310 (http or https, checked above)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:  # noqa: S310
                    found = json.load(answer)
                if was_gone and anew and self.identity and (now := self._introduced()) != self.identity:
                    other = next(name for name in now if now[name] != self.identity[name])
                    what = f"the teacher at {self.url} came back with another {other}"
                    raise UserError(what, "Start the one that was there; the run goes on from its last checkpoint")
                return found
            except urllib.error.HTTPError as e:
                said = f"status {e.code}: {e.read()[:300].decode(errors='replace')}"
                if e.code < 500 and e.code != 429:
                    raise Refused(f"the teacher at {self.url} refuses {path}: {said}", "Look at its log") from None
            except (OSError, http.client.HTTPException, ValueError) as e:  # also an answer that is cut off
                said, was_gone = f"{type(e).__name__}: {e}", True
            if attempt < self.tries - 1:
                time.sleep(min(30.0, 0.5 * 4**attempt))
        raise UserError(
            f"the teacher at {self.url} does not answer: {said}",
            "Start it, and give the same command again: the run goes on from its last checkpoint",
        )


def told_rows(
    teacher: Teacher, texts: Sequence[Sequence[int]], numbers: Sequence[int], rows: PolicyRows, top: int, ranks: Ranks
) -> tuple[Tensor, Tensor, Tensor]:
    """What a teacher tells of some rollouts, at the queries that predict their ids.

    Args:
        texts: the ids of rollouts `numbers`, each of which is one trajectory of `rows`. ranks: that share them out.

    Returns:
        log-probabilities fp32 [B, T], and of the K likeliest ids there ids int64 and log-probabilities [B, T, K].
    """
    told = ranks.dealt(texts, lambda mine: teacher.tell(mine, top))
    logprobs_BT = torch.zeros_like(rows.logprobs_BT)
    ids_BTK = rows.input_BT.new_zeros((*rows.input_BT.shape, top))
    top_BTK = logprobs_BT.new_zeros(ids_BTK.shape)
    for number, one in zip(numbers, told, strict=True):
        at_BT = rows.rollout_BT == number
        logprobs_BT[at_BT] = one.logprobs.to(logprobs_BT)
        ids_BTK[at_BT], top_BTK[at_BT] = one.top_ids.to(ids_BTK.device), one.top_logprobs.to(top_BTK)
    return logprobs_BT, ids_BTK, top_BTK
