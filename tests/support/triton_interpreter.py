"""Triton on a machine without a GPU: its interpreter, asked for before triton is first imported.

A test module calls `ask()` before it imports an operator, then `mend()`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch


def ask() -> None:
    """Skip the calling module where triton is not installed, or was imported already to be compiled."""
    if not torch.cuda.is_available():
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            reason = "triton was imported before its interpreter was asked for; run this file with TRITON_INTERPRET=1"
            pytest.skip(reason, allow_module_level=True)
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when first imported
    reason = "triton is not installed: the operators of glm5[gpu] go untested here"
    pytest.importorskip("triton", reason=reason)


def mend() -> None:
    """Triton 3.6 makes loop bounds of arrays with one element, which NumPy 2.4 no longer takes for integers."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_for_new_numpy(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_for_new_numpy
