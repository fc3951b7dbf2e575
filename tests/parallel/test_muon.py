"""Muon across ranks: bit for bit the one-process update on any layout, every matrix once, counted bytes, balance."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from glm5.model.glm5 import GLM5
from glm5.model.presets import nano
from glm5.parallel import muon
from glm5.parallel.holdings import Holdings
from glm5.parallel.muon import Matrix, MuonExchange, assign, newton_schulz_operations, pieces_of
from glm5.parallel.shard import parallelize, whole
from glm5.train import optim, spread
from glm5.train.optim import MuonSplit, clip_grad_norm, parameter_roles
from glm5.utils.errors import NumericalError, UserError
from support.ranks import run_ranks

# Four heads of 20 rows in W_UQ, eight experts; widths that four does not divide leave ranks with less, or nothing.
CONFIG = nano(
    hidden_size=32,
    vocab_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=22,
    kv_lora_rank=14,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    index_n_heads=3,
    index_head_dim=16,
    intermediate_size=46,
    moe_intermediate_size=9,
    n_routed_experts=8,
    num_experts_per_tok=2,
)


def _model(dtype=torch.float32):
    return GLM5(CONFIG, seed=3).to(dtype)


def _noise(model, seed, skip=()):
    """A gradient for every parameter, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    noise = {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in model.named_parameters()}
    return {n: g for n, g in noise.items() if not any(s in n for s in skip)}


def _set(model, grads):
    for name, p in model.named_parameters():
        g = grads.get(name)
        if g is None or not isinstance(p, DTensor):
            p.grad = g
        else:
            p.grad = _as(g, p)


def _as(t, p):
    """A whole tensor, laid out like a parameter."""
    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    part = t[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].clone()
    return DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


def _lay_out(model, mesh, rule):
    """Replace parameters by DTensors of `rule(name, parameter)`'s placements; None leaves a copy on each rank."""
    for name, p in list(model.named_parameters()):
        placements = rule(name, p)
        if placements is not None:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(distribute_tensor(p.detach(), mesh, placements)))
    return model


def _optimizer(model, holdings=None, only=(), **options):
    roles = [r for r in parameter_roles(model, CONFIG) if not only or r.name.endswith(tuple(only))]
    if holdings is not None:
        holdings = Holdings([r.parameter for r in roles], holdings)
    return MuonSplit(roles, 0.01, holdings=holdings, **options)


def _train(model, optimizer, steps=2, skip=lambda step: ()):
    rms = []
    for step in range(steps):
        _set(model, _noise(model, step, skip(step)))
        optimizer.step(measure=True)
        rms.append(dict(optimizer.update_rms))
    return rms


def _whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def _compare(model, optimizer, reference, reference_optimizer):
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(_whole(p).detach(), q.detach()), name
    state = optimizer.named_state()
    for name, t in reference_optimizer.named_state().items():
        assert state[name].dtype == t.dtype
        assert torch.equal(_whole(state[name]), t), name


class _Wire:
    """Counts what the exchange sends to other ranks: bytes of this rank, and calls."""

    def __enter__(self):
        self.bytes = self.calls = 0
        self.original = dist.all_to_all_single

        def counted(received, send, to_receive, to_send, group, async_op):
            self.calls += 1
            self.bytes += (sum(to_send) - to_send[group.rank()]) * send.itemsize
            return self.original(received, send, to_receive, to_send, group=group, async_op=async_op)

        dist.all_to_all_single = counted
        return self

    def __exit__(self, *_):
        dist.all_to_all_single = self.original


class _Iterations:
    """Counts the matrices that a module orthogonalises, and keeps the shapes of their batches."""

    def __init__(self, module):
        self.module, self.original = module, module.newton_schulz
        self.matrices, self.shapes = 0, set()

    def __enter__(self):
        def counted(x, *args, **options):
            self.matrices += int((x.flatten(1) != 0).any(1).sum())
            self.shapes.add(tuple(x.shape))
            return self.original(x, *args, **options)

        self.module.newton_schulz = counted
        return self

    def __exit__(self, *_):
        self.module.newton_schulz = self.original


