"""Weights over a process group: another process joins, sends, and the engine answers with what was sent."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from glm5.model.weights import disk_tensors
from glm5.serve import weights
from glm5.serve.client import WeightGroup, WeightUpdate
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.serve.request import Request, SamplingParams
from glm5.serve.runner import Runner
from glm5.utils.errors import CheckpointError, UserError
from support.scripted import chat_tokenizer
from support.tiny import tiny_model

SENDER = """
import sys, torch
from glm5.model.weights import disk_tensors
from glm5.serve.client import WeightGroup
from glm5.serve.weights import Joined
from support.tiny import tiny_model

torch.set_num_threads(1)
group = Joined(WeightGroup("127.0.0.1", int(sys.argv[1]), 0, 2, "trainer", "gloo"))
for name, tensor in disk_tensors(tiny_model(1)):
    group.broadcast(tensor.contiguous().bfloat16())
group.broadcast(torch.ones(3))
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_sender(port: int, program: str) -> subprocess.Popen[str]:
    paths = [p for p in sys.path if p]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{program}", str(port)]
    as_by_torchrun = os.environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=as_by_torchrun)


def test_a_trainer_sends_its_weights() -> None:
    port = free_port()
    sender = start_sender(port, SENDER)
    try:
        engine = Engine(tiny_model(0).eval(), EngineConfig(pages=4, context=128))
        engine.join_group(WeightGroup("127.0.0.1", port, 1, 2, "trainer", "gloo"))
        with pytest.raises(UserError, match="is in use"):
            engine.join_group(WeightGroup("127.0.0.1", port, 1, 2, "trainer", "gloo"))
        sent = dict(disk_tensors(tiny_model(1)))
        names = tuple(sent)
        update = WeightUpdate(
            "distributed",
            names=names,
            dtypes=("bfloat16",) * len(names),
            shapes=tuple(tuple(t.shape) for t in sent.values()),
            group_name="trainer",
            weight_version="1",
        )
        engine.update_weights(update)
        for name, tensor in disk_tensors(engine.model):
            assert torch.equal(tensor, sent[name].bfloat16().float()), name
        assert engine.weight_version == "1"
        before = engine.checksum()
        with pytest.raises(CheckpointError, match=r"unknown: no\.such"):
            engine.update_weights(
                WeightUpdate(
                    "distributed", names=("no.such",), dtypes=("float32",), shapes=((3,),), group_name="trainer"
                )
            )
        assert engine.checksum() == before
        engine.leave_group("trainer")
        with pytest.raises(UserError, match="was not joined"):
            engine.update_weights(update)
    finally:
        _, said = sender.communicate(timeout=60)
    assert sender.returncode == 0, said


LATE = """
import sys
from glm5.serve.client import WeightGroup
from glm5.serve.weights import Joined
from glm5.model.weights import disk_tensors
from support.tiny import tiny_model

group = Joined(WeightGroup("127.0.0.1", int(sys.argv[1]), 0, 2, "trainer", "gloo"))
sys.stdin.readline()  # until it is told to send
for name, tensor in disk_tensors(tiny_model(1)):
    group.broadcast(tensor.contiguous())
sys.stdin.readline()
"""


def test_answers_go_on_while_a_group_is_joined_and_while_it_sends() -> None:
    sent = dict(disk_tensors(tiny_model(1)))
    shapes = tuple(tuple(t.shape) for t in sent.values())
    update = WeightUpdate(
        "distributed",
        names=tuple(sent),
        dtypes=("float32",) * len(sent),
        shapes=shapes,
        group_name="trainer",
        weight_version="1",
    )
    asked = [Request([5, 6, 7], SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)) for _ in range(4)]

    async def ids(runner: Runner, request: Request) -> list[int]:
        return [id async for delta in await runner.generate(request) for id in delta.ids]

    async def told(sender: subprocess.Popen[str]) -> None:
        assert sender.stdin is not None
        sender.stdin.write("\n")
        sender.stdin.flush()

    async def main() -> None:
        engine = Engine(tiny_model(0).eval(), EngineConfig(pages=8, context=128))
        runner = Runner(engine, chat_tokenizer(), "m")
        await runner.start()
        port = free_port()
        joining = asyncio.create_task(runner.join_group(WeightGroup("127.0.0.1", port, 1, 2, "trainer", "gloo")))
        sender: subprocess.Popen[str] | None = None
        try:
            async with asyncio.timeout(120):
                before = await ids(runner, asked[0])  # nobody is there to be joined
                assert not joining.done()
                with pytest.raises(UserError, match="not joined yet"):
                    await runner.update_weights(update)
                sender = start_sender(port, LATE)
                await joining
                updating = asyncio.create_task(runner.update_weights(update))
                assert await ids(runner, asked[1]) == before  # nothing was sent
                assert runner.weight_version == "0"
                await told(sender)
                await updating
                assert runner.weight_version == "1"
                assert await ids(runner, asked[2]) != before
                for name, tensor in disk_tensors(engine.model):
                    assert torch.equal(tensor, sent[name]), name
                await runner.leave_group("trainer")
                await told(sender)
        finally:
            if sender is not None:
                _, said = sender.communicate(timeout=60)
                assert sender.returncode == 0, said
            await runner.stop()
            engine.close()

    asyncio.run(main())


