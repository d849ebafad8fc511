"""What the inputs of a span would be to linear cross-entropy, as far as their structure tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from storage_ops.autochunk.nodes import is_tensor, is_zero, name_of, shape
from storage_ops.autochunk.rules import is_transposition, rule_of
from storage_ops.autochunk.state import Conflict, Layout, Rows, Whole, same

CONVERT = "prims.convert_element_type.default"
_CASTS = ("aten.alias.default", CONVERT)


@dataclass
class Factor:
    """An upstream gradient: a number times a value of one element times the tokens' weights.

    Attributes:
        number: of Python.
        scales: nodes of one element, multiplied.
        inverse: nodes of one element that divide.
        weights: nodes with an element per token (or per class), multiplied.
        masks: (t, c): it is zero where t == c.
    """

    number: float = 1.0
    scales: list[fx.Node] = field(default_factory=list)
    inverse: list[fx.Node] = field(default_factory=list)
    weights: list[fx.Node] = field(default_factory=list)
    masks: set[tuple[fx.Node, int]] = field(default_factory=set)


@dataclass
class Roles:
    """The inputs of a span.

    Attributes:
        names: for every input, its role.
        input, weight, bias: of the product; weight is (D, V) if transposed, else (V, D).
        target: class indices, or probabilities.
        ignore_index: of the indices; None if none is ignored.
        classes: weights of the classes, or None.
        upstream: for the places of upstream gradients among the inputs, what they are.
        constants: for the places of numbers, their values.
    """

    input: fx.Node
    weight: fx.Node
    transposed: bool
    bias: fx.Node | None
    names: list[str] = field(default_factory=list)
    target: fx.Node | None = None
    ignore_index: int | None = None
    classes: fx.Node | None = None
    upstream: dict[int, Factor] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)

    @property
    def dense(self) -> bool:
        """Whether the targets are probabilities."""
        return "probabilities" in self.names


class Unlike(Exception):
    """The span is no linear cross-entropy."""


def kind_of(node: Any) -> str:
    """The kind of a node's rule, empty if it has none."""
    try:
        return rule_of(node).kind if isinstance(node, fx.Node) else ""
    except Conflict:
        return ""


def base_of(node: Any) -> tuple[fx.Node, bool]:
    """A matrix without its transpositions: as (V, D) when False is returned with it."""
    flipped = True  # the product reads (D, V)
    while is_transposition(node):
        node, flipped = node.args[0], not flipped
    return node, flipped


def bare(node: Any, casts: bool = False, expands: bool = True) -> Any:
    """A node without views of it, and perhaps without changes of its dtype."""
    kinds = ("view", "expand") if expands else ("view",)
    while isinstance(node, fx.Node) and node.op == "call_function":
        if kind_of(node) in kinds or name_of(node) in _CASTS[: 2 if casts else 1]:
            node = node.args[0]
        elif name_of(node) == "aten.select_scatter.default" and _only(node.args[0], node.args[2]):
            node = node.args[1]
        elif name_of(node) == "aten.select.int" and _only(node.args[0], node.args[1]):
            node = node.args[0]
        else:
            break
    return node


def _only(node: Any, dim: Any) -> bool:
    """Whether a dimension has but one index."""
    return same(shape(node)[dim], 1)


def same_value(left: fx.Node, right: fx.Node) -> bool:
    """Whether two nodes are views or casts of one."""
    return bare(left, True, False) is bare(right, True, False)


def is_one(node: Any) -> bool:
    """Whether a node has one element."""
    return is_tensor(node) and all(same(s, 1) for s in shape(node))


def choice(node: Any) -> tuple[fx.Node, int, Any, Any] | None:
    """(t, c, a, b) of a node that is a where t != c, else b."""
    node = bare(node)
    if not isinstance(node, fx.Node) or name_of(node) != "aten.where.self":
        return None
    condition, yes, no = node.args
    found = comparison(condition)
    if found is None:
        return None
    target, value, equal = found
    return (target, value, no, yes) if equal else (target, value, yes, no)


def comparison(node: Any) -> tuple[fx.Node, int, bool] | None:
    """(t, c, whether they are to be equal) of a node that compares t with a number."""
    node, negated = bare(node), False
    while isinstance(node, fx.Node) and name_of(node) in (
        "aten.bitwise_not.default", "aten.logical_not.default"
    ):  # fmt: skip
        node, negated = bare(node.args[0]), not negated
    if not isinstance(node, fx.Node) or name_of(node) not in ("aten.eq.Scalar", "aten.ne.Scalar"):
        return None
    if node.args[0].meta["val"].is_floating_point():  # type: ignore[union-attr]
        return None
    return bare(node.args[0]), node.args[1], ("eq" in name_of(node)) != negated  # type: ignore


