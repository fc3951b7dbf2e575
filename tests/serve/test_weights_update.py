"""Weights over a process group: another process joins, sends, and the engine answers with what was sent."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch

from glm5.model.weights import disk_tensors
from glm5.serve.client import WeightGroup, WeightUpdate
from glm5.serve.config import EngineConfig
from glm5.serve.engine import Engine
from glm5.utils.errors import CheckpointError, UserError
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


def test_a_trainer_sends_its_weights() -> None:
    port, paths = free_port(), [p for p in sys.path if p]
    sender = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{SENDER}", str(port)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        engine = Engine(tiny_model(0).eval(), EngineConfig(pages=4, context=128))
        engine.join_group(WeightGroup("127.0.0.1", port, 1, 2, "trainer", "gloo"))
        with pytest.raises(UserError, match="joined already"):
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


def test_a_group_that_nobody_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    from glm5.serve import weights

    monkeypatch.setattr(weights, "JOIN_TIMEOUT", timedelta(seconds=1))
    engine = Engine(tiny_model(0).eval(), EngineConfig(pages=4, context=128))
    with pytest.raises(UserError, match=r"cannot join trainer at tcp://127\.0\.0\.1"):
        engine.join_group(WeightGroup("127.0.0.1", free_port(), 1, 2, "trainer", "gloo"))
