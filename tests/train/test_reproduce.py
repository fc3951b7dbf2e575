"""The comparisons: the rule of the verdicts, what is measured, and that cells are fair, resumed and reused."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from glm5.kernels.attention import attention_logit_max
from glm5.kernels.visibility import Visibility
from glm5.model.glm5 import GLM5
from glm5.model.presets import gqa_8, mla_192
from glm5.model.trace import Aux
from glm5.train.evaluate import held_out
from glm5.train.loop import Rows, Trainer
from glm5.train.reproduce import cells, published, table1, table2, table6
from glm5.train.reproduce.cells import Cell, Lab, Text
from glm5.train.reproduce.settings import Settings, settings
from glm5.train.reproduce.verdict import MARGIN, Claim, interval, judge, spread
from glm5.train.schedule import LearningRate
from glm5.utils.config_io import to_dict
from glm5.utils.errors import ConfigError, DataError
from support.training import SEQ_LEN, dataset, tiny, trainer


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    directory = tmp_path_factory.mktemp("text")
    return Text(dataset(directory / "training"), dataset(directory / "held-out", (90, 70, 40, 12, 35)))


def small(**changes: Any) -> Settings:
    base = Settings(
        tiny().config,
        seq_len=SEQ_LEN,
        steps=4,
        rows=2,
        micro_batch=2,
        lr=LearningRate(2e-2, 2e-3, warmup_steps=1),
        held_out_rows=6,
        measure_every=2,
        prompts=2,
        new_tokens=8,
        warmup_steps=2,
        adapt_steps=2,
    )
    return replace(base, **changes)


class Spy(Lab):
    """A lab that remembers the cells it was asked for, and what was trained."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cells: list[Cell] = []
        self.lines: list[str] = []
        self.note = self.lines.append

    def results(self, cells: Sequence[Cell], measure: Any, watch: Any = None) -> Any:
        self.cells = list(cells)
        return super().results(cells, measure, watch)


TABLES: dict[str, Callable[..., Any]] = {"table1": table1.compare, "table2": table2.compare, "table6": table6.compare}


# --------------------------------------------------------------------------- the rule
def test_the_interval_is_students() -> None:
    assert spread([1.0, 2.0, 3.0]) == 1.0
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert interval([0.0, 2.0]) == pytest.approx(12.706)
    assert interval([0.0, 2.0] * 40) == pytest.approx(2.042 * spread([0.0, 2.0] * 40) / math.sqrt(80))
    assert interval([1.0]) is None
    assert spread([]) is None


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    samples = np.random.default_rng(0).normal(3.0, 2.0, (20_000, 4))
    missed = sum(abs(row.mean() - 3.0) > interval(row.tolist()) for row in samples)  # type: ignore[operator]
    assert missed / len(samples) == pytest.approx(0.05, abs=0.006)


@pytest.mark.parametrize(
    ("direction", "measured", "outcome", "reproduced"),
    [
        ("higher", (1.10, 1.11, 1.12), "same direction", True),
        ("higher", (0.90, 0.89, 0.88), "opposite", False),
        ("higher", (1.10, 0.95, 1.02), "within noise", None),
        ("lower", (0.90, 0.89, 0.88), "same direction", True),
        ("lower", (1.10, 1.11, 1.12), "opposite", False),
        ("lower", (1.0, 1.0, 1.0), "within noise", None),
        ("higher", (1.5,), "within noise", None),
        ("equal", (1.001, 1.002, 1.000), "match", True),
        ("equal", (1.0, 1.0, 1.0), "match", True),
        ("equal", (1.10, 1.11, 1.12), "no match", False),
        ("equal", (0.90, 0.89, 0.88), "no match", False),
        ("equal", (1.005, 1.02, 0.99), "within noise", None),
        ("equal", (1.0,), "within noise", None),
    ],
)
def test_verdicts(direction: Any, measured: tuple[float, ...], outcome: str, reproduced: bool | None) -> None:
    verdict = judge(Claim("a claim", "", direction), measured, (1.0,) * len(measured))
    assert (verdict.outcome, verdict.reproduced) == (outcome, reproduced)
    assert verdict.mean == pytest.approx(sum(measured) / len(measured) - 1)


