"""Triton on a machine without a GPU: its interpreter, which `conftest` asks for.

A test module calls `ask()` before it imports an operator, then `mend()`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def ask() -> None:
    """Skip the calling module where triton is not installed."""
    pytest.importorskip("triton", reason="triton is not installed: the operators of glm5[gpu] go untested here")


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
