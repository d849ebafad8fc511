"""`--gpus`: simulate one rank of several, with torch's fake process group."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from storage_ops.simulate.will_it_fit import FitReport

_NOT_SPLIT = "embedding_rowwise"  # the style of embeddings, which stay whole here
_SHARDS = "fsdp2", "ddp", "zero3"


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare --gpus, --shard and --tensor-parallel."""
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        help="number of ranks, each with --batch sequences (default: 1)",
    )
    parser.add_argument(
        "--shard",
        choices=_SHARDS,
        default="fsdp2",
        help="how the ranks divide the model (default: fsdp2)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="K",
        help="number of ranks that split each layer (default: 1)",
    )


@contextlib.contextmanager
def one_of(args: argparse.Namespace, model: nn.Module) -> Iterator[None]:
    """Shard a model for one rank. The fake process group exists in the with block.

    Raises:
        ValueError: an option is wrong, or the model does not support tensor parallelism.
    """
    _check(args)
    if args.gpus == 1:
        yield
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from storage_ops.cli.reference import reference_of

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.gpus)
    try:
        shape = args.gpus // args.tensor_parallel, args.tensor_parallel
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        if shape[1] > 1:
            _parallelize(model, mesh["tensor"])
        if shape[0] > 1 and args.shard != "ddp":
            for sharded in filter(None, (model, reference_of(model))):
                _shard(sharded, mesh["data"], args)
        if args.shard == "zero3":
            from storage_ops.cli import zero3

            zero3.add_buffers(model, args.gpus)
        yield
    finally:
        dist.destroy_process_group()


def _check(args: argparse.Namespace) -> None:
    for name in ("gpus", "tensor_parallel"):
        value = getattr(args, name)
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}. Expected 1 or more.")
    if args.gpus % args.tensor_parallel:
        raise ValueError(
            f"--tensor-parallel is {args.tensor_parallel}. Expected a divisor of --gpus, "
            f"{args.gpus}."
        )
    if args.shard == "zero3":
        from storage_ops.cli import zero3

        zero3.check(args)
    plans = "actions" in args or args.gradient_checkpointing  # "actions" is an option of fit
    draws = args.plot is not None or getattr(args, "html", None) is not None
    splits_layers = args.tensor_parallel > 1
    if args.gpus > 1 and args.shard == "ddp" and (plans or draws or splits_layers):
        raise ValueError(
            "--shard is ddp, which fit, --gradient-checkpointing, --plot, --html and "
            "--tensor-parallel do not support. Pass --shard fsdp2. Under DDP, a rank takes what "
            "one GPU takes, and buckets as large as all gradients."
        )
    if splits_layers and plans:
        raise ValueError(
            f"--tensor-parallel is {args.tensor_parallel}, but fit and --gradient-checkpointing "
            "cannot plan layers with DTensors. Leave out --tensor-parallel."
        )


def _shard(model: nn.Module, mesh: Any, args: argparse.Namespace) -> None:
    """Shard each layer in a ModuleList or Sequential by itself, and all other parameters together.

    --shard decides between FSDP2 and ZeRO-3.
    """
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    outermost: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{other}.") for other in outermost)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and name and not is_inside:
            outermost.append(name)
    children = (layer for name in outermost for layer in model.get_submodule(name).children())
    layers = [layer for layer in children if any(True for _ in layer.parameters())]
    if args.shard == "zero3":
        from storage_ops.cli import zero3

        zero3.cast(model, args)
        zero3.shard(model, mesh, layers)
        return
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def optimizer_of(args: argparse.Namespace, model: nn.Module) -> type[Optimizer] | None:
    """Return the class of --optimizer, as --shard runs it on this rank.

    Raises:
        ValueError: there is no such optimizer, or it does not run on shards.
    """
    from storage_ops.cli.optimizers import optimizer_named

    kind = optimizer_named(args.optimizer, model)
    if args.shard != "zero3":
        return kind
    from storage_ops.cli import zero3

    return zero3.optimizer_for(args, kind)


def accumulates(args: argparse.Namespace) -> bool:
    """Return True if gradients exist when the step begins, as with --accumulate and ZeRO-3."""
    return bool(args.accumulate or args.shard == "zero3")


def assumptions(args: argparse.Namespace, model: nn.Module) -> list[str]:
    """Return sentences about what the answer assumes for --shard."""
    if args.shard != "zero3":
        return []
    from storage_ops.cli import zero3

    return zero3.assumptions(model)


def _parallelize(model: nn.Module, mesh: Any) -> None:
    """Split layers by the tensor-parallel plan of the model's transformers class.

    Raises:
        ValueError: the class has no plan, or its plan has a style that torch does not have.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    gathered = ColwiseParallel(output_layouts=Replicate())
    known = {
        "colwise": ColwiseParallel(), "rowwise": RowwiseParallel(), "colwise_rep": gathered,
        "colwise_gather_output": gathered,
    }  # fmt: skip
    styles: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    kind = type(model).__name__
    if not styles:
        raise ValueError(
            f"--tensor-parallel is {mesh.size()}, but {kind} has no plan for it. Expected a model "
            "of transformers with base_model_tp_plan."
        )
    unknown = sorted(set(styles.values()) - known.keys() - {_NOT_SPLIT})
    if unknown:
        raise ValueError(
            f"--tensor-parallel is {mesh.size()}, but base_model_tp_plan of {kind} has "
            f"{', '.join(unknown)}. Expected only {', '.join(known)}."
        )
    _check_heads(model, mesh.size())
    embeddings = _embedding_weights(model)
    plan = {
        name: known[style]
        for name, module in model.named_modules()
        for pattern, style in styles.items()
        if fnmatch.fnmatchcase(name, pattern) and not embeddings & set(module.parameters())
    }
    parallelize_module(model, mesh, plan)


def _embedding_weights(model: nn.Module) -> set[Tensor]:
    """Return the weights of embeddings, which are not split. Tied output layers share them.

    torch returns a whole gradient for a split embedding, and optimizers refuse such a gradient.
    """
    from torch import nn

    return {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}


def _check_heads(model: nn.Module, ranks: int) -> None:
    config: Any = model.config
    text = config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads", "vocab_size"):
        number = getattr(text, name, None)
        if number is not None and number % ranks:
            raise ValueError(
                f"--tensor-parallel is {ranks}. Expected a divisor of the config's {name}, "
                f"{number}."
            )


def bucket_bytes(args: argparse.Namespace, model: nn.Module) -> int:
    """Return the bytes of DDP's buckets, which hold a copy of all gradients. Without DDP: 0."""
    if args.shard != "ddp" or args.gpus == 1:
        return 0
    trained = (p for p in model.parameters() if p.requires_grad)
    return sum(p.numel() * p.itemsize for p in trained)


def with_buckets(report: FitReport, nbytes: int) -> FitReport:
    """Add DDP's buckets to a report. They exist during the whole step."""
    from storage_ops.measure.owners import BUCKETS

    if not nbytes:
        return report
    step = report.step
    owners = dict(sorted([*step.by_owner.items(), (BUCKETS, nbytes)], key=lambda item: -item[1]))
    step = dataclasses.replace(
        step, peak_bytes=step.peak_bytes + nbytes, kept_bytes=step.kept_bytes + nbytes,
        by_owner=owners,
    )  # fmt: skip
    peak = step.peak_bytes
    return dataclasses.replace(
        report, fits=peak <= report.budget_bytes, peak_bytes=peak, by_owner=owners, step=step
    )
