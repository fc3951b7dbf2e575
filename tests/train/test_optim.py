"""Muon Split: roles by name, the update against a float64 SVD and by hand, batching, exact resume, clipping."""

import math
from collections import Counter

import pytest
import torch
from torch import nn

import glm5.train.optim as optim
from glm5.kernels.newton_schulz import newton_schulz, orthogonal_factor_svd
from glm5.model.glm5 import GLM5
from glm5.model.presets import gqa_8, mla_192, nano
from glm5.train.optim import MuonSplit, clip_grad_norm, default_ns_dtype, first_nonfinite, parameter_roles
from glm5.utils.errors import CheckpointError, ConfigError, NumericalError, UserError

SMALL = nano(hidden_size=32, vocab_size=64, num_hidden_layers=2, intermediate_size=48, moe_intermediate_size=16)
CONFIGS = {"mla": SMALL, "mla-192": mla_192(SMALL), "gqa": gqa_8(SMALL)}
Q_B = "model.layers.0.self_attn.q_b_proj.weight"
KV_B = "model.layers.0.self_attn.kv_b_proj.weight"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
DOWN = "model.layers.1.mlp.experts.down_proj"


def _model(config=SMALL, dtype=torch.float32, seed=0):
    return GLM5(config, seed=seed).to(dtype)


def _set_grads(model, seed=0, skip=()):
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g).to(p.dtype)
        p.grad = None if any(s in name for s in skip) else noise


def _weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def _optimizer(model, lr=0.01, *, split_heads=True, **options):
    return MuonSplit(parameter_roles(model, model.config, split_heads=split_heads), lr, **options)


class _Named(nn.Module):
    """A module with one parameter under any dotted name."""

    def __init__(self, name, shape):
        super().__init__()
        *path, leaf = name.split(".")
        module = self
        for part in path:
            child = nn.Module()
            module.add_module(part, child)
            module = child
        module.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))


# --------------------------------------------------------------------------- roles
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("split", [True, False])
def test_every_parameter_has_one_role_and_cuts_cover_it_once(config, split):
    model = _model(config)
    roles = parameter_roles(model, config, split_heads=split)
    assert [r.name for r in roles] == [n for n, _ in model.named_parameters()]
    for role in roles:
        if role.optimizer == "muon":
            hits = torch.zeros(role.parameter.shape)
            for cut in role.blocks:
                cut.view(hits).add_(1)
            assert torch.equal(hits, torch.ones_like(hits)), role.name
        else:
            assert not role.blocks


def test_roles_follow_names_not_dimensions():
    roles = {r.name: r for r in parameter_roles(_model(), SMALL)}
    adamw = {r.name for r in roles.values() if r.optimizer == "adamw"}
    vectors = {n for n, r in roles.items() if r.parameter.ndim == 1}
    assert adamw == vectors | {"model.embed_tokens.weight", "lm_head.weight"}
    assert {n for n, r in roles.items() if not r.decay} == vectors
    assert "model.layers.0.self_attn.indexer.k_norm.bias" in vectors
    muon = {n for n, r in roles.items() if r.optimizer == "muon"}
    assert {GATE_UP, DOWN, "model.layers.1.mlp.gate.weight", "model.layers.2.eh_proj.weight"} <= muon
    assert not any("e_score_correction_bias" in n for n in roles)


def test_how_each_matrix_is_cut():
    heads, nope, value = SMALL.num_attention_heads, SMALL.qk_nope_head_dim, SMALL.v_head_dim
    for split, matrices in ((True, heads), (False, 1)):
        roles = {r.name: r for r in parameter_roles(_model(), SMALL, split_heads=split)}
        (w_uq,), (w_uk, w_uv) = roles[Q_B].blocks, roles[KV_B].blocks
        assert (w_uq.group, w_uk.group, w_uv.group) == ("w_uq", "w_uk", "w_uv")
        assert w_uq.matrices == w_uk.matrices == w_uv.matrices == matrices
        assert [c.height * c.matrices for c in (w_uq, w_uk, w_uv)] == [
            heads * SMALL.qk_head_dim,
            heads * nope,
            heads * value,
        ]
    gate, up = roles[GATE_UP].blocks
    assert gate.matrices == up.matrices == SMALL.n_routed_experts
    assert gate.height == up.height == SMALL.moe_intermediate_size
    gqa = {r.name: r for r in parameter_roles(_model(CONFIGS["gqa"]), CONFIGS["gqa"])}
    counts = {n: gqa[f"model.layers.0.self_attn.{n}_proj.weight"].blocks[0].matrices for n in "qkvo"}
    groups = CONFIGS["gqa"].num_key_value_heads
    assert counts == {"q": CONFIGS["gqa"].num_attention_heads, "k": groups, "v": groups, "o": 1}


