"""Other code for the loss of a linear layer, of PyTorch and of installed packages.

Each peer is called as its documentation says, with its best settings. Peers that are missing, or
that cannot do the task, are named.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.nn import functional as F

from benchmarks._harness import skip

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # input, weight, target


class Unable(Exception):
    """A peer cannot do the task. The message says why."""


class Missing(Unable):
    """A peer is not installed."""


@dataclass(frozen=True)
class Task:
    """The loss to compute.

    Attributes:
        label: its name.
        tokens, vocab: rows of the input and of the weight.
        softcap: logits z become softcap * tanh(z / softcap).
        reduction: "mean" or "none".
    """

    label: str
    tokens: int
    vocab: int
    dtype: torch.dtype
    device: str
    softcap: float | None = None
    reduction: str = "mean"

    def plain(self, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        """Return the loss as usually written."""
        logits = F.linear(x, w)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return F.cross_entropy(logits, target, reduction=self.reduction)


def _compiled(task: Task) -> Loss:
    return torch.compile(task.plain, dynamic=False)


def _auto_chunker(task: Task) -> Loss:
    if not hasattr(inductor_config, "auto_chunker"):
        raise Missing("not in this torch")
    if task.reduction == "none":
        raise Unable("chunks scalar losses only")
    # Its default threshold skips heads that amplify their input less than 8 times.
    settings = {"enable": True, "amplify_ratio_threshold": 0, "num_chunk": 8}
    options = {f"auto_chunker.{key}": value for key, value in settings.items()}
    return torch.compile(task.plain, dynamic=False, options=options)


def _native(task: Task, **settings: Any) -> Loss:
    native = getattr(F, "linear_cross_entropy", None)
    if native is None or "options" not in inspect.signature(native).parameters:
        raise Missing("not in this torch")
    if task.softcap is not None:
        raise Unable("has no soft-cap")
    options = torch.nn.LinearCrossEntropyOptions(**settings)
    return lambda x, w, t: native(x, w, t, reduction=task.reduction, options=options)


def _native_default(task: Task) -> Loss:
    if task.device == "cpu":
        raise Missing("its defaults take 2 to 9 times eager's time on a CPU; the next is it too")
    return _native(task)


def _native_best(task: Task) -> Loss:
    """Return torch's chunked loss with larger chunks and sums in the inputs' dtype.

    Its defaults take 4 to 128 rows at once, and on a CPU sums in float32, which are slow.
    """
    rows = min(4096 if task.device == "cuda" else 512, task.tokens // 2)
    return _native(task, batch_chunk_size=rows, acc_dtype=task.dtype)


def _gpu_package(task: Task, module: str) -> Any:
    if task.device != "cuda":
        raise Missing("needs an NVIDIA GPU")
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package without its dependencies can fail in any way
        raise Missing(f"does not import ({type(error).__name__}: {error})") from error


def _liger(task: Task, **more: Any) -> Loss:
    package = _gpu_package(task, "liger_kernel.transformers.functional")
    call = package.liger_fused_linear_cross_entropy
    options = {"reduction": task.reduction, "softcap": task.softcap, **more}
    return lambda x, w, t: call(x, w, t, **options)


def _cce(task: Task, **more: Any) -> Loss:
    call = _gpu_package(task, "cut_cross_entropy").linear_cross_entropy
    options = {"reduction": task.reduction, "softcap": task.softcap, **more}
    return lambda x, w, t: call(x, w, t, **options)


def _quack(task: Task, scaled_exp: bool) -> Loss:
    call = _gpu_package(task, "quack.linear_cross_entropy").chunked_linear_cross_entropy
    if task.softcap is not None or task.reduction == "none" or task.vocab % 8:
        raise Unable("chunks plain means of vocabularies divisible by 8 only")
    options: dict[str, Any] = {"chunk_size": min(4096, task.tokens)}
    if "use_scaled_exp" in inspect.signature(call).parameters:
        options["use_scaled_exp"] = scaled_exp
    elif scaled_exp:
        raise Missing("not in this quack")
    return lambda x, w, t: call(x, w, t, **options)


PEERS: dict[str, Callable[[Task], Loss]] = {
    "eager": lambda task: task.plain,
    "torch.compile": _compiled,
    "Inductor auto_chunker, 8 chunks": _auto_chunker,
    "F.linear_cross_entropy": _native_default,
    "F.linear_cross_entropy at its best": _native_best,
    "Liger": _liger,
    "Liger, fp32 sums": lambda task: _liger(task, accum_dtype=torch.float32),
    "CCE": _cce,
    "CCE, unfiltered": lambda task: _cce(task, filter_eps=None),
    "quack": lambda task: _quack(task, scaled_exp=False),
    "quack, scaled exp": lambda task: _quack(task, scaled_exp=True),
}


def peers(task: Task) -> Iterator[tuple[str, Loss]]:
    """Yield the name and the loss of each peer that can do the task."""
    for name, make in PEERS.items():
        try:
            yield name, make(task)
        except Missing as why:
            skip(name, str(why))
        except Unable as why:
            skip(f"{task.label}: {name}", str(why))
