"""Estimates the memory of a call on a GPU without one: peak, timeline and owners at the peak."""

from __future__ import annotations

import contextlib
import gc
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.autograd import functional
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from storage_ops._callers import warn_caller
from storage_ops.checkpoint.layers.tile import register_estimator
from storage_ops.checkpoint.state.left_behind import Namespaces, remove_left_behind
from storage_ops.checkpoint.state.unchanged import unchanged
from storage_ops.foundation.ledger import Block, Ledger
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.loss.planning.devices import standing_for
from storage_ops.measure.calls import ONE_AT_A_TIME, Around, around_calls
from storage_ops.measure.measurement import Measurement
from storage_ops.measure.owners import BATCH, BUCKETS
from storage_ops.progress import say, showing
from storage_ops.quantities import MIB, InLines
from storage_ops.simulate.captured import Captured, on_one_device, simulated_optimizers
from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.patches.autocast import autocast_of_gpu
from storage_ops.simulate.patches.functions import (
    Functions,
    autocast_off_on_meta,
    distributions_unchecked,
)
from storage_ops.simulate.patches.gpu import following_resizes, gpu_kernels
from storage_ops.simulate.patches.hf import branches_of_a_run
from storage_ops.simulate.ranks.collectives import propagation_unseen
from storage_ops.simulate.ranks.ddp import ddp_simulated, reducers_renewed
from storage_ops.simulate.ranks.fsdp import fsdp_simulated
from storage_ops.simulate.rates import SimulatedDevice
from storage_ops.simulate.roles import Roles
from storage_ops.simulate.values.assume import Assumption, name_of, users_line
from storage_ops.storage.storage import share_storage


@dataclass
class Estimate(InLines, Measurement):
    """The memory of a call on an empty GPU. Inputs are part of every number.

    Printing it lists the blocks in memory at the peak.

    Attributes:
        peak_bytes: the highest level.
        kept_bytes: the level after the call, while its result still exists.
        timeline: the level after every allocation and release. The seconds are those of the
            simulation, not of a GPU.
        input_bytes: bytes of the arguments and of other tensors that existed before the call, such
            as parameters, gradients and the state of an optimizer.
        at_peak: the blocks in memory at the peak, largest first.
        by_owner: bytes at the peak by their owner, largest first: "parameters", "buffers",
            "gradients", "optimizer state", "inputs" and "temporaries". Memory that a module's call
            allocates, and that is not freed before the call returns, is "activations of " this
            module. Of nested calls, the innermost counts.
        sent_bytes: bytes that one rank of several sends to the others, by the name of the
            collective, as ring algorithms send them. For n bytes in all on R ranks that is
            2 n (R - 1) / R for an all_reduce and n (R - 1) / R for the others.
    """

    input_bytes: int = 0
    at_peak: list[Block] = field(default_factory=list, repr=False)
    by_owner: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"peak {self.peak_bytes / MIB:.1f} MiB, kept {self.kept_bytes / MIB:.1f} MiB, "
            f"inputs {self.input_bytes / MIB:.1f} MiB; in memory at the peak:"
        ]
        alike = Counter((b.nbytes, b.shape, b.dtype, b.made_by) for b in self.at_peak)
        order = sorted(alike.items(), key=lambda item: -item[0][0] * item[1])
        for (nbytes, shape, dtype, made_by), count in order[:12]:
            size = f"{nbytes * count / MIB:10.1f} MiB  {count:4d} x"
            lines.append(f"{size} {tuple(shape)} {str(dtype).removeprefix('torch.')}, {made_by}")
        return "\n".join(lines)


