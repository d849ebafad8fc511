"""A run on fake tensors: the ledger of its memory, and the time of its ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from storage_ops._op_arguments import tensors_in
from storage_ops.checkpoint.saved.guard import by_storage
from storage_ops.checkpoint.selective.selective import is_ignored
from storage_ops.fitting.roofline import Roofline
from storage_ops.foundation.op_names import Overload, is_allocation, is_mutating, is_view
from storage_ops.foundation.ops import Args, Kwargs, facts_of
from storage_ops.loss.call import Call
from storage_ops.loss.planning import planner
from storage_ops.loss.planning.devices import DEVICES, Rates, named
from storage_ops.loss.planning.plan import problem_of
from storage_ops.loss.planning.problem import GRADS
from storage_ops.simulate.captured import Captured
from storage_ops.simulate.estimate import call_simulated, simulating
from storage_ops.simulate.mode import Simulation
from storage_ops.simulate.rates import SimulatedDevice
from storage_ops.simulate.values.assume import Assumption

Tensors = Mapping[int, Tensor]  # by storage


class StepLedger:
    """The ledger of a simulated step, and the with block in which the simulation runs."""

    def __init__(self, device: SimulatedDevice, assumption: Assumption) -> None:
        self.ledger = device.ledger()
        self._device, self._assumption = device, assumption

    def mark(self) -> int:
        """Return the current moment, as a number of events."""
        return self.ledger.mark()

    def levels(self) -> list[int]:
        """Return the bytes in memory at each moment, from the start."""
        return self.ledger.levels()

    @contextlib.contextmanager
    def open(
        self, holders: object, args: Args, kwargs: Kwargs
    ) -> Iterator[tuple[Simulation, Any, Any]]:
        """Simulate inside a with block, as `simulating` does."""
        captured = Captured(None, (holders, args), kwargs)
        with simulating(
            self.ledger, captured, args, kwargs, self._assumption, self._device
        ) as simulated:
            yield simulated

    def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """Call a function in a simulation, and translate its errors."""
        return call_simulated(fn, args, {})


def computes(op: Overload, inputs: Tensors, outputs: Tensors) -> bool:
    """Return True if a call of an op takes time on the device. Tensors are by storage."""
    if is_view(op) or is_allocation(op):
        return False
    return bool(outputs) and (is_mutating(op) or not outputs.keys() <= inputs.keys())


def traffic_of(inputs: Tensors, outputs: Tensors) -> int:
    """Return the bytes that a call of an op reads and writes. Tensors are by storage."""
    return sum(_nbytes(t) for t in (*inputs.values(), *outputs.values()))


# Where no mode is active, torch adds the mask of attention and the bias of a linear layer to the
# product in place, if it does not fuse them. So the product cannot be saved, and there are fewer
# calls of this op.
_ADD = "aten::add.Tensor"
_ADDITIONS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, None)


class _Running(TorchFunctionMode):
    """Notes which function of torch runs."""

    function: object = None

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        before, self.function = self.function, func
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.function = before


class OpTimes(TorchDispatchMode):
    """Adds up the time of ops on a device.

    Attributes:
        seconds: seconds of all ops so far.
        count: number of ops so far, including views.
        ops: the ops that ran in a with block of `logging`.
        logits: bytes of the largest logits so far that a linear cross-entropy replaces.
    """

    supports_higher_order_operators = True

    def __init__(self, rates: Rates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.roofline = Roofline(rates)
        self._rates = rates
        self.seconds = 0.0
        self.count = 0
        self.logits = 0
        self.ops: list[Op] = []
        self._logs = False
        self._running = _Running()
        self._numbers: dict[str, int] = {}
        self._producers: dict[int, Op] = {}  # by storage

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that already compiled code runs as it is."""
        return True

    def __torch_dispatch__(
        self, op: Overload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = by_storage(tensors_in((args, kwargs)))
        out = op(*args, **kwargs)
        if is_ignored(op, args):
            return out
        self.count += 1
        outputs = by_storage(tensors_in(out))
        new_tensors = {key: t for key, t in outputs.items() if key not in inputs}
        for key in new_tensors:  # perhaps that of a storage which is gone
            self._producers.pop(key, None)
        sizes = [_nbytes(t) for t in new_tensors.values()]
        seconds = 0.0
        if computes(op, inputs, outputs):
            traffic = traffic_of(inputs, outputs)
            if op is torch.ops.storage_ops.linear_cross_entropy.default:
                call = Call(*args, **kwargs)
                vocab, hidden = call.weight.shape
                flops = 2 * call.input.numel() * vocab
                seconds = loss_seconds(call, self._rates)
                seconds *= self.roofline.relative_time(flops, call.input.dtype)
                self.logits = max(self.logits, _nbytes(call.input) // hidden * vocab)
            else:
                first = next(iter(outputs.values()))
                seconds = self.roofline.seconds(op, args, kwargs, out, first, traffic, sizes)
            self.seconds += seconds
        if self._logs:
            self._log(op, inputs, outputs, new_tensors, seconds)
        return out

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Log ops in a with block."""
        self._logs = True
        try:
            with self._running:
                yield
        finally:
            self._logs = False

    def _log(
        self, op: Overload, inputs: Tensors, outputs: Tensors, new_tensors: Tensors, seconds: float
    ) -> None:
        name = facts_of(op).family
        number = self._numbers.get(name, 0)
        self._numbers[name] = number + 1
        written = inputs.keys() & outputs.keys() if is_mutating(op) else set()
        if name == _ADD and self._running.function not in _ADDITIONS:
            written = set(inputs)
        for key in written & self._producers.keys():
            self._producers[key].saveable = False
        # The library saves no results of ops without tensors among their arguments.
        saveable = bool(new_tensors and inputs) and name != _ADD
        saveable = saveable and not (is_mutating(op) or is_view(op) or is_allocation(op))
        saveable = saveable and self.roofline.is_worth_saving(seconds)
        nbytes = sum(_nbytes(t) for t in new_tensors.values())
        self.ops.append(Op((name, number), nbytes, seconds, saveable))
        self._producers |= dict.fromkeys(new_tensors, self.ops[-1])


def loss_seconds(call: Call, rates: Rates) -> float:
    """Return the seconds of a linear cross-entropy, forward and backward, by its own planner."""
    device = next((name for name in DEVICES if named(name).name == rates.name), "cpu")
    grads = [name for name, needs in zip(GRADS, call.grad_mask, strict=True) if needs]
    vocab, hidden = call.weight.shape
    p = problem_of(
        call.input.numel() // hidden, hidden, vocab, call.input.dtype, grads, call.reduction,
        call.accumulate_dtype, call.logits_dtype, call.max_valid, device, call.gradient_tolerance,
    )  # fmt: skip
    return planner.choose(p, call.memory_budget, rates).seconds


class Op:
    """A call of an op in the forward of a layer.

    Attributes:
        call: its name and its number among the calls of that name, as `policies.save_calls` counts.
        nbytes: bytes of its results.
        seconds: its time.
        saveable: whether a selective checkpoint can save the result in less time.
    """

    def __init__(self, call: tuple[str, int], nbytes: int, seconds: float, saveable: bool) -> None:
        self.call, self.nbytes, self.seconds, self.saveable = call, nbytes, seconds, saveable


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.itemsize
