"""Teachers behind engines: they tell what the model itself gives, the policy learns from them, and one that is down,
reads other ids or changes its weights stops the run and no more."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distill import config

from glm5.model.glm5 import GLM5
from glm5.model.weights import load_model
from glm5.posttrain import teachers
from glm5.posttrain.distill import DistillConfig, Distiller, distill, load_teachers
from glm5.posttrain.divergence import reverse_kl, told_kl
from glm5.posttrain.drawing import prompt_of
from glm5.posttrain.losses import glm5_reasoning
from glm5.posttrain.reason import prepare_prompts
from glm5.posttrain.rollouts import Group, Rollouts
from glm5.posttrain.rows import PolicyRows
from glm5.posttrain.teachers import EngineTeacher, ServedTeacher
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.http.app import create_app
from glm5.serve.runner import Runner
from glm5.text import load_tokenizer
from glm5.utils.errors import ConfigError, UserError
from glm5.utils.files import read_json
from glm5.utils.runlog import read_metrics
from support.conversations import tokenizer
from support.serving import served


@contextmanager
def server(checkpoint: str) -> Iterator[tuple[str, Runner]]:
    """A model behind HTTP, as `glm5 serve` has it."""
    t = load_tokenizer(checkpoint)
    engine = Engine(load_model(checkpoint).eval(), EngineConfig(memory_gib=0.02, overlap=False), t)
    runner = Runner(engine, t, "teacher")
    with served(create_app(runner, start=runner.start, stop=runner.stop)) as url:
        yield url, runner


def taught(given: DistillConfig, tmp_path: Path, top: int = 0) -> tuple[PolicyRows, Distiller, list[Group]]:
    """Rows of the same four answers, with what these teachers make of them."""
    model, t = load_model(given.checkpoint), load_tokenizer(given.checkpoint)
    rollouts = Rollouts(model, t, replace(given.rollout, max_new_tokens=6), None, seed=0)
    learner = Distiller(given.learn, model, glm5_reasoning(), rollouts, tmp_path, "")
    learner.teachers, learner.divergence, learner.told = load_teachers(given, ["a", "b"], "cpu"), {}, top
    groups = rollouts.draw(list(enumerate(prepare_prompts(given.prompts, 0).train[:4])))
    batch = []
    for group in groups:
        group.advantages, group.copies = {0: 0.0}, {0: 1}
        batch += group.trajectories(len(batch), 1.0)
    return learner.taught(learner.rows(batch), groups), learner, groups


def test_engines_tell_what_the_model_gives(tmp_path: Path) -> None:
    given = config(tmp_path)
    expected, itself, _ = taught(given, tmp_path)
    with server(given.paths["b"]) as (url, _):
        mixed = replace(given, teachers=(given.teachers[0], f"b={url}"), teacher_engines=True)
        found, learner, _ = taught(mixed, tmp_path, top=5)
        beaten = []
        for name, teacher in learner.teachers.items():
            assert isinstance(teacher, EngineTeacher | ServedTeacher)
            teacher.beat = lambda name=name: beaten.append(name)  # type: ignore[misc]
            teacher.tell([[5, 6, 7]], 0)
    assert set(beaten) == {"a", "b"}, "each says that it gets on"
    assert isinstance(learner.teachers["a"], EngineTeacher)
    assert isinstance(learner.teachers["b"], ServedTeacher)
    torch.testing.assert_close(found.advantages_BT, expected.advantages_BT, rtol=0, atol=1e-4)
    assert float(expected.advantages_BT.abs().max()) > 0.05
    # The likeliest ids stand at the queries of their own rows, and are the teachers' own.
    assert found.told_ids_BTK is not None
    assert found.told_logprobs_BTK is not None
    vocab = tokenizer().vocab_size
    for number, domain in enumerate("ab"):
        teacher = itself.teachers[domain]
        assert isinstance(teacher, GLM5)
        with torch.no_grad():
            own = (expected.hidden(teacher) @ teacher.lm_head.weight.T)[..., :vocab].log_softmax(-1)
        at = expected.mask_BT & (expected.teacher_BT == number)
        assert int(at.sum()) > 4
        likeliest = own[at].topk(5).values
        torch.testing.assert_close(found.told_logprobs_BTK[at], likeliest, rtol=0, atol=1e-4)
        torch.testing.assert_close(own[at].gather(-1, found.told_ids_BTK[at]), likeliest, rtol=0, atol=1e-4)


@pytest.mark.parametrize("divergence", ["drawn", "full"])
def test_the_divergence_from_served_teachers_falls(tmp_path: Path, divergence: Any) -> None:
    given = config(tmp_path)
    # A whole divergence has less noise than those of drawn ids.
    learn = replace(given.learn, steps=8 if divergence == "full" else 14)
    rollout = replace(given.rollout, prompts=32 if divergence == "full" else 48)
    with server(given.paths["b"]) as (url, _):
        served_ = replace(
            given,
            teachers=(given.teachers[0], f"b={url}"),
            teacher_engines=True,
            teacher_memory_gib=0.02,
            divergence=divergence,
            top=8 if divergence == "full" else 0,
            learn=learn,
            rollout=rollout,
        )
        found = distill(served_, lambda _: None)
    records = read_metrics(found.run)
    course = [r["loss" if divergence == "full" else "reverse_kl"] for r in records]
    assert sum(course[-3:]) < 0.75 * sum(course[:3])
    assert all(r["stepped"] == 1 for r in records)
    page = (found.run / "rollouts.html").read_text()
    assert page.count("reward none</h2>") == 4
    assert "ratio 1.0000" in page
    kept = read_json(found.run / "teachers.json")
    assert kept["b"].pop("weights")
    assert kept["b"] == {"model": "teacher", "version": "0"}
    assert list(kept["a"]) == ["model.safetensors"]


def test_a_run_keeps_its_teachers(tmp_path: Path) -> None:
    given = config(tmp_path)
    few = replace(given, learn=replace(given.learn, steps=1, save_every=1))
    distill(few, lambda _: None)
    weights = Path(given.paths["a"]) / "model.safetensors"
    weights.write_bytes((Path(given.paths["b"]) / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"teachers='a=.*not those that this run began with"):
        distill(few, lambda _: None)


def test_a_server_with_other_weights_is_not_taken_for_the_same(tmp_path: Path) -> None:
    given = config(tmp_path)
    few = replace(given, learn=replace(given.learn, steps=1, save_every=1))
    with server(given.paths["b"]) as (url, runner):
        with_server = replace(few, teachers=(given.teachers[0], f"b={url}"))
        distill(with_server, lambda _: None)
        model = runner._engine.model
        with torch.no_grad():  # one number, under the same name and version
            model.lm_head.weight[0, 0] += 1e-3
        with pytest.raises(ConfigError, match=r"teachers='b=http.*the server's weights is not the one"):
            distill(with_server, lambda _: None)


@pytest.mark.usefixtures("hurried")
def test_a_server_that_was_away_says_again_who_it_is() -> None:
    def about(name: str, sums: dict[str, str] | None) -> list[tuple[int, bytes]]:
        told = (404, b"no such route") if sums is None else (200, json.dumps({"checksums": sums}).encode())
        return [(200, json.dumps({"model_path": name}).encode()), told]

    tokens = (200, json.dumps({"tokens": tokenizer().encode(teachers.PROBE)}).encode())
    asked = [*tokenizer().prefix_ids, *tokenizer().encode(teachers.PROBE)][:8]
    first = [tokens, (200, answer(asked)), *about("m", None)]
    same = [(200, b"{torn"), (200, answer([1, 2])), *about("m", None)]
    other = [(200, b"{torn"), (200, answer([1, 2])), *about("n", None)]
    with scripted(*first, *same, *other, (500, b"")) as (url, handler):
        teacher = ServedTeacher(url)
        assert teacher.check(tokenizer()) == {"model": "m", "version": "0", "weights": ""}
        teacher.tell([[1, 2]], 0)
        assert len(handler.said) == len(other) + 1
        with pytest.raises(UserError, match="came back with another model"):
            teacher.tell([[1, 2]], 0)
    sums = about("m", {"b": "2", "a": "1"})
    with scripted(tokens, (200, answer(asked)), *sums, (500, b"")) as (url, _):
        expected = hashlib.sha256(b"a 1\nb 2\n").hexdigest()
        assert ServedTeacher(url).check(tokenizer())["weights"] == expected


# ---------------------------------------------------------------------------------------------------- the formula
def test_a_told_divergence_by_hand() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 5, generator=g, dtype=torch.float64, requires_grad=True) for n in (7, 23))
    teacher = torch.randn(7, 23, generator=g, dtype=torch.float64).log_softmax(-1)
    whole = told_kl(hidden, head, torch.arange(22).repeat(7, 1), teacher[:, :22])
    own = (hidden @ head.T).log_softmax(-1)
    torch.testing.assert_close(whole, (own.exp() * (own - teacher)).sum(-1), rtol=0, atol=1e-5)
    ids = teacher.topk(1).indices
    p, q = own.exp().gather(-1, ids)[:, 0], teacher.exp().gather(-1, ids)[:, 0]
    one = told_kl(hidden, head, ids, teacher.gather(-1, ids), chunk=3)
    torch.testing.assert_close(one, p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log())
    assert bool((one <= whole + 1e-9).all())
    assert bool(torch.autograd.gradcheck(lambda h: told_kl(h, head.detach(), ids, teacher.gather(-1, ids)), hidden))
    # Where both name all ids it is the divergence to the model itself.
    states, theirs = torch.randn(7, 5, generator=g, dtype=torch.float64), torch.randn(23, 5, generator=g).double()
    named = (states @ theirs.T).log_softmax(-1)
    told = told_kl(hidden, head, torch.arange(22).repeat(7, 1), named[:, :22])
    torch.testing.assert_close(told, reverse_kl(hidden, head, states, theirs), rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- faults
CUT = b"<cut>"


class Scripted(BaseHTTPRequestHandler):
    """Answers with a list's first entries: (status, body). A body that ends in `CUT` is said to be longer."""

    said: list[tuple[int, bytes]]

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, body = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.removesuffix(CUT))

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def scripted(*said: tuple[int, bytes]) -> Iterator[tuple[str, type[Scripted]]]:
    handler = type("Handler", (Scripted,), {"said": list(said)})
    there = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=there.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{there.server_address[1]}", handler
    finally:
        there.shutdown()
        there.server_close()
        thread.join()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers.time, "sleep", lambda _: None)


