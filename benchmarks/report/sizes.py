"""The sizes of shapes with short names, such as S1, in results."""

import re

from benchmarks import head, linear_cross_entropy

SIZES = (
    linear_cross_entropy.SHAPES | linear_cross_entropy.GPU_SHAPES | head.SHAPES | head.GPU_SHAPES
)
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
_NAMES = re.compile(rf"\b(?:{'|'.join(SIZES)})\b")


def spelled_out(shape: str) -> str:
    """Return a shape such as "S1 float32" with sizes instead of its short name."""
    name, _, rest = shape.partition(" ")
    if name not in SIZES:
        return shape
    for dtype, short in SHORT.items():
        rest = rest.replace(dtype, short)
    return f"{_sizes(name)}, {rest}"


def without_names(note: str) -> str:
    """Return a note with sizes instead of the short names of shapes."""
    return _NAMES.sub(lambda match: _sizes(match[0]), note)


def _sizes(name: str) -> str:
    return " x ".join(map(str, SIZES[name]))
