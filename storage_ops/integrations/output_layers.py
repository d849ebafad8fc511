"""The output layers of models: which ones can return `DeferredLogits`, and their patched classes.

A `torch.nn.Linear` is a weight and a bias. Some layers of other libraries are more than that, but
compute a token's logits only from its hidden state. They are recognised by name, so no library is
imported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from storage_ops._subclass import Replaced, like
from storage_ops.integrations.deferred_forward import Forward, Origin, Refused
from storage_ops.integrations.deferred_logits import DeferredLogits
from storage_ops.integrations.gathered_head import Gathering, is_gathered, is_hooked

# Names of layers, with the dtype of their logits if it is not that of the product. Of PEFT's
# layers, these multiply hidden states or logits. Others create a matrix of the weight's size in
# every call.
_KNOWN = {
    "peft.tuners.adalora.layer.SVDLinear": None,
    "peft.tuners.ia3.layer.Linear": None,
    "peft.tuners.lora.layer.Linear": None,
    "peft.tuners.oft.layer.Linear": None,
    "peft.tuners.vera.layer.Linear": None,
    "peft.utils.other.TrainableTokensWrapper": None,
    "transformers.models.dory.modeling_dory.DoryLMHead": torch.float32,
}
_VARIANTS = ("DoraLinearVariant",)  # variants of LoRA's layer; others read more than one token


class PatchedHead(Replaced):
    """An output layer that returns `DeferredLogits` while the forward of its model needs them."""

    _deferred_in: Forward | None = None
    _gathering: Gathering | None = None  # gathers its weight during such a forward
    _use: Callable[[Tensor], Any] | None = None  # the function to run while its weight is gathered

    @staticmethod
    def forward_over(original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that runs the original one, unless the model needs deferred logits."""
        return _head_forward(original)


def _head_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @like(original)
    def forward(self: Any, *args: Any, **kwargs: object) -> Any:
        if self._use is not None:
            return self._use(*args)
        if self._deferred_in is None:
            return original(self, *args, **kwargs)
        if len(args) != 1 or kwargs:
            raise Refused(
                f"patch_causal_lm: the output layer of {self._deferred_in.model} is called with "
                f"{len(args)} arguments and {sorted(kwargs)}. Expected the hidden states alone."
            )
        (hidden,) = args
        origin = Origin(self._deferred_in, _base_layer(self).weight, hidden, self)
        dtype = origin.autocast or hidden.dtype
        if origin.gathering is not None and self.bias is not None:
            return DeferredLogits(origin, origin.hidden, dtype, head=origin.gathering.logits)
        if original is nn.Linear.forward:
            return DeferredLogits(origin, origin.hidden, dtype, bias=self.bias)
        deferred = DeferredLogits(origin, origin.hidden, _KNOWN[_kind(self)] or dtype)
        # A compiled backward only has the state of the traced forward.
        layer = self if torch.compiler.is_compiling() else _as_now(self, {})

        def head(hidden: Tensor) -> Tensor:
            origin.versions.check()
            logits: Tensor = original(layer, hidden)
            return logits

        return deferred.through(head)

    return forward


def _as_now(value: Any, made: dict[int, Any]) -> Any:
    """Return a copy of a layer in its current state, with the same tensors.

    Its forward depends on training mode, on active and merged adapters, and on parameters that
    torch.func.functional_call replaces during the model's forward. The loss runs it later, and
    again in the backward, when the original layer may have changed.

    Args:
        value: a layer, or an attribute of one. Modules and containers are copied.
        made: copies of modules, by the ids of the originals.
    """
    if isinstance(value, nn.Module):
        if id(value) not in made:
            made[id(value)] = module = object.__new__(type(value))
            vars(module).update((k, _as_now(v, made)) for k, v in vars(value).items())
        return made[id(value)]
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_as_now(v, made) for v in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((k, _as_now(v, made)) for k, v in value.items())
    return set(value) if type(value) is set else value


def _kind(head: object) -> str:
    return f"{type(head).__module__}.{type(head).__qualname__}"


