"""Documents of all lengths over ranks that divide into groups for every step: one process's loss and gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glm5.data.loader import TokenDataset
from glm5.data.mixing import MixedDataset
from glm5.parallel.expert import SpreadExperts
from glm5.parallel.mesh import Mesh, World
from glm5.train.config import TrainConfig
from glm5.train.groups import rows_for
from glm5.train.loop import Trainer
from glm5.train.ranks import check_batch
from glm5.utils.errors import ConfigError, NumericalError
from support.parallel import gradients, make, unlike
from support.ranks import run_ranks
from support.training import LetterTokenizer, documents

TOLERANCE = 3e-5
LONGEST, HELD = 96, 128  # tokens of a document, and of all ranks together
# One is cut, one takes three ranks' tokens, and many are short.
LENGTHS = (150, 20, 9, 61, 33, 5, 80, 47, 12, 7, 25, 40)
ROWS = 13
STAGES: dict[str, dict[str, Any]] = {
    "pretrain": dict(),
    "warmup": dict(stage="warmup", mtp_depths=1),
    "sparse": dict(stage="sparse", mtp_depths=2),
}
OF_THE_PLAN = ("imbalance", "imbalance_uniform")


def _data(directory: Path) -> TokenDataset:
    return TokenDataset.open(directory / "tokens", LONGEST, 4, "whole")


def _trainer(world: World | None, directory: str | Path, run: str, **changes: Any) -> Trainer:
    """As `make`, on whole documents."""
    return make(world, directory, run, **{"seq_len": LONGEST, "strategy": "whole", "rows": ROWS, **changes})


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens, and what one process makes of each stage's step by rows of one length, padded."""
    directory = tmp_path_factory.mktemp("one")
    TokenDataset.build(documents(LENGTHS), LetterTokenizer(), directory / "tokens", LONGEST, 4, "whole")
    for name, options in STAGES.items():
        of = _trainer(None, directory, f"run-{name}", **options)
        found, metrics = gradients(of)
        biases = [r.e_score_correction_bias.clone() for r in of.routers]
        torch.save((found, metrics, biases), directory / f"{name}.pt")
    return directory


