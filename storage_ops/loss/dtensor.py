"""Linear cross-entropy of DTensors: finds the role of each dimension of their mesh.

The role follows from the placements of the weight and the input, dimension by dimension:

    weight       input              the ranks of this dimension
    Shard(0)     Shard of tokens    hold slices of the vocabulary and parts of the tokens, which are
                                    gathered; each gets the gradient of its part
    Shard(0)     any other          hold slices of the vocabulary: `process_group`
    any other    Shard of tokens    hold parts of the tokens: the loss is summed over them
    any other    any other          all do the same

All other placements, such as sharded hidden sizes and pending sums, are first redistributed by
DTensor, which also does the backward. A plain tensor is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from storage_ops.loss.formulas import total_weight

Placements = list[Placement]


class _Meshed:
    """The arguments of a call, and the roles of the dimensions of their mesh.

    Attributes:
        vocabulary: the dimension of the mesh whose ranks hold slices of the vocabulary, or None.
        parts: for each dimension of the mesh the dimension of the tokens that it shards, or None.
        input_grad: the op's option, which depends on where tokens are gathered.
    """

    def __init__(self, tensors: dict[str, Tensor | None]):
        meshes = {n: t.device_mesh for n, t in tensors.items() if isinstance(t, DTensor)}
        (first, self.mesh), *others = meshes.items()
        for name, mesh in others:
            if mesh != self.mesh:
                raise ValueError(
                    f"linear_cross_entropy: `{name}` is on {mesh} and `{first}` on {self.mesh}. "
                    "Expected one mesh. Redistribute one of them, or use to_local()."
                )
        weight, x = tensors["linear_weight"], tensors["input"]
        assert weight is not None and x is not None
        sliced = [d for d, p in enumerate(self.of(weight)) if p.is_shard(0)]
        # FSDP on top of tensor parallelism shards the slices again, in another order.
        if len(sliced) > 1 or any(hasattr(p, "split_factor") for p in self.of(weight)):
            raise ValueError(
                f"linear_cross_entropy: `linear_weight` has placements {tuple(self.of(weight))}. "
                "Expected Shard(0), slices of the vocabulary, in at most one dimension of the "
                "mesh, and Shard(1), Replicate or Partial in others. Redistribute it first."
            )
        self.vocabulary = sliced[0] if sliced else None
        self.parts: list[int | None] = [None] * self.mesh.ndim
        self._of_input = self.of(x)
        for d, p in enumerate(self._of_input):
            if p.is_shard() and not p.is_shard(x.dim() - 1):
                self.parts[d] = p.dim  # type: ignore[attr-defined]
        self.input_grad = "replicate"
        if self.vocabulary is not None:
            self._check_slices(len(weight))
            self._choose_gather(x, tensors["target"])

    def of(self, t: Tensor) -> Placements:
        """Return the placements of a tensor."""
        return list(t.placements) if isinstance(t, DTensor) else self.everywhere

    def _check_slices(self, classes: int) -> None:
        assert self.vocabulary is not None
        ranks = self.mesh.size(self.vocabulary)
        if -(-classes // ranks) * (ranks - 1) >= classes:
            raise ValueError(
                f"linear_cross_entropy: `linear_weight` has {classes} classes on {ranks} ranks. "
                "Expected at least one on every rank, as Shard(0) distributes them."
            )

    def _choose_gather(self, x: Tensor, target: Tensor | None) -> None:
        """Gather inside the op if parts have one size and one mesh dimension shards tokens."""
        assert self.vocabulary is not None and target is not None
        part = self.parts[self.vocabulary]
        if part is None:
            return
        even = x.shape[part] % self.mesh.size(self.vocabulary) == 0
        if even and self.parts.count(part) == 1 and not target.is_floating_point():
            self.input_grad = "reduce_scatter"
        else:
            self.parts[self.vocabulary], self.input_grad = None, "partial"

    def tokens(self, whole: bool = False) -> Placements:
        """Return the placements of per-token values; with `whole`, as the op takes them."""
        placements: Placements = []
        for d, part in enumerate(self.parts):
            gathered = part is None or (whole and d == self.vocabulary)
            placements.append(Replicate() if gathered else self._of_input[d])
        return placements

    def classes(self) -> Placements:
        """Return the placements of per-class values."""
        return [Shard(0) if d == self.vocabulary else Replicate() for d in range(self.mesh.ndim)]

    @property
    def summed(self) -> list[int]:
        """Return the dimensions of the mesh over which the loss is summed."""
        return [d for d, p in enumerate(self.parts) if p is not None and d != self.vocabulary]

    def local(self, t: Tensor | None, placements: Placements, grad: Placements) -> Any:
        """Return this rank's part of a tensor.

        Args:
            t: the tensor.
            placements: the placements of the result.
            grad: the placements of its gradient.
        """
        if t is None:
            return None
        if not isinstance(t, DTensor):
            t = DTensor.from_local(t, self.mesh, self.of(t), run_check=False)
        return t.redistribute(self.mesh, placements).to_local(grad_placements=grad)

    def joined(self, t: Tensor, placements: Placements, shape: Sequence[int]) -> DTensor:
        """Return the results of the ranks as one tensor of this shape.

        The ranks' parts may have different sizes.
        """
        return _joined(t, self.mesh, placements, shape)

    @property
    def everywhere(self) -> Placements:
        """Return the placements of a tensor that every rank has in full."""
        return [Replicate()] * self.mesh.ndim

    def total(self, t: Tensor) -> DTensor:
        """Return the sum of the ranks' results for their tokens."""
        parts = self.joined(t, self.added(self.everywhere, self.summed), t.shape)
        return parts.redistribute(self.mesh, self.everywhere)

    def added(self, placements: Placements, over: Sequence[int | None]) -> Placements:
        """Return the placements of a gradient that is summed over some dimensions of the mesh."""
        return [Partial() if d in over else p for d, p in enumerate(placements)]