def roles_of(
    amplifier: fx.Node,
    inputs: list[tuple[fx.Node, Layout, fx.Node]],
    depends: Callable[[Any], bool],
) -> Roles:
    """The roles of a span's inputs; `depends`: whether a node carries the upstream gradient.

    Raises:
        Unlike: an input has none.
    """
    args: list[Any] = list(amplifier.args)
    *bias, left, right = args
    bias = bias or _added(amplifier)
    if bias and (len(shape(bias[0])) != 1 or bias[0].meta["val"].dtype != left.meta["val"].dtype):
        raise Unlike("a bias of another kind")
    weight, transposed = base_of(right)
    roles = Roles(left, weight, transposed, bias[0] if bias else None)
    targets: dict[tuple[fx.Node, int | None], None] = {}
    classes: dict[fx.Node, None] = {}
    for place, (arg, layout, _) in enumerate(inputs):
        roles.names.append(_role(roles, place, arg, layout, amplifier, targets, classes, depends))
    if len(targets) != 1 or len(classes) > 1 or not roles.upstream:
        raise Unlike("no target, or several")
    ((roles.target, roles.ignore_index),) = targets
    roles.classes = next(iter(classes), None)
    inside = bool({"kept", "ignored"} & set(roles.names))  # then the comparison sees it
    for factor in roles.upstream.values():
        _separate_mask(factor, roles, inside)
    return roles


def _added(amplifier: fx.Node) -> list[fx.Node]:
    """A vector over the classes that is added to the product."""
    stack = [amplifier]
    while stack:
        node = stack.pop()
        for user in node.users:
            if kind_of(user) == "view":
                stack.append(user)
            elif name_of(user) == "aten.add.Tensor":
                (other,) = (a for a in user.args if a is not node)
                if is_tensor(other) and len(shape(other)) == 1:  # type: ignore[arg-type]
                    return [other]  # type: ignore[list-item]
    return []


def _role(
    roles: Roles, place: int, arg: fx.Node, layout: Layout, amplifier: fx.Node,
    targets: dict[tuple[fx.Node, int | None], None], classes: dict[fx.Node, None],
    depends: Callable[[Any], bool],
) -> str:  # fmt: skip
    if arg is roles.input:
        return "input"
    if roles.bias is not None and bare(arg) is bare(roles.bias):
        return "bias"
    constant = _constant(arg)
    if constant is not None:
        roles.constants[place] = constant
        return "constant"
    base, flipped = base_of(arg)
    if base is roles.weight:
        return "weight.t" if flipped == roles.transposed else "weight"
    sizes, dtype = shape(arg), arg.meta["val"].dtype
    if not is_one(arg) and not _fits(layout):
        raise Unlike(f"{arg} has not one row per token")
    wide = bool(sizes) and same(sizes[-1], shape(amplifier)[-1])
    if not dtype.is_floating_point:
        found = comparison(arg)
        if found is not None:
            targets[found[:2]] = None
            return "ignored" if found[2] else "kept"
        targets[_target(arg)] = None
        return "target"
    if depends(arg):
        factor = _factor(arg, depends, wide)
        if wide:
            classes.update(dict.fromkeys(bare(w) for w in factor.weights))
            factor.weights.clear()
        roles.upstream[place] = factor
        return "class upstream" if wide else "upstream"
    if wide and isinstance(layout, Rows) and len(sizes) == 2:
        targets[arg, None] = None
        return "probabilities"
    if wide and all(same(s, 1) for s in sizes[:-1]):
        classes[bare(arg)] = None
        return "classes"
    raise Unlike(f"{arg} is none of its inputs")


def _constant(node: fx.Node) -> Tensor | None:
    """The value of a node that is the same number everywhere, for the comparison."""
    sizes, base = shape(node), bare(node)
    if not is_one(node) or kind_of(base) != "create":
        return None
    name, value = name_of(base), base.meta["val"]
    number = {"aten.zeros.default": 0, "aten.ones.default": 1}.get(name)
    if number is None:
        number = base.args[0 if name == "aten.scalar_tensor.default" else 1]
    dtype = torch.float64 if value.is_floating_point() else value.dtype
    return torch.full([1] * len(sizes), number, dtype=dtype)


