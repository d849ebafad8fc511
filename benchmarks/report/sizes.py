"""The sizes behind the short names of shapes, such as S1, which results have."""

from benchmarks import head, linear_cross_entropy

SIZES = (
    linear_cross_entropy.SHAPES | linear_cross_entropy.GPU_SHAPES | head.SHAPES | head.GPU_SHAPES
)
SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def spelled_out(shape: str) -> str:
    """Return a shape such as "S1 float32" with sizes in place of its short name."""
    name, _, rest = shape.partition(" ")
    if name not in SIZES:
        return shape
    for dtype, short in SHORT.items():
        rest = rest.replace(dtype, short)
    return f"{' x '.join(map(str, SIZES[name]))}, {rest}"