def estimate(
    fn: Callable[..., Any],
    *args: object,
    assume: float | Mapping[str, float] | None = None,
    **kwargs: object,
) -> Estimate:
    """Return the memory that `fn(*args, **kwargs)` would take on a GPU, without GPU and memory.

    The call runs once on fake tensors, which have shapes but no bytes. The live storages after
    every op count, rounded as by the CUDA caching allocator. Where GPU kernels and CPU kernels
    differ in memory, as for fused RMSNorm, attention and dropout, the GPU's counts. Large temporary
    memory of kernels counts, too: partial sums of the gradients of attention, biases and
    embeddings, copies for convolutions of cuDNN, the temporary of the softmax backward.

    `flex_attention` counts as the kernel that torch.compile creates for it. That kernel keeps its
    inputs, its output and a number per query and head, but no scores and no mask. All other code
    runs as if uncompiled. `discard_storage`, `share_storage` and `OutputDiscardCheckpoint` behave
    as in a real run. For a model on several ranks (`fully_shard`, DDP, `parallelize_module`,
    DTensors) the memory of this rank counts, with results of collectives and parameters that FSDP
    gathers. No collective runs. Workspaces of cuBLAS and of other kernels, such as a sort's, the
    CUDA context, and fragmentation do not count.

    Some sizes depend on values. Values of integers, booleans and single floating-point numbers are
    known (up to 256 MiB each) if they come from real tensors, constants and other known values.
    Random integers count as known, with an arbitrary value. Without an assumption, other
    floating-point tensors of up to 16 MiB, such as masks, are known, too, except for parameters.
    Numbers are assumed to be finite: a GradScaler skips no step. All other values, such as the
    choices of a router, need an assumption. Checks of `torch.distributions` are skipped.

    Args:
        fn: a function or module: a block, or a whole step with backward and optimizer.
        args, kwargs: the arguments of `fn`. Tensors, here and in any place that `fn` reaches, are
            real, fake or on the meta device, and do not change. Gradients, `requires_grad`,
            modules, arguments and objects that `fn` names are restored afterwards. So are
            optimizers, schedulers and random number generators. Tensors among the arguments are
            moved to the meta device if parameters are there. To pass `fn` a keyword `assume`, use
            `functools.partial`.
        assume: the assumption about unknown values, as a share (a float from 0.0 to 1.0) or a count
            (an int). For a condition (`x > 0`), it is the share of its elements that are True. For
            a choice (`topk`, `argmax`, `sort`, `multinomial`, ...), it is the share of all choices
            that the most frequent option gets, at least 1 / the number of options. The other
            options get equal parts of the rest.
            For an op whose size depends on unknown values (`nonzero`, `unique`, `coalesce`), it is
            the share of the largest possible size. A mapping has an assumption for each op by name,
            as in `{"topk": 0.2, "gt": 0.5}`. "item" is the number that `item()` and similar
            functions return, as in `{"item": 1.0}`.

    Raises:
        RuntimeError: a way of training on several ranks is not simulated: FSDP1, a communication
            hook or mixed_precision of DDP, CPUOffloadPolicy. The error names it. Or `fn` needs
            unknown values without an assumption. The error names the op, its line and the argument
            to pass. Or `fn` asks for a device that this machine does not have.
        TypeError: a tensor has a layout other than strided and COO, or `assume` is not numbers.
        ValueError: `assume` is out of range or names no op.

    Example:
        >>> mlp = torch.nn.Sequential(
        ...     torch.nn.Linear(4096, 16384, device="meta"),
        ...     torch.nn.GELU(),
        ...     torch.nn.Linear(16384, 4096, device="meta"),
        ... )
        >>> x = torch.empty(8192, 4096, device="meta")
        >>> e = storage_ops.memory.estimate(lambda x: mlp(x).sum().backward(), x)
        >>> e.peak_bytes >> 20, e.input_bytes >> 20
        (2560, 640)

        A quarter of the tokens passes:

        >>> kept = lambda x: x[x[:, 0] > 0]
        >>> e = storage_ops.memory.estimate(kept, x, assume=0.25)
        >>> (e.kept_bytes - e.input_bytes) >> 20
        32
    """
    ledger = Ledger()
    captured = Captured(fn, args, kwargs)
    simulated = simulating(ledger, captured, args, kwargs, Assumption(assume))
    with contextlib.ExitStack() as stack:
        stack.enter_context(showing("estimate"))
        for root in captured.roots:
            stack.enter_context(around_calls(root, _noting(ledger)))
        simulation, args, kwargs = stack.enter_context(simulated)
        roles = Roles(simulation)
        roles.note_modules(captured.roots)
        roles.note_optimizers(captured.optimizers)
        result = call_simulated(fn, args, kwargs)
        for root in captured.roots:
            roles.note_gradients(root.parameters())
        roles.note_optimizers(captured.optimizers)
        estimated = Estimate(
            input_bytes=sum(block.nbytes for block in ledger.inputs),
            subject=getattr(fn, "__name__", type(fn).__name__),
            device="a GPU",
            **roles.totals(),
        )
        del result
    return estimated


