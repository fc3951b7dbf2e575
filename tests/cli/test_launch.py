"""Which of several failed ranks is named."""

from __future__ import annotations

import pytest

from glm5.cli.launch import cause_of


@pytest.mark.parametrize(
    ("statuses", "cause"),
    [
        ({1: -9}, "rank 1 was ended by signal 9"),
        ({0: -15}, "rank 0 was ended by signal 15"),
        ({0: -15, 1: -9}, "rank 1 was ended by signal 9"),  # the first was ended for it
        ({0: -15, 1: 3}, "rank 1 ended with status 3"),
        ({0: 3}, "rank 0 ended with status 3"),
        ({0: 3, 1: -9}, "rank 1 was ended by signal 9"),
        ({0: 2}, ""),
        ({0: 2, 1: -15, 2: -15}, ""),  # the first has said why, and the others were ended for it
        ({0: 2, 1: -9, 2: -15}, "rank 1 was ended by signal 9"),
    ],
)
def test_the_cause_is_named_once(statuses: dict[int, int], cause: str) -> None:
    assert cause_of(statuses) == cause
