"""One update of the loop: independent of how a step is cut, each stage moving exactly what it should."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.data.corpus import Document
from glm5.data.loader import Batch, TokenDataset
from glm5.data.packing import first_and_positions
from glm5.kernels import cross_entropy
from glm5.model.glm5 import GLM5
from glm5.model.trace import Aux, Trace
from glm5.model.weights import load_model
from glm5.train import loop
from glm5.train.checkpoint import CheckpointStore
from glm5.train.loop import Trainer
from glm5.train.losses import router_bias_update as update
from glm5.train.objective import Objective
from glm5.train.rows import Rows
from glm5.train.schedule import BatchWarmup
from glm5.train.totals import Counts, Totals
from glm5.utils.errors import ConfigError, DataError, NumericalError
from glm5.utils.runlog import read_metrics
from support.training import SEQ_LEN, VOCAB, LetterTokenizer, dataset, documents, same, tensors, tiny, trainer


def gradients(of: Trainer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The gradients of the next step, after clipping, caught before the update."""
    found: dict[str, Tensor] = {}

    def catch(**_: Any) -> None:
        found.update({n: p.grad.clone() for n, p in of.model.named_parameters() if p.grad is not None})

    monkeypatch.setattr(of.optimizer, "step", catch)
    of.step()
    return found


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 3e-6) -> None:
    """Equal to fp32 rounding: by tensor, the largest difference against the largest entry."""
    assert a.keys() == b.keys()
    assert len(a) > 5
    for name in a:
        scale = a[name].abs().max()
        assert scale > 0, f"{name} has no gradient"
        assert (a[name] - b[name]).abs().max() <= tolerance * max(1e-3, float(scale)), name


