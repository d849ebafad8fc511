"""One table of the known facts of each op.

`facts_of(op)` returns the facts of an op. Estimates, policies, the roofline of `fit`, reports and
the chunker use them. The schema of an op states some facts. All others are rows of the table:
`describe` adds facts to an op. This file has the rows that several packages read. Packages above
add facts about memory to the table when they are imported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS

from storage_ops.foundation.op_names import (
    HIGHER_ORDER,
    Op,
    is_allocation,
    is_mutating,
    is_view,
    name_of,
    packet_of,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Flops = Callable[[Args, Kwargs], int]


class Product(NamedTuple):
    """The factors of an op that multiplies matrices.

    Attributes:
        left: position of the left factor among the arguments.
        right: position of the right factor.
        form: "matrices" are (..., n, k) and (..., k, m). "vector": the right factor is a vector.
            "transposed": the right factor is (m, k). "groups": offsets divide one dimension.
            "sum": the products of a batch are added up.
        on_cublas: whether cuBLAS computes the product on a GPU. cuBLAS keeps a workspace.
    """

    left: int
    right: int
    form: Literal["matrices", "vector", "transposed", "groups", "sum"] = "matrices"
    on_cublas: bool = False

    def flops(self, left: Tensor, right: Tensor) -> int:
        """Return the number of multiplications and additions for two factors."""
        if self.form == "transposed":
            return 2 * left.numel() * int(right.shape[0])
        if self.form == "groups" and left.dim() == 3 and right.dim() == 2:
            # Each matrix is multiplied with a part of the columns.
            return 2 * right.numel() * int(left.shape[1])
        return 2 * left.numel() * (1 if right.dim() == 1 else int(right.shape[-1]))


class Row(TypedDict, total=False):
    """The facts that `describe` accepts. `OpFacts` explains them."""

    product: Product
    flops: Callable[[Args], int]
    family: str
    is_attention: bool
    nanoseconds: float
    is_fused: bool
    is_plain_view: bool
    simulates_inside: bool
    sized_by_integers: bool
    in_place: Op
    result: Callable[..., object]
    result_on_cpu: Callable[..., object]
    sized: Callable[..., object]
    scratch: Callable[..., None]
    scratch_on_cpu: Callable[..., None]
    scratch_on_gpu: Callable[..., None]


@dataclass(frozen=True)
class OpFacts:
    """The known facts of an op.

    Attributes:
        op: the op.
        name: the dispatcher's name.
        saveable: whether its result can be saved instead of recomputed. False for an op that
            modifies an argument, returns a view, or returns uninitialised memory.
        may_share: whether an output may share the storage of an argument but have its own version
            counter. A view has the counter of its base.
        may_draw: whether it may draw random numbers.
        is_ignored: whether policies and checks ignore the op. Such ops only ask for a tensor's
            layout. C++ code calls them where an exception would end the process.
        is_cast: whether it converts a tensor.
        collective: "functional" for a collective that returns a tensor. "in place" for one that
            writes into its arguments, which its schema does not say. "" for other ops.
        product: positions of the factors of a matrix product. None for other ops.
        flops: counts the floating-point operations of a call. None if only torch's counter may
            know.
        family: a name for ops among which the device, the dtype or the compiler chooses. `name` for
            other ops.
        is_attention: whether it is the forward of a fused attention kernel.
        nanoseconds: time to compute one element of the result on a CPU, without reading and writing
            memory.
        is_fused: whether compiled code fuses it into the ops that read its result.
        is_plain_view: whether it only returns a view of its first argument.
        simulates_inside: whether a simulation runs its implementation op by op.
        sized_by_integers: whether the size of the result depends on the values of integer tensors.
            Fake tensors do not know these values.
        in_place: the op that autograd calls instead if the first argument is a tensor that autograd
            owns.
        result: returns the result for fake tensors, or NotImplemented if torch's own is right.
        result_on_cpu: the same for the CPU kernel alone.
        sized: returns the result if its size depends on unknown values.
        scratch: records memory that the op allocates for real tensors but not for fake ones.
        scratch_on_cpu: records the temporary memory of the CPU kernel.
        scratch_on_gpu: records the temporary memory of the CUDA kernel.
    """

    op: Op
    name: str
    saveable: bool
    may_share: bool
    may_draw: bool
    is_ignored: bool
    is_cast: bool
    collective: Literal["functional", "in place", ""] = ""
    product: Product | None = None
    flops: Flops | None = None
    family: str = ""
    is_attention: bool = False
    nanoseconds: float = 0.0
    is_fused: bool = False
    is_plain_view: bool = False
    simulates_inside: bool = False
    sized_by_integers: bool = False
    in_place: Op | None = None
    result: Callable[..., object] | None = None
    result_on_cpu: Callable[..., object] | None = None
    sized: Callable[..., object] | None = None
    scratch: Callable[..., None] | None = None
    scratch_on_cpu: Callable[..., None] | None = None
    scratch_on_gpu: Callable[..., None] | None = None


_rows: dict[str, Row] = {}  # keys are names of ops (all overloads) or of single overloads
_facts: dict[int, OpFacts] = {}


def describe(names: str, **row: Unpack[Row]) -> None:
    """Add facts to the table.

    Args:
        names: ops, separated by spaces. "sum" means every overload of `aten::sum`, "sum.default"
            one of them. Ops of other libraries are written as "storage_ops::name". "tag::pointwise"
            means every op with this tag. A row of an overload overrides the row of its op, which
            overrides the row of a tag.
        row: the facts, as `OpFacts` explains them.

    Raises:
        ValueError: the table already has one of these facts.
    """
    for name in names.split():
        full = name if "::" in name else f"aten::{name}"
        known = _rows.setdefault(full, {})
        if both := known.keys() & row.keys():
            raise ValueError(f"describe: {full} has {sorted(both)} already. Expected new facts.")
        known.update(row)
    _facts.clear()


def described() -> dict[str, Row]:
    """Return the rows of the table by the name of their op."""
    return _rows


def facts_of(op: Op) -> OpFacts:
    """Return the facts of an op.

    Ops are compared by identity, because an op's hash is slow Python code.
    """
    facts = _facts.get(id(op))
    if facts is None:
        facts = _facts[id(op)] = _new_facts(op)
    return facts


def _new_facts(op: Op) -> OpFacts:
    name = name_of(op)
    packet, _, overload = name.partition(".")
    row: dict[str, Any] = {}
    tags = [f"tag::{tag.name}" for tag in getattr(op, "tags", ())]
    for key in (*tags, packet, f"{packet}.{overload or 'default'}"):
        row.update(_rows.get(key, {}))
    row["family"] = row.get("family", name)
    row["flops"] = _flops(op, row)
    collective = _COLLECTIVES.get(name.partition("::")[0], "")
    writes = is_mutating(op) or collective == "in place"
    saveable = not (writes or is_view(op) or is_allocation(op))
    new = saveable and name.startswith("aten::") and op is not _UNSAFE_VIEW
    return OpFacts(
        op,
        name,
        saveable,
        not (new or is_view(op)),
        _may_draw(op),
        op in SAC_IGNORED_OPS or name.startswith(_ABOUT_LAYOUTS),
        op is _CAST,
        collective,
        **row,
    )


def family_of(name: str) -> str:
    """Return the name under which calls of an op are counted, from the dispatcher's name."""
    return _rows.get(packet_of(name), {}).get("family", name)