def answer(ids: list[int], version: str = "0", value: float = -1.0) -> bytes:
    pairs = [[None, ids[0], None], *([value, id, None] for id in ids[1:])]
    return json.dumps([{"meta_info": {"weight_version": version, "input_token_logprobs": pairs}}]).encode()


@pytest.mark.usefixtures("hurried")
def test_a_server_that_is_busy_is_asked_again() -> None:
    busy = (503, b"busy"), (200, b"{torn"), (200, b"{" + CUT), (429, b"")
    with scripted(*busy, (200, answer([1, 2, 3]))) as (url, handler):
        (told,) = ServedTeacher(url).tell([[1, 2, 3]], 0)
        assert told.logprobs.tolist() == [-1.0, -1.0]
        assert len(handler.said) == 1


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("said", "match"),
    [
        ((500, b"broken"), "does not answer: status 500: broken"),
        ((400, b"too long"), "refuses /generate: status 400: too long"),
        ((200, answer([1, 2, 4])), "tells of other ids"),
    ],
)
def test_what_ends_a_run_names_the_teacher(said: tuple[int, bytes], match: str) -> None:
    with scripted(said) as (url, _), pytest.raises(UserError, match=match):
        ServedTeacher(url).tell([[1, 2, 3]], 0)


@pytest.mark.usefixtures("hurried")
def test_weights_that_change_are_noticed() -> None:
    with scripted((200, answer([1, 2], "0")), (200, answer([1, 2], "1"))) as (url, _):
        teacher = ServedTeacher(url)
        teacher.tell([[1, 2]], 0)
        with pytest.raises(UserError, match="has weights '1' now, and had '0'"):
            teacher.tell([[1, 2]], 0)


