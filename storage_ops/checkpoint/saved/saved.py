"""Compare the tensors that a forward saves with those that its recompute saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from storage_ops.checkpoint.saved.checksums import checksum_of, text_of
from storage_ops.checkpoint.saved.guard import by_storage, storage_key

set_versions: Callable[[Any, Any], None] = torch._C._autograd._unsafe_set_version_counter


def fail(what: str) -> NoReturn:
    """Raise a RuntimeError whose message begins with "checkpoint: "."""
    raise RuntimeError(f"checkpoint: {what}")


def explain_transform(name: str, error: RuntimeError) -> None:
    """Raise a clear error if region `name` called a transform of `torch.func`.

    Args:
        name: the name of the region.
        error: the error of its forward. Transforms allow no saved-tensor hooks.
    """
    if "yet support saved tensor hooks" in str(error):
        fail(
            f"{name} calls a transform of torch.func, such as grad or vjp, which cannot run in a "
            "checkpoint. Use torch.autograd.grad(..., create_graph=True), or move the call out of "
            "checkpointed layers."
        )


def without_graph(t: Tensor) -> Tensor:
    """Return the tensor, detached if it or its base has an autograd node.

    A node may save its own output. That reference cycle would keep the graph alive.
    """
    base = t._base
    has_graph = t.grad_fn is not None or (base is not None and base.grad_fn is not None)
    return t.detach() if has_graph else t


def drop_graphs(tensors: list[Tensor]) -> None:
    """Detach the saved tensors of a recompute, in place.

    The nodes of these tensors reference the list by their hooks. The garbage collector cannot see
    that reference cycle, so the list is cleared if an interrupt comes.
    """
    try:
        tensors[:] = map(without_graph, tensors)
    except BaseException:
        tensors.clear()
        raise


def fail_modified(name: str, t: Tensor) -> NoReturn:
    """Raise the error for a tensor whose contents changed before the recompute of region `name`."""
    fail(
        f"a tensor of shape {tuple(t.shape)} that {name} uses was modified in place between "
        "forward and recompute. Modify it after the backward pass, or modify a clone."
    )


class Saved:
    """The description of a tensor that autograd saves, or that a region returns."""

    __slots__ = ("checksum", "is_leaf", "layout", "parameter", "version")

    def __init__(self, t: Tensor, checksum: bool = False) -> None:
        """Describe a tensor, with a checksum of its contents if `checksum`."""
        self.layout = (shape_of(t), stride_of(t), t.dtype, t.device)
        self.checksum = checksum_of(t) if checksum else None
        # A leaf is a parameter, a buffer or a view of one. The recompute reads its contents again.
        base = t._base
        root = t if base is None else base
        self.is_leaf = root.is_leaf
        # The class is tested first, because isinstance is slow with a Parameter's metaclass.
        is_parameter = type(root) is not Tensor and isinstance(root, torch.nn.Parameter)
        self.parameter = id(root) if is_parameter else None
        self.version = t._version

    @staticmethod
    def of(
        shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, device: str,
        parameter: int | None, is_leaf: bool, version: int, checksum: Tensor | None,
    ) -> Saved:  # fmt: skip
        """Return a description with these values. The library in C++ calls this function."""
        saved = Saved.__new__(Saved)
        layout = torch.Size(shape), stride, getattr(torch, dtype), torch.device(device)
        saved.layout, saved.checksum, saved.parameter = layout, checksum, parameter
        saved.is_leaf, saved.version = is_leaf, version
        return saved

    @property
    def is_jagged(self) -> bool:
        """Return True if the tensor has a symbolic size, such as a jagged nested tensor."""
        return any(isinstance(size, torch.SymInt) for size in self.layout[0])

    def is_like(self, other: Saved) -> bool:
        """Return True if shape, strides, dtype and device are equal, and the checksums, if any."""
        if self.layout != other.layout:
            return False
        if self.checksum is None or other.checksum is None:
            return True
        if isinstance(self.checksum, FakeTensor):  # a simulation has no bytes to compare
            return True
        return torch.equal(self.checksum, other.checksum)

    def __str__(self) -> str:
        shape, stride, dtype, device = self.layout
        strides = "" if _is_dense(shape, stride) else f" with strides {stride}"
        value = "" if self.checksum is None else f" with checksum {text_of(self.checksum)}"
        return f"{tuple(shape)} {dtype} on {device}{strides}{value}"


def explain_offsets(name: str) -> str:
    """Return why a jagged tensor of region `name` differs from that of the forward."""
    return (
        f"{name} creates its offsets, and torch takes new offsets for other sizes. Create the "
        "offsets outside of the region."
    )


def stride_of(t: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, or () for a sparse or nested tensor."""
    try:
        return t.stride()
    except RuntimeError:
        return ()


def shape_of(t: Tensor) -> Any:
    """Return the shape of a tensor. For a strided nested tensor, return the shapes of its parts."""
    try:
        return t.shape
    except RuntimeError:  # a strided nested tensor has no shape
        return tuple(map(tuple, t._nested_tensor_size().tolist()))


def _is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    if not stride:  # a number, or a tensor without strides
        return True
    dense, step = [], 1
    for size in reversed(shape):
        dense.append(step)
        step *= max(size, 1)
    return stride == tuple(reversed(dense))


def compare(
    name: str,
    first: list[Saved],
    recomputed: list[tuple[Saved, Tensor]],
    hint: Callable[[], str] = lambda: "",
    inputs: Iterable[Tensor] = (),
) -> None:
    """Raise if a region did not save the same tensors in its forward and in its recompute.

    Args:
        name: the name of the region, for the error.
        first: descriptions of the tensors that the forward saved.
        recomputed: descriptions of the tensors that the recompute saved, with the tensors.
        hint: returns the end of the error if the region ran other ops.
        inputs: the inputs of the recompute. Saved-tensor hooks around the region may return copies
            of inputs, with other versions, and not as views of a parameter.
    """
    if len(recomputed) != len(first):
        fail(
            f"{name} saved {len(first)} tensors in forward and {len(recomputed)} when it was "
            f"recomputed. It must do the same work both times.{hint()}"
        )
    of_inputs = by_storage(inputs)
    for index, (before, (after, t)) in enumerate(zip(first, recomputed, strict=True)):
        is_input = storage_key(t) in of_inputs
        if before.parameter != after.parameter and not is_input:
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
        if before.is_leaf and before.version != after.version and not is_input:
            fail_modified(name, t)


def check_unread(
    name: str, modified: list[Tensor], outputs: Iterable[Any], start: int, inputs: list[Tensor]
) -> None:
    """Raise if a region reads one of the tensors that were modified since its forward.

    The search is in the graph of the recompute, not of the forward. So a step in which no tensor
    was modified needs no search.

    Args:
        name: the name of the region, for the error.
        modified: leaves, and captured tensors with a history.
        outputs: the outputs of the recompute.
        start: sequence number of the first node of the recompute. Each thread has its own numbers.
        inputs: the inputs of the recompute, whose versions autograd compares.
    """
    ends = {t.grad_fn for t in (*inputs, *modified)} - {None}
    leaves, before = _edges(outputs, start, ends)
    read = {id(t) for t in leaves}
    for t in modified:
        if id(t) in read or (t.grad_fn is not None and t.grad_fn in before):
            fail_modified(name, t)


def _edges(outputs: Iterable[Any], start: int, ends: set[Any]) -> tuple[list[Tensor], set[Any]]:
    """Return the leaves and the nodes from before `start` that a graph reads.

    The search stops at the nodes in `ends`.
    """
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
