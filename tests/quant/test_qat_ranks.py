"""Training at INT4 on several processes: the gradients, and the exported weights, of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm5.data.loader import Loader, TokenDataset
from glm5.parallel.mesh import World
from glm5.quant.int4 import MARK, train_at_int4
from glm5.train.config import TrainConfig
from glm5.train.loop import Trainer
from glm5.train.ranks import PipelineOptions
from glm5.train.schedule import BatchWarmup, LearningRate
from support.parallel import apart, gradients
from support.ranks import run_ranks
from support.training import SEQ_LEN, dataset, tiny

ZERO_BUBBLE = PipelineOptions(schedule="zero-bubble", layout="E D M | N P H")


def make(world: World | None, directory: str | Path, run: str, *, quantised: bool = True) -> Trainer:
    config = TrainConfig(steps=2, batch=BatchWarmup(4, 4, 0), micro_batch=1, lr=LearningRate(1e-2, 1e-3), mtp_depths=1)
    model = tiny()
    if quantised:
        train_at_int4(model, 4)
    data = TokenDataset.open(Path(directory) / "tokens", SEQ_LEN, 4)
    how = ZERO_BUBBLE if world is not None and world.count("pp") > 1 else PipelineOptions()
    return Trainer(config, model, Loader(data, config.seed), Path(directory) / run, world, how)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one")
    dataset(directory)
    both = [gradients(make(None, directory, f"one-{q}", quantised=q))[0] for q in (True, False)]
    assert apart(*both, 1e-2)  # the rounding is seen
    torch.save(both[0], directory / "expected.pt")
    return directory


def _compare(world: World, directory: str, run: str) -> tuple[list[str], list[str], bool]:
    of = make(world, directory, run)
    found, _ = gradients(of)
    expected = torch.load(Path(directory) / "expected.pt")
    wrong = apart(found, {name: expected[name] for name in found}, 3e-5)
    return wrong, sorted(found), MARK in of.fp32_model().config.extra


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,ep=2", "pp=2"])
def test_the_gradients_of_one_process(mesh: str, one: Path) -> None:
    ranks = run_ranks(2, mesh, _compare, str(one), mesh)
    assert [wrong for wrong, _, _ in ranks] == [[], []]
    assert {name for _, names, _ in ranks for name in names} == set(torch.load(one / "expected.pt"))
    assert all(marked for _, _, marked in ranks)
