"""One call of a tiled module. Forward runs the tiles in order, and backward runs them again.

Backward does for each tile what a checkpoint does for a layer. The whole call is one autograd node,
so that the gradients from the tiles are summed in one buffer for each weight. With several nodes,
the engine would have to keep all terms. Backward runs the tiles in the order of the forward and
starts with the same generator state. So they draw the same random numbers.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from storage_ops.checkpoint.layers.last_product import LastProductLeftOut
from storage_ops.checkpoint.region.backward_pass import is_retained
from storage_ops.checkpoint.region.inputs import Inputs
from storage_ops.checkpoint.saved.saved import explain_transform
from storage_ops.checkpoint.state.execution import ExecutionState
from storage_ops.checkpoint.state.reachable import Surroundings
from storage_ops.checkpoint.state.unchanged import Place, places_of, replaced

# During a call other tensors replace the module's parameters, so the next call must wait.
_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def lock_of(module: nn.Module) -> Any:
    """Return the lock that a thread holds while it runs a tiled module.

    Nested calls of the same module may run.
    """
    return _locks.setdefault(module, threading.RLock())


Forward = Callable[[nn.Module, Tensor], Any]
# torch's error for a write to a leaf or to a view of one. In backward, each tile is a leaf.
_LEAF_IS_WRITTEN = re.compile("a (view of a )?leaf Variable that requires grad is being used in an")


def fail(name: str, what: str, kind: type[Exception] = RuntimeError) -> NoReturn:
    """Raise an error with the name of a tiled module."""
    raise kind(f"tile: {name} {what}")


class TiledModule:
    """A module that is called on tiles of its input.

    Args:
        module, forward: the module, and its plain forward.
        dim: the dimension to cut, counted from the first.
        tiles: the number of tiles, at most the number of tokens.
    """

    def __init__(self, module: nn.Module, forward: Forward, dim: int, tiles: int) -> None:
        self.name = type(module).__name__
        self.dim, self.tiles = dim, tiles
        self.host = _Host(module, forward)

    def places(self) -> list[Place]:
        """Return the slots of the module's parameters and buffers.

        Raises:
            RuntimeError: a parameter has no shape yet.
        """
        places = places_of(self.host)
        if any(is_lazy(t) for *_, t in places):
            fail(
                self.name,
                "has parameters whose shapes are unknown before its first call. Call the module "
                "once before it is tiled.",
            )
        return places

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the tiles of an input. Their sizes differ by at most one token."""
        return torch.tensor_split(x, self.tiles, self.dim)

    def run(self, x: Tensor) -> Tensor:
        """Return the outputs of all tiles, each copied into one tensor as soon as it exists."""
        out, at = None, 0
        for tile in self.split(x):
            part = self.output_of(tile)
            if out is None:
                shape = list(part.shape)
                shape[self.dim] = x.shape[self.dim]
                out = part.new_empty(shape)
            out.narrow(self.dim, at, tile.shape[self.dim]).copy_(part)
            at += tile.shape[self.dim]
        assert out is not None
        return out

    def output_of(self, tile: Tensor) -> Tensor:
        """Return the output for one tile.

        Raises:
            TypeError: the output is not a tensor.
            ValueError: the output has another number of tokens.
        """
        try:
            out = self.host.run(tile)
        except RuntimeError as error:
            explain_transform(self.name, error)
            if _LEAF_IS_WRITTEN.search(str(error)):
                fail(
                    self.name,
                    "modifies its input in place, and the backward needs the input again. Expected "
                    "a module that does not, such as nn.ReLU(inplace=False).",
                )
            raise
        if not isinstance(out, Tensor):
            fail(
                self.name,
                f"returned a {type(out).__name__}. Expected one tensor with the tokens of its "
                "input in the same dimension.",
                TypeError,
            )
        if out.ndim <= self.dim or out.shape[self.dim] != tile.shape[self.dim]:
            fail(
                self.name,
                f"returned a tensor of shape {tuple(out.shape)} for an input of shape "
                f"{tuple(tile.shape)}. Expected the same number of tokens in dimension "
                f"{self.dim}.",
                ValueError,
            )
        return out

    def check_leaves(self, out: Tensor, known: Iterable[Tensor]) -> None:
        """Raise an error if an output depends on a tensor that would get no gradient."""
        allowed = {id(t) for t in known}
        for leaf in _leaves_of_graph(out):
            if id(leaf) not in allowed:
                fail(
                    self.name,
                    f"uses a tensor of shape {tuple(leaf.shape)} that needs a gradient and is "
                    "neither its input nor a parameter of it. Make the tensor a parameter of the "
                    "module, or detach it.",
                )


