"""A stop that comes late still stops, and a run that has computed nothing holds nobody to its configuration."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from glm5.train.loop import Trainer
from glm5.utils.errors import ConfigError, NumericalError
from glm5.utils.runlog import run_status
from support.training import dataset, trainer


@pytest.mark.parametrize("moment", ["step", "save"])
def test_a_signal_in_the_last_step_or_its_save_stops_what_would_follow(moment: str, tmp_path: Path) -> None:
    of = trainer(tmp_path, dataset(tmp_path), steps=2)
    whole = getattr(of, moment)

    def interrupted(*args: Any) -> Any:
        if of.finished_steps == (1 if moment == "step" else 2):
            os.kill(os.getpid(), signal.SIGINT)
        return whole(*args)

    setattr(of, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        of.run()
    assert of.finished_steps == 2
    assert [p.name for p in of.store.list()] == ["step-00000002"]
    assert run_status(of.directory) == "finished"  # the stage itself lacks nothing


def test_a_run_without_checkpoints_takes_another_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(tmp_path)

    def fails(_self: Trainer) -> dict[str, Any]:
        raise NumericalError("the loss of step 0 is nan")

    with monkeypatch.context() as m:
        m.setattr(Trainer, "step", fails)
        with pytest.raises(NumericalError):
            trainer(tmp_path, data, lr=1e3).run()
    of = trainer(tmp_path, data, lr=1e-3)
    of.run()
    assert json.loads((of.directory / "config.json").read_text())["lr"]["peak"] == 1e-3
    with pytest.raises(ConfigError, match=r"lr\.peak=0\.5: this run began with 0\.001"):
        trainer(tmp_path, data, lr=0.5).run()