register_estimator(estimate)


def _noting(ledger: Ledger) -> Around:
    """Return a function for `around_calls` that records calls in the ledger and shows them."""

    def around(
        module: nn.Module, name: str, call: Callable[..., Any], args: Args, kwargs: Kwargs
    ) -> Any:
        say(name or type(module).__name__)
        with ledger.call(name):
            return call(*args, **kwargs)

    return around


@contextlib.contextmanager
def simulating(
    ledger: Ledger, captured: Captured, args: Args, kwargs: Kwargs, assumption: Assumption,
    device: SimulatedDevice | None = None,
) -> Iterator[tuple[Simulation, Any, Any]]:  # fmt: skip
    """Simulate ops on fake tensors in a with block. Yield the mode and the arguments of the call.

    Losses plan for the device, unless the tensors are on a GPU. Without a device, ops run as on a
    GPU, and losses plan for the device of the tensors.
    """
    on_gpu = device is None or device.is_gpu
    simulation = Simulation(ledger, share_copies(), assumption, on_gpu)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ONE_AT_A_TIME)
        # Autocast keeps casts of parameters until its outermost block ends.
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(_no_collection())
        stack.enter_context(_nothing_left(simulation, captured))
        stack.enter_context(reducers_renewed(captured.modules))
        stack.enter_context(unchanged(*captured.holders))
        # Compiled code is simulated op by op. With fullgraph=True, torch refuses that under a mode
        # unless this setting allows it.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(simulated_optimizers(captured, simulation, on_gpu))
        stack.callback(simulation.twins.restore_leaves)
        stack.enter_context(following_resizes())
        stack.enter_context(branches_of_a_run(simulation.values))
        stack.enter_context(distributions_unchecked())
        on_meta = any(t.is_meta for t in captured.tensors)
        if on_gpu or on_meta:  # for the meta device, torch would decompose fused kernels
            stack.enter_context(gpu_kernels())
        stack.enter_context(fsdp_simulated(captured.modules, simulation))
        stack.enter_context(propagation_unseen(simulation))
        elsewhere = on_gpu and not any(t.is_cuda for t in captured.tensors)
        if elsewhere and not on_meta:
            stack.enter_context(autocast_of_gpu())
        stack.enter_context(
            standing_for(device.rates if elsewhere and device is not None else None)
        )
        stack.enter_context(simulation)
        if on_meta:
            stack.enter_context(autocast_off_on_meta())
        stack.enter_context(Functions(simulation, on_meta))
        args, kwargs = on_one_device(simulation, captured, args, kwargs)
        for t in captured.tensors:
            simulation.twins.of(t)
        stack.enter_context(ddp_simulated(captured.modules, simulation))
        yield simulation, args, kwargs


@contextlib.contextmanager
def simulating_model(
    model: nn.Module, captured: Captured, args: Args, kwargs: Kwargs, device: SimulatedDevice,
    assumption: Assumption, title: str, around: Around | None = None,
) -> Iterator[tuple[Simulation, Roles, Any, Any]]:  # fmt: skip
    """Simulate calls of a model in a with block.

    Yield the mode, the roles of what exists before, and the arguments of the call.

    Args:
        model, captured: the model, and what exists before the call.
        args, kwargs: the arguments of the call, which are the batch.
        device, assumption: as for `simulating`.
        title: the title of the progress.
        around: runs the calls of modules, as for `around_calls`. None: calls are recorded.
    """
    ledger = device.ledger()
    calls = around_calls(model, around or _noting(ledger))
    simulated = simulating(ledger, captured, args, kwargs, assumption, device)
    with ONE_AT_A_TIME, showing(title), calls, simulated as (simulation, *moved):
        roles = Roles(simulation)
        # Includes modules such as a frozen reference that the loss names.
        roles.note_modules((model, *captured.roots))
        roles.note(BATCH, tree_leaves(moved))
        roles.note(BUCKETS, simulation.buckets)
        args, kwargs = moved
        del moved
        yield simulation, roles, args, kwargs


