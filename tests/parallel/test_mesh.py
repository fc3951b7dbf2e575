"""Meshes: what text means, which are refused and how, and that the groups of a running one are the right ranks."""

from __future__ import annotations

from typing import Any

import pytest

from glm5.model.presets import glm5, nano
from glm5.parallel.mesh import Mesh, World, open_world
from glm5.utils.errors import ConfigError
from support.ranks import run_ranks

AXES = ("pp", "dp", "cp", "tp", "data", "stage", "replicate", "shard", "ep", "edp", "world")


def test_parses_and_prints() -> None:
    mesh = Mesh.parse("dp=4, ep=2,pp=2,cp=2,tp=2,shard=4")
    assert (mesh.size, mesh.data, mesh.replicas, mesh.edp) == (32, 8, 2, 8)
    assert str(mesh) == "dp=4,pp=2,cp=2,tp=2,ep=2,shard=4"
    for text in ("dp=4,ep=2,pp=2,cp=2,tp=2,shard=4", "dp=2,shard=1", "cp=11"):
        assert Mesh.parse(str(Mesh.parse(text))) == Mesh.parse(text)
    assert Mesh.parse("") == Mesh.parse("dp=1") == Mesh() == Mesh.parse(str(Mesh()))
    mesh.check_model(glm5())
    Mesh.parse("dp=32,ep=32,tp=8").check_model(glm5())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dq=2", "unknown axis 'dq'; there are dp, pp, cp, tp, ep, shard"),
        ("dp", "'dp' is no axis=number"),
        ("dp=two", "'dp=two' is no axis=number"),
        ("dp=2,dp=2", "given twice"),
        ("dp=0", "mesh.dp=0: must be an integer of at least 1"),
        ("dp=-2", "mesh.dp=-2"),
        ("dp=2,ep=4", "mesh.ep=4: must divide dp x cp = 2"),
        ("dp=3,cp=2,ep=4", "must divide dp x cp = 6"),
        ("dp=4,shard=3", "mesh.shard=3: must divide"),
    ],
)
def test_refuses(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        Mesh.parse(text)


def test_refuses_devices_and_models() -> None:
    with pytest.raises(
        ConfigError, match="dp=2 x cp=1 x tp=2 needs 4 processes, and here is 1: start it with torchrun"
    ):
        Mesh.parse("dp=2,tp=2").check_devices(1)
    for mesh, changes, said in [
        ("dp=6,ep=6", {}, "mesh.ep=6: must divide n_routed_experts=8"),
        ("tp=3", {}, "mesh.tp=3: must divide num_attention_heads=4"),
        ("pp=9", {}, "mesh.pp=9: must be at most num_hidden_layers"),
    ]:
        model = nano(n_routed_experts=8, num_attention_heads=4, num_key_value_heads=4, **changes)
        with pytest.raises(ConfigError, match=said):
            Mesh.parse(mesh).check_model(model)


def _groups(world: World) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    sums = {}
    for axis in AXES:
        one = torch.tensor([1 << world.rank])
        dist.all_reduce(one, group=world.group(axis))
        sums[axis] = int(one)
    return {axis: (world.place(axis), world.count(axis), world.ranks(axis), sums[axis]) for axis in AXES}


def test_groups_are_the_right_ranks() -> None:
    found = run_ranks(4, "dp=2,tp=2,ep=2", _groups)
    for rank, axes in enumerate(found):
        for axis, (place, count, ranks, bits) in axes.items():
            assert ranks[place] == rank, axis
            assert len(ranks) == count, axis
            assert bits == sum(1 << r for r in ranks), axis
    assert [found[r]["dp"][2] for r in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [found[r]["edp"][2] for r in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_one_process_is_a_world() -> None:
    with open_world(Mesh(), "cpu") as world:
        assert (world.rank, world.size, world.main) == (0, 1, True)
        world.barrier()
        assert world.gather_objects("x") == ["x"]
    with pytest.raises(ConfigError, match="needs 2 processes"), open_world(Mesh(dp=2), "cpu"):
        pass
