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
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from storage_ops.checkpoint.region.backward_pass import is_retained
from storage_ops.checkpoint.region.inputs import Inputs
from storage_ops.checkpoint.saved.light_mode import LightMode
from storage_ops.checkpoint.saved.ref_counts import RefCounts
from storage_ops.checkpoint.saved.saved import explain_transform
from storage_ops.checkpoint.state.execution import ExecutionState
from storage_ops.checkpoint.state.reachable import Surroundings
from storage_ops.checkpoint.state.unchanged import Place, places_of, replaced
from storage_ops.foundation.op_names import Op, is_view
from storage_ops.foundation.ops import Args, Kwargs, facts_of

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
                with self._state.modes.again(), _LastProductLeftOut(leaves_out) as mode:
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


class _LastProductLeftOut(LightMode):
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
        if not leaves_out or any(type(t) not in _PLAIN for t in args) or not _fit(*args):
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


_aten = torch.ops.aten
_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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


def _as_it_is(t: Tensor) -> Tensor:
    return t


def can_check_tokens(tiled: TiledModule, x: Tensor) -> bool:
    """Return True if `check_tokens` can detect a dependence in this call.

    It needs gradients and values, and no dispatch mode: such a mode may record the check's ops for
    a checkpoint, or make tensors fake. Whole numbers, such as token ids, have no gradients.
    """
    has_tokens = x.numel() > 0 and x.shape[tiled.dim] > 2
    is_differentiable = x.is_floating_point() or x.is_complex()
    has_gradients = is_differentiable and not torch.is_inference_mode_enabled()
    return has_tokens and has_gradients and not torch._C._len_torch_dispatch_stack()


def _has_zeros(p: Tensor) -> bool:
    if type(p) is not nn.Parameter or p.dtype not in _FLOATS or p.numel() == 0:
        return False
    # The norm of order -inf is the smallest magnitude. torch computes it without a temporary
    # tensor.
    return not torch.linalg.vector_norm(p.detach().flatten(), -torch.inf)


def _without_zeros(t: Tensor) -> Tensor:
    """Return a detached copy of a tensor with positive random numbers in place of zeros."""
    t = t.detach()
    random = torch.rand_like(t).add_(0.5).div_(max(t.shape[-1:], default=1) ** 0.5)
    return torch.where(t == 0, random, t)


def check_tokens(tiled: TiledModule, x: Tensor) -> bool:
    """Raise an error for a module whose output at a token depends on other tokens.

    The check runs the module on three tokens. It computes the gradient of the output at the middle
    token with respect to the input at the other two. In a token-wise module this gradient is zero.
    A parameter that is initially zero, such as a gate, would hide a dependence. So the check
    replaces zeros in parameters and in the input by random numbers.

    Returns:
        True, or False if the output requires no gradient, so that a dependence cannot be detected.

    Raises:
        ValueError: the gradient is not zero.
        RuntimeError: the module uses a tensor that requires grad and is not its parameter.
    """
    parameters = list(tiled.host.parameters())
    state = ExecutionState(Surroundings.of(tiled.host.run, [], [x]), preserve_rng_state=True)
    copies = {b: b.clone() for b in tiled.host.buffers()}
    # The surrounding hooks count saved tensors, so use other hooks here.
    own = saved_tensors_hooks(_as_it_is, _as_it_is)
    with state, torch.enable_grad(), own:
        for p in parameters:
            if _has_zeros(p):
                copies[p] = _without_zeros(p).requires_grad_(p.requires_grad)
            elif p.grad_fn is not None:  # of `functional_call`; a call detaches it, too
                copies[p] = p.detach().requires_grad_()
        places = [(at, name, copies[t]) for at, name, t in places_of(tiled.host) if t in copies]
        tile = x.detach().narrow(tiled.dim, 0, 3)
        tile = (_without_zeros(tile) if type(x) in _PLAIN else tile.clone()).requires_grad_()
        with replaced(places):
            out = tiled.output_of(tile)
        tiled.check_leaves(out, [tile, *parameters, *copies.values()])
        if not out.requires_grad:
            return False
        middle = out.narrow(tiled.dim, 1, 1)
        (gradient,) = torch.autograd.grad(
            middle, tile, torch.rand_like(middle) + 0.5, allow_unused=True
        )
    if gradient is not None and any(
        gradient.narrow(tiled.dim, other, 1).ne(0).any() for other in (0, 2)
    ):
        fail(
            tiled.name,
            f"is not token-wise: its output at one place of dimension {tiled.dim} depends on its "
            "input at another. Expected a module such as an MLP or a norm of the last dimension.",
            ValueError,
        )
    return True
