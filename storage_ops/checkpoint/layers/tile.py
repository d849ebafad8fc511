"""Token-wise modules that run on slices of the sequence, in forward and in backward.

The intermediates of an MLP exist for one tile at a time. In backward, each tile runs again, and its
backward runs before the next tile. `tile_run.py` has one call of a tiled module. `token_wise.py`
checks at the first call that the module treats each token alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from storage_ops._subclass import Replaced, check_module, like
from storage_ops.checkpoint.layers import tile_run, token_wise
from storage_ops.checkpoint.layers.tile_run import TiledModule, fail
from storage_ops.checkpoint.region.lowering import compiled_region, traced_region
from storage_ops.checkpoint.region.options import is_repeatable
from storage_ops.checkpoint.state.execution import is_disabled, is_traced_by_fx
from storage_ops.checkpoint.state.left_behind import run_on_fakes
from storage_ops.checkpoint.state.unchanged import replaced, unchanged
from storage_ops.foundation import regions
from storage_ops.foundation.autocast import autocast_dtype
from storage_ops.foundation.eager import eager
from storage_ops.foundation.tensor_spec import TensorSpec
from storage_ops.quantities import parse_bytes, readable

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass
class Tiling:
    """The options of a tiled module, and results about its calls.

    Attributes:
        tiles: the number of tiles. None: as few as `budget` allows.
        budget: bytes that one tile may take.
        dim: the dimension of the tokens.
        tiles_by_call: numbers of tiles for earlier calls, by shapes, dtypes and other keys.
        checked: whether a check has shown that the module is token-wise.
    """

    tiles: int | None
    budget: int | None
    dim: int
    tiles_by_call: dict[Any, int] = field(default_factory=dict, compare=False, repr=False)
    checked: bool = field(default=False, compare=False, repr=False)

    @eager  # If the graph breaks inside of a tile, the tiles run eagerly, and stay regions.
    def run(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module. `original` is the forward of its class."""
        if not torch.compiler.is_compiling() and is_traced_by_fx(args, kwargs):
            return original(module, *args, **kwargs)
        x, forward = _input_of(module, original, args, kwargs)
        dim = self._dim_of(module, x)
        tokens = x.shape[dim]
        if is_disabled() or tokens < 2:
            return forward(module, x)
        if x.is_contiguous():
            forward = partial(_on_contiguous, forward)
        if torch.compiler.is_compiling():
            if self.tiles is None:
                fail(
                    type(module).__name__,
                    "is compiled with a budget, which needs a run on fake tensors. Pass `tiles` "
                    "instead of `budget`.",
                )
            call = partial(forward, module)
            if torch.is_grad_enabled():
                call = partial(_compiled, call)
            return torch.cat([call(t) for t in _cut(x, min(self.tiles, tokens), dim)], dim)
        tiled, leaves = TiledModule(module, forward, dim, 1), tree_leaves((args, kwargs))
        with tile_run.lock_of(module):
            tiled.tiles = self._number_for(tiled, x, (len(args), *kwargs, *map(_choice, leaves)))
            return self._run(tiled, x)

    def _run(self, tiled: TiledModule, x: Tensor) -> Tensor:
        if regions.tracing():
            call = tiled.host.run
            parts = [traced_region(call, (t,), {}, None, False) for t in tiled.split(x)]
            return torch.cat(parts, tiled.dim)
        if torch.is_grad_enabled() and not is_repeatable():
            return torch.cat([tiled.host.run(t) for t in tiled.split(x)], tiled.dim)
        if not self.checked and token_wise.can_check(tiled, x):
            self.checked = token_wise.check(tiled, x)
            if not self.checked:  # no output needs a gradient
                with torch.no_grad():
                    return tile_run.run(tiled, x)
        return tile_run.run(tiled, x)

    def _dim_of(self, module: nn.Module, x: Tensor) -> int:
        """Return the non-negative number of the token dimension."""
        dim = self.dim + x.ndim if self.dim < 0 else self.dim
        if not 0 <= dim < x.ndim - 1:
            fail(
                type(module).__name__,
                f"got an input of shape {tuple(x.shape)}, and `dim` is {self.dim}. Expected a "
                "dimension of the input other than the last.",
                ValueError,
            )
        return dim

    def _number_for(self, tiled: TiledModule, x: Tensor, others: tuple[Any, ...]) -> int:
        """Return the number of tiles.

        `others` distinguishes calls with other arguments.
        """
        tokens = x.shape[tiled.dim]
        if self.tiles is not None:
            return min(self.tiles, tokens)
        assert self.budget is not None
        # The bytes of a tile also depend on dropout, frozen weights and arguments.
        modes = tuple(module.training for module in tiled.host.modules())
        kinds = tuple((p.requires_grad, p.dtype) for p in tiled.host.parameters())
        autocast = autocast_dtype(x.device.type)
        key = (x.shape, x.dtype, x.requires_grad, autocast, modes, kinds, others)
        if key not in self.tiles_by_call:
            self.tiles_by_call[key] = _fewest(tiled, x, tokens, self.budget)
        return self.tiles_by_call[key]


