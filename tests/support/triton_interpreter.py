"""Triton on a machine without a GPU: its interpreter, asked for before triton is first imported.

A test module calls `ask()` before it imports an operator, then `mend()`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
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
    """Two faults of Triton 3.6's interpreter. Loop bounds are arrays of one element, which NumPy 2.4 no longer takes
    for integers; and e4m3 is rounded without carrying into the exponent, and has no NaN."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_for_new_numpy(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_for_new_numpy
    convert = interpreter._convert_float

    def convert_by_torch(source: Any, source_type: Any, target_type: Any, mode: Any) -> Any:
        if target_type.is_fp8e4nv() and source_type.is_fp32():
            given = torch.from_numpy(np.ascontiguousarray(source).view(np.float32).copy())
            return given.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(source.shape)
        if source_type.is_fp8e4nv() and (target_type.is_fp16() or target_type.is_fp32()):
            given = torch.from_numpy(np.ascontiguousarray(source).view(np.uint8).copy()).view(torch.float8_e4m3fn)
            wide = given.to(torch.float16 if target_type.is_fp16() else torch.float32).numpy()
            return wide.view(f"uint{target_type.primitive_bitwidth}").reshape(source.shape)
        return convert(source, source_type, target_type, mode)

    interpreter._convert_float = convert_by_torch