LINE, SQUARE = "line", "square"


def _layouts():
    """(name, mesh, rule): what data, tensor and expert parallelism make of a model, and worse."""
    column = ("o_proj.weight", "down_proj.weight", "eh_proj.weight")

    def tensor(name, p):  # rows of what widens, columns of what narrows, under a data-parallel cut of the rows
        if p.ndim == 1:
            return [Shard(0), Replicate()]
        return [Shard(0), Shard(1)] if name.endswith(column) else [Replicate(), Shard(0)]

    return (
        ("copies", LINE, lambda n, p: None),
        ("replicated", LINE, lambda n, p: [Replicate()]),
        ("rows", LINE, lambda n, p: [Shard(0)]),
        ("columns", LINE, lambda n, p: [Shard(p.ndim - 1)]),
        ("hybrid", SQUARE, lambda n, p: [Replicate(), Shard(0)]),
        ("tensor", SQUARE, tensor),
        ("experts' rows", SQUARE, lambda n, p: [Shard(0), Shard(1)] if p.ndim == 3 else [Replicate(), Replicate()]),
        ("mixed", SQUARE, lambda n, p: [Shard(0), Replicate()] if "self_attn" in n else None),
    )


def _every_layout(world):
    torch.manual_seed(0)
    meshes = {LINE: init_device_mesh("cpu", (4,)), SQUARE: init_device_mesh("cpu", (2, 2))}
    muon.BUCKET_BYTES = 4096  # several buckets
    reports = {}
    for ns_dtype in (torch.bfloat16, torch.float32):
        reference = _model()
        reference_optimizer = _optimizer(reference, ns_dtype=ns_dtype)
        with _Iterations(optim) as alone:
            rms = _train(reference, reference_optimizer)
        for name, mesh, rule in _layouts():
            if ns_dtype == torch.float32 and name != "tensor":
                continue
            model = _lay_out(_model(), meshes[mesh], rule)
            optimizer = _optimizer(model, dist.group.WORLD, ns_dtype=ns_dtype)
            with _Iterations(spread) as own, _Wire() as wire:
                found = _train(model, optimizer)
            # As many matrices at once as in one process, on which a product's bits may depend.
            assert own.shapes <= alone.shapes, name
            _compare(model, optimizer, reference, reference_optimizer)
            # The norm of all gradients, each element once however it is laid out.
            norm = clip_grad_norm(model.named_parameters(), math.inf, optimizer._holdings)
            assert norm == pytest.approx(clip_grad_norm(reference.named_parameters(), math.inf), rel=1e-5), name
            for one, other in zip(rms, found, strict=True):
                assert one == pytest.approx(other, rel=1e-5)
            exchange = optimizer._spread.exchange
            expected = exchange.wire_bytes(lambda _, d=ns_dtype: d)
            assert wire.bytes == 2 * expected[world.rank], name
            reports[name, ns_dtype] = (own.matrices, wire.bytes, wire.calls, exchange.loads()[world.rank])
    return reports


def test_update_is_the_one_process_update_bit_for_bit_on_every_layout():
    ranks = run_ranks(4, "dp=4", _every_layout)
    matrices = sum(
        cut.matrices for role in parameter_roles(_model(), CONFIG) if role.optimizer == "muon" for cut in role.blocks
    )
    for key in ranks[0]:
        computed, sent, calls, loads = (sum(r[key][i] for r in ranks) for i in range(4))
        assert computed == 2 * matrices, key  # two steps, and no matrix twice
        assert sent > 0
        assert calls > 2 * 2 * 4  # several buckets, there and back
        assert loads > 0
    numel = sum(r.parameter.numel() for r in parameter_roles(_model(), CONFIG) if r.optimizer == "muon")
    for name in ("copies", "replicated"):  # nothing but results, to three ranks
        assert sum(r[name, torch.bfloat16][1] for r in ranks) == 2 * 3 * numel * 2