@contextlib.contextmanager
def _nothing_left(simulation: Simulation, captured: Captured) -> Iterator[None]:
    """Raise an error if a simulation leaves fake tensors outside of its modules.

    Training that read such a tensor would fail later, far from the cause.
    """
    names = Namespaces(captured.modules, captured.functions)
    try:
        yield
    finally:
        simulation.forget()
        leftovers = remove_left_behind(names, simulation.has_made, lambda: bool(simulation.alive()))
    if leftovers:
        first, place = leftovers[0]
        warn_caller(
            f"estimate: the simulated code left {len(leftovers)} simulated tensors behind, one of "
            f"shape {tuple(first.shape)} in {place}. Reading them after the simulation fails. "
            "Store tensors only in modules, arguments, variables that the code names, and caches, "
            "which are restored."
        )


# Texts of torch's errors in simulations, and their meaning.
_RAW_ERRORS = {
    "data is not allocated yet": "reads the bytes of a tensor",
    "data pointer of Tensor": "reads the bytes of a tensor",
    ".numpy() is not supported": "reads the bytes of a tensor",
    "Attempted to set the storage of": "runs a recurrent layer of cuDNN, or sets a storage,",
    "FakeTensor.__format__": "prints the value of a tensor",
    "no rule registered for HigherOrderOperator": "calls a higher-order operator of torch",
}


def call_simulated(fn: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Call fn. Translate torch's errors into errors of this module."""
    try:
        with warnings.catch_warnings():
            # torch only warns that autocast and scalers do nothing without a GPU.
            warnings.filterwarnings("error", ".*CUDA is not available.*", UserWarning)
            return fn(*args, **kwargs)
    except UnsupportedOperatorException as error:
        raise RuntimeError(
            f"estimate: the simulated code calls {name_of(error.func)} at "
            f"{users_line(error.__traceback__)}, which has no implementation for fake tensors. "
            "Leave that part out."
        ) from error
    except (RuntimeError, TypeError) as error:
        does = next((does for text, does in _RAW_ERRORS.items() if text in str(error)), None)
        if does is None and _is_in_jacfwd(error) and "same device" in str(error):
            raise RuntimeError(
                "estimate: the simulated code differentiates in forward mode at "
                f"{users_line(error.__traceback__)} with torch.autograd.functional, where torch "
                "mixes devices of fake tensors. Use torch.func.hessian or torch.func.jacfwd, or "
                "strategy='reverse-mode'."
            ) from error
        if does is None:
            raise
        raise RuntimeError(
            f"estimate: the simulated code {does} at {users_line(error.__traceback__)}, which a "
            "simulation does not have. Leave that part out."
        ) from error
    except UserWarning as error:
        if "CUDA is not available" not in str(error):
            raise
        feature, expected = "torch.autocast for CUDA", "torch.autocast(x.device.type)"
        if "GradScaler" in str(error):
            feature, expected = "a GradScaler for CUDA", "torch.amp.GradScaler(x.device.type)"
        raise RuntimeError(
            f"estimate: the simulated code uses {feature}, which torch turns off on this machine. "
            f"Use {expected}."
        ) from error


def _is_in_jacfwd(error: BaseException) -> bool:
    """Return True if `torch.autograd.functional` raised an error in forward mode."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code is functional._jacfwd.__code__ for frame in frames)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turn the garbage collector off, so that cycles are not freed at arbitrary moments.

    New objects are collected first, such as those of earlier simulations. A collection of all
    objects in the process would take a tenth of a second each time.
    """
    was_enabled = gc.isenabled()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def share_copies() -> bool:
    """Return True if share_storage copies here because a native library is missing."""
    with no_dispatch():  # the caller may be in a fake mode
        dst, src = torch.empty(1), torch.empty(1)
        share_storage(dst, src)
        return dst.data_ptr() != src.data_ptr()
