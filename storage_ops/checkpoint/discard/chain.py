"""Several regions in a chain, where the output of one is the input of the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import ParamSpec, TypeVar, Unpack

from storage_ops.checkpoint.discard.consumers import ConsumerHooks, verify
from storage_ops.checkpoint.discard.containers import Containers
from storage_ops.checkpoint.discard.output_discard import (
    DiscardOptions,
    OutputDiscardCheckpoint,
    run_region,
)
from storage_ops.checkpoint.region.options import is_repeatable
from storage_ops.checkpoint.region.region import Region
from storage_ops.checkpoint.saved.saved import fail
from storage_ops.foundation import regions

P = ParamSpec("P")
T = TypeVar("T")


class OutputDiscardChain:
    """Context manager for a chain of regions, which frees all their outputs.

    All code in the block is a consumer. When the block ends, the outputs that a consumer or a later
    region has saved are freed. In backward each region is recomputed when it is needed, in the
    order of the forward. It is freed again as soon as the backward of its consumers is done.

    Without grad mode the calls are plain calls. Under torch.compile and inside another checkpoint
    they are plain calls, or calls of `torch.utils.checkpoint`.

    Args:
        options: arguments of `OutputDiscardCheckpoint`, for every region.

    Example:
        >>> up, down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
        >>> x = torch.randn(4, 16, requires_grad=True)
        >>> with storage_ops.OutputDiscardChain() as chain:
        ...     h = chain.checkpoint(up, x)
        ...     a = chain.checkpoint(torch.nn.functional.gelu, h)
        ...     y = down(a)
        >>> storage_ops.is_discarded(h), storage_ops.is_discarded(a)
        (True, True)
        >>> y.sum().backward()
    """

    # Variables of the functions around the block do not count as references to outputs.
    _variables = True

    def __init__(self, **options: Unpack[DiscardOptions]) -> None:
        self._options = OutputDiscardCheckpoint(**options).options
        self._regions: list[Region] = []
        self._block: ConsumerHooks | None = None
        self._containers = Containers()
        self._open = False

    def __enter__(self) -> OutputDiscardChain:
        if self._open:
            fail(
                "an OutputDiscardChain was entered inside its own with block. Use another chain "
                "there."
            )
        self._open = True
        # If no call is a region, there are no consumers to find.
        plain = torch.compiler.is_compiling() or regions.tracing()
        if plain or not is_repeatable() or Region.is_saved_by_another():
            return self
        self._regions = []
        self._block = ConsumerHooks(self._regions, self._variables, containers=self._containers)
        self._block.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False
        block, self._block = self._block, None
        if block is None:
            return
        try:
            block.__exit__(*error)
            if error[0] is None:
                self._discard_used(block, ())
        finally:
            for region in self._regions:
                region.outputs.forget()
            self._regions = []
            self._containers.clear()

    def checkpoint(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `fn(*args, **kwargs)` without saving its intermediates.

        Args:
            fn: any callable. It is called again in backward and must do the same work both times.
            args, kwargs: pytrees of any values, such as outputs of earlier regions of the chain.

        Raises:
            RuntimeError: called outside of the chain's with block.
        """
        if not self._open:
            fail(
                "checkpoint() of an OutputDiscardChain was called outside of its with block. Call "
                "it inside."
            )
        return self.run(fn, args, kwargs)

    def run(
        self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], name: str = ""
    ) -> T:
        """Run a region as `checkpoint` does, with a name for errors."""
        outputs, region = run_region(fn, args, kwargs, self._options, name)
        if region is not None:
            self._regions.append(region)
            if self._variables:  # otherwise every name of an output counts as a reference
                self._containers.add(outputs)
        return outputs

    def discard_output_and_register_recompute(self, *hook_tensors: Tensor) -> None:
        """Free the outputs that were used so far, before the block ends.

        Args:
            hook_tensors: tensors that receive their gradients first. Optional.
        """
        if self._block is not None:
            self._block.mark_referenced_outputs()
            self._discard_used(self._block, hook_tensors)

    def _discard_used(self, block: ConsumerHooks, hook_tensors: tuple[Tensor, ...]) -> None:
        for region in self._regions:
            verify(region, [block])
        for region in self._regions:
            unused = [
                entry.handle
                for entry in region.outputs.discardable
                if not region.outputs.uses.get(entry.key)
            ]
            region.discard(keep=(*unused, *hook_tensors))
            for t in hook_tensors:
                if t.requires_grad:
                    t.register_hook(region.trigger())