def _where_edges_meet(world):
    mesh = init_device_mesh("cpu", (4,))
    own = ("q_b_proj.weight", "kv_b_proj.weight", "experts.gate_up_proj", "experts.down_proj")
    model = _lay_out(_model(), mesh, lambda n, p: [Shard(0)])
    optimizer = _optimizer(model, dist.group.WORLD, only=own, ns_dtype=torch.bfloat16)
    reference = _model()
    reference_optimizer = _optimizer(reference, only=own, ns_dtype=torch.bfloat16)
    with _Wire() as wire:
        _train(model, optimizer)
    _train(reference, reference_optimizer)
    _compare(model, optimizer, reference, reference_optimizer)
    assert not optimizer._spread.exchange.communicates
    assert wire.calls == 0
    # A matrix cut in four equal parts: three quarters go to its owner, and three quarters come back.
    whole = ("eh_proj.weight",)
    model = _lay_out(_model(), mesh, lambda n, p: [Shard(0)])
    optimizer = _optimizer(model, dist.group.WORLD, only=whole, ns_dtype=torch.bfloat16)
    with _Wire() as wire:
        _train(model, optimizer, 1)
    counted = torch.tensor(wire.bytes)
    dist.all_reduce(counted)
    assert int(counted) == 32 * 64 * 3 // 4 * (4 + 2)
    # A gradient on some ranks only is an error on all of them, within a bounded time.
    _set(model, {n: g for n, g in _noise(model, 0).items() if n.endswith(whole) and world.rank != 2})
    with pytest.raises(UserError, match=r"on some ranks only, of shapes \[32, 64\]"):
        optimizer.step()


def test_nothing_is_sent_where_shards_end_between_matrices():
    run_ranks(4, "dp=4", _where_edges_meet)


