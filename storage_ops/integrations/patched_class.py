"""The class of patched models, which detects if a library replaces the forward later.

Trainers of TRL set a fused head on the model, and a forward on the instance hides the patch. A
fused head is replaced at once by the head of `fused_head.py`. Any other forward may call the
patched one, as accelerate's does for mixed precision, or may not. So the first call in training is
watched. There is a warning if the patched forward did not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from storage_ops._callers import warn_caller
from storage_ops._subclass import Replaced
from storage_ops.integrations import fused_head
from storage_ops.integrations.deferred_forward import LossOptions
from storage_ops.integrations.patched_model import has_patch, model_forward


class PatchedModel(Replaced):
    """A patched model with the options of its loss."""

    _loss_options: LossOptions
    _is_watched = False  # True from a replacement of the forward until the first call in training
    _has_run = False  # True if the patched forward has run in the watched call

    @staticmethod
    def forward_over(original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that defers the logits of a model with labels."""
        return model_forward(original)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and has_patch(self):
            value = fused_head.replacement(self, value, self._loss_options)
            if not fused_head.is_replacement(value):
                watch(self)
        super().__setattr__(name, value)


def watch(model: Any) -> None:
    """Warn after the next call in training if the patched forward did not run in it."""
    stop_watching(model)
    model._is_watched = True
    model.register_forward_pre_hook(_begin, prepend=True)
    model.register_forward_hook(_end)


def stop_watching(model: nn.Module) -> None:
    """Undo `watch`. A model that is not watched does not change."""
    for name in ("_is_watched", "_has_run"):
        vars(model).pop(name, None)
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (_begin, _end)]:
            del hooks[key]


def _begin(model: Any, args: object) -> None:
    if not torch.compiler.is_compiling():
        model._has_run = False


def _end(model: Any, args: object, outputs: object) -> None:
    if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
        return
    has_run = model._has_run
    stop_watching(model)
    if not has_run and has_patch(model):
        _warn_of_no_effect(model)


def _warn_of_no_effect(model: nn.Module) -> None:
    forward = vars(model).get("forward")
    function = getattr(forward, "__func__", forward)
    place = [getattr(function, name, None) for name in ("__module__", "__qualname__")]
    name = ".".join(str(part) for part in place if part) or repr(function)
    warn_caller(
        f"patch_causal_lm: the patch of {type(model).__name__} has no effect. {name} has replaced "
        "its forward since, and does not call the patched one. Turn off the option that replaces "
        "it, such as use_liger_kernel, or call storage_ops.unpatch_causal_lm(model)."
    )
