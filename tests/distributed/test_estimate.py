"""The estimated memory of one rank without the others equals the memory it uses among them."""

import contextlib
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import storage_ops as so
from storage_ops import memory
from storage_ops.simulate import step as steps
from storage_ops.simulate.layers import replay_cache
from storage_ops.simulate.values.wrappers import inside

from ..ranks import run_in_processes, run_on_ranks

pytestmark = [
    pytest.mark.in_turn,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed"),
]
WIDTH, LAYERS, VOCAB = 64, 3, 512
TOKENS = (4, 32)
ROUNDS = 40


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def fsdp(mesh, model=None, **how):
    model = model or Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def fsdp_mixed(mesh):
    # 16-bit products on a CPU use memory that the estimate does not include.
    half = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    return fsdp(mesh, Model().double(), mp_policy=half)


def fsdp_checkpointed(mesh, mode="full"):
    model = Model()
    names = ["layers.*"] if mode == "full" else ["layers.*.up"]
    so.apply_activation_checkpoint(model, {"layer_names": names, "mode": mode})
    return fsdp(mesh, model)


def fsdp_and_tp(mesh):
    return fsdp(mesh["dp"], tp(mesh["tp"]))


def tp(mesh):
    model = Model()
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()}
    for i in range(LAYERS):
        plan |= {f"layers.{i}.up": ColwiseParallel(), f"layers.{i}.down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def sequence(mesh):
    shard = Shard(1)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=shard),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=shard, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for i in range(LAYERS):
        plan |= {
            f"layers.{i}.norm": SequenceParallel(),
            f"layers.{i}.up": ColwiseParallel(input_layouts=shard),
            f"layers.{i}.down": RowwiseParallel(output_layouts=shard),
        }
    return parallelize_module(Model(), mesh, plan)


class Sliced(Model):
    """The model with the loss of a sliced vocabulary as its head."""

    def __init__(self, mesh, budget=None):
        super().__init__()
        ranks = mesh.size()
        self.head = so.LinearCrossEntropyLoss(
            WIDTH, VOCAB // ranks, process_group=mesh.get_group(), memory_budget=budget
        )

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x), ids)


def ddp(mesh, **how):
    return DistributedDataParallel(Model(), process_group=mesh.get_group(), **how)


PLANS = {
    "fsdp": fsdp,
    "fsdp, no reshard after forward": lambda mesh: fsdp(mesh, reshard_after_forward=False),
    "fsdp, mixed": fsdp_mixed,
    "fsdp, checkpointed": fsdp_checkpointed,
    "fsdp, discarded": lambda mesh: fsdp_checkpointed(mesh, "output_discard"),
    "tp": tp,
    "sequence": sequence,
    "sliced": Sliced,
    "sliced, chunks": lambda mesh: Sliced(mesh, 150_000),
    "ddp": ddp,
    "ddp, views": lambda mesh: ddp(mesh, gradient_as_bucket_view=True, bucket_cap_mb=0.1),
    "ddp, unused": lambda mesh: ddp(mesh, find_unused_parameters=True),
    "ddp, static": lambda mesh: ddp(mesh, static_graph=True),
}
MESHES = {"fsdp x tp": fsdp_and_tp, "hsdp": fsdp}


def loss(logits):
    if logits.dim() == 0:
        return logits
    flat = logits.flatten(0, 1)
    return F.cross_entropy(flat, torch.zeros(flat.shape[0], dtype=torch.int64))


def trained(model, ids, optimizer, rounds, measure=contextlib.nullcontext):
    """Train. Return the loss's and `measure`'s results of each round."""
    for _ in range(rounds):
        optimizer.zero_grad()
        with measure() as m:
            loss(model(ids)).backward()
            optimizer.step()
        yield m


def measured(model, ids, optimizer, enough):
    """Return the bytes that a later step uses above the bytes before it, and the number of steps.

    A gloo thread may hold a tensor last, and its frees are not counted. So steps repeat until the
    least of them is at most `enough` on every rank.
    """
    peaks = []
    for m in trained(model, ids, optimizer, ROUNDS, memory.measure):
        peaks.append(m.peak_bytes)
        done = torch.tensor(min(peaks[1:], default=math.inf) <= enough, dtype=torch.int)
        dist.all_reduce(done, dist.ReduceOp.MIN)
        if done:
            break
    return min(peaks[1:]), len(peaks)


