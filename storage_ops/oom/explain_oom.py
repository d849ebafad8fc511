"""Explains what was in memory when it ran out."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from storage_ops.foundation.ledger import Block, ModuleCall
from storage_ops.foundation.op_names import Overload
from storage_ops.foundation.ops import Args, Kwargs
from storage_ops.measure.measurement import numbered
from storage_ops.measure.owners import (
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    STATE,
    WORKSPACES,
    activations_of,
    owners_table,
)  # fmt: skip
from storage_ops.oom.advice import Follower, KnownStep, advise, bytes_of
from storage_ops.oom.tracking import Tracking
from storage_ops.quantities import Tabular, readable
from storage_ops.simulate.patches.gpu import following_resizes
from storage_ops.simulate.step import check_loss
from storage_ops.simulate.values.wrappers import inside

if TYPE_CHECKING:
    from rich.console import Group

    from storage_ops.fitting.plan import FitPlan

UNKNOWN = "not known"


@dataclass
class OomReport(Tabular):
    """The owners of memory when it ran out. Prints as a table, and is empty before that.

    Attributes:
        by_owner: bytes by their owner, largest first. An owner is "parameters of", "gradients of",
            "optimizer state of", "buffers of" or "activations of" a module, or "temporaries of" an
            op that ran outside of modules, as in backward. Or it is "input" with a shape. To
            measure "workspaces of cuBLAS", they are freed, and cuBLAS allocates them again when it
            needs them. "not known" are bytes of other code.
        in_use_bytes: the sum of these bytes.
        attributed_share: the share of these bytes that have a known owner, from 0 to 1.
        failed: the op that asked for more memory, and the module that called it.
        plan: what `storage_ops.fit` would do with this memory, or None if there is no plan.
        advice: a sentence about the plan, or the reason why there is none and the call to make.
    """

    by_owner: dict[str, int] = field(default_factory=dict)
    in_use_bytes: int = 0
    attributed_share: float = 1.0
    failed: str = ""
    plan: FitPlan | None = None
    advice: str = ""

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        title = "memory has not run out"
        if self.failed:
            in_use = readable(self.in_use_bytes)
            title = f"out of memory in {self.failed}: {in_use} were in use"
        table = owners_table(title, self.by_owner, share="of all")
        below = [Text(self.advice)] if self.advice else []
        return Group(table, *below, *([self.plan] if self.plan is not None else []))


@contextlib.contextmanager
def explain_oom(
    device: str | torch.device | None = None,
    model: nn.Module | None = None,
    batch: object = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: type[Optimizer] | Optimizer | None = None,
) -> Iterator[OomReport]:
    """Report what was in memory if a with block runs out of it, and what `fit` would do.

    A torch.OutOfMemoryError that leaves the block is not changed, but gets a note that is printed
    below its message. The note has the bytes by owner, the place where the op failed, and the plan
    of `storage_ops.fit` for this memory. The search for a plan takes seconds for a large model.

    Storages are followed op by op as in `limit`. So each op takes some ten microseconds longer, and
    functions under `torch.compile` run uncompiled.

    Args:
        device: the device whose memory to explain. None: the current CUDA device, or else the CPU.
        model: the model for `storage_ops.fit`. None: the module with the most parameters that the
            block called with gradients on.
        batch: the model's arguments. None: the arguments of the observed call.
        loss: as for `storage_ops.fit`.
        optimizer: as for `storage_ops.fit`. None: the optimizer of the model's parameters, if it
            existed before memory ran out.

    Yields:
        A report, empty until memory runs out.

    Raises:
        TypeError, ValueError: an argument is wrong; the error names it.

    Example:
        >>> layer, x = torch.nn.Linear(512, 512), torch.randn(64, 512)
        >>> try:
        ...     with storage_ops.memory.limit("1.2 MiB"), storage_ops.memory.explain_oom() as oom:
        ...         layer(layer(x))
        ... except torch.OutOfMemoryError:
        ...     print(max(oom.by_owner, key=oom.by_owner.get))
        parameters of Linear
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = numbered(device)
    if not isinstance(model, (nn.Module, type(None))):
        raise TypeError(f"`model` is {model!r}. Expected a torch.nn.Module, or None.")
    check_loss(loss)
    mode = Explaining(where)
    follower = Follower(mode.roots)
    named, calls = mode.named(), follower.following()
    try:
        with torch.compiler.set_stance("force_eager"), following_resizes(), named, calls, mode:
            yield mode.report
    except torch.OutOfMemoryError as error:
        mode.note(error, "code outside of ops")
        step = follower.complete(KnownStep(model, batch, loss, optimizer), mode.optimizers)
        mode.report.plan, mode.report.advice = advise(step, bytes_of(where, error))
        text = str(mode.report)
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:  # Python 3.10
            print(text)
        raise