def _fits(layout: Layout) -> bool:
    return isinstance(layout, Whole) or (isinstance(layout, Rows) and same(layout.per, 1))


def _target(node: fx.Node) -> tuple[fx.Node, int | None]:
    """The class indices and the ignored one, of an index that is 0 where it is ignored."""
    chosen = choice(node)
    if chosen is None:
        return bare(node), None
    if bare(chosen[2]) is not chosen[0] or not is_zero(chosen[3]):
        raise Unlike(f"{node} is no target")
    return chosen[:2]


def _factor(node: Any, depends: Callable[[Any], bool], wide: bool) -> Factor:
    """What an upstream gradient is a product of."""
    result = Factor()
    while True:
        node = bare(node, casts=True)
        if is_one(node):
            result.scales.append(node)
            return result
        name = name_of(node)
        args: Any = node.args
        chosen = choice(node)
        if chosen is not None and is_zero(chosen[3]):
            result.masks.add(chosen[:2])
            node = chosen[2]
        elif name == "aten.neg.default":
            result.number, node = -result.number, args[0]
        elif name.startswith(("aten.mul.", "aten.div.")):
            second = depends(args[1]) and not depends(args[0]) and "mul" in name
            node, other = (args[1], args[0]) if second else args[:2]
            _multiply(result, other, "div" in name)
        else:
            raise Unlike(f"{node} is no upstream gradient")


def _multiply(result: Factor, other: Any, divide: bool) -> None:
    if isinstance(other, (int, float)):
        result.number *= 1 / other if divide else other
    elif is_one(other):
        (result.inverse if divide else result.scales).append(other)
    elif divide:
        raise Unlike(f"divided by {other}")
    else:
        result.weights.append(other)


def _separate_mask(factor: Factor, roles: Roles, inside: bool) -> None:
    """Tell from the weights of tokens the mask of those that are not ignored."""
    kept = [w for w in factor.weights if not is_mask(w, roles)]
    masked = bool(factor.masks) or len(kept) < len(factor.weights)
    if not inside and masked != (roles.ignore_index is not None):
        raise Unlike("some upstream gradients ignore tokens, others do not")
    if factor.masks - {(roles.target, roles.ignore_index)}:
        raise Unlike("another mask than that of the target")
    factor.weights = kept


def is_mask(node: Any, roles: Roles) -> bool:
    """Whether a node is 1 where the target counts, and 0 where it is ignored."""
    found = comparison(bare(node, casts=True))
    return found is not None and found == (roles.target, roles.ignore_index, False)


def is_dropped(node: fx.Node, readers: list[fx.Node], roles: Roles, weights: list[fx.Node]) -> bool:
    """Whether all readers of a value per token drop it where the op does not work on the token.

    Those are the tokens with an ignored target, and those whose weight is zero.
    """
    keys = [bare(w, True, False) for w in weights]
    pending = {*keys, *([] if roles.ignore_index is None else ["mask"])}
    stack = [(user, node, frozenset(pending)) for user in readers]
    while stack:
        user, current, left = stack.pop()
        if not left:
            continue
        found = _drops(user, current, roles)
        if found is None:
            return False
        stack += [(each, user, left - {found}) for each in user.users]
    return True


def _drops(user: fx.Node, node: fx.Node, roles: Roles) -> Any:
    """What a reader multiplies by, "" for nothing; None if it does something else."""
    name = name_of(user)
    if user.op != "call_function":
        return None
    if bare(user, casts=True, expands=False) is bare(node, casts=True, expands=False):
        return ""
    if name in ("aten.neg.default", "aten.add.Tensor", "aten.sub.Tensor"):
        return ""
    if name == "aten.pow.Tensor_Scalar" and user.args[1] == 2:
        return ""
    if name == "aten.where.self":
        chosen = choice(user)
        fits = chosen is not None and chosen[:2] == (roles.target, roles.ignore_index)
        if chosen is not None and fits and chosen[2] is node and is_zero(chosen[3]):
            return "mask"
        return None
    if name.startswith(("aten.mul.", "aten.div.")):
        other = user.args[1] if user.args[0] is node else user.args[0]
        if isinstance(other, (int, float)) or is_one(other):
            return ""
        if other is node or "div" in name:
            return "" if other is node and "mul" in name else None
        return "mask" if is_mask(other, roles) else bare(other, True, False)
    return None