def test_the_full_size_model_has_the_reports_slices():
    from glm5.model.presets import glm5

    config = glm5(num_hidden_layers=4)
    with torch.device("meta"):
        model = GLM5(config, seed=None)
    shapes = Counter()
    for role in parameter_roles(model, config):
        for cut in role.blocks:
            shapes[cut.group, cut.height, role.parameter.shape[-1]] += cut.matrices
    layers = 5  # with the MTP block
    assert shapes["w_uq", 256, 2048] == shapes["w_uk", 192, 512] == shapes["w_uv", 256, 512] == 64 * layers
    assert shapes["experts", 2048, 6144] == 2 * 256 * 2
    assert shapes["experts", 6144, 2048] == 256 * 2
    assert shapes["router", 256, 6144] == 2


def test_an_unknown_parameter_is_named():
    with pytest.raises(UserError, match=r"model\.layers\.3\.mixer\.conv"):
        parameter_roles(_Named("model.layers.3.mixer.conv", (3, 3)), SMALL)


def test_a_parameter_that_contradicts_the_configuration_is_named():
    with pytest.raises(ConfigError, match="q_b_proj"):
        parameter_roles(_Named(Q_B, (SMALL.num_attention_heads * SMALL.qk_head_dim + 8, 4)), SMALL)


# --------------------------------------------------------------------------- one step, by hand
def _single(name, shape, config=SMALL, **options):
    module = _Named(name, shape).double()
    (p,) = module.parameters()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        p.copy_(torch.randn(shape, generator=g, dtype=torch.float64))
    p.grad = torch.randn(shape, generator=g, dtype=torch.float64)
    return p, MuonSplit(parameter_roles(module, config), 0.1, **options)


def test_one_muon_step_of_a_one_by_one_matrix_has_the_known_value():
    p, optimizer = _single("model.layers.0.eh_proj.weight", (1, 1), weight_decay=0.5)
    before, x = p.item(), 1.0
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    optimizer.step()
    expected = before - 0.1 * (0.2 * math.copysign(x, p.grad.item()) + 0.5 * before)
    assert p.item() == pytest.approx(expected, rel=1e-6)


