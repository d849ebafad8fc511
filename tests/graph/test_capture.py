"""Random ops of GPU steps in traced graphs, and the form that a CUDA graph can capture."""

import pytest
import torch
from torch import fx
from torch._prims.rng_prims import (
    graphsafe_run_with_rng_state,
    run_and_save_rng_state,
    run_with_rng_state,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from storage_ops import graph
from storage_ops.graph.recompute import capture, rng
from storage_ops.graph.recompute.remat import recompute

from .models import GPT, MODES, batch, both, count, gpt_step, leaves, selective

SAFE = graphsafe_run_with_rng_state
MM = torch.ops.aten.mm.default


def masks(x, w):
    """Return results and gradients that show the numbers of the forward and of its recomputes."""

    def region(x):
        inner = checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=False)
        return F.dropout(inner.exp(), 0.3) * w

    y = checkpoint(region, x, use_reentrant=False)
    return y.detach(), *torch.autograd.grad(y.sum(), (x, w))


class OnGPU(fx.Interpreter):
    """Gives the nodes of a graph fake values on a GPU, which need not exist."""

    def run_node(self, node):
        node.kwargs = {
            name: torch.device("cuda", 0) if name == "device" else value
            for name, value in node.kwargs.items()
        }
        node.meta["val"] = value = super().run_node(node)
        return value


def on_gpu(step):
    """Return the graph of a step before recomputation, as if traced on a GPU."""
    gm = capture.copy_of(step.gm.meta["storage_ops_before"])
    mode = FakeTensorMode()
    with mode, torch.no_grad():
        values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
        inputs = tree_map_only(
            torch.Tensor,
            lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda:0"),
            values,
        )
        OnGPU(gm).run(*inputs)
    return gm


def test_the_random_state_of_a_gpu_is_saved_and_restored():
    gm = recompute(on_gpu(graph.trace_step(masks, *leaves((4, 4), (4, 4)))), foreign=False)
    saves = [n for n in gm.graph.nodes if n.target is run_and_save_rng_state]
    restores = [n for n in gm.graph.nodes if n.target is run_with_rng_state]
    assert len(saves) == 2 and len(restores) == 3  # an op in two nested regions runs three times
    for node in saves:
        state, result = node.meta["val"]
        assert (state.device.type, state.numel()) == ("cpu", 16)
        assert result.device == torch.device("cuda", 0)
    assert all(node.meta["val"].device == torch.device("cuda", 0) for node in restores)
    with pytest.raises(RuntimeError, match=r"cannot capture. .*graph\.capturable"):
        capture.check_capture(gm.graph)
    assert rng.gpu_of_replays(gm.graph) == torch.device("cuda", 0)
    saves[0].meta["val"] = torch.empty(1, device="meta")
    with pytest.raises(RuntimeError, match=r"random ops on \['cuda:0', 'meta'\]"):
        rng.gpu_of_replays(gm.graph)


class OnCPU(fx.Interpreter):
    """Runs the form for CUDA graphs on the CPU, whose generators torch cannot swap."""

    def call_function(self, target, args, kwargs):
        if target is not SAFE:
            return super().call_function(target, args, kwargs)
        generator, *_ = kwargs.values()
        default = torch.get_rng_state()
        torch.set_rng_state(generator.get_state())
        result = args[0](*args[1:])
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(default)
        return result


def test_copies_draw_the_numbers_of_their_op_at_every_run(monkeypatch):
    monkeypatch.setattr(capture, "_DEVICES", ("cpu",))
    x, w = leaves((16, 16), (16, 16))
    step = both(masks, x, w)
    code = step.gm.code
    state = torch.get_rng_state()
    gm, generators = graph.capturable(step.gm)
    assert step.gm.code == code and not torch.equal(torch.get_rng_state(), state)
    assert count(gm, SAFE) == len(generators) == 5
    assert count(gm, run_and_save_rng_state, run_with_rng_state) == 0
    capture.check_capture(gm.graph)
    seen = []
    for _ in range(3):
        before = torch.get_rng_state()
        y, dx, dw = OnCPU(gm).run(x, w)
        assert torch.equal(torch.get_rng_state(), before)
        torch.testing.assert_close(dw * w, y)
        dropped = ((dw * 0.7).log().abs() < 1e-9) | (y == 0)
        torch.testing.assert_close(dx, torch.where(dropped, 0, 2 * y))
        seen.append(dw)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_ops_that_draw_nothing_on_a_gpu_do_not_change():
    step = both(masks, *leaves((4, 4), (4, 4)))
    gm, generators = graph.capturable(step.gm)
    assert gm is not step.gm and gm.code == step.gm.code and generators == []
    assert graph.remat(gm, verify=True) is gm


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
def test_gpt_with_dropout_equals_eager_on_a_gpu(mode):
    model = GPT(layers=2, mode=mode).cuda()
    data = [t.cuda() for t in batch()]
    step = gpt_step(model)
    results = []
    for run in (step, graph.trace_step(step, *data)):
        torch.manual_seed(0)
        loss = run(*data)
        grads = [p.grad for p in model.parameters()]
        results.append((loss, grads, torch.cuda.get_rng_state()))
        model.zero_grad()
    torch.testing.assert_close(results[1][2], results[0][2], rtol=0, atol=0)
    torch.testing.assert_close(results[1][:2], results[0][:2])


@pytest.mark.cuda
@pytest.mark.parametrize("context", [None, selective([MM])])
def test_a_cuda_graph_captures_a_step_with_recomputed_dropout(context):
    options = {} if context is None else {"context_fn": context}
    w = torch.randn(64, 64, device="cuda", requires_grad=True)

    def train(x):
        y = checkpoint(lambda x: F.dropout(x @ w, 0.5), x, use_reentrant=False, **options)
        y.square().sum().backward()
        return y.detach()

    x = torch.randn(8, 64, device="cuda")
    step = graph.trace_step(train, x)
    step.gm, generators = graph.capturable(step.gm)
    assert count(step.gm, SAFE) == len(generators) == 2
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries must allocate workspaces before the capture
        step(x)
    torch.cuda.current_stream().wait_stream(side)
    w.grad = None
    cuda_graph = torch.cuda.CUDAGraph()
    for generator in generators:
        cuda_graph.register_generator_state(generator)
    with torch.cuda.graph(cuda_graph):
        y = step(x)
    seen = []
    for _ in range(3):
        cuda_graph.replay()
        mask = (y != 0) * 2
        torch.testing.assert_close(w.grad, x.t() @ (2 * y * mask), rtol=1e-3, atol=1e-3)
        seen.append(mask.clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
