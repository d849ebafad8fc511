"""Memory facts for the table of ops: temporary buffers, and results that torch's fakes get wrong.

`cuda.py` and `cpu.py` describe temporary buffers of large kernels and workspaces of matrix
products. `cpu_copies.py` describes copies of operands on a CPU, `operand_copies.py` copies of
operands that are not contiguous. `cpu_convolutions.py` describes copies in oneDNN's convolutions,
and `native_convolutions.py` the convolutions that torch computes itself. `bitsandbytes.py` has the
ops of that package. `scratch.py` records buffers in a ledger. `fake_tensor_gaps.py` has the
behaviour of real tensors that fake tensors lack on every device, and results that torch's own fakes
get wrong.
"""

from storage_ops.simulate.kernels import (
    bitsandbytes,
    cpu,
    cpu_convolutions,
    cpu_copies,
    cuda,
    fake_tensor_gaps,
    operand_copies,
    scratch,
)

__all__ = [
    "bitsandbytes", "cpu", "cpu_convolutions", "cpu_copies", "cuda", "fake_tensor_gaps",
    "operand_copies", "scratch",
]  # fmt: skip