def compare(way, build, mesh):
    torch.manual_seed(0)
    model = build(mesh)
    ids = torch.randint(VOCAB, TOKENS)
    optimizer = torch.optim.AdamW(model.parameters())
    context = loss_parallel if way == "sequence" else contextlib.nullcontext
    with context():
        step = memory.simulate_step(
            model, ids, loss=loss, optimizer=torch.optim.AdamW, device="cpu"
        )
        estimated = step.peak_bytes - step.timeline[0].nbytes
        peak, rounds = measured(model, ids, optimizer, 1.01 * estimated)
        torch.manual_seed(0)
        other = build(mesh)  # without a simulation
        list(trained(other, ids, torch.optim.AdamW(other.parameters()), rounds))
    for p, right in zip(model.parameters(), other.parameters(), strict=True):
        assert all(map(torch.equal, inside(p.detach()), inside(right.detach())))
    assert list(model.state_dict()) == list(other.state_dict())
    assert abs(estimated - peak) <= 0.01 * peak, (way, estimated, peak)


def every_way(rank):
    mesh = init_device_mesh("cpu", (2,))
    for way, build in PLANS.items():
        compare(way, build, mesh)


def every_mesh(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for way, build in MESHES.items():
        compare(way, build, mesh)


def test_the_estimated_peak_of_a_rank_is_within_a_percent():
    run_on_ranks(every_way, 2)


def test_the_estimated_peak_on_a_mesh_is_within_a_percent():
    run_on_ranks(every_mesh, 4)


def alone(_, work):
    """Call `work` as one of a thousand ranks. The others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    work()
    dist.destroy_process_group()


def on_no_ranks(work):
    run_in_processes(alone, (work,), 1)


def sizes_of_many():
    with torch.device("meta"):
        model = Model()
    total = sum(p.nbytes for p in model.parameters())
    mesh = init_device_mesh("cpu", (512, 2), mesh_dim_names=("dp", "tp"))
    fsdp(mesh["dp"], model)
    ids = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    step = memory.simulate_step(model, ids, loss=meta_loss, optimizer=torch.optim.AdamW)
    # Each rank has a slice of the rows. One rank in 8, as this one, has a number of a vector of 64.
    rows = sum(-(-len(p) // 512) * p[0].numel() * p.itemsize for p in model.parameters())
    assert rows <= step.by_owner["parameters"] <= rows + 512 * len(list(model.parameters()))
    assert step.by_owner["gathered parameters"] > total / 8
    # FSDP gathers each layer twice and the rest of the root once, and reduces all gradients.
    layer = sum(-(-len(p) // 512) * 512 * p[0].numel() * 4 for p in model.layers[0].parameters())
    whole = rows * 512
    gathered = (whole + LAYERS * layer) * 511 // 512
    assert abs(step.sent_bytes["all_gather"] - gathered) < 100, (step.sent_bytes, gathered)
    assert abs(step.sent_bytes["reduce_scatter"] - whole * 511 // 512) < 100
    report = memory.will_it_fit(model, ids, "1MiB", loss=meta_loss)
    workspaces = report.by_owner["workspaces of cuBLAS"]  # of an H100, which this step does not use
    assert not report.fits and report.peak_bytes == step.peak_bytes + workspaces
    assert all(p.is_meta for p in model.parameters())


def meta_loss(logits):
    return logits.float().logsumexp(-1).mean()


def plans():
    mesh = init_device_mesh("cpu", (512, 2), mesh_dim_names=("dp", "tp"))
    ids = torch.zeros(8, 32, dtype=torch.int64)
    how = {"loss": loss, "optimizer": torch.optim.AdamW, "device": "cpu"}
    model = ddp(mesh["dp"])
    whole = memory.simulate_step(model, ids, **how).peak_bytes
    plan = so.fit(model, ids, int(0.9 * whole), **how)
    plan.apply()
    step = memory.simulate_step(model, ids, **how)
    assert step.peak_bytes == plan.peak_bytes <= 0.9 * whole
    with pytest.raises(RuntimeError, match=r"fit: layer layers.0 computes with a DTensor"):
        so.fit(tp(mesh["tp"]), ids, "1GiB", **how)


def nested(mesh):
    model = Model()
    for layer in model.layers:
        fully_shard(layer.up, mesh=mesh)
    return fsdp(mesh, model)


def partly(mesh):
    """All layers but one belong to the root."""
    model = Model()
    fully_shard(model.layers[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Summing(nn.Module):
    """A layer that communicates by itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        part = self.linear(x)
        return all_gather_tensor_autograd(part, 0, dist.group.WORLD).unflatten(0, (-1, len(x)))[0]


def summing(mesh=None):
    model = Model()
    for layer in model.layers:
        layer.down = nn.Sequential(layer.down, Summing())
    return model if mesh is None else fsdp(mesh, model)


def once_for_all():
    """Layers with the same ops are simulated once, with one ledger for all."""
    mesh = init_device_mesh("cpu", (512, 2), mesh_dim_names=("dp", "tp"))
    ids = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    how = {"loss": meta_loss, "optimizer": torch.optim.AdamW, "device": "h100"}
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    cases = {
        "plain": (lambda: fsdp(mesh["dp"]), LAYERS),
        "whole between": (lambda: fsdp(mesh["dp"], reshard_after_forward=False), LAYERS),
        "mixed": (lambda: fsdp(mesh["dp"], mp_policy=low), LAYERS),
        "hybrid": (lambda: fsdp(mesh), LAYERS),
        "full": (lambda: fsdp_checkpointed(mesh["dp"]), LAYERS),
        "discarded": (lambda: fsdp_checkpointed(mesh["dp"], "output_discard"), 0),
        "nested": (lambda: nested(mesh["dp"]), 0),
        "partly": (lambda: partly(mesh["dp"]), LAYERS - 1),
        "communicating": (lambda: summing(mesh["dp"]), LAYERS),
        "communicating alone": (summing, LAYERS),
        "with tensor parallelism": (lambda: fsdp_and_tp(mesh), None),
    }
    for name, (build, replayed) in cases.items():
        with torch.device("meta"):
            model = build()
        counts = []

        class Counted(replay_cache.Quick):
            def check(self, *arguments, counts=counts):
                counts.append(self.count)
                super().check(*arguments)

        with mock.patch.object(steps, "Quick", Counted):
            ours = memory.simulate_step(model, ids, **how)
        with mock.patch.object(steps, "_quickly", lambda *_: None):
            right = memory.simulate_step(model, ids, **how)
        assert ours.by_owner == right.by_owner and ours.sent_bytes == right.sent_bytes, name
        assert [s.nbytes for s in ours.timeline] == [s.nbytes for s in right.timeline], name
        assert counts[-1:] == ([] if replayed is None else [replayed]), (name, counts)
        assert not any("forward" in vars(module) for module in model.modules())


def optimizers():
    mesh = init_device_mesh("cpu", (512, 2), mesh_dim_names=("dp", "tp"))
    ids = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = fsdp_and_tp(mesh)
    for optimizer in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):

        class Same(optimizer):  # not known to update each number by itself
            pass

        ours, right = (
            memory.simulate_step(model, ids, loss=meta_loss, optimizer=kind, device="h100")
            for kind in (optimizer, Same)
        )
        sizes = [[sample.nbytes for sample in one.timeline] for one in (ours, right)]
        assert sizes[0] == sizes[1] and ours.by_owner == right.by_owner
        assert ours.sent_bytes == right.sent_bytes


