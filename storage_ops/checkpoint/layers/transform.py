"""Checkpoints the layers of a model that a config chooses."""

from __future__ import annotations

import difflib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from storage_ops._subclass import check_module
from storage_ops.checkpoint.discard import scope
from storage_ops.checkpoint.layers import tile, wrapper
from storage_ops.checkpoint.layers.config import ActivationCheckpointConfig
from storage_ops.checkpoint.layers.config_policy import class_of, qualified_name
from storage_ops.checkpoint.layers.report import checkpoint_report
from storage_ops.checkpoint.layers.wrapper import Checkpointing
from storage_ops.checkpoint.region import sharing

_log = logging.getLogger("storage_ops")


ModelT = TypeVar("ModelT", bound=nn.Module)
CheckFn = Callable[[str, nn.Module], bool]


def apply_activation_checkpoint(
    model: ModelT,
    cfg: ActivationCheckpointConfig | Mapping[str, Any],
    *,
    check_fn: CheckFn | None = None,
) -> ModelT:
    """Checkpoint the layers of a model that a config chooses, in place.

    Every such layer becomes a `CheckpointWrapper`: the same module with another class. The state
    dict, names, hooks and attributes of the model do not change. A matching layer inside another
    matching layer is part of the outer one. A layer in several places is checkpointed once.
    Applying the same config again changes nothing. DDP, FSDP2 and torch.compile may come before or
    after.

    A layer without parameters, buffers and other state, such as `nn.SiLU`, may be shared with other
    models. Then a copy replaces it in `model`, so that the other models do not change.

    The logger "storage_ops" reports the checkpointed layers at level INFO.
    `storage_ops.checkpoint_report(model, *inputs)` returns them, and the expected memory.

    Args:
        model: any module. If it matches itself, it is the layer.
        cfg: the layers, and how to checkpoint them: a config, or a mapping of its arguments.
        check_fn: called with the name and module of each layer that the config chooses, or of every
            module if the config names none. Modules for which it returns true are layers.

    Returns:
        The model.

    Raises:
        ValueError: the config names no layers, none matches (unless `allow_no_match`), or a layer
            of mode "output_discard" has no module around it.
        TypeError: `model` is no module, `cfg` no config, or the class of a layer cannot change.
        RuntimeError: a layer is already checkpointed differently. No error changes anything.

    Warns:
        UserWarning: one of several names matches no module.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(16, 2) for _ in "ab"))
        >>> cfg = storage_ops.ActivationCheckpointConfig(["TransformerEncoderLayer"])
        >>> model = storage_ops.apply_activation_checkpoint(model, cfg)
        >>> [isinstance(layer, storage_ops.CheckpointWrapper) for layer in model]
        [True, True]
    """
    check_module(model)
    if isinstance(cfg, Mapping):
        cfg = ActivationCheckpointConfig.from_dict(cfg)
    if not isinstance(cfg, ActivationCheckpointConfig):
        raise TypeError(f"`cfg` is {cfg!r}. Expected an ActivationCheckpointConfig.")
    if check_fn is not None and not callable(check_fn):
        raise TypeError(f"`check_fn` is {check_fn!r}. Expected a function of a name and a module.")
    if not (cfg.layer_classes or cfg.layer_names or cfg.allow_no_match or check_fn):
        raise ValueError(
            "The config names no layers. Set layer_classes, such as ['LlamaBlock'], layer_names, "
            "such as ['layers.*'], or pass a check_fn."
        )
    chosen = _chosen(model, cfg, check_fn)
    checkpointing = Checkpointing.of(cfg, model)
    discarding = checkpointing.mode == "output_discard"
    options = {
        "preserve_rng_state": checkpointing.options.preserve_rng_state,
        "determinism_check": checkpointing.options.determinism_check,
        "debug": checkpointing.options.debug,
    }
    for name, layer, holder in chosen:
        wrapper.check(layer, checkpointing)
        if not discarding:
            continue
        if holder is None:
            raise ValueError(
                f"`mode` is 'output_discard', but no module around the layer {name!r} uses its "
                "output. Expected a layer inside a module that does."
            )
        now = scope.options_of(holder)
        if now is not None and now != options:
            raise RuntimeError(
                f"{class_of(holder).__name__} already frees outputs of layers, with {now}. Pass "
                f"the same options ({options}), or call remove_activation_checkpoint(model) first."
            )
    changed: list[nn.Module] = []
    holders: list[nn.Module] = []
    separated: list[nn.Module] = []
    try:
        for _, layer, holder in chosen:
            if wrapper.checkpointing_of(layer) is None:
                if holder is not None and sharing.is_stateless(layer):
                    separated.append(holder)
                    layer = sharing.separate(layer, holder)
                wrapper.set_checkpointing(layer, checkpointing)
                changed.append(layer)
            if discarding and holder is not None and scope.options_of(holder) is None:
                scope.hold(holder, **options)
                holders.append(holder)
    except BaseException:  # also for an interrupt
        for layer in changed:
            wrapper.unset_checkpointing(layer)
        for holder in holders:
            scope.release(holder)
        for holder in separated:
            sharing.rejoin(holder)
        raise
    _log.info("%s", checkpoint_report(model))
    return model


