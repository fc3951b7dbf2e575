"""One reference run for all tests of the model: see `support.golden`."""

from __future__ import annotations

import pytest
import torch

pytest.register_assert_rewrite("support.checks", "support.golden", "support.faults")

from support import golden as golden_module


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> golden_module.Golden:
    """Our model and the public implementation on the same fresh weights, and ids whose decisions are clear."""
    with torch.random.fork_rng():
        return golden_module.make(tmp_path_factory.mktemp("golden"))
