"""Without isolation these tests skip, and say what to install; they never run a program unprotected."""

from __future__ import annotations

import pytest

from glm5.agents.sandbox import SandboxError, require


@pytest.fixture(scope="session")
def isolation() -> None:
    """Skip where the host can isolate nothing."""
    try:
        require()
    except SandboxError as e:
        pytest.skip(str(e))
