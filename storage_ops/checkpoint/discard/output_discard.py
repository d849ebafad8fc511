"""Checkpointing that also frees the output of a region, after its consumer has run.

An ordinary checkpoint frees the tensors that a region saves but keeps its output, because the
consumer saves it. For a wide intermediate such as the activation of an MLP, the output is most of
the memory.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor
from typing_extensions import ParamSpec, TypedDict, TypeVar, Unpack

from storage_ops.checkpoint.discard.consumers import ConsumerHooks, verify
from storage_ops.checkpoint.discard.containers import Containers
from storage_ops.checkpoint.region.inputs import leaves_of
from storage_ops.checkpoint.region.lowering import compiled_region, traced_region
from storage_ops.checkpoint.region.options import (
    CHECKS,
    ContextFn,
    DeterminismCheck,
    Options,
    is_repeatable,
)
from storage_ops.checkpoint.region.plain_region import plain_region, resume
from storage_ops.checkpoint.region.region import Region
from storage_ops.checkpoint.saved.saved import fail
from storage_ops.checkpoint.state.execution import is_disabled
from storage_ops.foundation import regions
from storage_ops.foundation.eager import eager

# Arguments and result of a function. An overload without brackets has the default types.
P = ParamSpec("P", default=...)
T = TypeVar("T", default=Any)
M = TypeVar("M")


class DiscardOptions(TypedDict, total=False):
    """Arguments of `OutputDiscardCheckpoint`; tests/test_types.py compares the names."""

    preserve_rng_state: bool
    determinism_check: DeterminismCheck
    debug: bool
    context_fn: ContextFn | None
    retain_input_tensors: bool
    fp8: Any
    ckpt_manager: Any


class OutputDiscardCheckpoint:
    """Run a region, let a consumer use its output, free the output, recompute it in backward.

    Gradients equal those of plain autograd, bit for bit if the ops are deterministic. Parameters of
    the region get their gradients as usual. Without grad mode every call is a plain call. Under
    torch.compile the region becomes a `torch.utils.checkpoint`, which frees the output, too. Inside
    another checkpoint, which saves nothing of the region anyway, and under torch.func every call is
    a plain call, too.

    The region runs again in backward, but its effects happen once. The recompute sees the state
    that the forward saw, and restores the current state. This holds for buffers of the modules that
    the region reaches (running statistics, a recurrent state, counters) and parameters that its
    code writes. It holds for other tensors without a gradient, up to 64 MiB in a region. It also
    holds for arguments: lists, dictionaries and sets, and objects such as a cache of keys and
    values. If the caller has replaced attributes, items or parameters since, by an assignment or
    `torch.func.functional_call`, the recompute uses those of the forward. Other effects of Python
    code, on numbers that the forward counts, files or other processes, happen twice. Inputs must
    not be modified in place. Random numbers are those of the process: a region that draws them in
    several threads at once cannot be repeated. After a backward with retain_graph=True the output
    stays in memory.

    An output tensor is not freed if it has references other than the caller's variables. Examples
    are a parameter, a buffer or an attribute that the region returns, and a tensor from outside
    that it writes to. Others are an object that a consumer returns, and an attribute of a custom
    Function's context.

    Args:
        preserve_rng_state: repeat the region with the random numbers of the forward, from the CPU,
            every device, generators that the region gets or reaches, and `register_rng_tracker`.
            Python's and numpy's generators must be registered by that function.
        determinism_check: "default" compares number, shape, strides, dtype and device of the
            tensors saved in forward and in the recompute. It also checks that nothing has modified
            a parameter, or a captured tensor that requires grad, in place since the forward.
            "checksum" also compares the bytes of all these tensors and of the outputs, and the
            error names the first difference. "none" does not compare saved tensors.
        debug: if `storage_ops.info()["guard"]` is False, find reads of a discarded output in
            Python.
        context_fn: as in `torch.utils.checkpoint`: returns two context managers, for the forward
            and for the recompute, such as those of `create_selective_checkpoint_contexts`.
        retain_input_tensors: an argument of Megatron-LM's class, without effect. Outputs that share
            memory with an input are always kept.
        fp8, ckpt_manager: arguments of Megatron-LM's class without a meaning here. Only their
            defaults are accepted.

    Attributes:
        outputs: the tensors of the last call, as far as other code references them. None before a
            call and after the discard.

    Raises:
        ValueError: an unknown `determinism_check`. TypeError: `fp8` or `ckpt_manager` is not its
            default.

    Example:
        >>> up, down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
        >>> x = torch.randn(4, 16, requires_grad=True)
        >>> ckpt = storage_ops.OutputDiscardCheckpoint()
        >>> h = ckpt.checkpoint(lambda x: torch.nn.functional.gelu(up(x)), x)
        >>> with ckpt.consumer():
        ...     y = down(h)
        >>> ckpt.discard_output_and_register_recompute()
        >>> storage_ops.is_discarded(h)
        True
        >>> y.sum().backward()
    """

    def __init__(
        self,
        preserve_rng_state: bool = True,
        determinism_check: DeterminismCheck = "default",
        debug: bool = False,
        context_fn: ContextFn | None = None,
        *,
        retain_input_tensors: bool = True,
        fp8: object = None,
        ckpt_manager: object = None,
    ) -> None:
        if fp8:
            raise TypeError(
                f"OutputDiscardCheckpoint: `fp8` is {fp8!r}. Expected None. Pass a context_fn "
                "whose second context is the recompute phase of TransformerEngine."
            )
        if ckpt_manager is not None:
            raise TypeError(
                f"OutputDiscardCheckpoint: `ckpt_manager` is {ckpt_manager!r}. Expected None. Use "
                "an OutputDiscardChain for regions that feed one another."
            )
        flags = ("preserve_rng_state", preserve_rng_state), ("debug", debug)
        for name, flag in flags:
            if not isinstance(flag, bool):
                raise TypeError(
                    f"OutputDiscardCheckpoint: `{name}` is {flag!r}. Expected True or False."
                )
        if context_fn is not None:
            _check_callable("context_fn", context_fn)
        if not isinstance(determinism_check, str) or determinism_check not in CHECKS:
            raise ValueError(
                f"OutputDiscardCheckpoint: `determinism_check` is {determinism_check!r}. Expected "
                f"one of {CHECKS}."
            )
        self.options = Options(preserve_rng_state, determinism_check, debug, context_fn)
        self._region: Region | None = None
        self._blocks: list[ConsumerHooks] = []
        self._containers = Containers()
        self._outputs: list[weakref.ref[Tensor]] | None = None
        self._called = False

    @property
    def outputs(self) -> tuple[Tensor, ...] | None:
        """Return the tensors of the last call, until they are discarded."""
        if self._outputs is None:
            return None
        return tuple(t for ref in self._outputs if (t := ref()) is not None)

    def checkpoint(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `fn(*args, **kwargs)` without saving its intermediates.

        Args:
            fn: any callable. It is called again in backward and must do the same work both times.
            args, kwargs: pytrees of any values; tensors inside them are tracked.
        """
        if self._region is not None:
            warnings.warn(
                f"OutputDiscardCheckpoint: the output of {self._region.name} was not discarded and "
                "stays in memory. Call discard_output_and_register_recompute() or clear() after "
                "each region.",
                stacklevel=2,
            )
        self.clear()
        outputs, self._region = run_region(fn, args, kwargs, self.options)
        self._called = True
        if self._region is not None:
            self._containers.add(outputs)
        if not torch.compiler.is_compiling():
            self._outputs = [weakref.ref(t) for t in leaves_of(outputs) if isinstance(t, Tensor)]
        return outputs

    def consumer(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for consumers. It finds every saved tensor of the output.

        Several blocks are allowed. Saved-tensor hooks around the block, such as offloading, get all
        other tensors. Hooks that are set inside the block are detected, too.
        """
        region = self._region
        if torch.compiler.is_compiling() or region is None:
            return contextlib.nullcontext()
        block = ConsumerHooks([region], containers=self._containers)
        self._blocks.append(block)
        return block

    def discard_output_and_register_recompute(self, *hook_tensors: Tensor) -> None:
        """Free the region's output until the backward needs it.

        Args:
            hook_tensors: tensors computed from the region's output, such as the consumer's result.
                The first of them to receive a gradient restores the output. That must happen before
                any other user of the output runs its backward. Not needed if all consumers ran
                inside `consumer()`: then reading their saved tensors restores the output.

        Raises:
            RuntimeError: `checkpoint` was not called, or the output was modified in place. Or a
                hook tensor has no gradient to wait for, although the output needs one. Or a
                consumer outside of `consumer()` has saved the output. Nothing is freed then.
        """
        if not self._called:
            fail(
                "checkpoint() was not called, so discard_output_and_register_recompute() has no "
                "output to discard. Call checkpoint() first."
            )
        region = self._region
        # No grad mode, compiled, or inside another checkpoint: no intermediate is saved.
        if region is None:
            self._outputs = None
            return
        if not hook_tensors and not self._blocks:
            fail(
                f"no `hook_tensor` was given for the region {region.name}, and no consumer ran in "
                "`with consumer():`. One of them is needed to restore the output in backward."
            )
        for t in hook_tensors:
            if not isinstance(t, Tensor) or not (t.requires_grad or region.is_frozen):
                fail(
                    f"`hook_tensor` for the region {region.name} needs no grad. Expected a tensor "
                    "computed from its output, whose gradient triggers the recompute."
                )
            if region.outputs.include(t):
                fail(
                    f"`hook_tensor` is the output of the region {region.name}, or a view of it. "
                    "Expected a tensor that its consumer computes from it."
                )
        self._discard(hook_tensors)
        for t in hook_tensors:
            if t.requires_grad:
                t.register_hook(region.trigger())

    def _discard(self, keep: Iterable[Any]) -> None:
        """Free the region's output, except for storages in `keep`."""
        if self._region is not None:
            if self._blocks:
                verify(self._region, self._blocks)
            self._region.discard(keep)
        self._region, self._blocks, self._outputs = None, [], None
        self._containers.clear()

    def clear(self) -> None:
        """Forget a region whose output will not be discarded. Its backward still works."""
        if self._region is not None:
            self._region.outputs.forget()
        self._region, self._blocks, self._outputs = None, [], None
        self._containers.clear()
        self._called = False


def _is_region() -> bool:
    """Return True if an eager call can be a region whose output is discarded."""
    return is_repeatable() and not regions.tracing() and not Region.is_saved_by_another()


def _check_callable(name: str, function: object) -> None:
    """Raise a TypeError for an argument that cannot be called."""
    if not callable(function):
        raise TypeError(f"`{name}` is {function!r}. Expected a function or a module.")


def run_region(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    name: str = "",
) -> tuple[T, Region | None]:
    """Return the result of `fn`, and the region that can repeat it.

    The region is None if no output can be discarded.
    """
    return _run_region(fn, args, kwargs, options, name, torch.compiler.is_compiling())


@eager
def _run_region(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    name: str,
    in_compiled: bool,
) -> tuple[T, Region | None]:
    """Return the same as `run_region`. `in_compiled`: whether the code around it is compiled."""
    if torch.compiler.is_compiling():
        rng = options.preserve_rng_state
        return compiled_region(fn, args, kwargs, rng, options.context_fn), None
    if regions.tracing() and not is_disabled():
        return traced_region(fn, args, kwargs, options.context_fn, discards=True), None
    _check_callable("fn", fn)
    if not _is_region():
        return fn(*args, **kwargs), None
    region = Region(fn, args, kwargs, options, name)
    outputs = region.forward(args, kwargs)
    if in_compiled:  # The graph broke inside of `fn`. The compiled code around it discards nothing.
        region.outputs.forget()
        return outputs, None
    return outputs, region


def output_discard(
    producer: Callable[P, M],
    consumer: Callable[[M], T],
    **options: Unpack[DiscardOptions],
) -> Callable[P, T]:
    """Compose two callables so that the producer's output is freed until backward.

    Args:
        producer: called with the arguments; its output is freed once the consumer has run.
        consumer: called with the producer's output; its own output is kept.
        options: arguments of `OutputDiscardCheckpoint`.

    Returns:
        A function equal to `lambda *args, **kwargs: consumer(producer(*args, **kwargs))`.

    Example:
        >>> mlp = storage_ops.output_discard(
        ...     torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU()),
        ...     torch.nn.Linear(64, 16),
        ... )
        >>> mlp(torch.randn(4, 16)).sum().backward()
    """
    _check_callable("producer", producer)
    _check_callable("consumer", consumer)
    region_options = OutputDiscardCheckpoint(**options).options

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        plain = None
        if not torch.compiler.is_compiling() and _is_region():
            plain = plain_region(producer, args, kwargs, region_options)
        if plain is None:
            hidden, region = run_region(producer, args, kwargs, region_options)
        else:
            outputs, unusual = plain.forward_and_discard(args, kwargs, consumer)
            if unusual is None:
                return outputs  # type: ignore[no-any-return]
            hidden, region = resume(plain, args, kwargs, unusual)
        if region is None:
            return consumer(hidden)
        with ConsumerHooks([region], named=False):
            outputs = consumer(hidden)
            del hidden  # an output with a name is referenced, and so would be kept
        region.discard()
        return outputs

    return run


class OutputDiscard(torch.nn.Module, Generic[P, T]):
    """`output_discard` as a module: `consumer(producer(x))` frees the producer's output.

    Example:
        >>> block = storage_ops.OutputDiscard(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))
        >>> block(torch.randn(4, 16)).shape
        torch.Size([4, 16])
    """

    def __init__(
        self,
        producer: Callable[P, M],
        consumer: Callable[[M], T],
        **options: Unpack[DiscardOptions],
    ) -> None:
        super().__init__()
        output_discard(producer, consumer, **options)  # a wrong argument raises an error here
        self.producer = producer
        self.consumer = consumer
        self._options = options

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run producer and consumer."""
        return output_discard(self.producer, self.consumer, **self._options)(*args, **kwargs)

    if TYPE_CHECKING:  # torch.nn.Module's own `__call__` returns Any

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
            """Call `forward` and its hooks."""