def test_differences_are_paired_by_seed() -> None:
    """A variant that is better on every seed by the same share counts, however far apart the seeds are."""
    reference = (1.0, 2.0, 4.0)
    verdict = judge(Claim("", "", "lower"), [0.95 * r for r in reference], reference)
    assert verdict.differences == pytest.approx((-0.05,) * 3)
    assert verdict.outcome == "same direction"
    absolute = judge(Claim("", "", "lower", "tokens"), [0.95 * r for r in reference], reference)
    assert absolute.differences == pytest.approx((-0.05, -0.1, -0.2))


def test_a_claim_needs_figures() -> None:
    with pytest.raises(ValueError, match="at least one seed"):
        judge(Claim("", "", "higher"), [], [])
    with pytest.raises(ValueError, match="reference of 0"):
        judge(Claim("it grows", "", "higher"), [1.0], [0.0])
    with pytest.raises(ValueError):
        judge(Claim("", "", "higher"), [1.0, 2.0], [1.0])


def test_the_margin_lies_between_the_reports_gap_and_its_match() -> None:
    gqa, mla, split, wide = (published.table1_mean(name) for name in published.TABLE1)
    assert (gqa, mla, split, wide) == pytest.approx((59.64, 57.84, 59.40, 59.19), abs=0.005)
    assert 1 - split / gqa < MARGIN < 1 - mla / gqa
    assert 1 - wide / split < MARGIN


# --------------------------------------------------------------------------- sizes
@pytest.mark.parametrize("size", ["tiny", "nano", "small", "mini"])
@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_every_size(table: Any, size: Any) -> None:
    chosen = settings(table, size)
    assert (chosen.model.num_nextn_predict_layers == 1) == (table == "table2")
    assert chosen.rows % chosen.micro_batch == 0
    if table == "table1":
        for _, variant, _ in table1.VARIANTS.values():
            variant(chosen.model)
    if table == "table6":
        assert chosen.seq_len >= 16 * chosen.model.index_topk  # far above
        assert chosen.warmup_steps > 0
        assert chosen.adapt_steps > 0


