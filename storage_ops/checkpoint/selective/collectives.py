"""Collectives that write into their arguments, such as `dist.all_reduce(t)`.

Autograd Functions of tensor parallelism call these. They bump no version counter, and their schemas
do not say what they write. A saved result is the content of the arguments after the collective. The
recompute copies it into its own arguments and does not communicate.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from storage_ops._op_arguments import tensors_in
from storage_ops.foundation.ops import Args

# All others write into their first argument.
_WRITES_NOTHING = frozenset(("c10d::send", "c10d::barrier", "c10d::monitored_barrier_"))
# Its caller asks the handle for the sender.
FROM_ANYBODY = "c10d::recv_any_source_"


def written_by(name: str, args: Args) -> list[Tensor]:
    """Return the tensors that a collective of this name writes, in the order of its argument."""
    return [] if name in _WRITES_NOTHING else tensors_in(args[:1])


@dataclass
class Sent:
    """A collective that ran in the forward.

    Attributes:
        returned: the handle that it returned, or a tuple that ends with the handle.
    """

    returned: Any

    def wait(self) -> None:
        """Let later computation wait for the collective."""
        handle = self.returned[-1] if isinstance(self.returned, tuple) else self.returned
        work = torch._C._distributed_c10d.Work.unbox(handle)
        # Gloo would treat a second wait for a message as another message.
        if not work.is_completed():
            work.wait()

    def repeat(self, args: Args, results: list[Tensor], name: str) -> Any:
        """Copy the results into the arguments of a recompute. Return what the collective would.

        Args:
            args: the arguments.
            results: the tensors that the collective wrote in the forward.
            name: the name of the collective.
        """
        for t, result in zip(written_by(name, args), results, strict=True):
            t.data.copy_(result)  # without a version bump, like the collective
        done = _finished().boxed()
        return (args[0], done) if isinstance(self.returned, tuple) else done


@functools.cache
def _finished() -> Any:
    """Return the handle of a finished collective."""

    class Finished(torch._C._distributed_c10d.Work):
        def wait(self, timeout: object = None) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

        def is_success(self) -> bool:
            return True

        def get_future(self) -> torch.futures.Future[list[Tensor]]:
            future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
            future.set_result([])
            return future

    return Finished()
