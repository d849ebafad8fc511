"""Checkpointing in which the OUTPUT of a region is freed too, once its consumer has run.

An ordinary checkpoint frees what a region saves but keeps its output, because the consumer saves
it. For a wide intermediate such as the activation of an MLP that output is most of the memory.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from storage_ops.checkpoint.region import Region


class OutputDiscardCheckpoint:
    """Run a region, let a consumer use its output, free the output, recompute it in backward.

    Gradients are those of plain autograd, bit for bit where the ops are deterministic. Parameters
    used by the region get theirs as usual. Without grad mode every call is a plain call. Under
    torch.compile the region becomes a `torch.utils.checkpoint`, which frees the output as well.
    Inside an enclosing checkpoint that is recomputing, the output is kept for its consumer.

    As with every checkpoint the region runs twice: what it does besides returning tensors, such as
    the running statistics of a batch norm, happens twice, and its inputs must not be modified in
    place. Random numbers are those of the process: a region that draws them in several threads at
    once cannot be repeated.

    Args:
        preserve_rng_state: repeat the region with the random numbers of the forward (CPU and every
            device among its arguments).
        determinism_check: "default" compares number, shape, dtype and device of the tensors saved
            in forward and in the recompute, and the versions of parameters; "none" does not.
        debug: name the line that discarded in the error a later read raises.

    Example:
        >>> up, down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
        >>> x = torch.randn(4, 16, requires_grad=True)
        >>> ckpt = storage_ops.OutputDiscardCheckpoint()
        >>> h = ckpt.checkpoint(lambda x: torch.nn.functional.gelu(up(x)), x)
        >>> y = down(h)
        >>> ckpt.discard_output_and_register_recompute(y)
        >>> storage_ops.is_discarded(h)
        True
        >>> y.sum().backward()
    """

    def __init__(
        self,
        preserve_rng_state: bool = True,
        determinism_check: Literal["default", "none"] = "default",
        debug: bool = False,
    ) -> None:
        if determinism_check not in ("default", "none"):
            raise ValueError(
                f"OutputDiscardCheckpoint: determinism_check is {determinism_check!r}; "
                "expected 'default' or 'none'"
            )
        self._preserve_rng_state = preserve_rng_state
        self._check_metadata = determinism_check == "default"
        self._debug = debug
        self._region: Region | None = None
        self._called = False

    def checkpoint(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `fn(*args, **kwargs)`, saving none of its intermediates.

        Args:
            fn: any callable. It is called again in backward and must do the same work both times.
            args, kwargs: pytrees of anything; tensors inside them are tracked.
        """
        if torch.compiler.is_compiling():
            self._called = True
            return torch_checkpoint(
                fn,
                *args,
                use_reentrant=False,
                preserve_rng_state=self._preserve_rng_state,
                **kwargs,
            )
        if self._region is not None:
            warnings.warn(
                f"OutputDiscardCheckpoint: the output of {self._region.name} was not discarded and "
                "stays in memory; call discard_output_and_register_recompute() or clear() after "
                "each region",
                stacklevel=2,
            )
            self.clear()
        self._called = True
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        region = Region(
            fn,
            args,
            kwargs,
            preserve_rng_state=self._preserve_rng_state,
            check_metadata=self._check_metadata,
        )
        outputs = region.forward(args, kwargs)
        if torch._C._current_graph_task_id() == -1:
            self._region = region
        else:
            # An enclosing checkpoint recomputes: what it saves now is needed at once.
            region.forget_outputs()
        return outputs

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the region's output and restore it when the gradient of `hook_tensor` arrives.

        Args:
            hook_tensor: a tensor computed from the region's output, such as the consumer's result.
                Its gradient must be ready before any other user of the output runs its backward.

        Raises:
            RuntimeError: `checkpoint` was not called, `hook_tensor` has no gradient to wait for, or
                the output was modified in place; nothing is freed.
        """
        if not self._called:
            raise RuntimeError(
                "OutputDiscardCheckpoint: checkpoint() was not called; there is no output for "
                "discard_output_and_register_recompute() to discard"
            )
        region = self._region
        if region is None:  # no grad mode, or compiled: nothing was kept
            return
        if not isinstance(hook_tensor, Tensor) or not hook_tensor.requires_grad:
            raise RuntimeError(
                f"OutputDiscardCheckpoint: hook_tensor for the region {region.name} needs no grad; "
                "expected a tensor computed from its output, whose gradient triggers the recompute"
            )
        if region.made(hook_tensor):
            raise RuntimeError(
                f"OutputDiscardCheckpoint: hook_tensor is the output of the region {region.name}, "
                "or a view of it; expected a tensor computed from it by its consumer"
            )
        self._discard([hook_tensor])

    def _discard(self, outputs: list[Tensor]) -> None:
        """Free the region's output, but for what the consumer hands on; recompute on a gradient."""
        region = self._region
        assert region is not None
        where = ""
        if self._debug:
            frames = [f for f in traceback.extract_stack() if f.filename != __file__]
            where = f" at {frames[-1].filename}:{frames[-1].lineno}"
        region.discard(
            f"the output of the region {region.name} was discarded by OutputDiscardCheckpoint"
            f"{where} and is read before the recompute; its consumer must run before the discard, "
            "and the gradient of the hook tensor must come before every other use in backward",
            keep=outputs,
        )
        for t in outputs:
            if t.requires_grad:
                t.register_hook(region.on_gradient)
        self._region = None

    def clear(self) -> None:
        """Forget a region whose output will not be discarded; its backward still works."""
        if self._region is not None:
            self._region.forget_outputs()
        self._region = None
        self._called = False


def output_discard(
    producer: Callable[..., Any], consumer: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
    """Compose two callables so that what passes between them is freed until backward.

    Args:
        producer: called with the arguments; its output is freed once the consumer has run.
        consumer: called with the producer's output; its own output is kept.
        options: those of `OutputDiscardCheckpoint`.

    Returns:
        A function equal to `lambda *args, **kwargs: consumer(producer(*args, **kwargs))`.

    Example:
        >>> mlp = storage_ops.output_discard(
        ...     torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU()),
        ...     torch.nn.Linear(64, 16),
        ... )
        >>> mlp(torch.randn(4, 16)).sum().backward()
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        checkpoint = OutputDiscardCheckpoint(**options)
        outputs = consumer(checkpoint.checkpoint(producer, *args, **kwargs))
        if checkpoint._region is not None:
            tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            if any(t.requires_grad for t in tensors):
                checkpoint._discard(tensors)
        return outputs

    return run


class OutputDiscard(torch.nn.Module):
    """`output_discard` as a module: `consumer(producer(x))` with the middle freed until backward.

    Example:
        >>> block = storage_ops.OutputDiscard(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))
        >>> block(torch.randn(4, 16)).shape
        torch.Size([4, 16])
    """

    def __init__(
        self, producer: Callable[..., Any], consumer: Callable[..., Any], **options: Any
    ) -> None:
        super().__init__()
        self.producer = producer
        self.consumer = consumer
        self._options = options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run producer and consumer."""
        return output_discard(self.producer, self.consumer, **self._options)(*args, **kwargs)