def _on_contiguous(forward: tile_run.Forward, module: nn.Module, tile_input: Tensor) -> Any:
    """Call a forward with a contiguous tile, as a module may call `view` on a contiguous input."""
    return forward(module, tile_input.contiguous())


def _choice(leaf: object) -> Any:
    """Return a key for an argument that is no tensor.

    Floating-point numbers do not affect the number of tiles, so they share a key.
    """
    return leaf if isinstance(leaf, (int, str, torch.dtype, type(None))) else type(leaf)


def _cut(x: Tensor, tiles: int, dim: int) -> tuple[Tensor, ...]:
    """Cut a tensor into tiles by bounds, which work for every symbolic number of tokens.

    `torch.tensor_split` with a number of tiles would compile a graph for each remainder.
    """
    tokens = x.shape[dim]
    return torch.tensor_split(x, [tokens * k // tiles for k in range(1, tiles)], dim)


def _compiled(call: Callable[[Tensor], Any], tile_input: Tensor) -> Any:
    return compiled_region(call, (tile_input,), {}, True, None, False)


_estimators: list[Callable[..., Any]] = []


def register_estimator(estimate: Callable[..., Any]) -> None:
    """Set the simulation that finds tiles for a budget. It belongs to a package above this one."""
    _estimators[:] = [estimate]


def _fewest(tiled: TiledModule, x: Tensor, tokens: int, budget: int) -> int:
    """Return the smallest number of tiles such that no tile takes more than the budget."""
    low, high = 1, tokens
    least = bytes_of_tile(tiled, x, 1)
    if least > budget:
        fail(
            tiled.name,
            f"needs {readable(least, up=True)} ({least} bytes) for one token, and `budget` is "
            f"{readable(budget)}. Pass a larger budget.",
            ValueError,
        )
    while low < high:
        middle = (low + high) // 2
        if bytes_of_tile(tiled, x, -(-tokens // middle)) <= budget:
            high = middle
        else:
            low = middle + 1
    return low


def bytes_of_tile(tiled: TiledModule, x: Tensor, tokens: int) -> int:
    """Return the peak bytes of a tile with this many tokens, by a run on fake tensors.

    They include all tensors of its forward and backward, with one weight's gradient before it is
    added to the sum. Its part of the input, the output, their gradients, and the sums do not count.
    """
    shape = list(x.shape)
    shape[tiled.dim] = tokens
    places = tiled.places()
    with _disable_current_modes():
        with FakeTensorMode():
            fakes = {t: _fake(t.shape, t) for *_, t in places}
            tile_input = _fake(shape, x)
        places = [(where, name, fakes[t]) for where, name, t in places]
        host = tiled.host  # named here, so that the estimate finds its caches

        @contextlib.contextmanager
        def bound() -> Iterator[None]:
            with unchanged(host), replaced(places):
                yield

        def output_like(_: FakeTensorMode) -> TensorSpec:
            with bound(), torch.no_grad():
                return TensorSpec.of(tiled.output_of(tile_input))

        output = run_on_fakes(host.modules(), output_like)
        with FakeTensorMode():
            gradient = output.make()

        def step(*_: Tensor) -> None:
            with torch.enable_grad(), bound():
                out = tiled.output_of(tile_input)
                if out.requires_grad:
                    out.backward(gradient)

        estimate = _estimators[0](step, tile_input, gradient, *fakes.values())
    return int(estimate.peak_bytes - estimate.input_bytes)


def _fake(shape: Sequence[int], t: Tensor) -> Tensor:
    fake = torch.empty(shape, dtype=t.dtype, device=t.device)
    if t.requires_grad:
        fake.requires_grad_()
        fake.grad = torch.empty_like(fake)
    return fake


class Tiled(Replaced):
    """A module that runs in tiles. The class of the module is changed to a subclass of this."""

    # On an instance, None means the plain forward.
    _tiling: Tiling | None = None

    @staticmethod
    def forward_over(original: Callable[..., Any]) -> Any:
        """Return a forward that runs the original one on tiles."""

        @like(original)
        def forward(self: Tiled, *args: object, **kwargs: object) -> Any:
            tiling = self._tiling
            if tiling is None:
                return original(self, *args, **kwargs)
            return tiling.run(self, original, args, kwargs)

        return forward


def tile(
    module: ModuleT,
    tiles: int | None = None,
    budget: int | float | str | None = None,
    *,
    dim: int = -2,
) -> ModuleT:
    """Run a token-wise module on slices of the sequence, in forward and in backward.

    Intermediates of the module exist for one tile at a time, and none is kept for backward, where
    each tile runs again. So the forward runs twice in all. In a checkpointed layer that ends with
    this module it also runs twice, because the recompute stops before the module.

    The module stays the same object with another class. Names, state dict, hooks and attributes do
    not change. Its own hooks see the whole sequence, those of its submodules see tiles. Random
    numbers are repeated exactly. Weight gradients are sums over tiles, each in one buffer, in
    float32 for 16-bit weights. So they differ from untiled gradients by rounding. Outputs may also
    differ by rounding, because products with fewer rows may add in another order. Inside
    `storage_ops.disable_checkpointing` the module runs untiled. In compiled and traced code, tiles
    are regions that the graph recomputes, and the graph adds the gradients.
    `remove_activation_checkpoint` undoes the change.

    Token-wise means that the output at a token depends only on the input at that token, and not on
    its position. The first call checks this by gradients at three tokens, outside of inference
    mode. The check cannot detect dependence on the position: a module that adds embeddings of
    positions gives wrong results without an error. It cannot detect dependence on values without
    gradients either, such as the detached maximum of all tokens, or ids of tokens.

    A module with a state, such as a counter or running statistics, updates it once for each tile. A
    tensor that the forward stores on the module, or in a container, has no gradient. Forward-mode
    derivatives and `is_grads_batched=True` raise an error. Threads that call the module wait for
    each other.

    Args:
        module: takes one tensor with tokens in dimension `dim` and returns one with as many tokens
            there, such as (batch, tokens, hidden). Its other arguments must not be tensors. It is
            changed in place and returned.
        tiles: the number of tiles, at most the number of tokens.
        budget: used instead of `tiles`, as bytes or text such as "400MiB". The module gets the
            fewest tiles such that no tile takes more in forward and backward. The input, the
            output, their gradients and the sums of weight gradients do not count. Not under
            torch.compile.
        dim: the dimension of the tokens, which is not the last one.

    Raises:
        TypeError, ValueError: an argument is wrong. In a call: the input or the output does not
            have the form above, or the module is not token-wise.
        RuntimeError: its forward was replaced on the instance, or it is tiled differently. In a
            call: it uses a tensor that requires grad and is not its parameter, or its parameters
            have no shapes yet. In a backward: it is differentiated twice.

    Example:
        >>> mlp = torch.nn.Sequential(
        ...     torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)
        ... )
        >>> mlp = storage_ops.tile(mlp, 4)
        >>> mlp(torch.randn(2, 100, 16)).sum().backward()
    """
    check_module(module, "tile: `module`")
    if (tiles is None) == (budget is None):
        raise ValueError(
            f"tile: `tiles` is {tiles!r} and `budget` is {budget!r}. Expected a value for exactly "
            "one of them."
        )
    for name, value in (("tiles", 1 if tiles is None else tiles), ("dim", dim)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"tile: `{name}` is {value!r}. Expected a whole number.")
    if tiles is not None and tiles < 1:
        raise ValueError(f"tile: `tiles` is {tiles}. Expected at least 1.")
    if dim == -1:
        raise ValueError("tile: `dim` is -1. Expected a dimension other than the last.")
    tiling = Tiling(tiles, None if budget is None else parse_bytes(budget, "tile: `budget`"), dim)
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        fail(name, "is a ScriptModule. Expected a module in Python.", TypeError)
    parts = module if isinstance(module, nn.Sequential) else [module]
    if any(isinstance(part, nn.modules.conv._ConvNd) for part in parts):
        fail(
            name,
            "is a convolution, whose channels are in dimension 1. Expected a module with features "
            "in the last dimension, such as nn.Linear for a convolution of kernel size 1.",
            TypeError,
        )
    if "forward" in vars(module):
        fail(
            name,
            "has a forward that was replaced on the instance. Expected the forward of its class.",
        )
    now = tiling_of(module)
    if now is not None and now != tiling:
        fail(
            name,
            f"is tiled already, as {now}. Pass the same options ({tiling}), or call "
            "remove_activation_checkpoint(model) first.",
        )
    if now is None:
        set_tiling(module, tiling)
    return module


def tiling_of(module: nn.Module) -> Tiling | None:
    """Return the tiling of a module, or None if it is not tiled."""
    return module._tiling if isinstance(module, Tiled) else None


def set_tiling(module: Any, tiling: Tiling) -> None:
    """Tile a module."""
    if not isinstance(module, Tiled):
        Tiled.change(module)
    module._tiling = tiling


def unset_tiling(module: nn.Module) -> None:
    """Restore the plain forward of a module, and its class unless another class is on top of it."""
    vars(module).pop("_tiling", None)
    Tiled.change_back(module)


def _input_of(
    module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tile_run.Forward]:
    """Return the input of a call, and the forward as a function of the module and of an input."""
    count = sum(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
    if count == 1 and args and isinstance(args[0], Tensor):
        x, rest = args[0], args[1:]
        return x, lambda module, t: original(module, t, *rest, **kwargs)
    named = [key for key, value in kwargs.items() if isinstance(value, Tensor)]
    if count == 1 and named:
        key, others = named[0], {k: v for k, v in kwargs.items() if k != named[0]}
        return kwargs[key], lambda module, t: original(module, *args, **others, **{key: t})
    fail(
        type(module).__name__,
        f"got {count} tensors. Expected one, as the first argument or by keyword.",
        TypeError,
    )