class _TiledCall:
    """A call that can be repeated in backward."""

    def __init__(self, tiled: TiledModule, x: Tensor, places: list[Place]) -> None:
        """Prepare for a call.

        Args:
            tiled, x: the module and its input.
            places: the slots of the parameters that require grad.
        """
        self.tiled = tiled
        numbers: dict[Tensor, int] = {}
        self._places = [
            (where, name, numbers.setdefault(t, len(numbers))) for where, name, t in places
        ]
        self.parameters = list(numbers)
        # Store the inputs before a tile runs. A checkpoint around the module stops its recompute at
        # the last saved tensor, which then comes before all tiles.
        self._inputs: Inputs | None = Inputs((x,), {"parameters": self.parameters})
        surroundings = Surroundings.of(tiled.host.run, [], self._inputs.tensors)
        self._state: ExecutionState | None = ExecutionState(surroundings, preserve_rng_state=True)
        self._inputs.forget()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of all tiles."""
        assert self._state is not None
        # Autocast caches its casts of parameters. Casts in this call have no graph, so it uses
        # detached parameters.
        with self._with([p.detach().requires_grad_() for p in self.parameters]):
            out = self.tiled.run(x)
        self._state.finish()
        return out

    def _with(self, parameters: list[Tensor]) -> Any:
        return replaced((where, name, parameters[i]) for where, name, i in self._places)

    def backward(self, gradient: Tensor, needed: tuple[bool, ...]) -> list[Tensor | None]:
        """Return the gradients of the input and of the parameters that are needed."""
        with lock_of(self.tiled.host.module):
            return self._backward(gradient, needed)

    def _backward(self, gradient: Tensor, needed: tuple[bool, ...]) -> list[Tensor | None]:
        tiled = self.tiled
        if self._inputs is None or self._state is None:
            fail(
                tiled.name,
                "is needed in a second backward pass, but the first one freed its input. Pass "
                "retain_graph=True to the first.",
            )
        self._state.effects.check(tiled.name)
        writes = self._state.effects.without_repeated_writes(tiled.name, checks=True)
        (x,), others = self._inputs.again(tiled.name)
        parameters = others["parameters"]
        self._inputs.forget_new_hooks()
        sums = [_Sum(p, needs) for p, needs in zip(parameters, needed[1:], strict=True)]
        gradient_of_x = torch.empty_like(x) if needed[0] else None
        leaves_out = not self._state.modes.see_ops  # a mode may change the result of every op
        at = 0
        with self._state, writes, self._with([total.leaf for total in sums]):
            for tile in tiled.split(x.detach()):
                where = (tiled.dim, at, tile.shape[tiled.dim])
                at += where[2]
                tile = _of_class(type(x), tile.detach()).requires_grad_(needed[0])
                with self._state.modes.again(), LastProductLeftOut(leaves_out) as mode:
                    out = tiled.output_of(tile)
                mode.finish(weakref.ref(out))
                tiled.check_leaves(out, [tile, *(total.leaf for total in sums)])
                if out.requires_grad:
                    torch.autograd.backward(out, gradient.narrow(*where))
                del out
                if gradient_of_x is not None:
                    part = gradient_of_x.narrow(*where)
                    _ = part.zero_() if tile.grad is None else part.copy_(tile.grad)
        if not is_retained():
            self._inputs = self._state = None
        return [gradient_of_x, *(total.total() for total in sums)]


class _Host(nn.Module):
    """Contains the module, so that its parameters can be replaced during its plain forward."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module = module
        self._forward = forward

    def run(self, tile: Tensor) -> Any:
        """Call the plain forward."""
        return self._forward(self.module, tile)


def _of_class(cls: type[Tensor], t: Tensor) -> Tensor:
    """Return a detached tensor as an instance of `cls`.

    torch returns instances of Tensor for all ops in the `backward` of a tensor subclass.
    """
    return t if cls in (type(t), nn.Parameter) else t.as_subclass(cls)


class _Sum:
    """A parameter as tiles see it, and the sum of its gradients from the tiles."""

    def __init__(self, parameter: Tensor, needed: bool) -> None:
        self.leaf = _of_class(type(parameter), parameter.detach()).requires_grad_(needed)
        self._wide: Tensor | None = None
        if needed and parameter.dtype in (torch.bfloat16, torch.float16):
            self.leaf.register_post_accumulate_grad_hook(self._add)

    def _add(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        if self._wide is None:
            self._wide = leaf.grad.float()
        else:
            self._wide.add_(leaf.grad)
        leaf.grad = None

    def total(self) -> Tensor | None:
        """Return the sum in the parameter's dtype. The caller has the only reference to it."""
        total, self._wide = self._wide, None
        gradient, self.leaf.grad = self.leaf.grad, None
        return gradient if total is None else total.to(self.leaf.dtype)


def _leaves_of_graph(t: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that a tensor depends on."""
    stack, seen = [t.grad_fn], set()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        stack += [after for after, _ in node.next_functions]


class _Tiled(torch.autograd.Function):
    """The autograd node of a call."""

    @staticmethod
    def forward(ctx: Any, call: _TiledCall, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call = call  # `name` is already an attribute of the node
        return call.forward(x)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        fail(
            ctx.call.tiled.name,
            "got dual numbers of forward-mode AD, and tiles have no forward-mode derivatives. Run "
            "the module without tiles: storage_ops.disable_checkpointing().",
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            fail(
                ctx.call.tiled.name,
                "was differentiated with create_graph=True, and tiles have first derivatives only. "
                "Run the module without tiles: storage_ops.disable_checkpointing().",
            )
        return (None, *ctx.call.backward(gradient, ctx.needs_input_grad[1:]))


def run(tiled: TiledModule, x: Tensor) -> Tensor:
    """Call a module tile by tile, as one autograd node if a gradient is needed."""
    if not torch.is_grad_enabled():
        return tiled.run(x)
    places = [place for place in tiled.places() if place[-1].requires_grad]
    if not (x.requires_grad or places):
        return tiled.run(x)
    call = _TiledCall(tiled, x, places)
    return _Tiled.apply(call, x, *call.parameters)  # type: ignore[no-untyped-call, no-any-return]
