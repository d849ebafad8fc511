"""Arguments, results, and state of traced steps, and errors of tracing."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from storage_ops import graph

from .models import GPT, MODES, batch, count, gpt_step


def run_twice(make, *args, steps=3, **kwargs):
    """Return the states of an eager and a traced trainer. `make` returns a state and a step."""
    results = []
    for traced in (False, True):
        torch.manual_seed(0)
        state, step = make()
        if traced:
            step = graph.trace_step(step, *args, **kwargs)
        torch.manual_seed(1)
        outputs = [copy.deepcopy(step(*args, **kwargs)) for _ in range(steps)]
        grads = [p.grad for p in state if isinstance(p, nn.Parameter)]
        results.append((outputs, [t.detach().clone() for t in state], grads, torch.get_rng_state()))
    return results


def assert_same(results):
    eager, traced = results
    torch.testing.assert_close(traced, eager, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gpt_with_dropout_equals_eager_bit_for_bit(mode, dtype):
    def make():
        model = GPT(layers=4, mode=mode).to(dtype)
        return list(model.parameters()), gpt_step(model)

    assert_same(run_twice(make, *batch(), steps=2))


@pytest.mark.parametrize("clear", [None, True, False])
@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
        functools.partial(torch.optim.AdamW, lr=0.01),
        functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
        functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
        functools.partial(torch.optim.RMSprop, lr=0.01),
        functools.partial(torch.optim.Adagrad, lr=0.01),
    ],
)
def test_optimizer_step_inside(optimizer, clear):
    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 3))
        opt = optimizer(model.parameters())

        def step(x):
            if clear is not None:
                opt.zero_grad(set_to_none=clear)
            loss = checkpoint(model, x, use_reentrant=False).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            if clear is None:
                opt.zero_grad()
            return loss.detach()

        return [*model.parameters()], step

    assert_same(run_twice(make, torch.randn(5, 4)))


@pytest.mark.in_turn
def test_gradients_accumulate_over_calls_and_inside_one():
    def make():
        model = GPT(layers=2, mode="full").double()

        def step(tokens, targets):
            losses = []
            for i in range(2):
                loss = model(tokens[i : i + 1], targets[i : i + 1]) / 2
                loss.backward()
                losses.append(loss.detach())
            return losses

        return list(model.parameters()), step

    eager, traced = run_twice(make, *batch(), steps=1)
    assert_same((eager, traced))
    # From the second call on, gradients are summed in another order.
    torch.testing.assert_close(*run_twice(make, *batch(), steps=2))


def test_existing_gradients_are_accumulated():
    layer = nn.Linear(3, 2)
    x = torch.randn(4, 3)

    def step(x):
        layer(x).square().sum().backward()

    step(x)
    once = layer.weight.grad.clone()
    traced = graph.trace_step(step, x)
    assert torch.equal(layer.weight.grad, once)
    traced(x)
    torch.testing.assert_close(layer.weight.grad, 2 * once)
    layer.zero_grad()
    traced(x)
    torch.testing.assert_close(layer.weight.grad, once)


def test_closed_over_tensors_and_modules_are_read_at_each_call():
    model, scale = nn.Linear(3, 3), torch.tensor(2.0)
    holder = {"bias": torch.zeros(3)}

    def step(x):
        return (model(x) * scale + holder["bias"]).sum()

    x = torch.randn(2, 3)
    traced = graph.trace_step(step, x)
    with torch.no_grad():
        model.weight.mul_(3)
    torch.testing.assert_close(traced(x), step(x))
    model.weight = nn.Parameter(torch.randn(3, 3))
    torch.testing.assert_close(traced(x), step(x))
    scale = torch.tensor(-1.0)
    holder["bias"] = torch.randn(3)
    torch.testing.assert_close(traced(x), step(x))
    model = nn.Linear(3, 3)
    torch.testing.assert_close(traced(x), step(x))
    model.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.double))
    with pytest.raises(ValueError, match=r"model\.weight has dtype"):
        traced(x)


def test_the_trace_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        opt.zero_grad()
        loss = checkpoint(model, x, use_reentrant=False).sum()
        loss.backward()
        opt.step()
        return loss

    x = torch.randn(6, 4, requires_grad=True)
    before = copy.deepcopy(model.state_dict())
    versions = [t._version for t in model.state_dict(keep_vars=True).values()]
    rng = torch.get_rng_state()
    traced = graph.trace_step(step, x)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [t._version for t in model.state_dict(keep_vars=True).values()] == versions
    assert torch.equal(torch.get_rng_state(), rng)
    assert x.grad is None and all(p.grad is None for p in model.parameters())
    traced(x)
    assert x.grad is not None and model[1].num_batches_tracked == 1


def test_buffers_are_updated_once():
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 4))
        model.register_buffer("average", torch.zeros(()))

        def step(x):
            h = checkpoint(model, x, use_reentrant=False)
            model.average = 0.9 * model.average + h.detach().mean()
            h.square().sum().backward()

        return [*model.parameters()], step

    torch.manual_seed(0)
    x = torch.randn(6, 4)
    models = []
    for traced in (False, True):
        torch.manual_seed(0)
        _, step = make()
        model = step.__closure__[0].cell_contents
        step = graph.trace_step(step, x) if traced else step
        step(x), step(x)
        models.append(model)
    eager, traced = models
    for p, q in zip(eager.parameters(), traced.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert torch.equal(eager.average, traced.average)
    # An eager checkpoint runs the batch norm twice.
    assert eager[1].num_batches_tracked == 4 and traced[1].num_batches_tracked == 2


def test_arguments_are_pytrees_and_constants():
    weight = nn.Parameter(torch.randn(3, 3))

    def step(data, *, power, flags=("a", None)):
        y = (data["x"][0] @ weight) ** power
        (grad,) = torch.autograd.grad(y.sum(), weight)
        return {"y": y.detach(), "grad": grad, "same": flags[0], "x": data["x"][0]}

    data = {"x": [torch.randn(2, 3)]}
    traced = graph.trace_step(step, data, power=2)
    new = {"x": [torch.randn(2, 3)]}
    result, expected = traced(new, power=2), step(new, power=2)
    assert result.pop("same") == expected.pop("same")
    torch.testing.assert_close(result, expected)
    assert result["x"] is new["x"][0] and not result["y"].requires_grad
    with pytest.raises(ValueError, match=r"kwargs\['power'\] is 3. Expected 2"):
        traced(new, power=3)
    with pytest.raises(ValueError, match=r"args\[0\]\['x'\]\[0\] has shape \(4, 3\)"):
        traced({"x": [torch.randn(4, 3)]}, power=2)
    with pytest.raises(TypeError, match="structure"):
        traced({"x": [torch.randn(2, 3), torch.randn(2, 3)]}, power=2)


def test_no_autograd_graph_and_inputs_get_gradients():
    model = GPT(layers=1, mode="full")
    tokens, targets = batch()
    traced = graph.trace_step(lambda a, b: model(a, b), tokens, targets)
    assert traced(tokens, targets).grad_fn is None

    def step(x, w):
        y = checkpoint(lambda x: (x @ w).sin(), x, use_reentrant=False).sum()
        y.backward()

    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    traced = graph.trace_step(step, x, w)
    traced(x, w)
    grads = x.grad, w.grad
    x.grad = w.grad = None
    step(x, w)
    assert torch.equal(x.grad, grads[0]) and torch.equal(w.grad, grads[1])


@pytest.mark.in_turn
def test_dynamic_dimensions():
    model = GPT(layers=2, mode="selective", dropout=0.0)
    tokens, targets = batch(size=4)
    for t in (tokens, targets):
        torch._dynamo.mark_dynamic(t, 0)
    traced = graph.trace_step(gpt_step(model), tokens, targets)
    with pytest.raises(ValueError, match=r"have the sizes \[\(1, 8\).*dimension to be 2 or more"):
        traced(*batch(size=1))
    for size in (4, 7, 3):
        tokens, targets = batch(size=size)
        model.zero_grad()
        loss = traced(tokens, targets)
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        torch.testing.assert_close(loss, gpt_step(model)(tokens, targets))
        torch.testing.assert_close(grads, [p.grad for p in model.parameters()])


def test_tensor_subclasses():
    weight = nn.Parameter(TwoTensor(torch.randn(3, 3), torch.randn(3, 3)))

    def step(x):
        y = checkpoint(lambda x: (x @ weight).sin() @ weight, x, use_reentrant=False)
        y.sum().backward()
        return y.detach()

    x = TwoTensor(torch.randn(2, 3), torch.randn(2, 3))
    traced = graph.trace_step(step, x)
    result, grad = traced(x), weight.grad
    weight.grad = None
    expected = step(x)
    assert type(result) is TwoTensor and type(grad) is TwoTensor
    for name in "ab":
        assert torch.equal(getattr(result, name), getattr(expected, name))
        assert torch.equal(getattr(grad, name), getattr(weight.grad, name))
    assert count(traced.gm, torch.ops.aten.mm.default) == 2 * 6


@pytest.fixture
def mesh():
    dist = pytest.importorskip("torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_distributed_tensors(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    initial = [distribute_tensor(torch.randn(4, 4), mesh, [p]) for p in (Shard(0), Replicate())]
    x = distribute_tensor(torch.randn(3, 4), mesh, [Replicate()])
    results = []
    for traced in (False, True):
        w, v = (nn.Parameter(t.clone()) for t in initial)
        opt = torch.optim.SGD([w, v], lr=0.1)

        def step(x, w=w, v=v, opt=opt):
            opt.zero_grad()
            y = checkpoint(lambda x: (x @ w).sin() @ v, x, use_reentrant=False)
            y.sum().backward()
            opt.step()
            return y.detach()

        step = graph.trace_step(step, x) if traced else step
        results.append([t.to_local() for t in (step(x), w, v, w.grad, v.grad)])
    assert all(map(torch.equal, *results))


def test_modules_with_untraceable_communication_are_refused():
    model = nn.DataParallel(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"model is a DataParallel.* or fully_shard"):
        graph.trace_step(lambda x: model(x).sum().backward(), torch.ones(1, 4))


def test_compiled_and_custom_functions_inside():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad * w, grad * x

    w = nn.Parameter(torch.randn(4))
    inner = torch.compile(lambda x: x.sin() * 2, backend="eager")

    def step(x):
        y = checkpoint(lambda x: Double.apply(inner(x), w).exp(), x, use_reentrant=False)
        return torch.autograd.grad(y.sum(), w)

    x = torch.randn(3, 4)
    assert torch.equal(graph.trace_step(step, x)(x)[0], step(x)[0])


def test_sparse_gradients():
    def make():
        table = nn.Embedding(6, 3, sparse=True)
        opt = torch.optim.SGD(table.parameters(), lr=0.1)

        def step(tokens):
            opt.zero_grad()
            table(tokens).square().sum().backward()
            opt.step()

        return list(table.parameters()), step

    assert_same(run_twice(make, torch.tensor([[1, 4], [1, 5]])))


def test_a_traced_step_inside_another():
    w = nn.Parameter(torch.randn(3, 3))

    def inner(x):
        y = checkpoint(lambda x: F.dropout(x @ w, 0.5).exp(), x, use_reentrant=False)
        return torch.autograd.grad(y.sum(), w)[0]

    x = torch.randn(4, 3)
    traced = graph.trace_step(inner, x)
    with pytest.raises(RuntimeError, match=r"repeats random numbers by run_and_save_rng_state"):
        graph.trace_step(lambda x: traced.gm(x, w)[0], x)
    outer = graph.trace_step(lambda x: traced(x) * 2, x)
    torch.manual_seed(0)
    expected = inner(x) * 2, torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(outer(x), expected[0]) and torch.equal(torch.get_rng_state(), expected[1])


def test_changed_constants_are_errors():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        opt.zero_grad()
        F.gelu(model(x)).sum().backward()
        opt.step()

    x = torch.randn(2, 3)
    traced = graph.trace_step(step, x)
    model.eval()
    with pytest.raises(ValueError, match=r"training is False\. Expected True"):
        traced(x)
    model.train()
    opt.param_groups[0]["lr"] = 0.2
    with pytest.raises(ValueError, match=r"lr of parameter group 0 of SGD is 0\.2"):
        traced(x)


def test_a_gradient_that_the_step_reads_must_exist_as_in_the_trace():
    w = nn.Parameter(torch.ones(2))

    def step(x):
        (x * w).sum().backward()
        with torch.no_grad():
            w.sub_(w.grad)

    x = torch.ones(2)
    traced = graph.trace_step(step, x)
    traced(x)
    assert torch.equal(w.detach(), torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"w\.grad is set, and `fn` reads gradients"):
        traced(x)


def test_untraceable_steps_are_errors_and_leave_nothing_behind():
    model = nn.Linear(3, 3)
    kept = []

    def keeps(x):
        kept.append(model(x).sum())
        kept[-1].backward()

    def decides(x):
        loss = model(x).sum()
        loss.backward()
        return loss if loss > 0 else -loss

    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match=r"keeps a tensor of the step in kept\[0\]"):
        graph.trace_step(keeps, x)
    assert kept == []
    with pytest.raises(RuntimeError, match=r"a tensor decides .* at .*test_trace\.py:\d+, in its"):
        graph.trace_step(decides, x)
    with pytest.raises(TypeError, match=r"`fn` is 3, a int\. Expected a function"):
        graph.trace_step(3)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match=r"args\[0\] has a grad_fn"):
        graph.trace_step(lambda x: x.sum(), x.requires_grad_() * 2)
    keeps(x)
    assert kept[0].item() == kept[0].item() and model.weight.grad is not None


def test_momentum_needs_one_step_first():
    w = nn.Parameter(torch.ones(2))
    opt = torch.optim.SGD([w], lr=0.1, momentum=0.9)

    def step(x):
        opt.zero_grad()
        (x * w).sum().backward()
        opt.step()

    x = torch.randn(2)
    with pytest.raises(RuntimeError, match="let it take one step before"):
        graph.trace_step(step, x)
    assert not opt.state[w] or opt.state[w]["momentum_buffer"] is None
    step(x)
    other = copy.deepcopy((w, opt.state_dict()))
    graph.trace_step(step, x)(x)
    result = w.detach().clone()
    with torch.no_grad():
        w.copy_(other[0])
    opt.load_state_dict(other[1])
    step(x)
    assert torch.equal(w, result)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_traced_step_uses_the_loaded_state_of_an_optimizer(fresh):
    results = []
    for traced in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x, model=model, opt=opt):
            opt.zero_grad()
            model(x).square().sum().backward()
            opt.step()

        x = torch.ones(2, 3)
        if not fresh:
            step(x)
        step = graph.trace_step(step, x) if traced else step
        step(x)
        saved = copy.deepcopy(opt.state_dict())
        step(x)
        opt.load_state_dict(saved)
        step(x)
        results.append((list(model.parameters()), opt.state_dict()["state"]))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_data_of_a_parameter_is_the_parameter():
    layer = nn.Linear(3, 3, bias=False)

    def step(x):
        layer.weight.data.mul_(2)
        return (x @ layer.weight.detach()).sum()

    x = torch.ones(3)
    traced = graph.trace_step(step, x)
    layer.weight = nn.Parameter(torch.eye(3))
    assert traced(x) == 6 and torch.equal(layer.weight.detach(), 2 * torch.eye(3))
