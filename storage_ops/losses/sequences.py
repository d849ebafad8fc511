"""Log-probabilities of tokens from hidden states, and their sums over sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from storage_ops.loss import checks
from storage_ops.loss.api import linear_cross_entropy
from storage_ops.loss.call import (
    LEAST,
    MODERATE,
    MOST,
    Result,
    count_of,
    has_64_bits,
    is_integer,
    is_moderate,
    is_number,
    is_one_of,
)
from storage_ops.loss.checks import INDICES, check_head, class_indices

IGNORED = -100

# Options of linear_cross_entropy that losses of log-probabilities set themselves.
_OF_RESULTS = (
    "returns", "reduction", "token_weight", "accumulate_into", "selected_ids", "top_k",
)  # fmt: skip
# Options without a meaning for log-probabilities.
_OF_THE_LOSS = ("weight", "label_smoothing", "z_loss", "divisor")


@dataclass
class Scored:
    """Log-probabilities and further results of the tokens of some sequences.

    Attributes:
        logps: log-probabilities of the targets, float32 (float64 for float64); 0 where ignored.
        mask: True for tokens of a completion, in the same shape.
        entropy: the entropy of each token's distribution, differentiable, or None.
        second: log-probabilities of `second_target` of `score`, like logps. None without one.
        second_mask: True for tokens with a second target, or None.
        of_sequence: the sequence of each token (N,) if packed. None: each row is a sequence.
        sequences: the number of sequences.
    """

    logps: Tensor
    mask: Tensor
    entropy: Tensor | None
    of_sequence: Tensor | None
    sequences: int
    second: Tensor | None = None
    second_mask: Tensor | None = None

    def per_sequence(self, values: Tensor) -> Tensor:
        """Return the sum of values of tokens over each sequence, (S,)."""
        if self.of_sequence is None:
            return values.sum(-1)
        # The last element is for tokens after all sequences.
        total = values.new_zeros(self.sequences + 1)
        return total.index_add(0, self.of_sequence, values.reshape(-1))[:-1]

    def per_token(self, values: Tensor) -> Tensor:
        """Return each token's value of its sequence, from (S,) values. Padding gets 0."""
        if self.of_sequence is None:
            return values.unsqueeze(-1).expand(self.logps.shape)
        padded = torch.cat([values, values.new_zeros(1)])
        return padded[self.of_sequence].view(self.logps.shape)

    @property
    def counts(self) -> Tensor:
        """Return the number of tokens of each completion, (S,), at least 1 for divisions."""
        return self.per_sequence(self.mask.to(self.logps.dtype)).clamp_min(1)


def wrong(loss: str, kind: type[Exception], argument: str, found: object, rule: str) -> Exception:
    """Return an error that names a loss, its argument, the value and the expected one."""
    return checks.wrong(kind, argument, found, rule, f"losses.{loss}")


