"""`--shard zero3`: one rank of DeepSpeed's ZeRO-3 with the default values of its config.

Layers gather parameters and reduce gradients with the code of FSDP2. The rest follows DeepSpeed:
parameters that stay whole, float32 copies, the reduce bucket, and gradients that always exist.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from storage_ops.cli import autocast, quantized
from storage_ops.cli.optimizers import Bitsandbytes, MuonAndAdamW
from storage_ops.quantities import readable

# Default values of DeepSpeed 0.19, in elements, by their names in `zero_optimization`.
PERSISTENT = 100_000  # stage3_param_persistence_threshold
REUSED = 1_000_000_000  # stage3_max_reuse_distance
BUCKET = 500_000_000  # reduce_bucket_size
SUB_GROUP = 1_000_000_000  # sub_group_size
_FLOATS = torch.float32, torch.bfloat16, torch.float16


class _InPlace(Bitsandbytes):
    """The state of DeepSpeed's FusedAdam, whose step takes no other memory."""

    moments, bits = 2, 32


class Partitioned(Optimizer):
    """The optimizer step of ZeRO-3 on this rank's partitions.

    The state is a flat float32 copy of the partitions, and the state of `inner` for this copy.
    Parameters in float32 need no copy. The step also creates float32 gradients, for one sub-group
    of partitions at a time.

    Attributes:
        inner: the optimizer of the copies.
        ranks: the number of ranks.
    """

    inner: Callable[[list[nn.Parameter]], Optimizer] = _InPlace
    ranks = 1

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the partitions of all parameters that have a gradient."""
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for members in _sub_groups(trained, self.ranks):
            state = self.state[members[0]]
            parts = [_partition(p, self.ranks) for p in members]
            flat = torch.cat([_partition(p.grad, self.ranks) for p in members])
            gradient = flat.float()
            del flat
            if parts[0].dtype == torch.float32:
                masters = [nn.Parameter(part) for part in parts]
                gradients = gradient.split([part.numel() for part in parts])
            else:
                state["master"] = nn.Parameter(torch.empty_like(gradient))
                masters, gradients = [state["master"]], (gradient,)
            for master, its_gradient in zip(masters, gradients, strict=True):
                master.grad = its_gradient
            optimizer = self.inner(masters)
            optimizer.step()
            state["inner"] = [dict(optimizer.state[master]) for master in masters]
            for master in masters:
                master.grad = None


def _sub_groups(parameters: list[Any], ranks: int) -> Iterator[list[Any]]:
    """Yield parameters of one dtype whose partitions are updated together."""
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        members: list[Any] = []
        elements = 0
        for p in (p for p in parameters if p.dtype == dtype):
            members.append(p)
            elements += math.ceil(p.numel() / ranks)
            if elements >= SUB_GROUP:
                yield members
                members, elements = [], 0
        if members:
            yield members


def _partition(t: Any, ranks: int) -> Tensor:
    """Return this rank's part of a tensor, flat: its shard, or a part of a whole tensor."""
    if hasattr(t, "to_local"):
        local: Tensor = t.to_local()
        return local.flatten()
    whole: Tensor = t.detach().flatten()
    return whole[: math.ceil(whole.numel() / ranks)]


def optimizer_for(args: argparse.Namespace, kind: type[Optimizer] | None) -> type[Optimizer] | None:
    """Return an optimizer that applies the class `kind` to partitions, as ZeRO-3 does.

    Raises:
        ValueError: the optimizer needs the shapes of matrices, which flat partitions do not have.
    """
    if kind is None:
        return None
    if issubclass(kind, MuonAndAdamW):
        raise ValueError(
            f"--optimizer is {args.optimizer}, but --shard zero3 updates flat partitions. Pass an "
            "optimizer that updates each element by itself, such as adamw, or pass --shard fsdp2."
        )
    plain = torch.optim.Adam, torch.optim.AdamW
    body = {"inner": _InPlace if kind in plain else kind, "ranks": args.gpus}
    return type(kind.__name__, (Partitioned,), body)


def check(args: argparse.Namespace) -> None:
    """Raise an error for options that `--shard zero3` does not support.

    Raises:
        ValueError: such an option is given.
    """
    if args.gpus == 1:
        raise ValueError("--shard is zero3 and --gpus is 1. Pass --gpus of 2 or more.")
    if args.tensor_parallel > 1:
        raise ValueError(
            f"--shard is zero3 and --tensor-parallel is {args.tensor_parallel}. Pass --shard fsdp2 "
            "with --tensor-parallel."
        )
    if args.autocast is not None:
        raise ValueError(
            f"--shard is zero3 and --autocast is {args.autocast}. Pass --dtype {args.autocast}: "
            "DeepSpeed trains 16-bit parameters, and keeps float32 copies of its partitions."
        )


