"""Products of 16-bit operands on a GPU with fp32 sums, whatever the settings of the process."""

from __future__ import annotations

import threading
from typing import Any

import torch

_ROUNDED = tuple(f"allow_{name}_reduced_precision_reduction" for name in ("bf16", "fp16"))


class _FullSums:
    """Context manager that prevents the rounding of incomplete sums in products.

    cuBLAS splits the depth of a product if it is large and the result is small. By default torch
    lets cuBLAS round the sums of the parts to 16 bits. In fp16 a setting of torch rounds every
    addition. Both are settings of the process. The first of several threads changes them, and the
    last one restores them.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: dict[str, Any] = {}

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = _settings()
                try:
                    _set({name: _without(value) for name, value in self._before.items()})
                except BaseException:
                    _set(self._before)
                    raise
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                _set(self._before)


full_sums = _FullSums()


def _set(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        setattr(torch.backends.cuda.matmul, name, value)


def _settings() -> dict[str, Any]:
    matmul = torch.backends.cuda.matmul
    # torch sets these two together: whether sums are rounded, and whether the depth is split.
    settings = {n: (getattr(matmul, n), getattr(matmul, f"{n}_split_k")) for n in _ROUNDED}
    return {**settings, "allow_fp16_accumulation": matmul.allow_fp16_accumulation}


def _without(value: Any) -> Any:
    return (False, value[1]) if isinstance(value, tuple) else False