def choices():
    """The gradient of an indexed DTensor is a copy of zeros. Others are written in place."""
    mesh = init_device_mesh("cpu", (1024,))
    local, ids = torch.rand(512, 1024, requires_grad=True), torch.zeros(512, 1, dtype=torch.int64)
    x, i = (DTensor.from_local(t, mesh, [Replicate()]) for t in (local, ids))
    for source, index, copies in ((local, ids, 1), (x, i, 2)):
        e = memory.estimate(lambda t=source, i=index: t.gather(1, i).sum().backward())
        assert e.peak_bytes - e.input_bytes == pytest.approx(copies * local.nbytes, rel=0.01)


def refusals():
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    mesh = init_device_mesh("cpu", (1024,))

    def hooked():
        model = ddp(mesh)
        model.register_comm_hook(None, lambda _, bucket: bucket)
        return model

    def older():
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(Model(), device_id=torch.device("cpu"))

    cases = {
        "communication hook": hooked,
        "FSDP1": older,
        "CPUOffloadPolicy": lambda: fsdp(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    }
    for name, build in cases.items():
        model = build()
        with pytest.raises(RuntimeError, match=f"estimate: .*{name}.*(Expected|Use) "):
            memory.simulate_step(model, ids, loss=loss, device="cpu")


def test_one_rank_of_a_thousand_is_estimated_without_weights():
    on_no_ranks(sizes_of_many)


def test_plans_of_one_rank():
    on_no_ranks(plans)


def test_equal_layers_of_fsdp_are_simulated_once():
    on_no_ranks(once_for_all)


def test_gradients_of_indexed_dtensors():
    on_no_ranks(choices)


def test_updates_of_local_tensors_and_of_dtensors_use_equal_memory():
    on_no_ranks(optimizers)


def test_unsupported_wrappers_are_refused_by_name():
    on_no_ranks(refusals)
