"""The dispatch mode of a simulation: ops run on fake tensors, and storages are recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    in_kernel_invocation_manager,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from storage_ops._op_arguments import tensors_in, with_tensors
from storage_ops.checkpoint.selective.copies import BookedCopies, active
from storage_ops.foundation.ledger import Block, Ledger
from storage_ops.foundation.op_names import Overload
from storage_ops.foundation.ops import Args, Kwargs, describe, facts_of
from storage_ops.simulate.fakes import SimulatedFakes
from storage_ops.simulate.kernels import fake_tensor_gaps, scratch
from storage_ops.simulate.module_kinds import NotComparable
from storage_ops.simulate.ranks import collectives
from storage_ops.simulate.twins import Twins
from storage_ops.simulate.values.assume import Assumption, Source, unanswered
from storage_ops.simulate.values.known import Values
from storage_ops.simulate.values.sizes import Sizes
from storage_ops.simulate.values.sparse import Sparse
from storage_ops.simulate.values.wrappers import inside, is_wrapper, is_wrapper_type
from storage_ops.storage import reference

_OPS = torch.ops.storage_ops
_aten = torch.ops.aten


class Simulation(TorchDispatchMode):
    """Runs every op on fake tensors and records the storages that it allocates.

    A tensor from outside (real, meta, or of another fake mode) has a fake twin here, so its bytes
    are neither needed nor changed (`twins`).
    """

    def __init__(
        self, ledger: Ledger, copies: bool, assumption: Assumption, on_gpu: bool = True
    ) -> None:
        """Start a simulation. `copies` means that share_storage must copy on this machine."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self._copies = copies
        self.on_gpu = on_gpu
        self._assumption = assumption
        self.values = Values(assumption)
        self._sizes = Sizes(self.values, assumption)
        self._sparse = Sparse(self.unseen, self._sizes.distinct, self._temporary)
        self._fake = SimulatedFakes()
        if not on_gpu:
            self._fake.reads = self.values.knows
        self.twins = Twins(self, self._fake, self._sparse)
        self._paused = False
        self._wrapped: Any = None  # the last op that was called with a wrapper
        # Provides unknown values in the step of an optimizer, such as its counts of steps.
        self.any_number: Callable[[Tensor], float] | None = None
        self.multiplies = False  # whether a matrix product was seen
        self.sent: Counter[str] = Counter()  # bytes from this rank to others, by collective
        self.buckets: list[Tensor] = []  # buckets of DDP
        self._to_host = BookedCopies()
        self.parts: list[Ledger] = []  # separate ledgers of recorded calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False for each op, because `simulating` keeps Dynamo from compiling anything."""
        return False

    def __enter__(self) -> Simulation:
        self._fake.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._fake.__exit__(*exception)

    @property
    def copies(self) -> BookedCopies | None:
        """Return the copies to host memory, on a GPU or a CPU that represents one, or None."""
        if not self.on_gpu and active() is None:
            return None
        if self.ledger.is_of_a_part:
            # The copies end with the next region, which is not in the recorded part.
            raise NotComparable
        return self._to_host

    def follow_resize(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized, which is not an op."""
        self.ledger.follow_resize(storage)

    def blocks_of(self, t: Tensor) -> list[Block]:
        """Return the blocks of a tensor. For a tensor from outside they are those of its twin."""
        if is_wrapper(t):
            return [b for part in inside(t) for b in self.blocks_of(part)]
        twin = self.twins.of(t)
        parts = self._sparse.parts(twin) if twin.layout == torch.sparse_coo else [twin]
        blocks = [self.ledger.block_of(part) for part in parts]
        return [block for block in blocks if block is not None]

    def note_random_state(self, t: Tensor) -> None:
        """Record the state of the CPU's generator, which is copied without an op.

        On a GPU, do nothing.
        """
        if not self.on_gpu:
            self.ledger.see(t, "random state")

    def identity(self, t: Tensor) -> Hashable:
        """Return what identifies the present values of a tensor, as `Values.identity` does."""
        return self.values.identity([self.twins.with_values(part) for part in inside(t)])

    def digests(self, tensors: list[Tensor]) -> tuple[str, ...]:
        """Return digests of the present values of tensors, as `Values.digest` does."""
        return tuple(self.values.digest(self.twins.with_values(t)) for t in tensors)

    def forget(self) -> None:
        """Drop all fake twins, and the buckets of DDP."""
        self.twins.forget()
        self.buckets.clear()

    def alive(self) -> set[int]:
        """Return the keys of this run's live storages, except for moved arguments."""
        known = {s._cdata for ledger in (self.ledger, *self.parts) for s in ledger.alive()}
        return known - self.twins.keys_of_moved()

    def has_made(self, t: FakeTensor) -> bool:
        """Return True if a live tensor belongs to this run and is not a moved argument."""
        if t.fake_mode is not self._fake or t.layout != torch.strided:
            return False
        key = t.untyped_storage()._cdata
        known = any(ledger.has(key) for ledger in (self.ledger, *self.parts))
        return known and key not in self.twins.keys_of_moved()

    def unseen(self, func: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Run an op on fake tensors without recording its allocations."""
        self._paused = True
        try:
            return func(*args, **kwargs)
        finally:
            self._paused = False

    def viewed(
        self,
        base: Tensor,
        shape: Sequence[int],
        stride: Sequence[int],
        offset: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return a tensor, without a history, at a place in the storage of another."""

        def view() -> Tensor:
            with torch.no_grad():
                nbytes = base.untyped_storage().nbytes()
                whole = base.as_strided((nbytes // base.itemsize,), (1,), 0).view(torch.uint8)
                elements = whole[: nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
                return elements.as_strided(shape, stride, offset)

        fake: Tensor = self.unseen(view)
        return fake

    def _see(self, func: Overload, t: Tensor) -> None:
        self.ledger.see(t, str(func))

    def imitate(self, new: Tensor, t: Tensor) -> None:
        """Copy the known values of `t` to its copy `new`."""
        with no_dispatch():
            self.values.imitate(new, self.twins.of(t))

    def _temporary(self, t: Tensor, made_by: str) -> None:
        self.ledger.temporary(t, made_by)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # asked several times for each op
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if any(map(is_wrapper_type, types)):
            self._wrapped = func
            return NotImplemented  # NotImplemented calls this again for the inner tensors
        facts = facts_of(func)
        if facts.is_plain_view and not kwargs:
            t = self.twins.of(args[0])
            if isinstance(t, FakeTensor) and t.layout == torch.strided and t.constant is None:
                return self._view(func, t, args[1:])
        if func is _aten._local_scalar_dense.default:
            return self._value(func, args[0])
        _check_device(func, kwargs.get("device"))
        args, kwargs = with_tensors(self.twins.of, (args, kwargs))
        inputs = tensors_in((args, kwargs))
        is_inside = func is self._wrapped
        if facts.in_place is not None and not is_inside and inputs[0].layout == torch.strided:
            block = self.ledger.block_of(inputs[0])
            func = fake_tensor_gaps.as_real(func, facts.in_place, block, args)
            facts = facts_of(func)
            if func is _aten.add_.Tensor and block is not None:
                self.ledger.added_to.add(block)
        if self.on_gpu and facts.product is not None and facts.product.on_cublas:
            self.multiplies = True
        if facts.collective:
            collectives.count_sent(self.sent, func, args)
            if facts.collective == "in place":
                return collectives.pretended(self, func, args)
        if func.namespace == "storage_ops":
            if facts.simulates_inside:
                with self:  # ops inside are simulated, too
                    return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args)
            if func in _STORAGE_OPS:
                return self._storage_op(func, *args)
        if self._sparse.takes(func, args, inputs):
            with self:
                return self._sparse(func, args, kwargs)
        try:
            result = facts.result if self.on_gpu else facts.result_on_cpu or facts.result
            out = NotImplemented if result is None else result(*args, **kwargs)
            if out is NotImplemented:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = self._by_values(func, args, kwargs)
        if func._schema.is_mutable:
            for t in inputs:
                if isinstance(t, FakeTensor) and t.layout == torch.strided:
                    self.ledger.follow_resize(t.untyped_storage())
        scratch.book(self.ledger, func, args, out, self.on_gpu, is_inside)
        if is_inside:
            self._wrapped = None
        for t in tensors_in(out):
            if isinstance(t, FakeTensor):
                _check_layout(func, t)
                self._see(func, t)
        if not facts.collective:  # the result has values of other ranks
            self.values.follow(func, args, kwargs, out)
        return out

    def _view(self, func: Overload, t: FakeTensor, rest: Args) -> Tensor:
        """Run an op that returns a view of its first argument, as half of a step's ops do.

        FakeTensorMode would do the same, but its cache is slower.
        """
        with in_kernel_invocation_manager(self._fake):
            view = func(t, *rest)
        view = FakeTensor(self._fake, view, t.fake_device)
        self._see(func, view)
        return view

    def _by_values(self, func: Overload, args: Args, kwargs: Kwargs) -> Any:
        """Run an op whose result has a value-dependent shape, or is a number."""
        real = self.values.compute(func, args, kwargs)
        facts = facts_of(func)
        if real is None and facts.sized_by_integers:
            real = self.values.compute(func, args, kwargs, any_numbers=True)
        if real is None and facts.sized is not None:
            with self:
                return facts.sized(self._sizes, func, *args, **kwargs)
        if real is None:
            returned = [str(r.type) for r in func._schema.returns]
            return self._said(func, args, "nothing" if "Tensor" in returned else "value")
        device = tensors_in((args, kwargs))[0].device
        return tree_map_only(
            Tensor,
            lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device),
            real,
        )

    def _value(self, func: Overload, t: Tensor) -> Any:
        known = self.values.read(self.twins.of(t))
        if known is not None:
            with no_dispatch():
                return func(known)
        if self.any_number is not None:
            return self.any_number(t)
        kind = bool if t.dtype == torch.bool else float if t.is_floating_point() else int
        return kind(self._said(func, t))

    def may_know(self, t: Tensor) -> bool:
        """Return True if the values of a tensor in the simulated code may be known."""
        return self.twins.is_from_outside(t) or is_wrapper(t) or self.values.knows(t)

    def listed(self, t: Tensor) -> Any:
        """Return the result of `t.tolist()`."""
        known = self.values.read(self.twins.of(t))
        with no_dispatch():
            if known is None:
                number = self._value(_aten._local_scalar_dense.default, t)
                known = torch.full(t.shape, number, dtype=t.dtype)
            return known.tolist()

    def _said(self, func: Overload, args: object, kind: str = "value") -> Any:
        """Return the number that the caller assumes for the result of an op."""
        value = self._assumption.value() if kind == "value" else None
        if value is None:
            cause = self.values.source(args)
            raise unanswered(Source.here(func, kind), cause)
        return value

    def _storage_op(self, func: Overload, t: Tensor, *rest: Tensor) -> bool | None:
        if func is _OPS.discard_storage.default:
            self.ledger.discard(t)
        elif func is _OPS.share_storage.default:
            reference.check_geometry(t, rest[0])
            self.ledger.share(t, rest[0], self._copies)
        elif func is _OPS._is_discarded.default:
            return self.ledger.is_discarded(t)
        return None


_STORAGE_OPS = {
    _OPS.discard_storage.default,
    _OPS.share_storage.default,
    _OPS._is_discarded.default,
    _OPS._check_storage.default,
    _OPS._record_stream.default,
}
_DEVICE = torch.ops.prim.device.default
describe(
    "alias.default detach.default select.int slice.Tensor t.default transpose.int view.default",
    is_plain_view=True,
)
describe(
    "storage_ops::linear_cross_entropy storage_ops::linear_cross_entropy_backward"
    " storage_ops::linear_cross_entropy_backward_kept"
    " storage_ops::linear_cross_entropy_backward_target"
    " storage_ops::linear_cross_entropy_backward_into"
    " storage_ops::linear_cross_entropy_backward_into_kept"
    " storage_ops::linear_kl_div storage_ops::linear_kl_div_backward",
    simulates_inside=True,
)


def _check_layout(func: Overload, t: Tensor) -> None:
    if t.layout != torch.strided:
        source = Source.here(func, "nothing")
        raise RuntimeError(
            f"estimate: the simulated code calls {source.name} at {source.line}, which creates a "
            f"tensor with layout {t.layout} that is not simulated. Leave that part out."
        )


def _check_device(func: Overload, device: torch.device | str | None) -> None:
    if device is None or torch.device(device).type in ("cpu", "meta"):
        return
    if not (torch.device(device).type == "cuda" and torch.cuda.is_available()):
        raise RuntimeError(
            f"estimate: {func} asks for device {device}, which this machine does not have. Use the "
            "device of an argument, such as device=x.device."
        )
