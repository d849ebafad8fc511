"""The config that chooses the checkpointed layers of a model, and how they are checkpointed.

Users write it in a config file.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn
from typing_extensions import TypedDict

from storage_ops.checkpoint.region.options import CHECKS, DeterminismCheck
from storage_ops.checkpoint.selective.policies import NAMED, Policy, PolicyName
from storage_ops.foundation.op_names import resolve
from storage_ops.optional import required

Mode = Literal["full", "selective", "output_discard"]
Names = str | Collection[str]
MODES: tuple[Mode, ...] = get_args(Mode)
PolicyChoice = PolicyName | Policy | Sequence[PolicyName | Policy] | None
_OPS = ("ops_to_save", "ops_to_recompute")
_LISTS_OF_OPS = (*_OPS, "ops_to_offload")
_LISTS = (
    *_LISTS_OF_OPS,
    "layer_classes",
    "layer_names",
    "mm_shapes_to_save",
    "mm_shapes_to_recompute",
)
_SWITCHES = (
    "use_reentrant", "preserve_rng_state", "allow_no_match", "early_stop", "debug",
    "respect_saved_tensors_hooks",
)  # fmt: skip
# Options that make a checkpoint selective.
_RULES = (*_LISTS_OF_OPS, "mm_shapes_to_save", "mm_shapes_to_recompute", "policy")


class LayerOptions(TypedDict, total=False):
    """Arguments of `ActivationCheckpointConfig` that do not choose layers."""

    use_reentrant: bool
    ops_to_save: Sequence[Any] | None
    mode: Mode | None
    ops_to_recompute: Sequence[Any] | None
    mm_shapes_to_save: Sequence[str] | None
    mm_shapes_to_recompute: Sequence[str] | None
    policy: PolicyChoice
    preserve_rng_state: bool
    determinism_check: DeterminismCheck
    early_stop: bool
    debug: bool
    respect_saved_tensors_hooks: bool
    ops_to_offload: Sequence[Any] | None


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """The layers that `apply_activation_checkpoint` checkpoints, and how.

    A module is checkpointed if its class or its name matches and no module around it does. The
    tensors that it saves for backward are then recomputed, except those that the rules below save.

    Args:
        layer_classes: classes of modules, or their names as in `type(module).__name__`, such as
            "LlamaBlock". A class is stored as its name, and its subclasses do not match. This and
            every other list may also be a set, or a single name, class or op.
        use_reentrant: use the reentrant checkpoint of torch. It allows no rules, and an input of
            the layer must require grad. torch.compile always uses the other kind.
        ops_to_save: ops whose results are saved: "aten.mm" for all overloads, "aten.mm.default",
            "torch.ops.aten.mm.default", a custom op, or the op itself.
        ops_to_offload: ops, named in the same ways, whose results are saved in host memory, unless
            other rules save them (`storage_ops.policies.offload`).
        layer_names: patterns (fnmatch; `*` also matches dots) of names in `named_modules()`, such
            as "layers.*.mlp". The model itself has the name "", which only "" matches.
        mode: "full" saves nothing inside a layer, and "selective" saves what the rules select.
            "output_discard" saves nothing either, and also frees the layer's output when the
            forward of the module around it ends. No code may read it after that. The default is
            "selective" if there are rules, else "full".
        every_k: of the matching layers, in the order of `named_modules()`, take the k-th, the 2k-th
            and so on.
        ops_to_recompute: ops whose results are recomputed, whatever other rules say. Without
            another rule, all other results are saved.
        mm_shapes_to_save: patterns of names of linear layers. Saves each matrix product (mm, addmm)
            whose right factor has the shape of the transposed weight of such a layer.
        mm_shapes_to_recompute: the same for products that are recomputed, whatever other rules say.
        policy: "matmuls", "attention", "every_other_mm" or "communication", a policy function, or
            several of these, each of which saves its part (see `storage_ops.policies`).
        preserve_rng_state: recompute with the random numbers of the forward.
        determinism_check: "default" compares shape, dtype and device of the recomputed tensors with
            those that the forward saved. It also checks that parameters were not modified in place
            in between. "checksum" also compares the bytes. "none" compares nothing.
        early_stop: end a recompute at the last tensor that backward needs. False runs it to the
            end. It has no effect on reentrant checkpoints, discarded outputs, and regions that
            communicate with other ranks.
        debug: if a recompute differs from the forward, the error names the first op that differs
            and its line, which takes time per op. For mode "output_discard", see
            `OutputDiscardCheckpoint`.
        respect_saved_tensors_hooks: pass the tensors that rules save to the saved-tensor hooks
            around the layer, such as `torch.autograd.graph.save_on_cpu`, like all others. This
            needs rules.
        allow_no_match: leave a model without a matching layer unchanged. Otherwise that is an
            error.

    Raises:
        TypeError: a value of the wrong type. ValueError: an unknown op or choice, or rules that
            contradict each other or the mode.

    Example:
        >>> cfg = storage_ops.ActivationCheckpointConfig(
        ...     layer_classes=["LlamaBlock"], use_reentrant=False, ops_to_save=["aten.mm"]
        ... )
        >>> cfg.effective_mode
        'selective'
    """

    layer_classes: Names | type[nn.Module] | Collection[str | type[nn.Module]] | None = None
    use_reentrant: bool = False
    ops_to_save: Any = None
    layer_names: Names | None = None
    mode: Mode | None = None
    every_k: int = 1
    ops_to_recompute: Any = None
    mm_shapes_to_save: Names | None = None
    mm_shapes_to_recompute: Names | None = None
    policy: PolicyChoice = None
    preserve_rng_state: bool = True
    determinism_check: DeterminismCheck = "default"
    allow_no_match: bool = False
    early_stop: bool = True
    debug: bool = False
    respect_saved_tensors_hooks: bool = False
    ops_to_offload: Any = None

    def __post_init__(self) -> None:
        for name in _LISTS:
            object.__setattr__(self, name, _list_of(name, getattr(self, name)))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` is {getattr(self, name)!r}. Expected True or False.")
        if isinstance(self.every_k, bool) or not isinstance(self.every_k, int) or self.every_k < 1:
            raise ValueError(
                f"`every_k` is {self.every_k!r}. Expected a whole number of at least 1."
            )
        _check_choice("mode", self.mode, (None, *MODES))
        _check_choice("determinism_check", self.determinism_check, CHECKS)
        self.policies()
        saved, recomputed = (resolve(getattr(self, name) or (), name) for name in _OPS)
        resolve(self.ops_to_offload or (), "ops_to_offload")
        self._check_rules(saved, recomputed)

    def _check_rules(self, saved: frozenset[str], recomputed: frozenset[str]) -> None:
        rules = [name for name in _RULES if getattr(self, name)]
        if self.mode == "selective" and not rules:
            raise ValueError(
                "`mode` is 'selective', but no option says what to save. Set one of "
                f"{', '.join(_RULES)}."
            )
        if self.mode in ("full", "output_discard") and rules:
            raise ValueError(
                f"`mode` is {self.mode!r}, which saves nothing, but {' and '.join(rules)} is "
                "given. Set `mode` to 'selective'."
            )
        if self.use_reentrant and self.effective_mode != "full":
            raise ValueError(
                f"`use_reentrant` is True with mode {self.effective_mode!r}, but a reentrant "
                "checkpoint cannot save anything. Set use_reentrant=False."
            )
        if self.determinism_check == "checksum" and self.use_reentrant:
            raise ValueError(
                "`determinism_check` is 'checksum' and `use_reentrant` is True, but a reentrant "
                "checkpoint compares nothing. Set use_reentrant=False."
            )
        if self.respect_saved_tensors_hooks and self.effective_mode != "selective":
            raise ValueError(
                f"`respect_saved_tensors_hooks` is True with mode {self.effective_mode!r}, which "
                "saves nothing. Set `mode` to 'selective'."
            )
        others = [name for name in rules if name not in (*_OPS, "mm_shapes_to_recompute")]
        if saved and not others and saved <= recomputed:
            raise ValueError(
                "`ops_to_recompute` has every op of `ops_to_save`, "
                f"{list(self.ops_to_save or ())}. Expected a policy that saves the result of at "
                "least one op."
            )

    @property
    def effective_mode(self) -> Mode:
        """Return the mode. Without `mode`, the rules decide."""
        if self.mode is not None:
            return self.mode
        return "selective" if any(getattr(self, name) for name in _RULES) else "full"

    def policies(self) -> list[Policy]:
        """Return the policy functions that `policy` names."""
        own_policy = self.policy
        if own_policy is None:
            return []
        items = (
            own_policy
            if isinstance(own_policy, Sequence) and not isinstance(own_policy, str)
            else [own_policy]
        )
        return [named_policy(item) for item in items]

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ActivationCheckpointConfig:
        """Return a config from a mapping of its arguments.

        Raises:
            ValueError: an unknown key. The error names the most similar valid one. TypeError: not a
                mapping.

        Example:
            >>> storage_ops.ActivationCheckpointConfig.from_dict({"layer_clases": ["Block"]})
            Traceback (most recent call last):
            ValueError: The config has the unknown key 'layer_clases'. Did you mean ...
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"The config is {values!r}. Expected a mapping of names to values.")
        known = [f.name for f in dataclasses.fields(ActivationCheckpointConfig)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
                raise ValueError(
                    f"The config has the unknown key {key!r}. Did you mean {near[0]!r}?"
                )
        return ActivationCheckpointConfig(**values)

    @staticmethod
    def from_json(source: str | os.PathLike[str]) -> ActivationCheckpointConfig:
        """Return a config from JSON.

        Args:
            source: the text, or a file: a path object, or a name that ends in ".json".

        Raises:
            ValueError: not JSON, or as `from_dict`. OSError: the file cannot be read.

        Example:
            >>> text = '{"layer_classes": ["Block"], "policy": "matmuls"}'
            >>> storage_ops.ActivationCheckpointConfig.from_json(text).policy
            'matmuls'
        """
        try:
            values = json.loads(_text_of(source, (".json",)))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"The config is not JSON: {error}. Expected an object of names and values."
            ) from error
        return ActivationCheckpointConfig.from_dict(values)

    @staticmethod
    def from_yaml(source: str | os.PathLike[str]) -> ActivationCheckpointConfig:
        """Return a config from YAML. This needs PyYAML.

        Args:
            source: the text, or a file: a path object, or a name that ends in ".yaml" or ".yml".

        Raises:
            ValueError: not YAML, or as `from_dict`. OSError: the file cannot be read.
            ImportError: PyYAML is not installed.

        Example:
            >>> text = "layer_names: ['layers.*']"
            >>> storage_ops.ActivationCheckpointConfig.from_yaml(text).layer_names
            ['layers.*']
        """
        yaml = required("yaml", "from_yaml")
        try:
            values = yaml.safe_load(_text_of(source, (".yaml", ".yml")))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ValueError(
                f"The config is not YAML. Expected a mapping of names to values. {error}"
            ) from error
        return ActivationCheckpointConfig.from_dict(values)


