"""One reference run for all tests of the model (see `support.golden`), and one thread for their tiny products."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("support.checks", "support.golden", "support.faults")

from support import golden as golden_module


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Products this small gain nothing from a second thread and wait for it on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> golden_module.Golden:
    """Our model and the public implementation on the same fresh weights, and ids whose decisions are clear."""
    with torch.random.fork_rng():
        return golden_module.make(tmp_path_factory.mktemp("golden"))
