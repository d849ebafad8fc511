"""Finds at patch time the operations that a patched model's first forward would refuse.

A copy of the model on fake tensors, which have no memory, runs one forward with labels. Its
operations on its logits are observed as in a real forward. Nothing is computed, and the model
itself does not change. Some models cannot run on fake tensors, because they read values or have
kernels without fakes. For these the probe finds nothing, and their first forward raises the error.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from storage_ops.checkpoint.state.left_behind import run_on_fakes
from storage_ops.integrations.deferred_forward import LossOptions, Refused

_SHAPE = (2, 8)


def find_refusal(model: nn.Module, options: LossOptions) -> Refused | None:
    """Return the operation that a patched model's forward refuses, or None if none is known."""
    names = inspect.signature(model.forward).parameters
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    if "input_ids" not in names or hooked:
        return None
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        keywords = {"use_cache": False} if "use_cache" in names else {}
        run = functools.partial(_run_on_fakes, model, options, keywords)
        return run_on_fakes(model.modules(), run)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of operators that fail on fake tensors, which is harmless here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _run_on_fakes(
    model: nn.Module, options: LossOptions, keywords: dict[str, Any], mode: FakeTensorMode
) -> Refused | None:
    device = next((p.device for p in model.parameters()), None)
    try:
        with torch.no_grad():
            shadow: Any = copy.deepcopy(model, _without_numbers(model, mode))
            vars(shadow)["_loss_options"] = LossOptions(options.returns)
            vars(shadow).pop("forward", None)  # it belongs to the original model
            ids = torch.zeros(_SHAPE, dtype=torch.long, device=device)
            of_rows = dict.fromkeys(other_labels(model.forward), ids[:, 0])
            shadow(input_ids=ids, labels=ids, **keywords, **of_rows)
    except Refused as refused:
        return refused
    except Exception:  # an error of the model or of torch, which says nothing about refusals
        return None
    return None


def other_labels(forward: Callable[..., Any]) -> list[str]:
    """Return the names of a forward's parameters for labels of a whole row.

    BertForPreTraining has a loss only if it gets `next_sentence_label` besides `labels`.
    """
    return [name for name in inspect.signature(forward).parameters if name.endswith("_label")]


def _without_numbers(model: nn.Module, mode: FakeTensorMode) -> dict[int, Tensor]:
    """Return a memo for copy.deepcopy that replaces parameters and buffers by fake tensors."""
    tensors = (*model.parameters(), *model.buffers())
    return {id(tensor): mode.from_tensor(tensor) for tensor in tensors}