def _real_fsdp(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    skip = lambda step: ("layers.2.", "layers.0.input_layernorm") if step == 1 else ()  # noqa: E731
    reference = _model(torch.bfloat16)
    reference_optimizer = _optimizer(reference)
    _train(reference, reference_optimizer, 4, skip)

    def sharded(**options):
        model = _model(torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        return model, _optimizer(model, dist.group.WORLD)

    model, optimizer = sharded(mesh=mesh)
    for step in range(3):
        _set(model, _noise(model, step, skip(step)))
        optimizer.step()
    # Its state goes on elsewhere: whole, into another layout; and as it is, into the same one.
    whole = {n: _whole(t).clone() for n, t in optimizer.named_state().items()}
    weights = {n: _whole(p).detach().clone() for n, p in model.named_parameters()}
    for saved, options in ((whole, {}), (dict(optimizer.named_state()), {"mesh": mesh})):
        other, other_optimizer = sharded(**options)
        with torch.no_grad():
            for name, p in other.named_parameters():
                p.copy_(_as(weights[name], p))
        other_optimizer.load_named_state(saved)
        _set(other, _noise(other, 3))
        other_optimizer.step()
        _compare(other, other_optimizer, reference, reference_optimizer)

    # The norm of all gradients, each element once, whatever the layout; and a bad one is found by every rank.
    grads = _noise(model, 5)
    _set(model, grads)
    holdings = Holdings(list(model.parameters()), dist.group.WORLD)
    exact = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    norm = clip_grad_norm(model.named_parameters(), 1.0, holdings)
    assert norm == pytest.approx(exact, rel=1e-5)
    _set(reference, grads)
    assert clip_grad_norm(reference.named_parameters(), 1.0) == pytest.approx(norm, rel=1e-5)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(_whole(p.grad), q.grad, rtol=0.01, atol=0)
    grads["model.layers.1.mlp.experts.down_proj"][0, 0, 0] = math.nan
    _set(model, grads)
    with pytest.raises(NumericalError, match=r"down_proj is not finite|on another rank"):
        clip_grad_norm(model.named_parameters(), 1.0, holdings)
    head = model.lm_head.weight
    head.grad = distribute_tensor(grads["lm_head.weight"], head.device_mesh, [Replicate()] * head.device_mesh.ndim)
    with pytest.raises(ValueError, match="redistribute it first"):
        optimizer.step()
    return norm


def test_fsdps_own_layout_masters_late_gradients_resume_elsewhere_and_norms():
    norms = run_ranks(4, "dp=4", _real_fsdp)
    assert len(set(norms)) == 1


def _tensor_and_expert_parallel(world):
    """The layouts of a mesh: tensor parallel under FSDP, experts over their own axis."""
    config = CONFIG.replace(moe_intermediate_size=10)
    models = [GLM5(config, seed=3), parallelize(GLM5(config, seed=3), world)]
    optimizers = []
    for model, group in zip(models, (None, world.group("stage")), strict=True):
        roles = parameter_roles(model, config)
        holdings = None if group is None else Holdings([r.parameter for r in roles], group)
        optimizers.append(MuonSplit(roles, 0.01, holdings=holdings))
        _train(model, optimizers[-1])
    for (name, p), (also, q) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert name == also
        assert torch.equal(whole(q).detach(), p.detach()), name
    state = optimizers[1].named_state()
    for name, t in optimizers[0].named_state().items():
        assert torch.equal(whole(state[name]), t), name
    # Every rank has its own experts and heads; the rest is spread.
    exchange = optimizers[1]._spread.exchange
    assert exchange.communicates
    return exchange.loads()


@pytest.mark.parametrize("mesh", ["dp=2,tp=2,ep=2", "dp=4,ep=2,shard=2"])
def test_on_the_layouts_of_meshes(mesh):
    found = run_ranks(4, mesh, _tensor_and_expert_parallel)
    assert all(loads == found[0] for loads in found)  # one plan on all
    assert max(found[0]) < 2 * sum(found[0]) / 4


# --------------------------------------------------------------------------- the planner, without processes
@st.composite
def _worlds(draw):
    """Matrices of some shapes over ranks that hold even or uneven rows of them, or copies."""
    ranks = draw(st.integers(1, 6))
    matrices, boxes = [], [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 12))):
        heads, rows, columns = draw(st.integers(1, 5)), draw(st.sampled_from((2, 3, 8))), draw(st.sampled_from((4, 8)))
        copies = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
        shards = ranks // copies
        cut = math.ceil(heads * rows / shards)
        for rank in range(ranks):
            place = rank % shards
            span = (min(cut * place, heads * rows), min(cut * (place + 1), heads * rows))
            boxes[rank].append(((0, 1), span, (0, columns)))
        batch = draw(st.integers(1, 4))
        matrices += [Matrix(number, ((0, h * rows, (h + 1) * rows),), columns, batch) for h in range(heads)]
    return matrices, boxes


@settings(max_examples=150, deadline=None)
@given(_worlds())
def test_every_matrix_has_one_owner_that_holds_it_and_loads_are_balanced(case):
    matrices, boxes = case
    held = [{} for _ in matrices]
    covered = [torch.zeros(m.height, m.columns) for m in matrices]
    for rank, theirs in enumerate(boxes):
        for piece in pieces_of(matrices, theirs):
            held[piece.matrix][rank] = held[piece.matrix].get(rank, 0) + piece.numel
            rows, columns = slice(piece.row, piece.row + piece.rows), slice(piece.column, piece.column + piece.columns)
            covered[piece.matrix][rows, columns] += 1
    assert all(bool((c == c.max()).all()) and c.max() >= 1 for c in covered)  # each element on as many ranks
    units = assign(matrices, held)
    assert sorted(i for u in units for i in u.matrices) == list(range(len(matrices)))
    loads, costs, free = Counter(), [], True
    for unit in units:
        assert len({(matrices[i].shape, matrices[i].batch) for i in unit.matrices}) == 1
        assert len(unit.matrices) <= unit.size == matrices[unit.matrices[0]].batch
        for i in unit.matrices:
            full = [r for r, n in held[i].items() if n == matrices[i].height * matrices[i].columns]
            assert unit.owner in (full or held[i])
            free &= len(full or held[i]) == len(boxes)
        costs.append(unit.size * newton_schulz_operations(*matrices[unit.matrices[0]].shape))
        loads[unit.owner] += costs[-1]
    if free:  # anyone may own anything: Graham's bound
        assert max(loads.values()) <= sum(costs) / len(boxes) + max(costs)