def _compare(
    world: World | None, directory: str, stages: Sequence[str] = tuple(STAGES)
) -> tuple[list[str], dict[str, Any], list[int]]:
    """What is wrong on this rank, the metrics of the first, and this rank's places in its micro-steps."""
    wrong: list[str] = []
    said: dict[str, Any] = {}
    sizes: list[int] = []
    count, run = (1, "grouped") if world is None else (world.count("dp"), str(world.mesh))
    for name in stages:
        options = STAGES[name]
        expected = torch.load(f"{directory}/{name}.pt")
        of = _trainer(world, directory, f"{run}-{name}", context_groups=HELD // count, **options)
        assert all(not m.alike for m in of.model.modules() if isinstance(m, SpreadExperts))
        own, figures = gradients(of)
        wrong += [f"{name}: {w}" for w in unlike(of, own, figures, expected, TOLERANCE)]
        if not said:
            said = {k: figures[k] for k in (*OF_THE_PLAN, "context_groups", "context_steps")}
            assert of.groups is not None
            plan = of.groups.plan(of.loader.rows(0, ROWS))
            place = 0 if world is None else world.place("dp")
            groups = [plan.group_of(step, place) for step in range(len(plan.steps))]
            sizes = [0 if g is None else g.size for g in groups]
    return wrong, said, sizes


def _right(results: Sequence[tuple[list[str], dict[str, Any], list[int]]]) -> dict[str, Any]:
    """What all ranks say, none of whom found anything wrong."""
    for rank, (wrong, _, _) in enumerate(results):
        assert not wrong, f"rank {rank}: {wrong[:8]}"
    said = results[0][1]
    assert all(other == said for _, other, _ in results)
    assert 1.0 <= said["imbalance"] <= said["imbalance_uniform"]
    return said


def test_one_step_equals_one_process(expected: Path) -> None:
    results = run_ranks(4, "dp=4,ep=2,shard=2", _compare, str(expected), timeout=400)
    said = _right(results)
    assert set(said["context_groups"]) == {"1", "2", "4"}
    assert said["imbalance"] < 0.95 * said["imbalance_uniform"]
    assert any(0 in sizes for *_, sizes in results)  # a rank that rests runs padding


def test_one_process_packs_them_for_itself(expected: Path) -> None:
    wrong, said, sizes = _compare(None, str(expected))
    assert not wrong
    assert set(sizes) == {1}
    assert said["context_steps"] < ROWS


def _goes_on(world: World, directory: str) -> tuple[float, float]:
    """Loss of a step, of a run that goes on to it from its checkpoint and of one that never stopped."""
    options: dict[str, Any] = dict(context_groups=HELD // world.count("dp"), micro_batch=1, rows=4)
    whole = _trainer(world, directory, "cut", **options)
    whole.step()
    whole.save()
    whole.store.wait()
    again = _trainer(world, directory, "cut", **options)
    again.resume()
    assert again.finished_steps == 1
    return again.step()["loss"], whole.step()["loss"]


def _spoiled(world: World, directory: str) -> str:
    """What is said where a rank's loss is no number, in a row that it has alone, while it shares the step's first."""
    of = _trainer(world, directory, "spoiled", context_groups=HELD // world.count("dp"))
    rows = of._rows(0, ROWS)
    of._ahead = (0, ROWS, rows)
    assert (rows[0].held is None, rows[-1].held is None) == (False, True)
    first, last = (rows[i].input_BT.shape[1] for i in (0, -1))
    assert first != last
    if world.place("dp") == 1:
        of.model.model.norm.register_forward_hook(lambda _m, _x, y: y * math.nan if y.shape[1] == last else None)
    with pytest.raises(NumericalError) as raised:
        of.step()
    return str(raised.value)


def _beside_tensors(world: World, directory: str) -> tuple[Any, tuple[float, float], str]:
    return _compare(world, directory, ("sparse",)), _goes_on(world, directory), _spoiled(world, directory)


def test_beside_tensor_parallel_ranks_a_resumed_run_and_a_bad_one(expected: Path) -> None:
    results = run_ranks(4, "dp=2,tp=2", _beside_tensors, str(expected), timeout=400)
    compared, gone_on, said = zip(*results, strict=True)
    _right(compared)
    for again, whole in gone_on:
        assert again == whole
    for text in said:
        assert "the loss of step 0 is nan; first bad tensor: " in text
        assert text.partition(" / ")[0].endswith("output of model.norm")


def test_rows_of_whole_documents(expected: Path) -> None:
    data = _data(expected)
    assert data.rows == ROWS
    assert data.lengths(range(ROWS)).max() == LONGEST
    # Every prediction is made once: pieces share the token at which they are cut.
    assert int(data.lengths(range(ROWS)).sum()) - ROWS == int((data.store.lengths - 1).sum())
    one = data.end_to_end([3, 1, 12], 160)
    used = data.lengths([3, 1, 12])
    assert (one.document_BS >= 0).sum() == used.sum()
    assert one.document_BS[0, : used.sum()].tolist() == np.repeat(range(3), used).tolist()
    each = [data.batch([row]) for row in (3, 1, 12)]
    for depth in (1, 2, 4):
        target, weight = one.targets(depth)
        wanted = [b.targets(depth)[0][0, :n][b.targets(depth)[1][0, :n] > 0] for b, n in zip(each, used, strict=True)]
        assert target[weight > 0].tolist() == np.concatenate(wanted).tolist()
    assert one.num_bytes_BT.sum() == sum(b.num_bytes_BT.sum() for b in each)
    empty = data.end_to_end([], 16)
    assert empty.document_BS.max() == -1
    assert not empty.loss_BS.any()
    both = MixedDataset({"a": data, "b": data})
    assert both.lengths([2, ROWS + 3]).tolist() == data.lengths([2, 3]).tolist()
    mixed, alone = both.end_to_end([2, ROWS + 3], 64), data.end_to_end([2, 3], 64)
    assert np.array_equal(mixed.ids_BS, alone.ids_BS)
    assert np.array_equal(mixed.document_BS, alone.document_BS)
    with pytest.raises(ConfigError, match="must hold"):
        data.end_to_end([3, 1, 12], int(used.sum()) - 1)
    assert rows_for(TrainConfig(), data) is data
    packed = TokenDataset.open(expected / "tokens", LONGEST, 4)
    assert rows_for(TrainConfig(context_groups=8), packed).rows == ROWS


@pytest.mark.parametrize(
    ("mesh", "rule"),
    [("dp=3", "dp to be a power of two, and it is 3"), ("dp=2,cp=2", "without pp and cp"), ("dp=2,pp=2", "without pp")],
)
def test_meshes_that_cannot_be_grouped(mesh: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        check_batch(TrainConfig(context_groups=64), Mesh.parse(mesh))


def test_settings_that_contradict_groups(expected: Path) -> None:
    with pytest.raises(ConfigError, match="needs mtp_share=1"):
        TrainConfig(context_groups=8, mtp_share=0.5)
    with pytest.raises(ConfigError, match="leave by_work out"):
        TrainConfig(context_groups=8, by_work=True)
    with pytest.raises(ConfigError, match="must be at least 96"):
        _trainer(None, expected, "small", context_groups=95)
    with pytest.raises(ConfigError, match="best-fit"):
        make(None, expected, "packed", context_groups=96)