def test_later_stages_keep_their_share() -> None:
    chosen = settings("table6", "nano")
    half = chosen.with_steps(chosen.steps // 2)
    assert (half.steps, half.warmup_steps, half.adapt_steps) == (160, 25, 30)
    assert chosen.with_steps(1).adapt_steps == 1
    assert settings("table1", "nano").with_steps(7).adapt_steps == 0
    with pytest.raises(ConfigError, match="steps=0"):
        chosen.with_steps(0)


# --------------------------------------------------------------------------- attention logits
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_largest_logit_is_that_of_all_visible_pairs(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.kernels.tiling.TILE_ELEMENTS", 100)  # several tiles
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 9, 4, 6, generator=generator)
    k = torch.randn(2, 9, groups, 6, generator=generator)
    # Two documents in the first row; the second ends in padding, which sees nothing.
    first = torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4, 4], [0, 0, 0, 0, 0, 0, 0, 8, 9]])
    logits = 0.5 * torch.einsum("bthx,bshx->bhts", q, k.repeat_interleave(4 // groups, 2))
    slot = torch.arange(9)
    visible = (slot[None, None] >= first[..., None]) & (slot[None, None] <= slot[None, :, None])
    expected = logits.masked_fill(~visible[:, None], -math.inf).amax((0, 2, 3))
    found = attention_logit_max(q, k, Visibility.documents(first), None, 0.5)
    torch.testing.assert_close(found, expected)
    selected = slot[None, :, None].expand(2, 9, 1)  # itself alone
    selected = torch.where(visible.any(-1, keepdim=True), selected, -1).int()
    found = attention_logit_max(q, k, Visibility.documents(first), selected, 0.5)
    seen = visible.any(-1)[:, None]
    torch.testing.assert_close(found, logits.diagonal(dim1=2, dim2=3).masked_fill(~seen, -math.inf).amax((0, 2)))


@pytest.mark.parametrize("variant", [None, mla_192, gqa_8])
def test_logits_of_every_variant_are_measured(variant: Any, text: Text) -> None:
    base = tiny()
    model = base if variant is None else GLM5(variant(base.config), seed=1)
    rows = table1.probe(text.held_out, model)
    found = table1.attention_logit_maxima(model, rows)
    assert len(found) == model.config.num_hidden_layers
    with torch.no_grad():
        before = model.hidden(rows.input_BT, documents=rows.documents_BT, sparse=False)
        aux = Aux(logits=True)
        torch.testing.assert_close(
            before,
            model.hidden(rows.input_BT, documents=rows.documents_BT, sparse=False, aux=aux),
            rtol=1e-5,
            atol=1e-6,
        )
        assert all(m.shape == (model.config.num_attention_heads,) for m in aux.logit_maxima)
        if model.config.attention == "mla":  # the indexer's loss measures them on its own way
            aux = Aux(indexer=True)
            model.hidden(rows.input_BT, documents=rows.documents_BT, sparse=False, aux=aux)
            assert found == pytest.approx([float(x.logit_max_H.max()) for x in aux.indexer_losses])
        else:  # logits are linear in the last layer's keys
            model.blocks[-1].self_attn.k_proj.weight.mul_(3.0)  # type: ignore[union-attr,operator]
            assert table1.attention_logit_maxima(model, rows) == pytest.approx([found[0], 3 * found[1]], rel=1e-4)


def test_mtp_trains_with_grouped_queries_too(tmp_path: Path) -> None:
    run = trainer(tmp_path, dataset(tmp_path), model=GLM5(gqa_8(tiny().config), seed=1), steps=1)
    metrics = run.step()
    assert all(math.isfinite(metrics[f"mtp_loss_{d}"]) for d in (1, 2, 3))
    assert run.model.mtp.self_attn.q_proj.weight.grad.any()  # type: ignore[union-attr]


# --------------------------------------------------------------------------- fairness
def test_table_1_changes_attention_and_optimizer_alone(text: Text, tmp_path: Path) -> None:
    lab = Spy(tmp_path, text, small())
    table1.compare(lab, (0, 1))
    assert [c.name for c in lab.cells[:4]] == ["gqa-8-seed0", "mla-seed0", "mla-split-seed0", "mla-256-split-seed0"]
    for seed in (0, 1):
        own = [c for c in lab.cells if c.seed == seed]
        assert len({replace(c.train, split_heads=True) for c in own}) == 1
        assert [c.train.split_heads for c in own] == [False, False, True, True]
        assert {c.train.seed for c in own} == {seed}
        assert own[1].model == own[2].model
    assert [c.model.attention for c in lab.cells[:4]] == ["gqa", "mla", "mla", "mla"]


def test_table_2_changes_the_trained_depths_alone(text: Text, tmp_path: Path) -> None:
    lab = Spy(tmp_path, text, small())
    table2.compare(lab, (0,))
    one, three = lab.cells
    assert (one.train.mtp_depths, three.train.mtp_depths) == (1, 3)
    assert replace(one.train, mtp_depths=3) == three.train
    assert one.model == three.model
    assert one.train.mtp_share == 1.0


def test_table_6_controls_for_the_steps_of_adaptation(text: Text, tmp_path: Path) -> None:
    lab = Spy(tmp_path, text, small())
    table6.compare(lab, (0,))
    named = {c.variant: c for c in lab.cells}
    dense, warm, sparse, control = (named[name] for name in ("dense", "warm-up", "sparse", "control"))
    assert (sparse.train.stage, control.train.stage, warm.train.stage) == ("sparse", "pretrain", "warmup")
    assert replace(sparse.train, stage="pretrain") == control.train
    assert (control.parent, warm.parent, sparse.parent) == (dense, dense, warm)
    assert sparse.train.lr.peak == sparse.train.lr.final == dense.train.lr.final
    assert sparse.train.seed != dense.train.seed  # rows in another order than pretraining's


# --------------------------------------------------------------------------- table 2's figures
def test_every_step_of_a_measurement_drafts_in_full(text: Text) -> None:
    model = tiny()
    found = table2.draft(model, text.prompts(2), 3, 9)
    assert len(found["acceptance"]) == 3
    assert found["accept_length"] == pytest.approx(1 + sum(found["acceptance"]))
    assert np.cumprod(found["conditional"]) == pytest.approx(found["acceptance"])
    assert 1 <= found["accept_length"] <= 4
    assert found == table2.draft(model, text.prompts(2), 3, 9)


def test_losses_of_depths(text: Text) -> None:
    model = tiny()
    found = table2.depth_losses(model, text.held_out, max_rows=100, rows_at_once=2)
    sums, counts = [0.0] * 3, [0] * 3
    for row in range(text.held_out.rows):
        batch = text.held_out.batch([row])
        on = Rows.of(batch, model.device)
        with torch.no_grad():
            trunk = model.hidden(on.input_BT, documents=on.documents_BT, sparse=False)
            depths = model.mtp_hidden(trunk, on.ids_BS, 3, documents=on.documents_BS, sparse=False)
            for i, hidden in enumerate(depths):
                target, weight = (torch.from_numpy(x)[0] for x in batch.targets(i + 2))
                kept = weight[: hidden.shape[1]] > 0
                logits = model.lm_head(hidden[0])[kept]
                sums[i] += float(F.cross_entropy(logits, target[: len(kept)][kept], reduction="sum"))
                counts[i] += int(kept.sum())
    assert found == pytest.approx([s / n for s, n in zip(sums, counts, strict=True)], rel=1e-5)


def test_prompts_begin_held_out_documents(text: Text) -> None:
    store = text.held_out.store
    assert text.prompts(2) == [store.read(d, 0, SEQ_LEN // 2).tolist() for d in (0, 2)]
    assert len(text.prompts(100)) == 5
    assert all(store.end_of_text_id not in prompt for prompt in text.prompts(100))


# --------------------------------------------------------------------------- table 6's figures
def test_lengths_double_from_half_of_top_k_to_the_context() -> None:
    assert table6.length_edges(8, 32) == [4, 8, 16, 32]
    assert table6.length_edges(8, 40) == [4, 8, 16, 32, 40]
    assert table6.length_names([4, 8, 16, 40], 8) == ["0.5x", "1x", "2x", "5x"]
    with pytest.raises(ConfigError, match="at least twice index_topk=8"):
        table6.length_edges(8, 15)


@pytest.mark.parametrize("sparse", [False, True])
def test_lengths_together_are_the_whole(sparse: bool, text: Text) -> None:
    model = tiny()
    edges = [4, 8, 16, 32]
    bits = table6.bits_by_context(model, text.held_out, edges, sparse=sparse, max_rows=100, rows_at_once=2)
    batch = text.held_out.batch(range(text.held_out.rows))
    seen = batch.position_BT + 1
    size = [
        batch.num_bytes_BT[(seen > low) & (seen <= high)].sum() for low, high in zip([0, *edges], edges, strict=False)
    ]
    whole = held_out(model, text.held_out, sparse=sparse).bits_per_byte
    assert np.dot(bits, size) / sum(size) == pytest.approx(whole, rel=1e-6)
    if sparse:
        dense = table6.bits_by_context(model, text.held_out, edges, sparse=False, max_rows=100)
        assert bits[:2] == pytest.approx(dense[:2], rel=1e-6)  # up to top-k everything is read
        assert bits[3] != pytest.approx(dense[3], rel=1e-6)


def test_documents_too_short_for_a_length_are_an_error(tmp_path: Path) -> None:
    short = dataset(tmp_path, (10, 9, 12, 8))
    with pytest.raises(DataError, match="more than 16 others"):
        table6.bits_by_context(tiny(), short, [4, 8, 16, 32], sparse=False, max_rows=9)


def test_warm_up_alone_is_the_dense_model_up_to_top_k(text: Text, tmp_path: Path) -> None:
    found = table6.compare(Lab(tmp_path, text, small()), (0,))
    rows = {row.name: row.by_seed for row in found.rows}
    for length in ("0.5x", "1x"):
        assert rows["warm-up only"][length] == pytest.approx(rows["dense"][length], rel=1e-6)
        assert rows["sparse-adapted"][length] != pytest.approx(rows["dense"][length], rel=1e-4)
    assert rows["warm-up only"]["4x"] != pytest.approx(rows["dense"]["4x"], rel=1e-6)


# --------------------------------------------------------------------------- cells
@pytest.mark.parametrize("table", TABLES)
def test_finished_cells_are_reused(table: str, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Spy(tmp_path, text, small())
    found = to_dict(TABLES[table](lab, (0,)))
    assert not list(tmp_path.rglob("checkpoints"))  # weights go when no later cell needs them

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a finished cell was trained again")

    monkeypatch.setattr(cells, "Trainer", never)
    again = Spy(tmp_path, text, small())
    assert to_dict(TABLES[table](again, (0,))) == found
    assert all(line.endswith("done before") for line in again.lines)


def test_seeds_can_be_added(text: Text, tmp_path: Path) -> None:
    first = table2.compare(Lab(tmp_path, text, small()), (0,))
    lab = Spy(tmp_path, text, small())
    both = table2.compare(lab, (0, 1))
    assert sum(line.endswith("done before") for line in lab.lines) == 2
    for a, b in zip(first.rows, both.rows, strict=True):
        for name, values in a.by_seed.items():
            assert list(values) == list(b.by_seed[name])[:1]
            assert len(b.by_seed[name]) == 2
    assert all(v.half_width is None for v in first.verdicts)
    assert all(v.half_width is not None for v in both.verdicts)


@pytest.mark.parametrize("table", ["table1", "table6"])
def test_an_interrupted_comparison_ends_as_if_it_was_not(
    table: str, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = to_dict(TABLES[table](Lab(tmp_path / "whole", text, small()), (0,)))
    steps = 0
    step = Trainer.step

    def interrupted(self: Trainer) -> dict[str, Any]:
        nonlocal steps
        steps += 1
        if steps in (7, 9):  # in the middle of cells; in table 6 both begin with another's weights
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Trainer, "step", interrupted)
    interruptions = 0
    while True:
        try:
            found = TABLES[table](Lab(tmp_path / "cut", text, small()), (0,))
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions == 2

    def figures(of: dict[str, Any]) -> Any:
        return [of["rows"], of["verdicts"], of["charts"]]

    assert figures(to_dict(found)) == figures(whole)


def test_other_settings_are_refused(text: Text, tmp_path: Path) -> None:
    table2.compare(Lab(tmp_path, text, small()), (0,))
    with pytest.raises(ConfigError, match=r"train\.steps=5: .*this run began with 4; .*another directory"):
        table2.compare(Lab(tmp_path, text, small(steps=5)), (0,))
    other = Text(dataset(tmp_path / "other", (99, 80, 40)), text.held_out)
    with pytest.raises(ConfigError, match="corpus="):
        table2.compare(Lab(tmp_path, other, small()), (0,))


def test_weights_stay_while_a_later_cell_begins_with_them(text: Text, tmp_path: Path) -> None:
    there: dict[str, set[str]] = {}

    class Watching(Lab):
        def results(self, cells: Sequence[Cell], measure: Any, watch: Any = None) -> Any:
            def look(cell: Cell, model: GLM5) -> Any:
                there[cell.variant] = {p.parent.name for p in tmp_path.glob("*/checkpoints")}
                return measure(cell, model)

            return super().results(cells, look, watch)

    table6.compare(Watching(tmp_path, text, small()), (0,))
    assert there["control"] == {"dense-seed0", "control-seed0"}
    assert there["sparse"] == {"dense-seed0", "warm-up-seed0", "sparse-seed0"}
    assert not list(tmp_path.glob("*/checkpoints"))
    table6.compare(Lab(tmp_path / "kept", text, small(), keep=True), (0,))
    assert len(list(tmp_path.glob("kept/*/checkpoints"))) == 4


def test_costs_are_the_ledgers(text: Text, tmp_path: Path) -> None:
    found = table1.compare(Lab(tmp_path, text, small()), (0,))
    fixed = {row.name: row.fixed for row in found.rows}
    config = small().model
    gqa, mla, wide = gqa_8(config), mla_192(config), config
    own = {
        "GQA-8": GLM5(gqa),
        "MLA": GLM5(mla),
        "MLA-256 + Muon Split": GLM5(wide),
    }
    for name, model in own.items():
        state = model.state_dict()
        assert fixed[name]["parameters"] == sum(t.numel() for n, t in state.items() if ".indexer." not in n)
    cache = "cache elements a token and layer"
    assert fixed["GQA-8"][cache] == 2 * gqa.num_key_value_heads * gqa.head_dim
    assert fixed["MLA"][cache] == fixed["MLA-256 + Muon Split"][cache] == config.kv_lora_rank + config.qk_rope_head_dim
    decode = next(name for name in fixed["MLA"] if name.startswith("decode"))
    assert fixed["MLA-256 + Muon Split"][decode] * 3 == fixed["MLA"][decode] * 2


def test_a_child_begins_with_all_digits_of_a_bf16_parent(text: Text, tmp_path: Path) -> None:
    lab = Lab(tmp_path, text, small(), keep=True)
    parent = lab.cell("parent", 0, small().model, precision="bf16")
    child = lab.cell("child", 0, small().model, parent=parent, data_seed=9, precision="bf16", steps=1)
    exact = lab._train(parent, None).fp32_model()
    found: dict[str, torch.Tensor] = {}

    begin = cells.Trainer.__init__

    def remember(self: Trainer, config: Any, model: GLM5, *args: Any, **options: Any) -> None:
        if config.seed == 9:
            found.update({n: p.detach().clone() for n, p in model.named_parameters()})
        begin(self, config, model, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells.Trainer, "__init__", remember)
        lab._train(child, None)
    expected = dict(exact.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    assert any(not torch.equal(t, t.bfloat16().float()) for t in found.values())