def named_policy(policy: object) -> Policy:
    """Return the policy function of a name. A function is returned unchanged.

    Raises:
        ValueError: there is no policy of this name. TypeError: neither a name nor a function.
    """
    if isinstance(policy, str):
        _check_choice("policy", policy, tuple(NAMED))
        return NAMED[policy]
    if not callable(policy):
        raise TypeError(
            f"`policy` is {policy!r}, a {type(policy).__name__}. Expected one of "
            f"{', '.join(NAMED)}, or a function policy(ctx, op, *args, **kwargs)."
        )
    return policy


def _check_choice(name: str, value: object, choices: Iterable[Any]) -> None:
    choices = tuple(choices)
    if (value is None or isinstance(value, str)) and value in choices:
        return
    names = [c for c in choices if isinstance(c, str)]
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"`{name}` is {value!r}. Expected one of {', '.join(names)}.{hint}")


def _list_of(name: str, value: object) -> Any:
    """Return the names or ops of a value as a list, or as the given tuple.

    Raises:
        TypeError: the value has other items.
    """
    if value is None:
        return None
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)  # a set has no order
    elif isinstance(value, (str, type, nn.Module)) or not isinstance(value, Sequence):
        value = [value]
    items = [_name_of(name, item) for item in value]
    return tuple(items) if isinstance(value, tuple) else items


def _name_of(name: str, item: object) -> Any:
    """Return an item of a list in its stored form.

    A class is stored as its name, so that configs can be written to files.
    """
    if isinstance(item, str) or name in _LISTS_OF_OPS:
        return item
    wants = "names"
    if name == "layer_classes":
        if isinstance(item, type) and issubclass(item, nn.Module):
            return item.__name__
        wants = "subclasses of torch.nn.Module, or their names"
        if isinstance(item, nn.Module):
            wants += f", such as {type(item).__name__!r}"
    elif isinstance(item, type):
        wants += "; layer_classes takes classes"
    raise TypeError(f"`{name}` contains {item!r}, a {type(item).__name__}. Expected {wants}.")


def _text_of(source: str | os.PathLike[str], suffixes: tuple[str, ...]) -> str:
    if isinstance(source, os.PathLike) or source.strip().endswith(suffixes):
        return Path(source).read_text()
    return source
