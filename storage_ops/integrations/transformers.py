"""The loss of Hugging Face causal language models, without their logits.

The forward of the model stays its own. While it runs with labels, its output layer returns
`DeferredLogits`; they pass through the model's scaling and capping to the model's loss, and the
cross-entropy in there becomes `linear_cross_entropy`. So shifting, reduction and auxiliary losses
are the model's, in every version of transformers, which is not imported here.

Model and output layer change their class for a subclass, as FSDP2 and torch.nn.utils.parametrize
do. A forward set on the instance would keep the model in a reference cycle, and its memory with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from storage_ops._subclass import Replaced, like
from storage_ops.integrations.deferred_logits import DeferredLogits, Forward, Origin, autocast_dtype


class _PatchedModel(Replaced):
    """Marks a patched model."""

    @staticmethod
    def forward_over(original: Callable[..., Any]) -> Callable[..., Any]:
        return _model_forward(original)


class _PatchedHead(Replaced):
    """An output layer that returns `DeferredLogits` while the forward of its model wants them."""

    _deferred_in: Forward | None = None

    @staticmethod
    def forward_over(original: Callable[..., Any]) -> Callable[..., Any]:
        return _head_forward(original)


def _head_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @like(original)
    def forward(self: Any, input: Tensor) -> Any:
        if self._deferred_in is None:
            return original(self, input)
        autocast = autocast_dtype(input)
        origin = Origin(self._deferred_in, self.weight, self.bias, autocast)
        return DeferredLogits(origin, input, autocast or input.dtype)

    return forward


def _model_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    position = list(inspect.signature(original).parameters).index("labels") - 1  # without self

    @like(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[position] if len(args) > position else kwargs.get("labels")
        # Not patched any more: another wrapper has held on to this function.
        if labels is None or not isinstance(self, _PatchedModel):
            return original(self, *args, **kwargs)
        name = type(self).__name__
        head = _patched_head(self, name)
        if head._deferred_in is not None:  # a patched model around this one waits for them
            return original(self, *args, **kwargs)
        run = Forward(name)
        head._deferred_in = run
        try:
            outputs = original(self, *args, **kwargs)
        finally:
            head._deferred_in = None
        if run.losses < max(run.calls, 1):
            missing = "a cross-entropy of its logits" if run.calls else "get_output_embeddings()"
            raise NotImplementedError(
                f"patch_causal_lm: the forward of {name} with labels ended without {missing}; "
                "expected a causal language modeling loss of the logits of its output layer. "
                "storage_ops.unpatch_causal_lm(model) gives the model its own loss back"
            )
        return _without_logits(outputs)

    return forward


def _without_logits(outputs: Any) -> Any:
    if isinstance(outputs, tuple):
        return tuple(None if isinstance(v, DeferredLogits) else v for v in outputs)
    if isinstance(outputs, dict):
        kept = {k: None if isinstance(v, DeferredLogits) else v for k, v in outputs.items()}
        return type(outputs)(**kept)
    return outputs


def _patched_head(model: Any, name: str) -> Any:
    """The output layer of the model, patched; it may be another one than at the last call."""
    head: Any = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict) and len(copies) == 1:  # PEFT trains a copy of the layer
        (head,) = copies.values()
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    if not isinstance(head, nn.Linear):
        raise TypeError(
            f"patch_causal_lm: the output layer of {name}, get_output_embeddings(), is {kind}; "
            "expected torch.nn.Linear"
        )
    if head._forward_hooks or head._backward_hooks or head._backward_pre_hooks:
        raise RuntimeError(
            f"patch_causal_lm: the output layer of {name} has forward or backward hooks, which "
            "would see no logits or free its weight too early; expected none. Sharding libraries "
            "set them on every module they shard: let the layer belong to the model around it"
        )
    if "forward" in vars(head):
        raise _replaced(f"the output layer of {name}")
    if not isinstance(head, _PatchedHead):
        if type(head).forward is not nn.Linear.forward:
            raise TypeError(
                f"patch_causal_lm: the output layer of {name} is {kind} with a forward of its "
                "own; expected that of torch.nn.Linear"
            )
        head.__class__ = _PatchedHead.over(type(head))
    return head


def _replaced(what: str) -> RuntimeError:
    return RuntimeError(
        f"patch_causal_lm: the forward of {what} was replaced on the instance; expected that of "
        "its class. Patch the model before other libraries wrap it; a model that is spread over "
        "devices by hooks (device_map) cannot be patched"
    )


class CausalLMPatch:
    """What `patch_causal_lm` returns; as a context manager it takes the patch back at the end."""

    def __init__(self, model: nn.Module, applied: bool) -> None:
        self._model = model
        self._applied = applied

    def __enter__(self) -> nn.Module:
        return self._model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._applied:
            unpatch_causal_lm(self._model)


def patch_causal_lm(model: nn.Module) -> CausalLMPatch:
    """Let a Hugging Face causal language model compute its loss without its logits, in place.

    `model(input_ids, labels=labels).loss` keeps its value and its gradients, in training and in
    evaluation, and is computed by `linear_cross_entropy`. **`outputs.logits` is then None**: code
    that reads logits next to a loss, such as `compute_metrics` of Trainer, needs the model
    unpatched. Calls without labels, and so `generate`, are what they were, logits included.

    The model's own forward and loss function run, so labels are shifted, ignored and averaged as
    they would be (`num_items_in_batch`, `shift_labels`), and auxiliary losses are added. A bias,
    a scale and a tanh cap of the logits are supported. Parameters, state dict, saved files and the
    signature of forward do not change; copies of the model, pickled ones too, are patched as well.

    Patch a model before Trainer, PEFT, torch.compile or FSDP wrap it. One that is patched already
    stays as it is. LoRA on the output layer itself is refused, and so is every library that hooks
    into that layer (FSDP on it alone, tensor parallelism, ZeRO-3, device_map). Not for a model that
    two threads call at the same time.

    Args:
        model: a transformers model whose `forward` takes `labels` and whose
            `get_output_embeddings()` is a `torch.nn.Linear`.

    Returns:
        A context manager that yields the model and calls `unpatch_causal_lm` at its end. It need
        not be used as one.

    Raises:
        TypeError: not such a model.
        RuntimeError: the output layer has hooks, or a forward was replaced on the instance.
        NotImplementedError: from the forward of the patched model, when the model does something
            to its logits that cannot be done without them.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32)
        >>> heads = dict(num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
        >>> ids = torch.randint(64, (2, 8))
        >>> expected = model(ids, labels=ids).loss
        >>> with storage_ops.patch_causal_lm(model):
        ...     outputs = model(ids, labels=ids)
        >>> torch.testing.assert_close(outputs.loss, expected)
        >>> outputs.logits is None
        True
    """
    name = type(model).__name__
    if isinstance(model, _PatchedModel):
        return CausalLMPatch(model, applied=False)
    if not isinstance(model, nn.Module) or not hasattr(model, "get_output_embeddings"):
        raise TypeError(
            f"patch_causal_lm: model is {name}, without get_output_embeddings(); expected a "
            "transformers model, not a wrapper around one"
        )
    if "forward" in vars(model):
        raise _replaced(name)
    if "labels" not in inspect.signature(type(model).forward).parameters:
        raise TypeError(f"patch_causal_lm: forward of {name} takes no labels; expected it to")
    _patched_head(model, name)
    model.__class__ = _PatchedModel.over(type(model))
    return CausalLMPatch(model, applied=True)


def unpatch_causal_lm(model: nn.Module) -> None:
    """Undo `patch_causal_lm`; a model that is not patched stays as it is.

    Args:
        model: what was given to `patch_causal_lm`.

    Raises:
        TypeError: not a module.
        RuntimeError: the class of the model was changed again since.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))
        >>> _ = storage_ops.patch_causal_lm(model)
        >>> storage_ops.unpatch_causal_lm(model)
        >>> type(model) is GPT2LMHeadModel, type(model.lm_head) is torch.nn.Linear
        (True, True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"unpatch_causal_lm: model is {type(model).__name__}; expected a torch.nn.Module"
        )
    if not isinstance(model, _PatchedModel):
        return
    modules: list[Any] = [model, *(m for m in model.modules() if isinstance(m, _PatchedHead))]
    if any("_original" not in vars(type(module)) for module in modules):
        raise RuntimeError(
            f"unpatch_causal_lm: the class of {type(model).__name__} or of its output layer was "
            "changed after patch_causal_lm; expected the one it made. Undo the later change first"
        )
    for module in modules:
        vars(module).pop("_deferred_in", None)  # set by every call with labels
        module.__class__ = module._original
