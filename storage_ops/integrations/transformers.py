"""The loss of Hugging Face causal language models, without their logits.

The model keeps its own forward. When it runs with labels, its output layer returns
`DeferredLogits`. They pass through the model's scaling and capping to the model's loss. The
cross-entropy there becomes `linear_cross_entropy`. Without labels the model may return them to a
caller's loss. So shifting, reduction and auxiliary losses are those of the model, in every version
of transformers. transformers itself is not imported here.

Model and output layer change their class to a subclass, as FSDP2 and torch.nn.utils.parametrize do.
A forward on the instance would keep the model, and its memory, in a reference cycle.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Literal, get_args

from torch import Tensor, nn
from typing_extensions import TypeVar

from storage_ops._subclass import check_module
from storage_ops.checkpoint.layers.config_policy import uncompiled
from storage_ops.fitting.heads import OWN_OPTIONS, Patching, register_patching
from storage_ops.integrations import fused_head
from storage_ops.integrations.deferred_forward import LossOptions
from storage_ops.integrations.output_layers import PatchedHead, patched_heads
from storage_ops.integrations.patch_probe import find_refusal
from storage_ops.integrations.patched_class import PatchedModel, stop_watching
from storage_ops.integrations.patched_model import has_patch
from storage_ops.loss.call import TOLERANCE, is_number
from storage_ops.loss.checks import budget_of, check_rules
from storage_ops.optional import check_version

ModelT = TypeVar("ModelT", bound=nn.Module, default=nn.Module)
PatchResult = Literal["loss", "nll", "lse", "entropy", "argmax", "correct"]
Logits = Literal["eval", "always", "never", "deferred"]
RESULTS: tuple[PatchResult, ...] = get_args(PatchResult)
LOGITS: tuple[Logits, ...] = get_args(Logits)


class CausalLMPatch(Generic[ModelT]):
    """The result of `patch_causal_lm`. As a context manager it undoes the patch at the end."""

    def __init__(self, model: ModelT, applied: bool) -> None:
        self._model = model
        self._applied = applied

    def __enter__(self) -> ModelT:
        return self._model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._applied:
            unpatch_causal_lm(self._model)


def patch_causal_lm(
    model: ModelT,
    *,
    returns: Sequence[PatchResult] = ("loss",),
    token_weights: Tensor | str | None = None,
    label_smoothing: float = 0.0,
    logits: Logits = "eval",
    memory_budget: int | float | str | None = None,
    gradient_tolerance: float = 0.0,
) -> CausalLMPatch[ModelT]:
    """Let a Hugging Face causal language model compute its loss without its logits, in place.

    `model(input_ids, labels=labels).loss` keeps its value and its gradients, in training and in
    evaluation. `linear_cross_entropy` computes it, in float32 even if the model would use 16 bits.
    **In training `outputs.logits` is None.** Calls without labels, and so `generate`, do not
    change: they return logits, unless `logits` is "deferred". `shift_labels` without `labels`, as
    in sequence parallelism, gives the loss, too.

    The model's own forward and loss function run. So labels are shifted, ignored and averaged as
    usual (`num_items_in_batch`, `shift_labels`), and auxiliary losses are added. A bias, a scale
    (also one per class) and a tanh cap of the logits are supported. Parameters, state dict, saved
    files and the signature of forward do not change. Copies of the model, also pickled ones, are
    patched as well.

    For PEFT, pass the `PeftModel` or the model in it. LoRA, DoRA, AdaLoRA, VeRA, OFT, IA3,
    `trainable_token_indices` and `modules_to_save` are supported on the output layer. All but the
    last, and a scale per class, run on some tokens at a time, and again in the backward. The frozen
    weight then has no gradient, and no copies except those of the layer itself. The backward uses
    the adapters and modes of the forward, even if they have changed since. Dropout of such an
    adapter draws other masks than one call for all tokens would.

    Patch a model before Trainer, torch.compile or FSDP wrap it, before or after PEFT. Patching a
    model again with the same options has no effect. The trainers SFT, DPO, KTO, GRPO and RLOO of
    TRL (from 1.15) set a fused head on the model, which returns the results per token that their
    losses use. `linear_cross_entropy` computes these results in a patched model. Patch the model
    before or after the trainer is created, and `trainer.ref_model` if there is one. ORPO, CPO, TPO
    and OnlineDPO compute their losses from logits and need `logits="deferred"`. Distillation of one
    model from another (GKDTrainer, DistillationTrainer) is not supported.

    Another library may replace the forward of a patched model by one that does not call it. Then
    the first call in training warns that the patch has no effect.

    FSDP2 (fully_shard on the output layer) and ZeRO-3 of DeepSpeed gather the weight of the layer
    for its call. The loss then runs inside that call, if the layer is a plain one and there are
    labels. Other hooks of the output layer (tensor parallelism, device_map) and other adapters
    raise an error. Two threads must not call the model at the same time.

    Args:
        model: a transformers model whose `forward` takes `labels` and whose
            `get_output_embeddings()` is a `torch.nn.Linear`, adapted or not, or its `PeftModel`.
        returns: "loss", and any of "nll", "lse", "entropy", "argmax" and "correct". These become
            entries of the output such as `outputs.nll`, or the last items of a tuple. They have the
            value of every token in the shape of the labels, and 0 (-1 for argmax) for an ignored
            label. nll, lse and entropy are differentiable. With them the backward computes the
            logits again. A model that moves labels by one has the nll of label i + 1 at i. These
            entries belong to the model's first cross-entropy. If it selects tokens, by a mask for
            example, they have one value for each of these tokens.
        token_weights: a weight for every label, in their shape. A mean divides by their sum. Pass a
            tensor, or the name of a keyword of the model's call, such as a column of the batch
            (with `remove_unused_columns=False` in Trainer). A call in training without this
            keyword, or with it and without labels, is an error. A call in evaluation without it has
            no weights.
        label_smoothing: for the model's loss. With "deferred" logits a call in training without
            labels is an error, because another loss would ignore this option. The same is true of
            token_weights.
        logits: when a call with labels also computes the tensor `outputs.logits`, in the model's
            dtype: "eval" (only in eval mode, for `compute_metrics` of Trainer), "always" or
            "never". The same holds for logits that the output of a part of the model has.
            "deferred" is as "eval", and a call without labels in training mode returns deferred
            logits, for a loss outside the model. A Trainer with a `compute_loss_func` or a
            `label_smoothing_factor` computes such a loss. These logits are not a tensor. A loss
            may slice, mask, split, reshape, scale, cast and detach them. It may compute their
            `cross_entropy`, their `logsumexp` or `argmax` over the classes, or `log_softmax`. The
            result of `log_softmax` supports `gather` of one class for each token, the sum or mean
            over the classes and the entropy. Without gradients a loss may take the mean of logits.
            The results are float32. Any other operation raises NotImplementedError.
            `outputs.logits.formed()` is the tensor.
        memory_budget: as in `storage_ops.linear_cross_entropy`.
        gradient_tolerance: as in `storage_ops.linear_cross_entropy`, for the model's own loss of
            a plain output layer. Adapters of the output layer and fused heads of TRL stay exact.

    Returns:
        A context manager that yields the model and calls `unpatch_causal_lm` at its end. The patch
        is applied without a with block, too.

    Raises:
        TypeError: the model is of another kind, or there are token_weights for an encoder-decoder,
            whose labels are inputs, too.
        ValueError: an option has a wrong value.
        RuntimeError: the output layer has hooks, a forward was replaced on the instance, or the
            model is patched with other options. ImportError: transformers is older than 4.57.
        NotImplementedError: the model's operation on its logits cannot be done without them. A copy
            of it runs on fake tensors to find that out. If it cannot run on these, because it reads
            numbers or has hooks, the first forward of the patched model raises the error. A loss of
            "deferred" logits raises it in the same way.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32)
        >>> heads = dict(num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
        >>> ids = torch.randint(64, (2, 8))
        >>> expected = model(ids, labels=ids).loss
        >>> with storage_ops.patch_causal_lm(model, returns=("loss", "nll")):
        ...     outputs = model(ids, labels=ids)
        >>> torch.testing.assert_close(outputs.loss, expected)
        >>> outputs.logits is None, outputs.nll.shape
        (True, torch.Size([2, 8]))
    """
    outer_model, model = model, _inner(model)
    name = type(model).__name__
    budget = budget_of(memory_budget, "patch_causal_lm")
    options = _options(returns, token_weights, label_smoothing, logits, budget, gradient_tolerance)
    if isinstance(model, PatchedModel) and has_patch(model):
        own = vars(model).get(OWN_OPTIONS, model._loss_options)  # without the budget of a plan
        if own.key != options.key:
            raise RuntimeError(
                f"patch_causal_lm: {name} is patched already, with {own}. Pass the "
                f"same options ({options}), or call storage_ops.unpatch_causal_lm(model) first."
            )
        return CausalLMPatch(outer_model, applied=False)
    if not isinstance(model, nn.Module) or not hasattr(model, "get_output_embeddings"):
        raise TypeError(
            f"patch_causal_lm: `model` is {name}, without get_output_embeddings(). Expected a "
            "transformers model, not a wrapper around one. In a model of your own, use "
            "storage_ops.LinearCrossEntropyLoss."
        )
    if any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        check_version("transformers", "patch_causal_lm")
    given_forward = vars(model).get("forward")
    fused_head.check(model, given_forward, options)
    parameters = inspect.signature(type(model).forward).parameters
    if "labels" not in parameters:
        raise TypeError(
            f"patch_causal_lm: the forward of {name} takes no labels. Expected a model whose "
            "forward does."
        )
    if isinstance(token_weights, str) and token_weights in parameters:
        raise ValueError(
            f"patch_causal_lm: `token_weights` is {token_weights!r}, which the forward of {name} "
            "takes itself. Expected the name of a keyword for the weights alone."
        )
    config = getattr(model, "config", None)
    if token_weights is not None and getattr(config, "is_encoder_decoder", False):
        raise TypeError(
            f"patch_causal_lm: {name} is an encoder-decoder, which computes inputs from its "
            "labels. Expected token_weights=None."
        )
    if not isinstance(model, PatchedModel):  # type(patched)(config) has the class, but no patch
        model.__class__ = PatchedModel.over(type(model))
    vars(model)["_loss_options"] = options
    try:
        patched_heads(model, name)
        refused = find_refusal(model, options)
        if refused is not None:
            raise refused
        if given_forward is not None:
            model.forward = given_forward  # as if it were set now
    except BaseException:  # also for an interrupt
        unpatch_causal_lm(model)
        raise
    return CausalLMPatch(outer_model, applied=True)


def _inner(model: object) -> Any:
    """Return the model in a `PeftModel` or a result of torch.compile, or the model itself.

    A `PeftModel` adds its adapters to the model in it.
    """
    model = uncompiled(model) if isinstance(model, nn.Module) else model
    inner = getattr(model, "get_base_model", None)
    return inner() if isinstance(model, nn.Module) and callable(inner) else model


def _options(
    returns: object,
    token_weights: object,
    label_smoothing: Any,
    logits: object,
    memory_budget: int | None,
    gradient_tolerance: float,
) -> LossOptions:
    """Check the options and return them. An error names the wrong option."""
    names = tuple(returns) if isinstance(returns, (list, tuple)) else ()
    if not names or not set(names) <= set(RESULTS):
        raise ValueError(f"patch_causal_lm: `returns` is {returns!r}. Expected some of {RESULTS}.")
    if not isinstance(logits, str) or logits not in LOGITS:
        raise ValueError(f"patch_causal_lm: `logits` is {logits!r}. Expected one of {LOGITS}.")
    if not is_number(label_smoothing) or not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"patch_causal_lm: `label_smoothing` is {label_smoothing!r}. Expected a number from 0 "
            "to 1."
        )
    if not isinstance(token_weights, (Tensor, str, type(None))):
        raise TypeError(
            f"patch_causal_lm: `token_weights` is {token_weights!r}. Expected a tensor, the name "
            "of a keyword of the model's call, or None."
        )
    check_rules("patch_causal_lm", TOLERANCE, {"gradient_tolerance": gradient_tolerance})
    if gradient_tolerance and (label_smoothing or "entropy" in names):
        raise ValueError(
            f"patch_causal_lm: `gradient_tolerance` is {gradient_tolerance}. Expected 0 with "
            "label_smoothing or 'entropy' in returns, whose gradients it does not bound."
        )
    smoothing, tolerance = float(label_smoothing), float(gradient_tolerance)
    return LossOptions(names, token_weights, smoothing, logits, memory_budget, tolerance)


def is_patched(model: nn.Module) -> bool:
    """Return True if `patch_causal_lm` has changed a model."""
    return has_patch(_inner(model))


def set_memory_budget(model: nn.Module, memory_budget: int | None) -> None:
    """Set another budget for the loss of a patched model, until `restore_memory_budget`."""
    inner = _inner(model)
    own = vars(inner).setdefault(OWN_OPTIONS, inner._loss_options)
    inner._loss_options = replace(own, memory_budget=memory_budget)


def restore_memory_budget(model: nn.Module) -> None:
    """Undo `set_memory_budget`. Models without a patch do not change."""
    inner = _inner(model)
    own = vars(inner).pop(OWN_OPTIONS, None)
    if own is not None:
        inner._loss_options = own


def unpatch_causal_lm(model: nn.Module) -> None:
    """Undo `patch_causal_lm`. A model without a patch does not change.

    Args:
        model: the argument of `patch_causal_lm`.

    Raises:
        TypeError: `model` is not a module.
        RuntimeError: the class of the model was changed again since.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))
        >>> _ = storage_ops.patch_causal_lm(model)
        >>> storage_ops.unpatch_causal_lm(model)
        >>> type(model) is GPT2LMHeadModel, type(model.lm_head) is torch.nn.Linear
        (True, True)
    """
    check_module(model, "unpatch_causal_lm: `model`")
    model = _inner(model)
    if not isinstance(model, PatchedModel):
        return
    modules: list[Any] = [model, *(m for m in model.modules() if isinstance(m, PatchedHead))]
    if any("_original" not in vars(type(module)) for module in modules):
        raise RuntimeError(
            f"unpatch_causal_lm: the class of {type(model).__name__} or of its output layer was "
            "changed after patch_causal_lm. Undo the later change first."
        )
    for module in modules:
        for attribute in ("_deferred_in", "_loss_options", OWN_OPTIONS):
            vars(module).pop(attribute, None)
        module.__class__ = module._original
    stop_watching(model)
    fused_head.restore(model)


register_patching(
    Patching(
        is_patched, patch_causal_lm, unpatch_causal_lm, set_memory_budget, restore_memory_budget
    )
)