def test_nesterov_momentum_over_three_steps():
    p, optimizer = _single("model.layers.0.eh_proj.weight", (3, 5), weight_decay=0.1)
    weight, momentum = p.detach().clone(), torch.zeros(3, 5, dtype=torch.float64)
    for step in range(3):
        p.grad = torch.randn(3, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        momentum = 0.95 * momentum + p.grad
        o = newton_schulz(p.grad + 0.95 * momentum)
        weight = weight - 0.1 * (0.2 * math.sqrt(5) * o + 0.1 * weight)
        optimizer.step()
        torch.testing.assert_close(p.detach(), weight, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(optimizer.state[p]["momentum"], momentum, rtol=1e-12, atol=1e-12)


def test_one_adamw_step_has_the_known_value():
    p, optimizer = _single("model.embed_tokens.weight", (4, 3), weight_decay=0.5)
    before = p.detach().clone()
    optimizer.step()
    # After bias correction the first step is the sign of the gradient.
    torch.testing.assert_close(p.detach(), before - 0.1 * (p.grad.sign() + 0.5 * before), rtol=1e-6, atol=1e-6)


def test_adamw_equals_torchs_over_many_steps():
    p, optimizer = _single("lm_head.weight", (6, 5), weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    q = nn.Parameter(p.detach().clone())
    reference = torch.optim.AdamW([q], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    for step in range(10):
        p.grad = torch.randn(6, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-12, atol=1e-12)


def test_vectors_do_not_decay():
    p, optimizer = _single("model.norm.weight", (4,), weight_decay=0.9)
    before = p.detach().clone()
    optimizer.step()
    torch.testing.assert_close(p.detach(), before - 0.1 * p.grad.sign(), rtol=1e-6, atol=1e-6)


def _slices(name, tensor):
    """The matrices of a parameter, written out by loops over heads and experts."""
    h, n, r, v = (SMALL.num_attention_heads, SMALL.qk_nope_head_dim, SMALL.qk_rope_head_dim, SMALL.v_head_dim)
    f = SMALL.moe_intermediate_size
    if name.endswith("q_b_proj.weight"):
        return [tensor[i * (n + r) : (i + 1) * (n + r)] for i in range(h)]
    if name.endswith("kv_b_proj.weight"):
        rows = [tensor[i * (n + v) : (i + 1) * (n + v)] for i in range(h)]
        return [x[:n] for x in rows] + [x[n:] for x in rows]
    if name.endswith("gate_up_proj"):
        return [x[:f] for x in tensor] + [x[f:] for x in tensor]
    return list(tensor) if tensor.ndim == 3 else [tensor]


def test_split_update_of_every_slice_is_close_to_the_svds():
    model = _model(dtype=torch.float64)
    _set_grads(model)
    before = _weights(model)
    optimizer = _optimizer(model, lr=1.0, weight_decay=0.0, ns_dtype=torch.float64)
    optimizer.step()
    checked = 0
    for name, p in model.named_parameters():
        if p.ndim == 1 or name.startswith(("lm_head", "model.embed")) or p.dtype != torch.float64:
            continue
        # The slices of the difference are the update of each matrix, at its own scale.
        for update, grad in zip(_slices(name, before[name] - p.detach()), _slices(name, p.grad), strict=True):
            o = update / (0.2 * math.sqrt(max(update.shape)))
            exact = orthogonal_factor_svd(grad)
            assert torch.linalg.matrix_norm(o, 2) < 1.203, name
            assert (o * exact).sum() / (o.norm() * exact.norm()) > 0.97, name
            checked += 1
    assert checked > 150


def test_splitting_changes_the_attention_up_projections_alone():
    split, plain = _model(), _model()
    for model, flag in ((split, True), (plain, False)):
        _set_grads(model)
        _optimizer(model, split_heads=flag, ns_dtype=torch.float32).step()
    plain_weights = _weights(plain)
    different = {n for n, w in _weights(split).items() if (w - plain_weights[n]).abs().max() > 1e-6}
    assert different == {n for n in plain_weights if n.endswith(("q_b_proj.weight", "kv_b_proj.weight"))}


def test_plain_muon_takes_w_uk_and_w_uv_as_two_matrices_of_all_heads():
    model = _model(dtype=torch.float64)
    _set_grads(model)
    before = _weights(model)[KV_B]
    _optimizer(model, lr=1.0, weight_decay=0.0, split_heads=False, ns_dtype=torch.float64).step()
    p = dict(model.named_parameters())[KV_B]
    h, half = SMALL.num_attention_heads, SMALL.num_attention_heads
    for update, grad in (
        (torch.cat(_slices(KV_B, before - p.detach())[:half]), torch.cat(_slices(KV_B, p.grad)[:half])),
        (torch.cat(_slices(KV_B, before - p.detach())[h:]), torch.cat(_slices(KV_B, p.grad)[h:])),
    ):
        expected = 0.2 * math.sqrt(max(update.shape)) * newton_schulz(grad * 1.95)
        torch.testing.assert_close(update, expected, rtol=1e-9, atol=1e-9)


def test_a_loud_head_does_not_quieten_the_others_when_split():
    # The point of Muon Split: one head's large gradient leaves the others' updates as large as its own.
    sizes = {}
    for flag in (True, False):
        model = _model()
        _set_grads(model)
        p = dict(model.named_parameters())[Q_B]
        with torch.no_grad():
            p.grad[: SMALL.qk_head_dim] *= 1000
        before = p.detach().clone()
        _optimizer(model, split_heads=flag, weight_decay=0.0).step()
        norms = [u.norm().item() for u in _slices(Q_B, before - p.detach())]
        sizes[flag] = min(norms) / max(norms)
    assert sizes[True] > 0.9
    assert sizes[False] < 0.75


# --------------------------------------------------------------------------- batching
def test_batched_update_equals_one_matrix_at_a_time(monkeypatch):
    results = []
    for elements in (1, 3000, 1 << 30):
        monkeypatch.setitem(optim.BATCH_ELEMENTS, "cpu", elements)
        model = _model()
        optimizer = _optimizer(model, ns_dtype=torch.float32)
        for step in range(2):
            _set_grads(model, seed=step)
            optimizer.step()
        results.append((len(optimizer._batches), _weights(model)))
    (most, alone), (some_batches, some), (least, together) = results
    assert most > 150 > some_batches > least
    for name, want in together.items():
        # A CPU may add in another order for another batch size: the last bits of O, times lr and scale.
        torch.testing.assert_close(alone[name], want, rtol=0, atol=1e-6)
        torch.testing.assert_close(some[name], want, rtol=0, atol=1e-6)


def test_equal_runs_give_equal_bits():
    runs = []
    for _ in range(2):
        model = _model()
        optimizer = _optimizer(model)
        for step in range(3):
            _set_grads(model, seed=step)
            optimizer.step(measure=step == 1)
        runs.append(_weights(model))
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])


def test_a_parameter_without_gradient_is_left_alone():
    model = _model()
    optimizer = _optimizer(model)
    before = _weights(model)
    _set_grads(model, skip=("indexer", "layers.1.mlp.experts.down"))
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(before[name], p) == (p.grad is None), name
        assert (name + ".momentum" in optimizer.named_state()) <= (p.grad is not None)


def test_frozen_parameters_are_left_out():
    model = _model()
    for name, p in model.named_parameters():
        p.requires_grad_("indexer" in name)
    optimizer = _optimizer(model)
    names = [n for group in optimizer.param_groups for n in group["param_names"]]
    assert names
    assert all("indexer" in n for n in names)


def test_an_expert_without_tokens_keeps_its_zero_momentum_and_only_decays():
    model = _model()
    optimizer = _optimizer(model, lr=0.1, weight_decay=0.1)
    _set_grads(model)
    p = dict(model.named_parameters())[DOWN]
    p.grad[3] = 0
    before = p.detach().clone()
    optimizer.step()
    torch.testing.assert_close(p.detach()[3], before[3] * 0.99)


def test_a_nan_reaches_its_own_matrix_only():
    model = _model()
    optimizer = _optimizer(model)
    _set_grads(model)
    p = dict(model.named_parameters())[GATE_UP]
    p.grad[5, 0, 0] = float("nan")
    optimizer.step()
    bad = {n for n, w in _weights(model).items() if not w.isfinite().all()}
    assert bad == {GATE_UP}
    experts = p.detach().isnan().flatten(1).any(1)
    assert experts.nonzero().flatten().tolist() == [5]
    assert not p.detach()[5, SMALL.moe_intermediate_size :].isnan().any()


def test_update_rms_is_reported_by_group():
    model = _model()
    optimizer = _optimizer(model)
    _set_grads(model)
    optimizer.step()
    assert optimizer.update_rms == {}
    before = _weights(model)
    optimizer.set_lr(1e-3)
    optimizer.step(measure=True)
    assert set(optimizer.update_rms) == set(
        "attention dense embedding experts head indexer mtp router shared_experts vectors w_uk w_uq w_uv".split()
    )
    after = _weights(model)
    w_uq = [n for n in after if n.endswith("q_b_proj.weight")]
    moved = torch.cat([(before[n] * (1 - 1e-3 * 0.1) - after[n]).flatten() for n in w_uq])
    assert moved.square().mean().sqrt().item() / 1e-3 == pytest.approx(optimizer.update_rms["w_uq"], rel=1e-2)
    # A full-rank matrix has an update near 0.2, whatever its shape; AdamW's is near 1 for noise early on.
    assert all(0.1 < optimizer.update_rms[g] < 0.25 for g in ("w_uq", "w_uk", "w_uv", "experts", "mtp"))


def test_closure_is_evaluated_with_gradients():
    model = _model()
    optimizer = _optimizer(model)

    def closure():
        loss = model.lm_head.weight.square().sum()
        loss.backward()
        return loss

    before = model.lm_head.weight.detach().clone()
    assert optimizer.step(closure).item() > 0
    assert not torch.equal(before, model.lm_head.weight)


# --------------------------------------------------------------------------- precision and resume
def test_master_weights_keep_updates_that_bf16_would_lose():
    results = {}
    for flag in (True, False):
        model = _model(dtype=torch.bfloat16)
        optimizer = _optimizer(model, lr=1e-5, master_weights=flag)
        before = _weights(model)[Q_B]
        for _ in range(40):
            _set_grads(model)
            optimizer.step()
        p = dict(model.named_parameters())[Q_B]
        results[flag] = (p.detach() - before).float().norm().item()
        if flag:
            master = optimizer.state[p]["master"]
            assert master.dtype == torch.float32
            assert torch.equal(master.bfloat16(), p.detach())
    # 40 steps of 1e-5 x 0.2 against weights of about 0.02: below half a bf16 step each.
    assert results[True] > 3 * results[False]


def test_reset_forgets_all_but_the_weights():
    model = _model(dtype=torch.bfloat16)
    optimizer = _optimizer(model)
    for step in range(2):
        _set_grads(model, seed=step)
        optimizer.step()
    before = {name: t.clone() for name, t in optimizer.named_state().items()}
    assert {"master", "momentum", "step", "exp_avg"} <= {name.rpartition(".")[2] for name in before}
    optimizer.reset()
    after = optimizer.named_state()
    assert after.keys() == {name for name in before if name.endswith(".master")}
    assert all(torch.equal(t, before[name]) for name, t in after.items())
    other = _optimizer(_model(dtype=torch.bfloat16, seed=1))
    other.load_named_state(after)  # one can go on from a checkpoint of it
    assert other.named_state().keys() == after.keys()


def test_master_weights_are_those_of_an_fp32_run():
    narrow = _model(dtype=torch.bfloat16)
    wide = GLM5(SMALL)
    wide.load_state_dict(narrow.state_dict())
    runs = [(narrow, _optimizer(narrow)), (wide, _optimizer(wide))]
    for step in range(3):
        _set_grads(narrow, seed=step)
        for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
            q.grad = p.grad.float()
        for _, optimizer in runs:
            optimizer.step()
    for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
        master = runs[0][1].state[p].get("master", p)
        assert torch.equal(master, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["state_dict", "named_state"])
def test_resume_is_exact_and_keeps_dtypes(dtype, layout):
    def train(model, optimizer, steps):
        for step in steps:
            # A parameter that gets its first gradient late has its own step count.
            _set_grads(model, seed=step, skip=("layers.0.input_layernorm",) if step == 0 else ())
            optimizer.set_lr(0.01 / (step + 1))
            optimizer.step()

    straight = _model(dtype=dtype)
    straight_optimizer = _optimizer(straight)
    train(straight, straight_optimizer, range(6))

    first = _model(dtype=dtype)
    first_optimizer = _optimizer(first)
    train(first, first_optimizer, range(3))
    weights = {k: v.clone() for k, v in first.state_dict().items()}
    if layout == "state_dict":
        saved = first_optimizer.state_dict()
    else:
        saved = {k: v.clone() for k, v in first_optimizer.named_state().items()}

    second = _model(dtype=dtype, seed=9)
    second.load_state_dict(weights)
    second_optimizer = _optimizer(second, lr=123.0)
    (second_optimizer.load_state_dict if layout == "state_dict" else second_optimizer.load_named_state)(saved)
    restored = second_optimizer.named_state()
    for name, t in first_optimizer.named_state().items():
        assert restored[name].dtype == t.dtype == (torch.int64 if name.endswith(".step") else torch.float32)
        assert torch.equal(restored[name], t)
        assert restored[name].data_ptr() != t.data_ptr()
    train(second, second_optimizer, range(3, 6))
    for (name, p), q in zip(straight.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q), name
    end = straight_optimizer.named_state()
    assert all(torch.equal(t, end[n]) for n, t in second_optimizer.named_state().items())


def test_load_state_dict_restores_the_settings():
    model = _model()
    saved = _optimizer(model, lr=0.5, momentum=0.9, weight_decay=0.2).state_dict()
    optimizer = _optimizer(model)
    optimizer.load_state_dict(saved)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5] * 3
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.2, 0.0]
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_state_that_does_not_fit_is_listed_and_nothing_changes():
    model = _model()
    optimizer = _optimizer(model)
    _set_grads(model)
    optimizer.step()
    before = {n: t.clone() for n, t in optimizer.named_state().items()}
    bad = dict(before)
    del bad["lm_head.weight.exp_avg"]
    bad[f"{Q_B}.momentum"] = bad[f"{Q_B}.momentum"].bfloat16()
    bad[f"{KV_B}.momentum"] = bad[f"{KV_B}.momentum"][1:]
    bad["model.layers.9.extra.momentum"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as error:
        optimizer.load_named_state(bad)
    for part in ("lm_head.weight.exp_avg is missing", f"{Q_B}.momentum is torch.bfloat16", KV_B, "layers.9.extra"):
        assert part in str(error.value)
    assert all(torch.equal(before[n], t) for n, t in optimizer.named_state().items())
    other = _optimizer(_model(CONFIGS["gqa"]))
    with pytest.raises(CheckpointError, match="other parameters"):
        other.load_state_dict(optimizer.state_dict())


def test_default_iteration_dtype():
    assert default_ns_dtype(torch.device("cuda")) == torch.bfloat16
    assert default_ns_dtype(torch.device("cpu"), torch.float64) == torch.float64
    assert default_ns_dtype(torch.device("cpu")) in (torch.float32, torch.bfloat16)


# --------------------------------------------------------------------------- gradients
def test_first_nonfinite_names_the_first_bad_tensor():
    tensors = [("ids", torch.tensor([1, 2])), ("none", None), ("empty", torch.zeros(0)), ("a", torch.ones(3))]
    assert first_nonfinite(tensors) is None
    assert first_nonfinite([]) is None
    inf, nan = torch.tensor([1.0, -math.inf]), torch.tensor([math.nan, 1.0], dtype=torch.bfloat16)
    assert first_nonfinite([*tensors, ("b", inf), ("c", nan)]) == "b"
    assert first_nonfinite([*tensors, ("c", nan), ("b", inf)]) == "c"


def test_clipping_by_hand():
    a, b, unused = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    named = [("a", a), ("b", b), ("unused", unused)]
    assert clip_grad_norm(named, 10.0) == 5.0
    assert a.grad.tolist() == [3.0, 0.0]
    assert clip_grad_norm(named, math.inf) == 5.0
    assert clip_grad_norm(named, 1.0) == 5.0
    torch.testing.assert_close(torch.cat([a.grad, b.grad]), torch.tensor([0.6, 0.0, 0.0, 0.8]))
    assert clip_grad_norm([("unused", unused)], 1.0) == 0.0


def test_clipping_measures_bf16_gradients_in_fp32():
    p = nn.Parameter(torch.zeros(1000, 1000, dtype=torch.bfloat16))
    p.grad = torch.full((1000, 1000), 0.01, dtype=torch.bfloat16)
    expected = p.grad.double().norm().item()
    assert clip_grad_norm([("p", p)], math.inf) == pytest.approx(expected, rel=1e-5)


def test_clipping_stops_at_a_bad_gradient_and_names_it():
    model = _model()
    _set_grads(model)
    p = dict(model.named_parameters())[DOWN]
    p.grad[1, 2, 3] = math.inf
    before = model.lm_head.weight.grad.clone()
    with pytest.raises(NumericalError, match=DOWN.replace(".", r"\.")):
        clip_grad_norm(model.named_parameters(), 1.0)
    assert torch.equal(model.lm_head.weight.grad, before)
    p.grad.zero_()
    model.lm_head.weight.grad.fill_(1e30)
    with pytest.raises(NumericalError, match="overflows"):
        clip_grad_norm(model.named_parameters(), 1.0)


# --------------------------------------------------------------------------- it trains
def test_loss_of_a_small_model_falls():
    model = _model()
    optimizer = _optimizer(model, lr=0.01)
    ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(model(ids[:, :-1], sparse=False).logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.0
