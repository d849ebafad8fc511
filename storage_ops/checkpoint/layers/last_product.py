"""A mode that leaves out the matrix product at the end of a block that runs again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from storage_ops.checkpoint.saved.light_mode import LightMode
from storage_ops.checkpoint.saved.ref_counts import RefCounts
from storage_ops.foundation.op_names import Op, is_view
from storage_ops.foundation.ops import Args, Kwargs, facts_of

_aten = torch.ops.aten
# Exact classes of tensors without behaviour of their own.
PLAIN = (Tensor, nn.Parameter, FakeTensor)


class LastProductLeftOut(LightMode):
    """Leaves out the matrix product that ends a block, if backward only needs its inputs.

    A product waits until the next op that computes something, and then runs. Views do not count as
    reads. A checkpoint does the same, because it ends its recompute at the last saved tensor. The
    last product is left out only if nothing else references its output. A function that saved it,
    or a hook, may read it in backward.
    """

    def __init__(self, leaves_out: bool) -> None:
        super().__init__()
        self._waiting: tuple[Any, Any, Tensor] | None = None
        self._leaves_out = leaves_out

    def dispatch(self, op: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run an op, after the waiting product. If the op is a product, let it wait."""
        if is_view(op) or op is _aten._unsafe_view.default or op.namespace == "prim":
            return op(*args, **kwargs)  # an op of prim asks for a fake tensor's device
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            product, factors, out = waiting
            with torch.no_grad():  # the op may run before autograd, such as a size
                product(*factors, out=out)
        leaves_out = self._leaves_out and not kwargs and _is_plain_product(op)
        if not leaves_out or any(type(t) not in PLAIN for t in args) or not _fit(*args):
            return op(*args, **kwargs)
        first, second = args[-2:]
        result: Tensor = first.new_empty((*first.shape[:-1], second.shape[-1]))
        self._waiting = op.overloadpacket.out, args, result
        return result

    def finish(self, output: Callable[[], Tensor | None]) -> None:
        """Run the waiting product if other code than the caller references its result.

        Args:
            output: returns the output of the block, which is the result of the product or a view.
        """
        if self._waiting is None:
            return
        product, factors, result = self._waiting
        self._waiting, out = None, output()
        assert out is not None
        base, key = out._base, result.untyped_storage()._cdata
        # These are the references from autograd, the caller and local names. Code with any other
        # reference may read the output.
        known = [weakref.ref(t) for t in (result, base, out) if t is not None]
        now = [RefCounts.counted(key, ref) for ref in known]
        tensors = len({id(ref()) for ref in known})
        expected = [
            RefCounts(
                tensors, 1 + (t is base), sum(t is name for name in (result, base, out, output()))
            )
            for t in (result, base, out)
            if t is not None
        ]
        if now != expected:
            with torch.no_grad():
                product(*factors, out=result.data)  # this write does not bump the version


def _is_plain_product(op: Op) -> bool:
    """Return True for a product of two matrices or two batches that has an `out` argument.

    Such an op does not save its result for backward.
    """
    product = facts_of(op).product
    return product is not None and product.on_cublas and product.form == "matrices"


def _fit(*factors: Tensor) -> bool:
    """Return True if a product of these arguments raises no error, which its caller could catch."""
    *added, first, second = factors
    shape = (*first.shape[:-1], second.shape[-1])
    return (
        first.ndim == second.ndim
        and first.shape[:-2] == second.shape[:-2]
        and first.shape[-1] == second.shape[-2]
        and all(t.dtype == first.dtype and t.device == first.device for t in factors)
        and all(t.shape in (shape, shape[-1:]) for t in added)
    )
