"""torch.utils.checkpoint under `trace_step`: its regions are marked and run once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import checkpoint as torch_checkpoint

from storage_ops.checkpoint.region.options import contexts_of
from storage_ops.foundation import regions

# The function that wraps the forward of a region that is not reentrant. Torch 2.15 has it under
# another name, and takes its options by keyword only.
_NEW, _OLD = (f"_checkpoint_without_reentrant_generator{end}" for end in ("_impl", ""))
_NAME = _NEW if hasattr(torch_checkpoint, _NEW) else _OLD
_original = getattr(torch_checkpoint, _NAME)
_OriginalFunction = torch_checkpoint.CheckpointFunction


def policy_of(
    context_fn: Callable[[], Any],
) -> tuple[regions.Policy | None, contextlib.AbstractContextManager[Any]]:
    """Return the policy that a checkpoint's `context_fn` stands for, and its forward's context."""
    forward, _ = contexts_of(context_fn)
    if isinstance(forward, torch_checkpoint._CachingTorchDispatchMode):
        return forward.policy_fn, contextlib.nullcontext()
    return None, forward


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Let checkpoints of this thread mark their region in a with block, and run it once."""
    thread = threading.get_ident()

    def generator(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
        if threading.get_ident() != thread:
            yield from _original(*args, **kwargs)
        elif not torch.is_grad_enabled():
            yield
        else:
            context_fn = kwargs["context_fn"] if _NAME == _NEW else args[2]
            policy, forward = policy_of(context_fn)
            with forward, regions.region(policy):
                yield

    class Function:
        @staticmethod
        def apply(fn: Callable[..., Any], preserve: bool, *args: object) -> Any:
            if threading.get_ident() != thread:
                return _OriginalFunction.apply(fn, preserve, *args)
            return regions.mark(fn, args)

    # A caller may have a reference to torch's function. That finds its parts in its module.
    with (
        mock.patch.object(torch_checkpoint, _NAME, generator),
        mock.patch.object(torch_checkpoint, "CheckpointFunction", Function),
    ):
        yield
