"""Compare a tensor of a forward with the one of its repetition."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20  # elements that are mixed at a time
# The constants of SplitMix64, as signed numbers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))

set_versions: Callable[[Any, Any], None] = torch._C._autograd._unsafe_set_version_counter


def fail(what: str) -> NoReturn:
    """Raise the error that a user of a checkpoint sees."""
    raise RuntimeError(f"checkpoint: {what}")


def call_region(
    name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return `fn(*args, **kwargs)`, the forward of region `name`.

    Raises:
        RuntimeError: `fn` calls a transform of `torch.func`, which allows no saved-tensor hooks.
    """
    try:
        return fn(*args, **kwargs)
    except RuntimeError as error:
        if "yet support saved tensor hooks" not in str(error):
            raise
    fail(
        f"{name} calls a transform of torch.func, such as grad or vjp, which cannot run in a "
        "checkpoint. Use torch.autograd.grad(..., create_graph=True), or move the call out of "
        "checkpointed layers."
    )


def without_graph(t: Tensor) -> Tensor:
    """Return a tensor to keep: detached, if it has autograd nodes or is a view of one that has.

    A node may save a tensor that it made itself, and such a cycle would keep the graph.
    """
    base = t._base
    has_graph = t.grad_fn is not None or (base is not None and base.grad_fn is not None)
    return t.detach() if has_graph else t


def drop_graphs(tensors: list[Tensor]) -> None:
    """Detach the saved tensors of a repetition, whose nodes hold this list by their hooks.

    The garbage collector does not see that cycle, so an interrupt must not leave it behind.
    """
    try:
        tensors[:] = map(without_graph, tensors)
    except BaseException:
        tensors.clear()
        raise


def fail_modified(name: str, t: Tensor) -> NoReturn:
    """Raise the error for a tensor that region `name` would read with other contents."""
    fail(
        f"a tensor of shape {tuple(t.shape)} that {name} uses was modified in place between "
        "forward and recompute. Modify it after the backward pass, or modify a clone."
    )


class Saved:
    """A tensor that autograd saves, or that a region returns."""

    __slots__ = ("checksum", "is_leaf", "layout", "parameter", "version")

    def __init__(self, t: Tensor, checksum: bool = False) -> None:
        """Describe a tensor."""
        self.layout = (shape_of(t), stride_of(t), t.dtype, t.device)
        self.checksum = checksum_of(t) if checksum else None
        # A parameter, a buffer or a view of one: what changes it changes what is recomputed.
        base = t._base
        root = t if base is None else base
        self.is_leaf = root.is_leaf
        # The class is looked at first: isinstance asks a Parameter's metaclass, which takes long.
        is_parameter = type(root) is not Tensor and isinstance(root, torch.nn.Parameter)
        self.parameter = id(root) if is_parameter else None
        self.version = t._version

    @staticmethod
    def of(
        shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, device: str,
        parameter: int | None, is_leaf: bool, version: int,
    ) -> Saved:  # fmt: skip
        """Return a description that was made without Python."""
        saved = Saved.__new__(Saved)
        layout = torch.Size(shape), stride, getattr(torch, dtype), torch.device(device)
        saved.layout, saved.checksum, saved.parameter = layout, None, parameter
        saved.is_leaf, saved.version = is_leaf, version
        return saved

    @property
    def is_jagged(self) -> bool:
        """Return True if a size of the tensor is a symbol, as of jagged nested tensors."""
        return any(isinstance(size, torch.SymInt) for size in self.layout[0])

    def is_like(self, other: Saved) -> bool:
        """Return True if shape, strides, dtype, device and the checksums, if taken, are equal."""
        if self.layout != other.layout:
            return False
        if self.checksum is None or other.checksum is None:
            return True
        return torch.equal(self.checksum, other.checksum)

    def __str__(self) -> str:
        shape, stride, dtype, device = self.layout
        strides = "" if _is_dense(shape, stride) else f" with strides {stride}"
        value = "" if self.checksum is None else f" with checksum {_hex(self.checksum)}"
        return f"{tuple(shape)} {dtype} on {device}{strides}{value}"


def explain_offsets(name: str) -> str:
    """Return why a jagged tensor that region `name` makes does not fit the one of the forward."""
    return (
        f"{name} creates its offsets, and torch takes new offsets for other sizes. Create the "
        "offsets outside of the region."
    )