def linear_cross_entropy(
    call: Callable[..., Any],
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    token_weight: Tensor | None,
    accumulate_into: Tensor | None,
    selected_ids: Tensor | None,
    ignore_index: int | None,
    reduction: str,
    shift: int,
    divisor: Any,
    process_group: Any,
    input_grad: str,
    **options: Any,
) -> Any:
    """Run `call`, the loss of plain tensors, on this rank's part of the DTensors."""
    _refuse(process_group, input_grad, accumulate_into)
    if shift and selected_ids is not None:
        raise ValueError(
            f"linear_cross_entropy: `shift` is {shift}. Expected False with selected_ids and "
            "DTensors. Shift the targets before the call."
        )
    meshed = _Meshed({
        "input": input, "linear_weight": linear_weight, "target": target,
        "linear_bias": linear_bias, "weight": weight, "token_weight": token_weight,
        "selected_ids": selected_ids,
    })  # fmt: skip
    ignored = -100 if ignore_index is None else ignore_index
    if shift:
        last = input.dim() - 2
        if target.is_floating_point():
            weights = target.new_ones(target.shape[:-1]) if token_weight is None else token_weight
            target, token_weight = (
                _shifted(target, last, shift, 0),
                _shifted(weights, last, shift, 0),
            )
        else:
            target = _shifted(target, last, shift, ignored)
            token_weight = None if token_weight is None else _shifted(token_weight, last, shift, 0)
    tokens, whole, classes = meshed.tokens(), meshed.tokens(whole=True), meshed.classes()
    of_target = whole
    if target.is_floating_point() and meshed.vocabulary is not None:
        of_target = list(whole)
        of_target[meshed.vocabulary] = Shard(target.dim() - 1)
    local_target = meshed.local(target, of_target, of_target)
    local_weights = meshed.local(token_weight, whole, whole)
    if reduction == "mean" and meshed.summed:
        divisor = _divisor(meshed, local_target, local_weights, weight, ignored)
        reduction = "sum"
    group = None if meshed.vocabulary is None else meshed.mesh.get_group(meshed.vocabulary)
    adds = [meshed.vocabulary] if meshed.input_grad == "partial" else []
    results = call(
        meshed.local(input, tokens, meshed.added(tokens, adds)),
        meshed.local(linear_weight, classes, meshed.added(classes, meshed.summed)),
        local_target,
        linear_bias=meshed.local(linear_bias, classes, meshed.added(classes, meshed.summed)),
        weight=meshed.local(weight, classes, classes),
        token_weight=local_weights,
        selected_ids=meshed.local(selected_ids, whole, whole),
        ignore_index=ignored,
        process_group=group,
        input_grad=meshed.input_grad,
        reduction=reduction,
        divisor=divisor,
        **options,
    )
    dim = input.dim() - 2 if shift else None

    def whole_of(result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(map(whole_of, result))
        joined = _result(meshed, result, input.shape[:-1], whole, dim, int(shift))
        return joined if isinstance(input, DTensor) else joined.to_local()

    return whole_of(results)


def _refuse(process_group: Any, input_grad: str, accumulate_into: Tensor | None) -> None:
    """Raise an error for options that placements replace."""
    for name, value, expected in (
        ("process_group", process_group, None),
        ("input_grad", input_grad, "replicate"),
        ("accumulate_into", accumulate_into, None),
    ):
        if value is not expected and value != expected:
            kind = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"linear_cross_entropy: `{name}` is {kind}. Expected {expected!r} with DTensors, "
                "whose placements give the sharding. To set it yourself, pass their to_local()."
            )


def _joined(
    local: Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]
) -> DTensor:
    """Return the DTensor of this shape, of which each rank has `local`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _shifted(t: Tensor, dim: int, by: int, last: float) -> Tensor:
    """Return a tensor moved along a dimension, with `last` in the places that become free."""
    if isinstance(t, DTensor):
        whole = [Replicate() if p.is_shard(dim) else p for p in t.placements]
        local = _shifted(t.redistribute(t.device_mesh, whole).to_local(), dim, by, last)
        return _joined(local, t.device_mesh, whole, t.shape)
    by = min(int(by), t.shape[dim])
    rest = t.narrow(dim, by, t.shape[dim] - by)
    return torch.cat((rest, torch.full_like(t.narrow(dim, 0, by), last)), dim)


def _divisor(
    meshed: _Meshed, target: Tensor, token_weight: Tensor | None, classes: Tensor | None,
    ignore_index: int,
) -> Tensor:  # fmt: skip
    """Return the divisor of a mean over the tokens of all ranks, as in formulas.py."""
    classes = meshed.local(classes, meshed.everywhere, meshed.everywhere)
    weight = total_weight(target, -1, classes, token_weight, ignore_index, torch.float64)
    return meshed.total(weight).to_local()


def _result(
    meshed: _Meshed, t: Tensor, tokens: Sequence[int], placements: Placements, moved: int | None,
    shift: int,
) -> DTensor:  # fmt: skip
    """Return a result of all ranks.

    It is a reduced loss, or per-token values without the tokens that `shift` leaves out.

    Args:
        tokens: the shape of the tokens of all ranks.
        placements: the placements of per-token values.
        moved: the dimension that `shift` moves targets along.
    """
    if t.dim() == 0:
        return meshed.total(t)
    whole = meshed.joined(t, placements, (*tokens, *t.shape[len(tokens) :]))
    if moved is None:
        return whole
    return whole.narrow(moved, 0, max(whole.shape[moved] - shift, 0))  # type: ignore[return-value]
