"""What is relied upon of torch's inside, so that a release that changes it says so here."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from glm5.parallel.compat import (
    Action,
    Kind,
    LeanStage,
    Runtime,
    gathered_gradient_bytes,
    hold_gradients,
    reduce_gradients,
    settle_gradients,
    units,
)
from glm5.parallel.mesh import Mesh, World, open_world
from glm5.parallel.pipeline.schedule import SCHEDULES


def test_actions_and_schedules() -> None:
    assert {k.value for k in Kind} >= {"F", "I", "W", "B", "REDUCE_GRAD", "UNSHARD", "RESHARD", "SEND_F", "RECV_F"}
    assert Action(3, Kind.FORWARD, 2) == (3, Kind.FORWARD, 2, None)
    for schedule in SCHEDULES.values():
        if schedule.torch is not None:
            assert issubclass(get_schedule_class(schedule.torch), Runtime)


def test_what_a_stage_overrides_is_there() -> None:
    for name in vars(LeanStage):
        inherited = not name.startswith("__") and name not in ("receives", "sends", "_on_meta", "_release")
        if inherited and name != "_validate_fwd_outputs":  # torch 2.11 alone has that one
            assert hasattr(PipelineStage, name), name
    options = inspect.signature(PipelineStage.__init__).parameters
    assert {"input_args", "output_args", "group", "dw_builder"} <= set(options)


def test_gradients_add_up_whole_and_are_reduced_once() -> None:
    with open_world(Mesh(), "cpu") as world:
        check_gradients(world)


def check_gradients(world: World) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    model(x).square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for part in (*model, model):
        fully_shard(part, mesh=world.dense["shard"], reshard_after_forward=False)
    hold_gradients(model)
    for micro in range(4):
        model(x).square().sum().backward()
        settle_gradients(model)
        assert len(list(units(model))) >= 2
        assert gathered_gradient_bytes(model) == 4 * sum(g.numel() for g in wanted)
        if micro % 2:
            reduce_gradients(model, last=micro == 3)
            assert gathered_gradient_bytes(model) == 0
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), 4 * grad)