def product_of(name: str) -> Product | None:
    """Return how a function of torch, such as "matmul", multiplies matrices, or None."""
    return _rows.get(f"aten::{name}", {}).get("product") or _FUNCTIONS.get(name)


def _may_draw(op: Op) -> bool:
    arguments = getattr(getattr(op, "_schema", None), "arguments", ())
    seeded = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
    return seeded or any("Generator" in str(argument.type) for argument in arguments)


# Sizes, strides and offsets of strided nested tensors, and the layout of jagged ones.
_ABOUT_LAYOUTS = ("aten::_nested_tensor_s", "prim::")
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_CAST = torch.ops.aten._to_copy.default
_COLLECTIVES: dict[str, Literal["functional", "in place", ""]] = {
    "_c10d_functional": "functional", "_c10d_functional_autograd": "functional",
    "_dtensor": "functional", "c10d": "in place",
}  # fmt: skip


def flops_of(op: Op, args: Args, kwargs: Kwargs, out: object) -> int:
    """Return the floating-point operations of a call of `op`, or 0 if no formula is known.

    Matrix products, convolutions and attention are counted from shapes alone. A multiplication and
    an addition count as two operations. Attention counts as if nothing was masked and all sequences
    had the greatest length. Its forward counts as two matrix products, its backward as five.
    torch's counter knows the other ops.
    """
    count = facts_of(op).flops
    if count is not None:
        return count(args, kwargs)
    from torch.utils.flop_counter import flop_registry

    formula: Any = flop_registry.get(getattr(op, "overloadpacket", op))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _flops(op: Op, row: dict[str, Any]) -> Flops | None:
    count, product = row.get("flops"), row.get("product")
    if count is not None:
        return lambda args, kwargs: count(args)
    if product is not None:
        return functools.partial(_flops_of_product, op, product)
    return _flops_of_attention(op)


def _flops_of_product(op: Op, product: Product, args: Args, kwargs: Kwargs) -> int:
    schema: Any = getattr(op, "_schema", None)
    left, right = (
        args[place] if place < len(args) else kwargs[schema.arguments[place].name]
        for place in (product.left, product.right)
    )
    return product.flops(left, right)