def test_a_sender_that_goes_is_an_error_and_the_weights_stay() -> None:
    port = free_port()
    sender = start_sender(port, LATE.partition("for name")[0])  # it joins, and is gone when it is told to send
    try:
        engine = Engine(tiny_model(0).eval(), EngineConfig(pages=4, context=128))
        engine.join_group(WeightGroup("127.0.0.1", port, 1, 2, "trainer", "gloo"))
        before = engine.checksum()
        _, said = sender.communicate("\n", timeout=60)
        assert sender.returncode == 0, said
        names = ("model.norm.weight",)
        shape = (engine.model.config.hidden_size,)
        update = WeightUpdate(
            "distributed", names=names, dtypes=("float32",), shapes=(shape,), group_name="trainer", weight_version="1"
        )
        with pytest.raises(UserError, match=r"model\.norm\.weight did not come over trainer"):
            engine.update_weights(update)
        assert (engine.checksum(), engine.weight_version) == (before, "0")
        engine.leave_group("trainer")
    finally:
        sender.kill()
        sender.wait()


def test_a_group_that_nobody_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails in bounded time, and its name is free again."""
    monkeypatch.setattr(weights, "REACH_SECONDS", 0.5)
    source = weights.WeightSource(tiny_model(0).eval())
    for address in ("127.0.0.1", "no-such-host.invalid"):
        for _ in range(2):
            with pytest.raises(UserError, match=f"cannot join trainer at {address}"):
                source.join(WeightGroup(address, free_port(), 1, 2, "trainer", "gloo"))


@pytest.mark.parametrize("listens", [False, True], ids=["nobody", "not all come"])
def test_a_group_that_is_given_up_while_it_is_joined(listens: bool) -> None:
    """Whoever waits for it is told at once, also where torch itself waits on, and the name is free again."""
    source = weights.WeightSource(tiny_model(0).eval())
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if listens else None
            port = free_port() if store is None else store.port
            joining = pool.submit(source.join, WeightGroup("127.0.0.1", port, 1, 2, "trainer", "gloo"))
            while "trainer" not in source._groups or (store is not None and store.num_keys() == 0):
                assert not joining.done()
            with pytest.raises(UserError, match="not joined yet"):
                source.receive(WeightUpdate("distributed", group_name="trainer"))
            source.leave("trainer")
            with pytest.raises(UserError, match="given up"):
                joining.result(timeout=60)
    with pytest.raises(UserError, match="was not joined"):
        source.leave("trainer")


def test_checksums_hold_few_tensors_at_a_time() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    most = [0]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(100):
            one = torch.full((3,), float(i))
            made.append(weakref.ref(one))
            most[0] = max(most[0], sum(ref() is not None for ref in made))
            yield f"{i}", one

    sums = weights.checksums_of(tensors())
    assert sums == {f"{i}": weights.checksum_of(torch.full((3,), float(i))) for i in range(100)}
    assert list(sums) == [f"{i}" for i in range(100)]
    assert most[0] <= 2 * weights.HASHERS + 3


@pytest.mark.filterwarnings("ignore:Device capability")
def test_a_group_of_an_unknown_backend_leaves_its_name_free() -> None:
    source = weights.WeightSource(tiny_model(0).eval())
    for _ in range(2):
        with pytest.raises(UserError, match=r"cannot join trainer .*backend"):
            source.join(WeightGroup("127.0.0.1", free_port(), 0, 1, "trainer", "nvlink"))


def test_a_group_that_is_there_after_it_was_given_up_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    may_join, left = threading.Event(), threading.Event()

    class Late:
        def __init__(self, group: WeightGroup, given_up: Callable[[], bool]) -> None:
            assert may_join.wait(60)
            assert given_up()

        def leave(self) -> None:
            left.set()

    monkeypatch.setattr(weights, "Joined", Late)
    source = weights.WeightSource(tiny_model(0).eval())
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(source.join, WeightGroup("127.0.0.1", 1, 1, 2, "trainer", "gloo"))
        while "trainer" not in source._groups:
            assert not joining.done()
        source.leave("trainer")
        with pytest.raises(UserError, match="given up"):
            joining.result(timeout=60)
    assert not left.is_set()
    may_join.set()
    assert left.wait(60)