# --------------------------------------------------------------------------- cutting a step
@pytest.mark.parametrize("stage", ["pretrain", "warmup", "sparse"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_gradients_do_not_depend_on_micro_batches(
    stage: Any, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset(tmp_path)
    found = []
    for micro_batch in (4, 2, 1, 3):
        of = trainer(
            tmp_path, data, stage=stage, micro_batch=micro_batch, mtp_share=share, balance_weight=0.3, clip=1e9
        )
        found.append(gradients(of, monkeypatch))
        # No trainable parameter is left out, whatever shares it: norms, embedding and head serve the MTP block, too.
        assert set(found[-1]) == {n for n, p in of.model.named_parameters() if p.requires_grad}
    for other in found[1:]:
        close(found[0], other)


def test_every_loss_term_reaches_the_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before compares does hold all terms: switching one off changes the gradients."""
    data = dataset(tmp_path)
    options = dict(stage="sparse", balance_weight=0.3, clip=1e9)
    whole = gradients(trainer(tmp_path, data, **options), monkeypatch)
    router = "model.layers.1.mlp.gate.weight"
    head, indexer, mtp = "lm_head.weight", "model.layers.1.self_attn.indexer.wk.weight", "model.layers.2.eh_proj.weight"
    for name, changes in (
        (router, dict(balance_weight=0.0)),
        (indexer, dict(indexer_weight=0.5)),
        (mtp, dict(mtp_weight=0.1)),
        (head, dict(mtp_depths=2)),
    ):
        other = gradients(trainer(tmp_path, data, **{**options, **changes}), monkeypatch)
        assert (whole[name] - other[name]).abs().max() > 1e-4 * whole[name].abs().max(), name


def inside(batch: Batch, depth: int) -> NDArray[np.bool_]:
    """[B, T], slot by slot: whether a query's token `depth` ahead is of its own document."""
    document_BS, found = batch.document_BS, np.zeros((len(batch), batch.seq_len), dtype=bool)
    for b, t in np.ndindex(found.shape):
        found[b, t] = document_BS[b, t] >= 0 and document_BS[b, t + depth] == document_BS[b, t]
    return found


def test_the_loss_is_its_formula(tmp_path: Path) -> None:
    """Counts of one, plain PyTorch: mean CE of the main head + lambda times the depths' mean + balance + KL."""
    data = dataset(tmp_path)
    of = trainer(tmp_path, data, stage="sparse", balance_weight=0.2, mtp_weight=0.6, mtp_depths=2)
    # Samples whose first row, on which alone MTP runs, holds several documents.
    start = next(i for i in range(8) if len(np.unique(of.loader.batch(i, 1).document_BS)) > 2)
    batch = of.loader.batch(start, 4)
    rows = Rows.of(batch, torch.device("cpu"))
    counts = Counts(rows=1, mtp_rows=1, tokens=1, queries=1)
    totals = Totals(len(of.routers), 2)
    loss = Objective(of.config, of.ranks, of.tokens, counts, totals).of(of.model, rows, 0)

    aux = Aux(indexer=True, balance=True, valid=torch.from_numpy(inside(batch, 0)))
    trunk = of.model.hidden(rows.input_BT, documents=rows.documents_BT, sparse=True, aux=aux)
    kept = rows.head(1)
    passes = of.model.mtp_hidden(trunk[:1], kept.ids_BS, 2, documents=kept.documents_BS, sparse=True, aux=aux)
    depths = []
    for depth in (1, 2):
        aux.valid = torch.from_numpy(inside(batch, depth)[:1])
        assert 0 < int(aux.valid.sum()) < int(inside(batch, depth - 1)[:1].sum())
        depths.append(next(passes))

    def ce(hidden: Tensor, depth: int, n: int) -> Tensor:
        target, weight = (torch.from_numpy(x)[:n] for x in batch.targets(depth + 1))
        t = hidden.shape[1]
        logp = of.model.lm_head(hidden).log_softmax(-1).gather(-1, target[:, :t, None])[..., 0]
        return -(logp * weight[:, :t]).sum()

    expected = ce(trunk, 0, 4) + 0.6 / 2 * sum(ce(h, d, 1) for d, h in enumerate(depths, 1))
    kl = [x.kl for x in aux.indexer_losses]
    expected = expected + kl[0] + kl[1] + (kl[2] + kl[3]) / 2
    balance = aux.balance_losses
    expected = expected + 0.2 * (balance[0] + (balance[1] + balance[2]) / 2)
    torch.testing.assert_close(loss, expected)


def test_mtp_trains_on_its_share_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(tmp_path)
    seen: list[int] = []
    hidden = GLM5.mtp_hidden

    def count(self: GLM5, hidden_BTD: Tensor, *args: Any, **options: Any) -> Any:
        seen.append(len(hidden_BTD))
        return hidden(self, hidden_BTD, *args, **options)

    monkeypatch.setattr(GLM5, "mtp_hidden", count)
    for share, micro_batch, expected in (
        (1.0, 4, [4]),
        (0.5, 4, [2]),
        (0.5, 1, [1, 1]),
        (0.75, 2, [2, 1]),
        (0.01, 4, [1]),
    ):
        seen.clear()
        trainer(tmp_path, data, mtp_share=share, micro_batch=micro_batch).step()
        assert seen == expected, (share, micro_batch)


def test_a_share_of_equal_rows_trains_mtp_as_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share saves time and changes no weight: where all rows are alike, nothing changes at all."""
    text = documents([SEQ_LEN - 2])[0].text
    copies = [Document(f"{i}", text) for i in range(6)]
    data = TokenDataset.build(copies, LetterTokenizer(), tmp_path / "copies", SEQ_LEN)
    for stage in ("pretrain", "sparse"):
        options = dict(stage=stage, balance_weight=0.3, mtp_weight=0.9, clip=1e9)
        whole = gradients(trainer(tmp_path, data, **options), monkeypatch)
        for share, micro_batch in ((0.5, 4), (0.25, 2)):
            part = trainer(tmp_path, data, **options, mtp_share=share, micro_batch=micro_batch)
            close(whole, gradients(part, monkeypatch))


def test_the_head_in_chunks_gives_the_gradients_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(tmp_path)
    whole = gradients(trainer(tmp_path, data, clip=1e9), monkeypatch)
    for tokens in (1, 37):
        monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": tokens * VOCAB, "cuda": 1})
        close(whole, gradients(trainer(tmp_path, data, clip=1e9), monkeypatch))


# --------------------------------------------------------------------------- packed rows
def alone(batch: Batch) -> Batch:
    """The same documents, each in a row of its own at slot 0, with padding behind."""
    rows = []
    for ids, document, loss in zip(batch.ids_BS, batch.document_BS, batch.loss_BS, strict=True):
        for d in dict.fromkeys(document[document >= 0].tolist()):
            here = document == d
            row = np.zeros_like(ids), np.full_like(document, -1), np.zeros_like(loss)
            for empty, full in zip(row, (ids, document, loss), strict=True):
                empty[: here.sum()] = full[here]
            rows.append(row)
    ids_BS, document_BS, loss_BS = (np.stack(x) for x in zip(*rows, strict=True))
    first_BT, position_BT = first_and_positions(document_BS[:, : batch.seq_len])
    return Batch(ids_BS, document_BS, loss_BS, first_BT, position_BT, np.zeros_like(first_BT))


@pytest.mark.parametrize("stage", ["pretrain", "warmup", "sparse"])
def test_packed_documents_train_as_if_alone(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(tmp_path, (13, 12, 9, 9, 8, 25, 4, 90))
    packed = data.batch(range(data.rows))
    apart = alone(packed)
    assert len(apart) > len(packed) >= 3
    found = []
    for batch in (packed, apart):
        # Balance is a property of a row, so it does differ.
        of = trainer(tmp_path, data, stage=stage, rows=len(batch), balance_weight=0.0, clip=1e9, lr=1e-3)
        monkeypatch.setattr(of, "_rows", lambda *_, batch=batch: [Rows.of(batch, torch.device("cpu"))])
        found.append(gradients(of, monkeypatch))
    close(*found, tolerance=1e-5)


def test_rows_of_one_document_need_no_mask(tmp_path: Path) -> None:
    """The fused kernel's case is taken for full rows of one document alone, and changes nothing."""
    data = dataset(tmp_path)
    kinds = [Rows.of(data.batch([row]), torch.device("cpu")) for row in range(data.rows)]
    plain = [rows for rows in kinds if rows.documents_BT is None]
    assert 0 < len(plain) < len(kinds)
    model = tiny()
    for rows in plain:
        assert bool(rows.valid_BT().all())
        with_mask = model.hidden(rows.input_BT, documents=torch.zeros_like(rows.input_BT), sparse=False)
        torch.testing.assert_close(model.hidden(rows.input_BT, sparse=False), with_mask)


# --------------------------------------------------------------------------- what each stage moves
def test_warmup_moves_the_indexers_and_nothing_else(tmp_path: Path) -> None:
    of = trainer(tmp_path, dataset(tmp_path), stage="warmup", weight_decay=0.5)
    before = tensors(of)
    # Nothing else even keeps a graph, which is what makes warm-up cheap.
    assert {n for n, p in of.model.named_parameters() if p.requires_grad} == {n for n in before if ".indexer." in n}
    for _ in range(3):
        metrics = of.step()
    unmoved = same(before, tensors(of))
    assert set(unmoved) == {name for name in before if ".indexer." not in name}
    assert len(before) - len(unmoved) == 3 * 5  # three layers, the MTP block's among them, of five tensors
    assert "loss" not in metrics


def test_warmup_brings_the_indexers_closer(tmp_path: Path) -> None:
    of = trainer(tmp_path, dataset(tmp_path), stage="warmup", steps=100, lr=2e-2, rows=6, mtp_depths=0)
    kl = [of.step()["indexer_kl"] for _ in range(100)]
    assert sum(kl[-5:]) < 0.5 * sum(kl[:5])


def test_the_language_model_and_the_indexers_learn_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse stage: bit for bit, the KL gives the model nothing, and the language model's losses the indexers."""
    data = dataset(tmp_path)
    options = dict(stage="sparse", clip=1e9, balance_weight=0.1)
    both = gradients(trainer(tmp_path, data, **options), monkeypatch)
    no_kl = gradients(trainer(tmp_path, data, **options, indexer_weight=0.0), monkeypatch)
    other_lm = gradients(trainer(tmp_path, data, **{**options, "balance_weight": 0.0}, mtp_weight=0.9), monkeypatch)
    indexers = {name for name in both if ".indexer." in name}
    assert len(indexers) == 3 * 5
    assert {n for n in both if not no_kl[n].any()} == indexers
    assert set(same(both, no_kl)) == set(both) - indexers
    assert indexers <= set(same(both, other_lm))
    assert "model.layers.2.eh_proj.weight" not in same(both, other_lm)


def test_pretraining_leaves_the_indexers_alone(tmp_path: Path) -> None:
    of = trainer(tmp_path, dataset(tmp_path), weight_decay=0.5)
    before = tensors(of)
    metrics = of.step()
    assert set(same(before, tensors(of))) == {name for name in before if ".indexer." in name}
    assert 0 < metrics["indexer_recall"] < 1


def test_without_depths_the_mtp_block_rests(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    for layer_types in (("dense", "sparse"), ("dense", "dense")):
        of = trainer(tmp_path, data, model=tiny(mlp_layer_types=layer_types), mtp_depths=0)
        before = tensors(of)
        of.step()
        unmoved = same(before, tensors(of))
        assert {n for n in before if n.startswith("model.layers.2.")} <= set(unmoved)
        assert "lm_head.weight" not in unmoved


# --------------------------------------------------------------------------- the router's bias
def test_the_router_bias_moves_by_the_rate_towards_balance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(tmp_path)
    of = trainer(tmp_path, data, micro_batch=2, bias_rate=1e-3)
    names = ["model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.2.mlp.gate.e_score_correction_bias"]
    with torch.no_grad():
        for name in names:
            of.model.get_buffer(name).copy_(torch.tensor([7.0, 7.1, 7.0, 6.9]))
    before = tensors(of)
    batch = of.loader.batch(0, 4)
    rows = Rows.of(batch, torch.device("cpu"))
    trace = Trace()
    with torch.no_grad():
        trunk = of.model.hidden(rows.input_BT, documents=rows.documents_BT, sparse=False, trace=trace)
        list(of.model.mtp_hidden(trunk, rows.ids_BS, 3, documents=rows.documents_BS, sparse=False, trace=trace))
    # Of the trunk every token counts; at MTP depth d not a document's last d, which have no token to embed.
    chosen = [
        experts.view(4, SEQ_LEN, 2)[torch.from_numpy(inside(batch, d))] for d, (*_, experts) in enumerate(trace.router)
    ]
    assert [len(x) for x in chosen] == sorted({len(x) for x in chosen}, reverse=True)
    loads = [torch.bincount(x.flatten(), minlength=4) for x in chosen]
    used: list[Tensor] = []
    monkeypatch.setattr(
        loop, "router_bias_update", lambda bias, load, rate: used.append(load) or update(bias, load, rate)
    )
    of.step()
    after = tensors(of)
    for name, load, counted in zip(names, (loads[0], sum(loads[1:])), used, strict=True):
        assert counted.tolist() == load.tolist()
        direction = torch.sign(load.double().mean() - load.double()).float()
        assert torch.equal(after[name], before[name] + 1e-3 * direction)
        assert direction.abs().sum() > 0


def test_late_values_hold_from_their_token_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the very step that begins with that many tokens seen, as if they had been the values from there on."""
    data = dataset(tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    early = trainer(tmp_path, data)
    early.step()
    late = trainer(tmp_path, data, late_tokens=early.tokens, late_mtp_weight=0.05, late_bias_rate=0.0)
    assert late.config.mtp_weight_at(early.tokens - 1) == 0.3
    late.step()
    after_one = tensors(late)
    assert len(same(after_one, tensors(early))) == len(after_one)
    assert after_one[name].any()
    early.config = replace(early.config, mtp_weight=0.05)
    unlike = trainer(tmp_path, data)
    unlike.step()
    found = [gradients(of, monkeypatch) for of in (early, late, unlike)]
    assert len(same(*found[:2])) == len(found[0])
    assert "model.layers.2.eh_proj.weight" not in same(found[0], found[2])
    assert torch.equal(tensors(late)[name], after_one[name])
    assert not torch.equal(tensors(early)[name], after_one[name])


def test_bias_and_master_weights_stay_fp32_in_bf16(tmp_path: Path) -> None:
    model = tiny()
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    bias = model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    bias.fill_(7.0)
    of = trainer(tmp_path, dataset(tmp_path), model=model, precision="bf16", lr=0.0, weight_decay=0.0)
    assert of.model.dtype == torch.bfloat16
    of.step()
    moved = of.model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    assert moved.dtype == torch.float32
    assert set(((moved - 7.0).abs() * 1000).round(decimals=2).tolist()) <= {0.0, 1.0}  # bf16 has steps of 0.03 there
    assert not torch.equal(moved, torch.full_like(moved, 7.0))
    # With a learning rate of 0 the weights come back as they were given, not rounded to bf16; so do those that rest.
    of.export(tmp_path / "model")
    written = load_model(tmp_path / "model")
    assert written.dtype == torch.float32
    for name, parameter in written.named_parameters():
        assert torch.equal(parameter, given[name]), name
    assert torch.equal(written.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias"), moved)


# --------------------------------------------------------------------------- learning
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_small_corpus_is_learned_by_heart(precision: Any, tmp_path: Path) -> None:
    data = dataset(tmp_path, (60, 45, 20))
    options = dict(rows=data.rows, lr=4e-2, mtp_weight=1.0, weight_decay=0.0)
    of = trainer(tmp_path, data, steps=30, precision=precision, **options)
    first = of.step()
    assert first["loss"] == pytest.approx(math.log(VOCAB), abs=0.5)
    for _ in range(29):
        last = of.step()
    # Random letters cannot be guessed: only memory brings the loss down, to what the first letters leave open.
    assert last["loss"] < 0.25
    assert max(last[f"mtp_loss_{d}"] for d in (1, 2, 3)) < 0.5


def test_metrics_say_what_happened(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    of = trainer(tmp_path, data, stage="sparse", micro_batch=2, batch=BatchWarmup(2, 4, 6), measure_every=2)
    records = [of.step() for _ in range(4)]
    assert [r["tokens"] for r in records] == np.cumsum(
        [predictions(of, a, n) for a, n in ((0, 2), (2, 2), (4, 3), (7, 4))]
    ).tolist()
    assert of.samples == 11
    assert all(
        {"loss", "mtp_loss_1", "mtp_loss_3", "expert_load_max", "indexer_kl", "grad_norm"} <= r.keys() for r in records
    )
    # Recall is of the dense attention: the sparse pass alone would make it 1.
    assert ["indexer_recall" in r for r in records] == [True, False, True, False]
    assert 0 < records[0]["indexer_recall"] < 1
    assert len(records[0]["attention_logit_max_by_layer"]) == 3
    assert records[0]["update_rms"]["w_uk"] > 0
    for r in records:
        assert r["bits_per_byte"] == pytest.approx(r["loss"] / math.log(2) / data.bytes_per_token)


def predictions(of: Trainer, first: int, count: int) -> int:
    return int(of.loader.batch(first, count).targets(1)[1].sum())


# --------------------------------------------------------------------------- options that contradict each other
def test_contradictions_are_refused_by_name(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    short = TokenDataset.open(tmp_path / "tokens", SEQ_LEN, ahead=2)
    gqa = dict(attention="gqa", head_dim=8)
    for options, field in (
        (dict(model=tiny(num_nextn_predict_layers=0)), "mtp_depths=3"),
        (dict(model=tiny(**gqa), stage="sparse"), "stage='sparse'"),
        (dict(model=tiny(**gqa), stage="warmup"), "stage='warmup'"),
        (dict(model=tiny(index_topk=SEQ_LEN), stage="sparse"), f"seq_len={SEQ_LEN}: must exceed index_topk"),
        (dict(model=tiny(max_position_embeddings=16)), f"seq_len={SEQ_LEN}: must be at most max_position"),
    ):
        with pytest.raises(ConfigError, match=re.escape(field)):
            trainer(tmp_path, data, **options)
    with pytest.raises(ConfigError, match=r"mtp_depths=3.*2 tokens ahead"):
        trainer(tmp_path, short)
    trainer(tmp_path, short, mtp_depths=1).step()
    trainer(tmp_path, data, model=tiny(**gqa)).step()


def test_ids_outside_the_vocabulary_are_refused_before_the_first_step(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    with pytest.raises(DataError, match=r"hold id \d+, outside the model's vocabulary of 40"):
        trainer(tmp_path, data, model=tiny(vocab_size=40))


# --------------------------------------------------------------------------- numbers that are not
def test_a_nan_stops_the_run_and_names_its_tensor(tmp_path: Path) -> None:
    of = trainer(tmp_path, dataset(tmp_path), steps=6)

    def spoil(at: Trainer) -> None:
        if at.finished_steps == 3:
            with torch.no_grad():
                at.model.model.layers[1].self_attn.kv_b_proj.weight[2, 5] = math.nan

    with pytest.raises(NumericalError) as found:
        of.run(on_step=spoil)
    assert "the loss of step 3 is nan" in found.value.what
    assert "parameter model.layers.1.self_attn.kv_b_proj.weight" in found.value.what
    kept = CheckpointStore(tmp_path / "run" / "failed" / "step-3").load_newest()
    assert kept is not None
    assert kept.step == 3
    assert str(kept.path) in found.value.mend
    assert kept.tensors["model"]["model.layers.1.self_attn.kv_b_proj.weight"].isnan().sum() == 1
    # The checkpoint before it is whole, and the run goes on from there to its end.
    again = trainer(tmp_path, of.loader.dataset, steps=6)
    again.run()
    assert again.finished_steps == 6
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_no_checkpoint_holds_a_nan(tmp_path: Path) -> None:
    """An expert that no token visits can be bad without hurting a loss; it is found when it would be saved."""
    of = trainer(tmp_path, dataset(tmp_path), bias_rate=0.0)
    with torch.no_grad():
        of.model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")[2] = -100.0
        of.model.model.layers[1].mlp.experts.down_proj[2, 5, 1] = math.inf
    with pytest.raises(NumericalError, match=r"parameter model\.layers\.1\.mlp\.experts\.down_proj is not finite"):
        of.run()
    assert not of.store.list()


def test_an_overflow_inside_is_named_by_its_module(tmp_path: Path) -> None:
    of = trainer(tmp_path, dataset(tmp_path))
    with torch.no_grad():
        of.model.model.layers[0].mlp.down_proj.weight.fill_(3e38)  # finite itself; its product is not
    with pytest.raises(NumericalError, match=r"output of model\.layers\.0\.mlp\.down_proj"):
        of.step()


def test_a_bad_gradient_is_named_and_changes_nothing(tmp_path: Path) -> None:
    of = trainer(tmp_path, dataset(tmp_path))
    of.model.lm_head.weight.register_hook(lambda grad: grad * math.inf)
    before = tensors(of)
    with pytest.raises(NumericalError, match=r"gradient of lm_head\.weight is not finite"):
        of.step()
    assert len(same(before, tensors(of))) == len(before)
