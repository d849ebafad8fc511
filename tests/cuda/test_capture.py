"""Training steps are captured once as CUDA graphs, and replayed on new inputs."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so

from ..loss.test_linear_cross_entropy import problem
from .devices import captured, each_device, moved

# A CUDA graph cannot read the random state of the device, so these regions do not save it.
NO_RANDOM = {"preserve_rng_state": False}


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "none"}, {"memory_budget": 2 << 20}, {"max_valid": 256}, {"shift": True},
     {"softcap": 5.0, "z_loss": 0.1, "label_smoothing": 0.1}],
    ids=str,
)  # fmt: skip
def test_the_loss_replays_on_new_inputs(device, dtype, options):
    x, w, target, b = moved(problem(256, 64, 3001, dtype), device)
    leaves = [t.requires_grad_() for t in (x, w, b)]

    def step():
        loss = so.linear_cross_entropy(x, w, target, linear_bias=b, **options)
        return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)

    replay = captured(device, step)
    for _ in range(3):
        with torch.no_grad():
            for t in leaves:
                t.normal_()
            target.random_(3001)
            target[::3] = -100
        results = [t.clone() for t in replay()]
        for ours, right in zip(results, step(), strict=True):
            # A capture may use another workspace, and therefore another order of sums.
            difference = (ours - right).double().norm()
            assert difference <= 1e-2 * right.double().norm() and right.isfinite().all()


@each_device
def test_a_target_out_of_range_gives_nan_only_at_its_replay(device):
    if device == "cpu":
        pytest.skip("raises on a CPU, in tests/loss")
    x, w, target, _ = moved(problem(64, 32, 503, ignored=0.0), device)
    replay = captured(device, lambda: so.linear_cross_entropy(x, w, target))
    right = replay().clone()
    target[5] += 1000
    assert replay().isnan()
    target[5] -= 1000
    assert torch.equal(replay(), right)


# At a kernel's first launch, the driver loads its code, which may allocate memory and wait for the
# device. During a capture, user code must not do this. This test checks that the driver can. The
# library has its own CUDA runtime, so torch's earlier launches do not prepare it.
FIRST_LAUNCHES = """
import torch
from tests.cuda.test_row_kernel import DTYPES, OPTIONS, Place, Rows
from storage_ops.loss.planning.schedule import GRADIENT, UPDATE

class Captured:
    @staticmethod
    def _cross_entropy_rows(*args):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            torch.ops.storage_ops._cross_entropy_rows(*args)
        graph.replay()
        torch.cuda.synchronize()

for dtype in DTYPES:
    for options in ("plain", "all"):  # a kernel of its own for each of these
        rows = Rows(dtype, 4099, **OPTIONS[options])
        rows.compare(Place("cuda", Captured), (0, 4099, UPDATE | GRADIENT))
print("captured")
"""


@pytest.mark.cuda
@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_the_first_launches_of_a_process_may_be_captured(loading):
    environment = os.environ | {"CUDA_MODULE_LOADING": loading}
    command = [sys.executable, "-c", FIRST_LAUNCHES]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert result.stdout.strip() == "captured", result.stderr


class Net(nn.Module):
    """A block and a loss. `way` says how intermediate tensors are freed."""

    def __init__(self, way, width=64, vocab=503, depth=1):
        super().__init__()
        self.way, self.depth = way, depth
        self.embedding, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def expand(self, x):
        return F.gelu(self.up(self.norm(x)))

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for _ in range(self.depth):  # always the same block
            if self.way == "output_discard":
                x = x + so.output_discard(self.expand, self.down, **NO_RANDOM)(x)
            elif self.way == "chain":
                with so.OutputDiscardChain(**NO_RANDOM) as chain:
                    h = chain.checkpoint(self.up, chain.checkpoint(self.norm, x))
                    x = x + self.down(chain.checkpoint(F.gelu, h))
            elif self.way == "checkpoint":
                x = x + torch.utils.checkpoint.checkpoint(
                    lambda x: self.down(self.expand(x)), x, use_reentrant=False, **NO_RANDOM
                )
            else:
                x = x + self.down(self.expand(x))
        return so.linear_cross_entropy(x, self.embedding.weight, targets)


def trainer(net, tokens, targets):
    """Return a step of gradient descent in place."""

    def step():
        loss = net(tokens, targets)
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.grad, alpha=0.1)
                p.grad = None
        return (loss.detach(),)

    return step


@each_device
@pytest.mark.parametrize("way", ["plain", "output_discard", "chain", "checkpoint", "selective"])
def test_a_training_step_replays(path, device, way):
    plain = Net("plain").to(device)
    ours = copy.deepcopy(plain)
    ours.way = way
    if way == "selective":
        so.apply_activation_checkpoint(
            ours, {"layer_names": ["up"], "ops_to_save": ["aten.addmm"], **NO_RANDOM}
        )
    tokens, targets = (torch.randint(503, (4, 32), device=device) for _ in range(2))
    replay = captured(device, trainer(ours, tokens, targets))
    eager = trainer(plain, tokens, targets)
    for _ in range(3):  # the warm-up
        eager()
    for _ in range(4):
        tokens.random_(503)
        targets.random_(503)
        (loss,) = replay()
        poison = [torch.full((1 << 18,), float("nan"), device=device) for _ in range(8)]
        (right,) = eager()
        torch.testing.assert_close(loss, right)
        del poison
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
def test_a_replay_takes_no_memory_and_the_graph_frees_what_eager_frees():
    def reserved(way):
        net = Net(way, 256, 503, depth=6).cuda()
        tokens, targets = (torch.randint(503, (6, 512), device="cuda") for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        replay = captured("cuda", trainer(net, tokens, targets))
        torch.cuda.empty_cache()  # frees the memory of the warm-up
        taken = torch.cuda.memory_reserved() - before
        with so.memory.measure("cuda") as m:
            replay()
        assert m.peak_bytes == m.kept_bytes == 0
        return taken

    # Each of the six blocks frees two activations of 12 MiB. At most one block has its own at any
    # time. The first call also allocates workspaces of cuBLAS, up to 32 MiB.
    assert reserved("output_discard") <= reserved("plain") - (64 << 20)