def check_choice(loss: str, argument: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise a ValueError unless a text is one of the allowed ones."""
    if not is_one_of(value, allowed):
        raise wrong(loss, ValueError, f"{argument} is", repr(value), f"one of {allowed}")


def check_flag(loss: str, argument: str, value: Any) -> None:
    """Raise a TypeError unless a value is a bool."""
    if not isinstance(value, bool):
        raise wrong(loss, TypeError, f"{argument} is", repr(value), "True or False")


def check_number(loss: str, argument: str, value: Any) -> None:
    """Raise a ValueError unless a value is a number whose size is moderate."""
    if not is_number(value) or not is_moderate(value):
        raise wrong(loss, ValueError, f"{argument} is", repr(value), MODERATE)


def check_range(loss: str, argument: str, value: Any, low: float = LEAST) -> None:
    """Raise a ValueError unless a value is a number of at least `low`, and not too large."""
    if not is_number(value) or not low <= value <= MOST:
        rule = f"a number from {low} to {MOST:.0e}"
        raise wrong(loss, ValueError, f"{argument} is", repr(value), rule)


def check_smoothing(loss: str, label_smoothing: Any) -> None:
    """Raise a ValueError unless a value is a share of wrong labels, less than half of them."""
    if not is_number(label_smoothing) or not 0 <= label_smoothing < 0.5:
        rule = "a number from 0 to below 0.5"
        raise wrong(loss, ValueError, "label_smoothing is", repr(label_smoothing), rule)


def score(
    loss: str,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    shift: bool = False,
    ignore_index: int = IGNORED,
    with_entropy: bool = False,
    second_target: Tensor | None = None,
    **options: Any,
) -> Scored:
    """Return log-probabilities of the targets. `options` are those of `linear_cross_entropy`.

    Each token may have a second target, or ignore_index. It is scored from the same logits.
    """
    for name in (*_OF_RESULTS, *_OF_THE_LOSS):
        if name in options:
            raise wrong(
                loss, TypeError, name, "is given", "only options that the loss does not set itself"
            )
    check_indices(loss, "target", target)
    target = scored_target = separated(loss, target, cu_seqlens, shift, ignore_index)
    names: list[Result] = ["nll"]
    if with_entropy:
        names.append("entropy")
    if second_target is not None:
        second_target = separated(loss, second_target, cu_seqlens, shift, ignore_index)
        scored_target = torch.where(second_target == ignore_index, target, second_target)
        options["selected_ids"] = target.unsqueeze(-1)
        names.append("selected")
    scored = linear_cross_entropy(
        input, linear_weight, scored_target, shift=shift, ignore_index=ignore_index, returns=names,
        **options,
    )  # fmt: skip
    values = map(whole, scored if len(names) > 1 else (scored,))
    results = dict(zip(names, values, strict=True))
    logps, mask = -results["nll"], _predicted(target, shift) != ignore_index
    second = second_mask = None
    if second_target is not None:
        second_mask = _predicted(second_target, shift) != ignore_index
        second, logps = logps, results["selected"].squeeze(-1)
    owners, sequences = None, count_of(logps.shape[:-1])
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].to(torch.int64) - int(shift)  # ends of the scored tokens
        places = torch.arange(logps.numel(), device=logps.device)
        owners, sequences = torch.searchsorted(ends, places, right=True), ends.shape[0]
    elif logps.dim() != 2:
        rule = "(S, T) for S sequences, or cu_seqlens"
        raise wrong(loss, ValueError, "target has shape", tuple(target.shape), rule)
    return Scored(logps, mask, results.get("entropy"), owners, sequences, second, second_mask)


def _predicted(target: Tensor, shift: bool) -> Tensor:
    return target[..., 1:] if shift else target


def whole(t: Tensor) -> Tensor:
    """Return the plain tensor of all ranks if `t` is a DTensor, and any other tensor unchanged.

    Losses compute with values of all tokens, such as masks, that are plain on every rank.
    """
    return t.full_tensor() if hasattr(t, "device_mesh") else t  # type: ignore[attr-defined]


def separated(
    loss: str, target: Tensor, cu_seqlens: Tensor | None, shift: bool, ignore_index: int = IGNORED
) -> Tensor:
    """Return the targets. Padding, and tokens that another sequence would predict, are ignored.

    Targets that are a DTensor become plain.

    Raises:
        TypeError, ValueError: cu_seqlens are no bounds of the packed tokens, target is no tensor,
            or shift is not True or False.
    """
    check_tensor(loss, "target", target)
    if not is_integer(ignore_index):
        raise wrong(loss, TypeError, "ignore_index is", repr(ignore_index), "an integer")
    if not has_64_bits(ignore_index):
        raise wrong(loss, ValueError, "ignore_index is", ignore_index, "an integer of 64 bits")
    if not isinstance(shift, int) or shift not in (0, 1):
        raise wrong(loss, TypeError, "shift is", repr(shift), "True or False")
    target = whole(class_indices(target))
    if cu_seqlens is None:
        return target
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
        raise wrong(loss, TypeError, "cu_seqlens is", kind, "an int32 or int64 tensor")
    count = target.shape[-1] if target.dim() else 0
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        rule = "(S + 1,) bounds of S sequences"
        raise wrong(loss, ValueError, "cu_seqlens has shape", tuple(cu_seqlens.shape), rule)
    if target.dim() not in (1, 2) or target.numel() != count:
        rule = "(N,) or (1, N) with cu_seqlens"
        raise wrong(loss, ValueError, "target has shape", tuple(target.shape), rule)
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > count:
            rule = f"bounds from 0 up to {count} at most, in order"
            raise wrong(loss, ValueError, "cu_seqlens is", bounds, rule)
    places = torch.arange(count, device=target.device)
    drop = places >= cu_seqlens[-1]
    if shift:
        drop = drop | torch.isin(places, cu_seqlens)
    return target.masked_fill(drop.view(target.shape), ignore_index)


def reference_logps(
    loss: str,
    logps: Tensor | None,
    ref_input: Tensor | None,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
    target: Tensor,
    summed: bool,
    **options: Any,
) -> Tensor | None:
    """Return the frozen reference's log-probabilities: of sequences if `summed`, else of tokens."""
    if (ref_input is None) != (ref_weight is None):
        name = "ref_input" if ref_input is None else "ref_weight"
        raise wrong(loss, TypeError, f"{name} is", "None", "ref_input and ref_weight, or neither")
    if ref_input is None or ref_weight is None:
        if ref_bias is not None:
            raise wrong(
                loss, TypeError, "ref_bias is", "given without ref_input", "both or neither of them"
            )
        if logps is None:
            return None
        check_tensor(loss, "ref_logps", logps)
        return logps.detach()
    if logps is not None:
        raise wrong(
            loss, ValueError, "ref_logps", "is given together with ref_input", "one of them"
        )
    _check_reference(loss, ref_input, ref_weight, ref_bias)
    options.pop("linear_bias", None)
    with torch.no_grad():
        scored = score(loss, ref_input, ref_weight, target, linear_bias=ref_bias, **options)
        return scored.per_sequence(scored.logps) if summed else scored.logps


def _check_reference(
    loss: str, ref_input: Tensor, ref_weight: Tensor, ref_bias: Tensor | None
) -> None:
    """Raise the errors of `score` with the names of the reference's arguments."""
    reference = {"ref_input": ref_input, "ref_weight": ref_weight}
    for name, t in reference.items():
        check_tensor(loss, name, t)
    check_head(f"losses.{loss}", reference)
    if ref_bias is not None:
        check_tensor(loss, "ref_bias", ref_bias)
        if ref_bias.shape != ref_weight.shape[:1]:
            bias_shape, rule = tuple(ref_bias.shape), str(tuple(ref_weight.shape[:1]))
            raise wrong(loss, ValueError, "ref_bias has shape", bias_shape, rule)


def check_values(
    loss: str,
    argument: str,
    value: Tensor | None,
    shape: tuple[int, ...],
    like: Tensor | None,
    judgements: bool = False,
) -> None:
    """Raise a TypeError or ValueError unless a tensor has numbers (or bools) and this shape.

    If there is a tensor `like`, the tensor must be on its device.
    """
    if value is None:
        return
    check_tensor(loss, argument, value)
    if (value.dtype == torch.bool) != judgements:
        rule = "a bool tensor" if judgements else "a tensor of numbers"
        raise wrong(loss, TypeError, f"{argument} is", value.dtype, rule)
    if tuple(value.shape) != shape:
        raise wrong(loss, ValueError, f"{argument} has shape", tuple(value.shape), str(shape))
    if like is not None and value.device != like.device:
        raise wrong(loss, ValueError, f"{argument} is on", value.device, str(like.device))


def check_indices(loss: str, argument: str, value: object) -> None:
    """Raise a TypeError unless a value is a tensor of class indices."""
    check_tensor(loss, argument, value)
    assert isinstance(value, Tensor)
    if value.dtype not in INDICES:
        rule = "int64, int32 or uint8 class indices"
        raise wrong(loss, TypeError, f"{argument} is", value.dtype, rule)


def check_returns(loss: str, return_logps: Any, return_metrics: Any) -> None:
    """Raise a TypeError or ValueError unless at most one of both options is True."""
    for name, value in (("return_logps", return_logps), ("return_metrics", return_metrics)):
        check_flag(loss, name, value)
    if return_logps and return_metrics:
        rule = "False with return_metrics, which has them as 'logps'"
        raise wrong(loss, ValueError, "return_logps is", return_logps, rule)


def check_tensor(loss: str, argument: str, value: object) -> None:
    """Raise a TypeError for a value that is not a tensor."""
    if not isinstance(value, Tensor):
        raise wrong(loss, TypeError, f"{argument} is", f"a {type(value).__name__}", "a tensor")