def stride_of(t: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor; none where it has none, as sparse and nested tensors."""
    try:
        return t.stride()
    except RuntimeError:
        return ()


def shape_of(t: Tensor) -> Any:
    """Return the shape of a tensor; for a strided nested tensor those of the tensors in it."""
    try:
        return t.shape
    except RuntimeError:  # a nested tensor has none
        return tuple(map(tuple, t._nested_tensor_size().tolist()))


def _is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    if not stride:  # a number, or a tensor without strides
        return True
    dense, step = [], 1
    for size in reversed(shape):
        dense.append(step)
        step *= max(size, 1)
    return stride == tuple(reversed(dense))


def _hex(checksum: Tensor) -> str:
    return f"{int(checksum) & (1 << 64) - 1:016x}"


def checksum_of(t: Tensor) -> Tensor:
    """Return 64 bits that depend on every bit of a tensor and on its place.

    The sum of SplitMix64 (Steele, Lea and Flood 2014) of every element and its index needs no sync
    with a device. A mere xor of the elements, such as `torch.hash_tensor`, misses what changes an
    even number of them alike.
    """
    t = t.detach()
    if t.layout != torch.strided or t.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    bits = t.resolve_neg().contiguous().view(-1).view(INTEGERS[t.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE]
        mixed = torch.arange(start, start + len(piece), device=t.device).mul_(_GAMMA).add_(piece)
        for shift, factor in _ROUNDS:  # shifts of signed numbers, which mix as well
            mixed = mixed.bitwise_xor_(mixed >> shift).mul_(factor)
        total += mixed.bitwise_xor_(mixed >> 31).sum()
    return total


def compare(
    name: str,
    first: list[Saved],
    again: list[tuple[Saved, Tensor]],
    hint: Callable[[], str] = lambda: "",
) -> None:
    """Raise unless a region named `name` saved the same in its forward and in its repetition.

    Args:
        name: what the error calls the region.
        first, again: what it saved.
        hint: what the error ends with where it did other work.
    """
    if len(again) != len(first):
        fail(
            f"{name} saved {len(first)} tensors in forward and {len(again)} when it was "
            f"recomputed. It must do the same work both times.{hint()}"
        )
    for index, (before, (after, t)) in enumerate(zip(first, again, strict=True)):
        if before.parameter != after.parameter:
            fail(
                f"tensor {index} that {name} saves is another parameter of shape {tuple(t.shape)} "
                "when it is recomputed. It was replaced after the forward in a place that the "
                "region does not reach. Replace it after the backward pass."
            )
        if not before.is_like(after):
            if before.is_jagged and after.is_jagged:
                fail(
                    f"tensor {index} that {name} saves is a jagged tensor, {before} in forward and "
                    f"{after} when it is recomputed. {explain_offsets(name)}"
                )
            fail(
                f"tensor {index} that {name} saves was {before} in forward and is {after} when it "
                f"is recomputed. The metadata or contents differ.{hint()}"
            )
        if t._version != after.version:
            fail(
                f"tensor {index} that {name} saves, {before}, was modified in place after autograd "
                "had saved it. Modify a clone instead."
            )
        if before.is_leaf and before.version != after.version:
            fail_modified(name, t)


def check_unread(
    name: str, modified: list[Tensor], outputs: Iterable[Any], start: int, given: list[Tensor]
) -> None:
    """Raise if a region has read one of the tensors that were modified since its forward.

    It is asked of the repetition: mostly nothing was modified, and then no graph is walked.

    Args:
        name: what the error calls the region.
        modified: leaves, and captured tensors with a history.
        outputs: of the repetition.
        start: number of the first node of its graph; other threads have other numbers.
        given: its inputs, which autograd compares.
    """
    ends = {t.grad_fn for t in (*given, *modified)} - {None}
    leaves, before = _edges(outputs, start, ends)
    read = {id(t) for t in leaves}
    for t in modified:
        if id(t) in read or (t.grad_fn is not None and t.grad_fn in before):
            fail_modified(name, t)


def _edges(outputs: Iterable[Any], start: int, ends: set[Any]) -> tuple[list[Tensor], set[Any]]:
    """Return the leaves and the earlier nodes that a graph reads, no farther than `ends`."""
    stack = [t.grad_fn for t in outputs if isinstance(t, Tensor)]
    seen: set[Any] = {None}
    leaves, before = [], set()
    while stack:
        node: Any = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        elif node in ends or node._sequence_nr() < start:
            before.add(node)
        else:
            stack += [following for following, _ in node.next_functions]
    return leaves, before