# Names of queries, keys and values in ops of attention.
_QKV = (("query", "key", "value"), ("q", "k", "v"))
# Arguments with the most keys per sequence, if one dimension has all sequences.
_MOST_KEYS = ("max_k", "max_seqlen_k")


def _flops_of_attention(op: Op) -> Flops | None:
    """Return the formula of an attention op, or None for another op.

    torch's counter has no formula for attention on a CPU or in other packages. torch's formulas
    refuse keys with fewer heads than queries. They also read lengths of sequences, which fake
    tensors lack.
    """
    name = packet_of(name_of(op))
    if "attention" not in name and "attn" not in name:
        return None
    schema = getattr(op, "_schema", None)  # flex_attention has none
    names = _QKV[0] if schema is None else [argument.name for argument in schema.arguments]
    places = {argument: place for place, argument in enumerate(names)}
    qkv_names = next((qkv for qkv in _QKV if all(argument in places for argument in qkv)), None)
    if qkv_names is None:
        return None
    before = "scaled_dot_product" in name or name.startswith(HIGHER_ORDER)
    # Backward computes the scores again, and the gradients of both factors of both products.
    of_q, of_v = (3, 2) if name.endswith("backward") else (1, 1)

    def count(args: Args, kwargs: Kwargs) -> int:
        def value_of(argument: str) -> Any:
            place = places.get(argument, len(args))
            return args[place] if place < len(args) else kwargs.get(argument)

        q, k, v = map(value_of, qkv_names)
        if before:  # true if the dimension of heads comes before that of the sequence
            keys = k.shape[-2]
        else:
            most = [size for size in map(value_of, _MOST_KEYS) if size is not None]
            keys = min([k.shape[max(-3, -k.dim())], *most])
        return int(2 * math.prod(q.shape[:-1]) * keys * (of_q * q.shape[-1] + of_v * v.shape[-1]))

    return count


_MATRICES, _AFTER_BIAS = Product(0, 1), Product(1, 2)
_GROUPS = Product(0, 1, "groups")
# Functions of torch that autograd sees as products of the table.
_FUNCTIONS = {"matmul": _MATRICES, "einsum": _MATRICES}

describe("mm bmm", product=Product(0, 1, on_cublas=True))
describe("addmm baddbmm", product=Product(1, 2, on_cublas=True))
describe("mv dot", product=Product(0, 1, "vector", on_cublas=True))
describe("addmv", product=Product(1, 2, "vector", on_cublas=True))
describe("addbmm", product=Product(1, 2, "sum"))
describe("linear mkldnn_linear", product=Product(0, 1, "transposed"))
describe("_int_mm _scaled_mm _scaled_mm_v2", product=_MATRICES)
describe("_addmm_activation", product=_AFTER_BIAS)
describe("_grouped_mm", product=_GROUPS, family="grouped_mm")
describe("_scaled_grouped_mm _scaled_grouped_mm_v2", product=_GROUPS)
# transformers has its own op for products that torch's grouped products do not support.
describe("transformers::grouped_mm_fallback", product=_GROUPS, family="grouped_mm")
describe(
    "transformers::grouped_mm_fallback_backward",
    flops=lambda args: 2 * _GROUPS.flops(args[0], args[1]),
)
describe(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"
    " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
    " _scaled_dot_product_fused_attention_overrideable _flash_attention_forward"
    f" _efficient_attention_forward {HIGHER_ORDER}::flex_attention",
    is_attention=True, family="attention",
)  # fmt: skip

# Nanoseconds on a CPU were measured with torch 2.13 on two cores of an AMD EPYC with AVX-512.
describe("tanh", nanoseconds=1.0)
describe("sin cos", nanoseconds=0.55)
describe("erf", nanoseconds=0.5)
describe("log", nanoseconds=0.35)
describe("exp gelu", nanoseconds=0.3)
describe("sqrt", nanoseconds=0.15)
describe("silu sigmoid rsqrt", nanoseconds=0.1)
describe("where", nanoseconds=1.5)
describe("_log_softmax", nanoseconds=0.6)
# Compiled code fuses elementwise ops, and the ops below, into the ops that read their results.
describe("tag::pointwise", is_fused=True)
describe("bernoulli_ native_dropout", nanoseconds=2.1, is_fused=True)
describe("normal_", nanoseconds=1.2, is_fused=True)
describe("uniform_ rand", nanoseconds=1.0, is_fused=True)
describe("native_layer_norm", nanoseconds=0.3, is_fused=True)
describe("_softmax", nanoseconds=0.2, is_fused=True)
describe("_safe_softmax", nanoseconds=0.4, is_fused=True)
describe(
    "_to_copy mean sum amax var_mean native_group_norm _fused_rms_norm cat clone copy_ randn arange"
    " full full_like zeros zeros_like ones ones_like scalar_tensor embedding",
    is_fused=True,
)