def remove_activation_checkpoint(model: ModelT) -> ModelT:
    """Undo `apply_activation_checkpoint`, `CheckpointWrapper` and `tile` in all modules of a model.

    Every layer runs its plain forward again. It also gets its plain class back, unless another
    library, such as FSDP2, has changed the class since.

    Returns:
        The model.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> cfg = storage_ops.ActivationCheckpointConfig(layer_names=["0"])
        >>> model = storage_ops.apply_activation_checkpoint(model, cfg)
        >>> type(storage_ops.remove_activation_checkpoint(model)[0]) is torch.nn.Linear
        True
    """
    check_module(model)
    modules = list(model.modules())
    for module in modules:
        for _ in range(3):  # the order of the classes is unknown
            scope.release(module)
            wrapper.unset_checkpointing(module)
            tile.unset_tiling(module)
    for module in modules:
        sharing.rejoin(module)
    return model


Layer = tuple[str, nn.Module, nn.Module | None]


def _chosen(
    model: nn.Module, cfg: ActivationCheckpointConfig, check_fn: CheckFn | None
) -> list[Layer]:
    """Return the name, the layer and the module around it for each layer to checkpoint."""
    classes: Any = cfg.layer_classes or ()  # names, although classes may have been passed
    patterns = cfg.layer_names or ()
    names = {qualified_name(n): m for n, m in model.named_modules(remove_duplicate=False)}
    found_classes = {class_of(module).__name__ for module in names.values()}
    unmatched = [(c, found_classes) for c in classes if c not in found_classes]
    unmatched += [(p, set(names)) for p in patterns if not any(_matches(n, p) for n in names)]
    matching = list(_outermost(model, cfg, check_fn, "", None, set()))
    chosen = matching[cfg.every_k - 1 :: cfg.every_k]
    if cfg.allow_no_match:
        return chosen
    if not matching or unmatched:
        text = "; ".join(f"{name!r} matches no module{_near(name, of)}" for name, of in unmatched)
        if check_fn is not None and not matching and not text:
            text = f"`check_fn`, {check_fn!r}, is true of no module"
        if not matching:
            raise ValueError(
                f"No layer of {type(model).__name__} matches: {text}. Expected at least one match, "
                "or allow_no_match=True."
            )
        warnings.warn(f"apply_activation_checkpoint: {text}.", stacklevel=3)
    if not chosen:
        raise ValueError(
            f"`every_k` is {cfg.every_k}, but only {len(matching)} layers match. Pass at most that "
            "number, or allow_no_match=True."
        )
    return chosen


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) if name else pattern == ""


def _outermost(
    module: nn.Module,
    cfg: ActivationCheckpointConfig,
    check_fn: CheckFn | None,
    name: str,
    holder: nn.Module | None,
    seen: set[tuple[int, int]],
) -> Iterator[Layer]:
    """Yield each matching module once, and the module that runs the forward around it."""
    plain = qualified_name(name)
    classes: Any = cfg.layer_classes or ()
    matches = class_of(module).__name__ in classes
    matches = matches or any(_matches(plain, p) for p in cfg.layer_names or ())
    if check_fn is not None:
        matches = matches or not (cfg.layer_classes or cfg.layer_names)
        matches = matches and bool(check_fn(plain, module))
    if matches:
        # Each module around a shared stateless module gets its own copy.
        place = id(module), id(holder) if sharing.is_stateless(module) else 0
        if place not in seen:
            seen.add(place)
            yield plain, module, holder
        return
    inner = holder if isinstance(module, (nn.ModuleList, nn.ModuleDict)) else module
    for child_name, child in module._modules.items():  # named_children() hides second names
        if child is not None:
            below = f"{name}.{child_name}" if name else child_name
            yield from _outermost(child, cfg, check_fn, below, inner, seen)


def _near(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    return f" (did you mean {', '.join(map(repr, near))}?)" if near else ""
