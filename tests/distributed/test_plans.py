"""Plans of `fit` for one rank of many, with FSDP around layers and inside them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import storage_ops as so
from storage_ops import memory
from storage_ops.fitting.actions import Action
from storage_ops.fitting.search import Search

from ..ranks import run_on_ranks
from .test_estimate import WIDTH, Block, Model, fsdp, loss, measured, on_no_ranks, partly

pytestmark = [
    pytest.mark.in_turn,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed"),
]
HOW = {"loss": loss, "device": "cpu"}


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) + 0  # a view would lose FSDP's hooks


class Mixture(Block):
    """A block with an expert for each half of the tokens."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x):
        halves = zip(self.experts, super().forward(x).chunk(2, 1), strict=True)
        return torch.cat([expert(half) for expert, half in halves], 1)


def experts(mesh, **how):
    """Shard experts separately from their layer, as torchtitan does."""
    model = Model()
    model.layers = nn.ModuleList(Mixture() for _ in range(3))
    for layer in model.layers:
        for expert in layer.experts:
            fully_shard(expert, mesh=mesh, **how)
    return fsdp(mesh, model, **how)


def on_fake_ranks():
    """With each plan, the peak composed from layers equals that of a whole step."""
    mesh = init_device_mesh("cpu", (2, 512), mesh_dim_names=("dp", "tp"))
    ids = torch.zeros(16, 64, dtype=torch.int64)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    cases = {
        "around layers": lambda: fsdp(mesh["dp"]),
        "no reshard after forward": lambda: fsdp(mesh["dp"], reshard_after_forward=False),
        "partly sharded": lambda: partly(mesh["dp"]),
        "experts, mixed precision": lambda: experts(mesh["dp"], mp_policy=half),
    }
    for name, build in cases.items():
        search = Search(build(), ids, **HOW, actions=["full"], accumulate="experts" in name)
        (variant,) = search._variants
        assert len(variant.recording.calls) == 3, name
        full = [[a for a, _ in costs].index(Action("full")) for costs in variant.costs]
        for choice in ([0] * 3, full):
            composed = variant.problem.peak(choice)
            whole = search._simulated(0, choice).peak_bytes
            assert composed == pytest.approx(whole, rel=0.01), (name, choice)


def on_two_ranks(rank):
    """Gradients equal those of the model without a plan, and the peak equals the plan's."""
    mesh = init_device_mesh("cpu", (2,))
    ids = torch.randint(512, (4, 32))
    how = HOW | {"optimizer": torch.optim.AdamW}
    torch.manual_seed(0)
    plain = experts(mesh)
    loss(plain(ids)).backward()
    torch.manual_seed(0)
    model = experts(mesh)
    whole = memory.simulate_step(model, ids, **how)
    plan = so.fit(model, ids, int(0.9 * whole.peak_bytes), actions=["full"], **how)
    plan.apply()
    loss(model(ids)).backward()
    for p, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), right.grad.to_local())
    above = plan.peak_bytes - whole.timeline[0].nbytes
    peak, _ = measured(model, ids, torch.optim.AdamW(model.parameters()), 1.01 * above)
    assert abs(peak - above) <= 0.01 * peak, (peak, above)


def after_a_simulation(rank):
    """Estimates change no gradient of later steps, and are the same after a forward or a step."""
    mesh, ids = init_device_mesh("cpu", (2,)), torch.randint(512, (2, 4, 32))[rank]
    replicated = nn.parallel.DistributedDataParallel
    for build, begin in (
        (lambda: replicated(Model(), static_graph=True), lambda model: None),
        (lambda: fsdp(mesh), lambda model: model(ids).detach()),
        (lambda: fsdp(mesh), lambda model: loss(model(ids)).backward()),
    ):
        grads, peaks = [], []
        for simulates in (False, True):
            torch.manual_seed(0)
            model = build()
            if simulates:
                peaks.append(memory.simulate_step(model, ids, **HOW).peak_bytes)
            begin(model)
            model.zero_grad()
            if simulates:
                peaks.append(memory.simulate_step(model, ids, **HOW).peak_bytes)
            for _ in range(2):
                loss(model(ids)).backward()
            grads.append([getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()])
        assert all(map(torch.equal, *grads))
        assert peaks[0] == peaks[1]


def test_steps_after_a_simulation():
    run_on_ranks(after_a_simulation, 2)


def test_layers_with_fsdp_around_and_inside():
    on_no_ranks(on_fake_ranks)


def test_a_plan_among_two_ranks():
    run_on_ranks(on_two_ranks, 2)