def test_of_equally_loaded_ranks_the_one_that_holds_most_is_the_owner():
    matrix = Matrix(0, ((0, 0, 8),), 4, 1)
    assert assign([matrix], [{0: 8, 1: 24}])[0].owner == 1
    assert assign([matrix], [{0: 16, 1: 16}])[0].owner == 0
    assert [u.owner for u in assign([matrix] * 3, [{0: 8, 1: 24}] * 3)] == [1, 0, 1]


def test_operations_are_those_of_the_iteration():
    # X Xᵀ, its square, and a product with X, in each of five steps; two operations a multiply-add.
    assert newton_schulz_operations(2, 3) == 5 * (2 * 2 * 2 * 3 + 2 * 2 * 2 * 2 + 2 * 2 * 2 * 3)


def test_published_sizes_are_balanced_over_a_node():
    # A stage of eight layers over 8 ranks, experts and heads whole on each, the rest cut in rows.
    from glm5.model.presets import glm5

    config = glm5(num_hidden_layers=11)
    with torch.device("meta"):
        model = GLM5(config, seed=None)
    roles = [r for r in parameter_roles(model, config) if r.blocks and ".gate." not in r.name]
    roles = [r for r in roles if 3 <= int(r.name.split(".")[2]) < 11]
    optimizer_batches = optim._plan(roles)
    numbers = {r.parameter: i for i, r in enumerate(roles)}
    matrices = []
    for batch in optimizer_batches:
        size = sum(s.last - s.first for s in batch.slices)
        for s in batch.slices:
            for i in range(s.first, s.last):
                (run,) = s.cut.runs(i)
                height = s.parameter.shape[-2]
                where = (run[0] // height, run[0] % height, run[0] % height + run[1] - run[0])
                matrices.append(Matrix(numbers[s.parameter], (where,), s.parameter.shape[-1], size))
    boxes = []
    for rank in range(8):
        mine = []
        for r in roles:
            shape = [1] * (3 - r.parameter.ndim) + list(r.parameter.shape)
            axis = 0 if r.parameter.ndim == 3 else 1
            step = math.ceil(shape[axis] / 8)
            spans = [(0, n) for n in shape]
            spans[axis] = (min(rank * step, shape[axis]), min((rank + 1) * step, shape[axis]))
            mine.append(tuple(spans))
        boxes.append(mine)

    class Group:
        def rank(self):
            return 0

    exchange = MuonExchange(matrices, boxes, Group())
    loads = exchange.loads()
    assert max(loads) / (sum(loads) / 8) < 1.02
    # Heads (8 a rank) and experts stay where they are.
    moving = {matrices[i].parameter for b in exchange._buckets for u in b.units for i in exchange.units[u].matrices}
    # What stays moves as few strips: a bank of experts' gates, or W_UK of all heads here, as one.
    mine = [(number, strips) for number, strips in exchange._local if len(exchange.units[number].matrices) > 1]
    assert mine
    assert all(len(strips) <= 2 * len(roles) for _, strips in mine)
    assert not any(roles[n].name.endswith(("q_b_proj.weight", "kv_b_proj.weight")) for n in moving)
    assert not any("mlp.experts" in roles[n].name for n in moving)