class Explaining(Tracking):
    """Records which op creates which storage, and the owners when memory runs out."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.report = OomReport()
        # A weak reference, because an error keeps the frames that raised it, with their tensors.
        self._noted: Callable[[], BaseException | None] = lambda: None
        self._names: dict[int, str] = {}
        for root in self.roots:
            for name, module in root.named_modules():
                self._names.setdefault(id(module), name or type(root).__name__)

    def __torch_dispatch__(
        self, func: Overload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except torch.OutOfMemoryError as error:
            self.note(error, str(func))
            raise

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Follow the calls of all modules, without hooks on them."""
        calls = self.ledger.calls

        def begin(module: nn.Module, args: Args) -> None:
            calls.append(ModuleCall(self._names.get(id(module), type(module).__name__)))

        def end(module: nn.Module, args: Args, output: object) -> None:
            if calls:
                calls.pop()

        handles = (
            modules.register_module_forward_pre_hook(begin),
            modules.register_module_forward_hook(end, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def note(self, error: BaseException, failed: str) -> None:
        """Record the owners of memory when an error is first seen."""
        if error is self._noted():
            return
        self._noted = weakref.ref(error)
        self._add_late_holders()
        roles = self._roles()
        owners: Counter[str] = Counter()
        for block in self.ledger.live:
            owners[roles.get(block) or _maker_of(block)] += block.nbytes
        calls = self.ledger.calls
        self.report.failed = f"{failed} of {calls[-1].name}" if calls else failed
        known = self.ledger.level
        total = known
        if self._device.type == "cuda":
            total = max(known, torch.cuda.memory_allocated(self._device))
            owners[WORKSPACES] = workspaces = min(_freed_workspaces(self._device), total - known)
            known += workspaces
            owners[UNKNOWN] = total - known
        self.report.by_owner = dict((+owners).most_common())
        self.report.in_use_bytes = total
        self.report.attributed_share = known / total if total else 1.0

    def _add_late_holders(self) -> None:
        """Find the optimizers and models that were created inside the block, too."""
        roots = self.roots
        known = {id(module) for root in roots for module in root.modules()}
        self.look_for_holders()
        # Leave out models around known ones.
        late = (r for r in self.roots if known.isdisjoint(map(id, r.modules())))
        self.roots = [*roots, *late]

    def _roles(self) -> dict[Block, str]:
        """Return the owner of each block of parameters, gradients, buffers and optimizer state."""
        roles: dict[Block, str] = {}

        def give(role: str, t: object) -> None:
            for part in filter(self.counts, inside(t)):
                block = self.ledger.block_of(part)
                if block is not None:
                    roles.setdefault(block, role)

        for root in self.roots:
            for name, module in root.named_modules():
                suffix = f" of {name or type(root).__name__}"
                for p in module.parameters(recurse=False):
                    give(PARAMETERS + suffix, p)
                    give(GRADIENTS + suffix, p.grad)
                for b in module.buffers(recurse=False):
                    give(BUFFERS + suffix, b)
        for optimizer in self.optimizers:
            self._give_state(optimizer, give)
        return roles

    @staticmethod
    def _give_state(optimizer: Optimizer, give: Callable[[str, object], None]) -> None:
        for p in tree_leaves([group["params"] for group in optimizer.param_groups]):
            give(PARAMETERS, p)
            give(GRADIENTS, p.grad)
        for t in tree_leaves(list(optimizer.state.values())):
            give(f"{STATE} of {type(optimizer).__name__}", t)


def _freed_workspaces(device: torch.device) -> int:
    """Free the workspaces of cuBLAS, one per thread and stream. Return their bytes."""
    if torch.cuda.is_current_stream_capturing():
        return 0
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(device)


def _maker_of(block: Block) -> str:
    if block.made_by == "input":
        return f"input {tuple(block.shape)} {str(block.dtype).removeprefix('torch.')}"
    if block.call is not None:
        return activations_of(block.call.name)
    return f"temporaries of {block.made_by}"
