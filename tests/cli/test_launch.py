"""Which of several failed ranks is named."""

from __future__ import annotations

from typing import NoReturn

import pytest

from glm5.cli import launch
from glm5.cli.launch import cause_of, spoken_once
from glm5.utils.errors import ConfigError, UserError

KILLED = "(by hand, or by the kernel where memory is full)"


@pytest.mark.parametrize(
    ("statuses", "cause"),
    [
        ({1: -9}, f"rank 1 was ended by signal 9 {KILLED}"),
        ({0: -15}, "rank 0 was ended by signal 15"),
        ({0: -15, 1: -9}, f"rank 1 was ended by signal 9 {KILLED}"),  # the first was ended for it
        ({0: -15, 1: 3}, "rank 1 ended with status 3"),
        ({0: 3}, "rank 0 ended with status 3"),
        ({0: 3, 1: -9}, f"rank 1 was ended by signal 9 {KILLED}"),
        ({0: 2}, ""),
        ({0: 2, 1: -15, 2: -15}, ""),  # the first has said why, and the others were ended for it
        ({0: 2, 1: -9, 2: -15}, f"rank 1 was ended by signal 9 {KILLED}"),
    ],
)
def test_the_cause_is_named_once(statuses: dict[int, int], cause: str) -> None:
    assert cause_of(statuses) == cause


def test_what_one_rank_alone_has_found_is_said_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(_: object) -> NoReturn:
        raise ConfigError("device", "cuda", "here is none")

    waited: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"^device='cuda': here is none$"):
        spoken_once(wrong)
    assert waited == []
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(UserError, match=r"^rank 3: device='cuda': here is none$"):
        spoken_once(wrong)
    assert waited == [launch.PATIENCE]