def cast(model: nn.Module, args: argparse.Namespace) -> None:
    """Cast all parameters to one dtype, as DeepSpeed does, adapters and norms too.

    The dtype is --dtype for a transformers model, and that of the first parameter for a model of
    --model. Statistics of quantized weights keep their dtypes: they are no parameters in DeepSpeed.
    """
    statistics = {
        p
        for module in model.modules() if type(module).__module__.startswith(quantized.__name__)
        for p in module.parameters(recurse=False)
    }  # fmt: skip
    floats = [p for p in model.parameters() if p.dtype in _FLOATS and p not in statistics]
    is_own = args.model is not None
    dtype = floats[0].dtype if is_own else autocast.dtype_of_parameters(args, "bf16")
    for p in floats:
        p.data = p.data.to(dtype)


def _whole(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that stay whole because they are small."""
    return [p for p in model.parameters() if p.numel() <= PERSISTENT]


def shard(model: nn.Module, mesh: Any, layers: list[nn.Module]) -> None:
    """Shard a model as ZeRO-3 does, with the code of FSDP2.

    Each embedding and each layer is gathered by itself, and the rest together. Small parameters
    stay whole. The last layers of the forward stay gathered until their backward, within
    DeepSpeed's reuse distance.

    Args:
        model: the model.
        mesh: a device mesh of the ranks.
        layers: the modules that are gathered one by one, in the order of the forward.
    """
    from torch.distributed.fsdp import fully_shard

    whole = set(_whole(model))
    inside = {id(p) for layer in layers for p in layer.parameters()}
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    # The number of modules that have a weight. A tied weight is in the output layer too.
    counts: dict[int, int] = {}
    for m in model.modules():
        for p in m.parameters(recurse=False):
            counts[id(p)] = counts.get(id(p), 0) + 1
    alone = [m for m in embeddings if id(m.weight) not in inside and counts[id(m.weight)] == 1]
    groups = [*alone, *layers]
    grouped = {p for group in groups for p in group.parameters()}
    after = sum(p.numel() for p in model.parameters() if p not in grouped)
    for group in reversed(groups):
        # Between a group's forward and backward, the later parameters run twice.
        is_near = 2 * after < REUSED
        after += sum(p.numel() for p in group.parameters())
        if any(p not in whole for p in group.parameters()):
            fully_shard(group, mesh=mesh, reshard_after_forward=not is_near, ignored_params=whole)
    fully_shard(model, mesh=mesh, ignored_params=whole)


def add_buffers(model: nn.Module, ranks: int) -> None:
    """Add buffers for DeepSpeed's reduce bucket and for the partitions of whole parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    small = _whole(model)
    device = next(model.parameters()).device
    bucket = torch.empty(BUCKET, dtype=trained[0].dtype if trained else None, device=device)
    model.register_buffer("reduce_bucket", bucket, persistent=False)
    for dtype in dict.fromkeys(p.dtype for p in small):
        elements = sum(math.ceil(p.numel() / ranks) for p in small if p.dtype == dtype)
        name = f"partitions_{dtype}".replace(".", "_")
        partitions = torch.empty(elements, dtype=dtype, device=device)
        model.register_buffer(name, partitions, persistent=False)


def assumptions(model: nn.Module) -> list[str]:
    """Return the assumptions of an answer, for a model that `add_buffers` has changed."""
    small = sum(p.numel() for p in _whole(model))
    bucket: Any = model.get_buffer("reduce_bucket")
    return [
        "The options of zero_optimization have the default values of DeepSpeed 0.19. All "
        f"parameters are in {str(bucket.dtype).removeprefix('torch.')}.",
        f"stage3_param_persistence_threshold is {PERSISTENT:,}: parameters with at most so many "
        f"elements stay whole, {small:,} elements in all. Their gradients are counted whole, but "
        "DeepSpeed partitions them.",
        f"reduce_bucket_size is {BUCKET:,}: it takes {readable(bucket.nbytes)} of the buffers. "
        "DeepSpeed copies a full bucket to reduce it. Here only the copy of one layer is counted.",
        f"stage3_max_reuse_distance is {REUSED:,}: the last layers of the forward stay gathered "
        "until their backward, if fewer elements run in between.",
        "stage3_prefetch_bucket_size and stage3_max_live_parameters are not simulated. One layer "
        "is gathered ahead, as in FSDP2.",
        f"sub_group_size is {SUB_GROUP:,}: the optimizer creates float32 gradients for so many "
        "elements at a time.",
        "Gradients are partitioned, and exist during the whole step. The optimizer state has "
        "float32 copies of 16-bit parameters. Adam and AdamW are DeepSpeed's FusedAdam.",
        "Partitions have whole rows, as in FSDP2. The buffers of NCCL are not counted.",
    ]