def _base_layer(head: object) -> Any:
    """Return the `torch.nn.Linear` in an output layer of PEFT, or the layer itself."""
    while not isinstance(head, nn.Linear):
        below = getattr(head, "original_module", None) or getattr(head, "base_layer", None)
        if below is None:
            break
        head = below
    return head


def patched_heads(model: Any, name: str) -> list[Any]:
    """Return the model's output layers, patched. They may differ from those of the last call.

    If PEFT trains copies of the layer, these are the copies and the layer without an adapter.

    Raises:
        TypeError: a layer is not supported.
        RuntimeError: a layer has hooks, or its forward was replaced.
    """
    head: Any = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    heads = [head]
    if isinstance(copies, nn.ModuleDict):
        heads = [head.original_module, *copies.values()]
    return [_patched(head, name) for head in heads]


def _patched(head: Any, name: str) -> Any:
    if isinstance(head, nn.Module) and "forward" in vars(head):
        raise replaced(f"the output layer of {name}")
    if not isinstance(head, PatchedHead):
        _check(head, name)
    plain = isinstance(head, nn.Linear) and not torch.compiler.is_compiling()
    if is_hooked(head) and not (plain and is_gathered(head)):
        raise RuntimeError(
            f"patch_causal_lm: the output layer of {name} has forward or backward hooks, which "
            "would see no logits. Expected none, or those of FSDP2 (fully_shard) or DeepSpeed on a "
            "torch.nn.Linear that is not compiled."
        )
    _check_variants(head, name)
    if not isinstance(head, PatchedHead):
        head.__class__ = PatchedHead.over(type(head))
        head._deferred_in = None  # torch.compile would compile twice if the first call added it
    return head


def _check(head: object, name: str) -> None:
    """Raise an error for a layer that may use more than a token's hidden state for its logits."""
    kind = _kind(head)
    if kind in _KNOWN and isinstance(_base_layer(head), nn.Linear):
        return
    remedy = ""
    if kind.startswith("peft."):
        remedy = (
            " PEFT's LoRA (DoRA too), AdaLoRA, VeRA, OFT, IA3 and trainable_token_indices on a "
            "torch.nn.Linear work too. Otherwise take the layer out of target_modules, or train it "
            "whole by modules_to_save."
        )
    if not isinstance(head, nn.Linear):
        raise TypeError(
            f"patch_causal_lm: the output layer of {name}, get_output_embeddings(), is {kind}. "
            f"Expected torch.nn.Linear.{remedy}"
        )
    if isinstance(head, Replaced):
        raise TypeError(
            f"patch_causal_lm: the output layer of {name} is checkpointed or in tiles. Expected a "
            "plain torch.nn.Linear. Patch the model first, or leave the layer out of "
            "apply_activation_checkpoint and tile."
        )
    if type(head).forward is not nn.Linear.forward:
        raise TypeError(
            f"patch_causal_lm: the output layer of {name} is {kind} with a forward of its own. "
            f"Expected that of torch.nn.Linear.{remedy}"
        )


def _check_variants(head: object, name: str) -> None:
    """Raise an error for unknown variants of LoRA. Adapters may be added after patching."""
    variants = getattr(head, "lora_variant", None)
    for adapter, variant in (variants or {}).items():
        kind = variant.__name__ if isinstance(variant, type) else type(variant).__name__
        if kind not in _VARIANTS:
            raise TypeError(
                f"patch_causal_lm: the adapter {adapter!r} of the output layer of {name} is "
                f"{kind}. Expected LoRA or DoRA. Take the layer out of target_modules, or train it "
                "whole by modules_to_save."
            )


def replaced(what: str) -> RuntimeError:
    """Return the error for a forward that was set on an instance."""
    return RuntimeError(
        f"patch_causal_lm: the forward of {what} was replaced on the instance. Expected that of "
        "its class. Patch the model before other libraries wrap it. A model that hooks spread over "
        "devices (device_map) cannot be patched."
    )
