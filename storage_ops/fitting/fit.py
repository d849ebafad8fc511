"""Chooses what a model recomputes, so that a step fits into a budget at the least cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from storage_ops.fitting.actions import ActionName
from storage_ops.fitting.plan import FitPlan
from storage_ops.fitting.search import Search
from storage_ops.measure.calls import ONE_AT_A_TIME
from storage_ops.progress import showing
from storage_ops.quantities import parse_bytes

ModelT = TypeVar("ModelT", bound=nn.Module)


def fit(
    model: ModelT,
    batch: object,
    budget: int | float | str,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: type[Optimizer] | Optimizer | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[ActionName] | None = None,
    accumulate: bool = False,
    assume: float | Mapping[str, float] | None = None,
) -> FitPlan[ModelT]:
    """Choose for each layer what it recomputes, so that a training step fits at the least cost.

    Nothing is computed, and nothing of that size is allocated. Each distinct layer is simulated
    once per action on fake tensors, which its hooks see, too. The best plan is found from these
    numbers, and the whole step is simulated with it. The plan changes the model when it is applied.

    A layer is a module with submodules in a `ModuleList` or `Sequential`, or a similar module
    beside such a list. Actions are:

    - "keep" keeps the tensors that autograd keeps.
    - "output_discard" frees the outputs of norms and activations.
    - "selective" saves the results of some ops and recomputes the others. The ops are chosen for
      the layer by their bytes and their time.
    - "full" recomputes the whole layer.
    - "offload" saves results in host memory (`policies.offload`), at most as many as the link of
      the device can move while the layer runs. It must be asked for, because such a model cannot be
      compiled.
    - "tile" runs MLPs over slices of the sequence (`storage_ops.tile`). This lowers the peak
      further, and sums in another order. It must be asked for.
    - "linear_cross_entropy" chooses the `memory_budget` of the loss. It must be asked for. The loss
      is each `storage_ops.LinearCrossEntropyLoss` in the model or in `loss`, or a `loss` that
      `torch.compile(..., backend="storage_ops")` compiles. In a causal language model of
      transformers it computes the loss without the logits (`storage_ops.patch_causal_lm`):
      `outputs.logits` is None in training. If the model is patched already, only its
      `memory_budget` changes.

    Gradients equal those of eager mode bit for bit, except with "tile" and "linear_cross_entropy",
    where they are equal to rounding.

    For a compiled model, or one with compiled layers, the seconds are those of compiled code, in
    which ops of single elements and of rows take no time. A compiled layer is assumed to hold its
    saved tensors to the end of its backward. The peak is that of eager mode.

    Seconds are predicted from times that `calibrate` measured on the device. Without a calibration,
    they are predicted from a table of the rates of devices. The plan says which.

    Args:
        model: a model without checkpoints, in the mode and dtype in which it is trained; on the
            meta device or a real one.
        batch, loss, optimizer: as in `storage_ops.memory.simulate_step`. The model's output is
            freed once the loss exists. If a training loop keeps it in a variable, add its bytes.
        budget: bytes, or text such as "70GiB", for everything on the device during one whole step:
            parameters, gradients, optimizer state, batch, activations and temporaries.
        device: "cpu", "cuda" or the name of a GPU, such as "h100". None: the parameters' device,
            where the meta device means an H100.
        actions: names of actions that may be used, besides "keep". None: "output_discard",
            "selective" and "full".
        accumulate: whether gradients of earlier batches exist, as in `simulate_step`. Pass True if
            one step of the optimizer is for several batches.
        assume: as in `memory.estimate`, for sizes that depend on values, such as the choices of a
            router.

    Returns:
        A plan, which prints as a table.

    Raises:
        ValueError: nothing fits. The error names the smallest budget that does, and the owners of
            its bytes. Or an argument has a wrong value.
        TypeError: an argument has a wrong type.
        RuntimeError: the model has checkpointed or tiled layers, or layers of DTensors (tensor
            parallelism), or it differentiates through layers twice, or as in `memory.estimate`.

    Example:
        >>> model = torch.nn.Sequential(
        ...     *(torch.nn.TransformerEncoderLayer(64, 4, batch_first=True) for _ in range(4))
        ... )
        >>> plan = storage_ops.fit(model, torch.randn(8, 64, 64), budget="40MiB")
        >>> plan.peak_bytes <= 40 << 20
        True
        >>> model = plan.apply()
    """
    limit = parse_bytes(budget, "`budget`")
    with ONE_AT_A_TIME, showing("fit"):
        search = Search(model, batch, loss, optimizer, device, actions, accumulate, assume)
        return search.plan(limit)
