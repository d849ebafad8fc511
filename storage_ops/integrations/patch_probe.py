"""Finds at patch time the operations that a patched model's first forward would refuse.

A copy of the model on fake tensors, which have no memory, runs one forward with labels. The copy
has one layer of each list of alike layers, or all layers if the model cannot run with fewer. The
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
from torch import nn
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
    dropped = _layers_to_drop(model)
    # The layers come before the logits, so one of a kind is enough for most models.
    for without in (dropped, {}) if dropped else ({},):
        try:
            with torch.no_grad():
                shadow = _shadow(model, mode, without)
                vars(shadow)["_loss_options"] = LossOptions(options.returns)
                vars(shadow).pop("forward", None)  # it belongs to the original model
                ids = torch.zeros(_SHAPE, dtype=torch.long, device=device)
                of_rows = dict.fromkeys(other_labels(model.forward), ids[:, 0])
                shadow(input_ids=ids, labels=ids, **keywords, **of_rows)
        except Refused as refused:
            return refused
        except Exception:  # an error of the model or of torch, not a refusal
            continue
        return None
    return None


def _layers_to_drop(module: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Return the outermost lists of layers of one class, with all layers but the first."""
    layers = list(module.children())
    is_alike = len(layers) > 1 and len({type(layer) for layer in layers}) == 1
    if type(module) is nn.ModuleList and is_alike:
        return {module: layers[1:]}
    dropped: dict[nn.Module, list[nn.Module]] = {}
    for child in layers:
        dropped |= _layers_to_drop(child)
    return dropped


def _shadow(
    model: nn.Module, mode: FakeTensorMode, dropped: dict[nn.Module, list[nn.Module]]
) -> Any:
    """Copy a model, with fake tensors in place of its parameters and buffers, without layers."""
    left_out = {layer for layers in dropped.values() for layer in layers}
    # Another reference to a layer that is left out must not copy its bytes.
    memo: dict[int, Any] = {id(layer): nn.Module() for layer in left_out}
    for module in _modules_without(model, left_out):
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(t) not in memo:
                memo[id(t)] = mode.from_tensor(t)
    for layers in dropped:
        first = next(layers.children())
        memo[id(layers)] = nn.ModuleList([copy.deepcopy(first, memo)])
    return copy.deepcopy(model, memo)


def _modules_without(model: nn.Module, left_out: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield a model and the modules in it, without some modules and those inside of them."""
    yield model
    for child in model.children():
        if child not in left_out:
            yield from _modules_without(child, left_out)


def other_labels(forward: Callable[..., Any]) -> list[str]:
    """Return the names of a forward's parameters for labels of a whole row.

    BertForPreTraining has a loss only if it gets `next_sentence_label` besides `labels`.
    """
    return [name for name in inspect.signature(forward).parameters if name.endswith("_label")]