@pytest.mark.usefixtures("hurried")
def test_nobody_there_and_other_ids() -> None:
    with scripted((200, b"{}")) as (url, _):
        pass
    with pytest.raises(UserError, match="does not answer: URLError"):
        ServedTeacher(url).tell([[1, 2]], 0)
    with (
        scripted((200, b'{"tokens": [1, 2]}')) as (url, _),
        pytest.raises(ConfigError, match="its tokenizer is not the policy's"),
    ):
        ServedTeacher(url).check(tokenizer())


def test_answers_that_a_teachers_engine_cannot_read_are_refused_at_once(tmp_path: Path) -> None:
    given = replace(config(tmp_path), teacher_engines=True, teacher_memory_gib=0.02)
    context = load_model(given.checkpoint).config.max_position_embeddings
    t, prompts = load_tokenizer(given.checkpoint), prepare_prompts(given.prompts, given.learn.seed).train
    longest = max(len(prompt_of(t, p.messages, p.tools, thinking=given.rollout.thinking)) for p in prompts)
    room = context - longest  # of an answer, in the policy's own engine
    with pytest.raises(ConfigError, match=rf"rollout\.max_new_tokens={room}: must be at most {room - 1}:"):
        distill(replace(given, rollout=replace(given.rollout, max_new_tokens=room)), lambda _: None)


def test_settings_that_engines_cannot_tell_of(tmp_path: Path) -> None:
    given = config(tmp_path)
    with pytest.raises(ConfigError, match=r"rollout\.temperature"):
        replace(given, teacher_engines=True, rollout=replace(given.rollout, temperature=0.7))
    with pytest.raises(ConfigError, match=r"top.*\[1, 64\]"):
        replace(given, teachers=("a=http://x:1", given.teachers[1]), divergence="full")
    with pytest.raises(ConfigError, match="teacher_memory_gib"):
        replace(given, teacher_memory_gib=0.0)
    with pytest.raises(ConfigError, match="must be http"):
        ServedTeacher("ftp://x")
