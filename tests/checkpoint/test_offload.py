"""Results are in host memory between forward and backward. A CPU simulates the link."""

import copy
import gc
import threading
import warnings
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import storage_ops as so
from storage_ops import policies
from storage_ops.checkpoint.selective import copies as copying
from storage_ops.checkpoint.selective import offload

from ..link import SimulatedCopy, simulated_copies
from .blocks import Model, assert_same, make_input, step

aten = torch.ops.aten
AWAY = {
    "matmuls": policies.offload(policies.matmuls),
    "everything": policies.offload(policies.everything),
    "some": policies.union(policies.save("aten.bmm"), policies.offload(policies.matmuls)),
    "function": lambda ctx, op, *args, **kwargs: "offload" if op is aten.mm.default else False,
}


class Clock:
    """A clock that tests advance. A recompute does not set it back."""

    def __init__(self):
        self._time = threading.local()  # regions restore plain attributes and lists
        self._time.now = 0.0

    def __call__(self):
        return self._time.now

    def sleep(self, seconds):
        self._time.now += seconds


def checkpointed(model, policy, **options):
    cfg = so.ActivationCheckpointConfig(layer_names=["layers.*"], policy=policy, **options)
    return so.apply_activation_checkpoint(copy.deepcopy(model), cfg)


@pytest.fixture
def link():
    with simulated_copies(1e15) as copies:
        yield copies
    assert copying.active() is None


@pytest.mark.parametrize("name", AWAY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_eager_bit_for_bit(link, name, dtype):
    model = Model().to(dtype)
    right = step(model, make_input(dtype=dtype))
    x = make_input(dtype=dtype)
    away = checkpointed(model, AWAY[name])
    got = step(away, x)
    assert_same(got, step(model, x))
    assert_same(step(away, x), got)
    assert right[0].shape == got[0].shape
    # All layers but the last fetch the tensors that they sent.
    assert sum(entry[0] == "to device" for entry in link.log) >= 3


def test_a_read_before_the_tensor_arrives_gives_nan(link, monkeypatch):
    """Buffers are filled with NaN, so gradients are NaN if the waits are removed."""
    model, x = Model(dropout=0.0), make_input(dtype=torch.float32)
    wait = SimulatedCopy.wait
    away = checkpointed(model, AWAY["matmuls"])
    monkeypatch.setattr(SimulatedCopy, "wait", lambda self: self._way == "to host" and wait(self))
    away(x).square().sum().backward()
    assert x.grad.isnan().all()


def test_bytes_are_on_the_host_between_forward_and_backward(link):
    model, x = Model(layers=6, width=64, dropout=0.0), make_input(64, torch.float32)
    kept = {}
    for name, policy in {"saved": policies.matmuls, "away": AWAY["matmuls"]}.items():
        layers = checkpointed(model, policy)
        with so.memory.measure() as measured:
            y = layers(x)
        kept[name] = measured.kept_bytes
        y.sum().backward()
        del y  # else its tensors would be freed while the next case is measured
    products = 2 * 6 * 4 * (3 * 64 + 64 + 4 * 64 + 64 + 64) + 4 * 2 * 2 * 6 * 6
    assert kept["saved"] - kept["away"] == pytest.approx(5 * products, rel=0.01)


def test_a_fast_link_is_hidden_and_a_slow_one_is_waited_for():
    clock = Clock()
    model, x = Model(layers=5, dropout=0.0), make_input(dtype=torch.float32)
    away = checkpointed(model, policies.offload(policies.save_calls([("aten::mm", 2)])))
    nbytes = 2 * 6 * 64 * 4  # the wide product of each layer

    def takes_a_second(module, *_):
        clock.sleep(1.0)

    for layer in away.layers:
        layer.register_forward_hook(takes_a_second)
        layer.register_full_backward_hook(takes_a_second)
    with simulated_copies(nbytes / 0.9, clock, clock.sleep) as fast:
        away(x).sum().backward()
    assert fast.waited_seconds == 0.0
    assert [entry[0] for entry in fast.log] == ["to host"] * 5 + ["to device"] * 4
    for way, n, begun, ends, asked in fast.log:
        assert n == nbytes and ends == pytest.approx(begun + 0.9)
        # Tensors are requested one layer ahead, when another layer has run.
        assert asked >= begun + (0.9 if way == "to device" else 0.0)
    with simulated_copies(nbytes / 2.0, clock, clock.sleep) as slow:
        away(x).sum().backward()
    # Each of the four copies of a forward and of a backward takes a second longer than a layer.
    assert slow.waited_seconds == pytest.approx(8.0, abs=1.01)


def region(fn, policy=AWAY["everything"]):
    return lambda *args: checkpoint(
        fn, *args, use_reentrant=False, context_fn=partial(policies.contexts, policy)
    )


def test_results_with_other_references_stay_on_the_device(link):
    references = []

    def keeps(x):
        h = x.sin()
        references.append(h.detach())
        y = h.cos()
        return y.exp(), y

    x = torch.randn(64, requires_grad=True)
    out, y = region(keeps)(x)
    second = region(torch.sin)(out)  # from now on, the results of the first region may be sent
    assert torch.equal(references[0], x.detach().sin()) and not so.is_discarded(y)
    second.sum().backward()
    reference = x.detach().requires_grad_()
    reference.sin().cos().exp().sin().sum().backward()
    assert torch.equal(x.grad, reference.grad) and not link.log


def test_a_result_that_the_region_writes_in_place_is_recomputed(link):
    def writes(x):
        h = x.sin()
        y = h * 2
        y.add_(1)
        return (y.cos() * h).tan()

    x = torch.randn(64, requires_grad=True)
    with pytest.warns(UserWarning, match="modifies in place"):
        y = region(writes)(x)
    y = region(torch.tan)(y)
    grad = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(grad, torch.autograd.grad(writes(x).tan().sum(), x)[0])


def test_a_write_through_data_after_the_region_is_accepted(link):
    x = torch.randn(64, requires_grad=True)
    y = region(lambda x: x.sin().cos().exp())(x)
    y.data.add_(0)  # does not change the version counter
    y = region(torch.tanh)(y)
    y.sum().backward()
    assert x.grad.isfinite().all()


def views(x):
    h = F.linear(x, torch.eye(8, dtype=x.dtype)).view(4, 4, 8).transpose(0, 1)
    return (h[1:].cos() @ h[:-1].transpose(1, 2)).tanh().flatten()


def test_views_second_derivatives_and_retained_graphs(link):
    x = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)

    def whole(f):
        y = f(x).exp()
        first = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), x, retain_graph=True)[0]
        return [first, second, *(torch.autograd.grad(y.sum(), x, retain_graph=True) * 2)]

    def two(x):
        return region(torch.sin)(region(views)(x))

    for a, b in zip(whole(two), whole(lambda x: views(x).sin()), strict=True):
        assert torch.equal(a, b)
    assert torch.autograd.gradcheck(two, x)
    y = two(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        y.sum().backward()


def test_a_backward_through_a_part_of_the_model(link):
    model, x = Model(dropout=0.0), make_input(dtype=torch.float32)
    away = checkpointed(model, AWAY["matmuls"])
    for part in ("layers.3.mlp.up.weight", "layers.1.mlp.up.weight"):
        got = torch.autograd.grad(away(x).sum(), away.get_parameter(part))[0]
        assert torch.equal(got, torch.autograd.grad(model(x).sum(), model.get_parameter(part))[0])


def test_nested_regions(link):
    model, x = Model(), make_input(dtype=torch.float32)
    right = step(model, x)
    away = checkpointed(model, AWAY["matmuls"])
    so.CheckpointWrapper(away)
    assert_same(step(away, x), right)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", AWAY)
def test_estimates_and_limits_count_the_device_only(name, link):
    model, x = Model(layers=6, width=64, dropout=0.0), make_input(64, torch.float32)
    away = checkpointed(model, AWAY[name])

    def run():
        for t in (x, *away.parameters()):
            t.grad = None
        away(x).square().sum().backward()

    run()
    x.grad = None
    away.zero_grad()
    with so.memory.measure() as measured:
        run()
    x.grad = None
    away.zero_grad()
    simulated = so.memory.simulate_step(away, x, loss=lambda y: y.square().sum(), device="cpu")
    before = x.nbytes + sum(p.nbytes for p in away.parameters())
    # A factor of an op may be a tensor of eight bytes, which a simulation does not create.
    assert 0 <= measured.peak_bytes + before - simulated.peak_bytes <= 8
    with so.memory.limit(simulated.peak_bytes, device="cpu"):
        run()
    x.grad = None
    away.zero_grad()
    with (
        pytest.raises(torch.OutOfMemoryError),
        so.memory.limit(int(simulated.peak_bytes * 0.99), device="cpu"),
    ):
        run()


def hosts():
    gc.collect()
    return [o for o in gc.get_objects() if isinstance(o, (offload.Trip, SimulatedCopy))]


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("at", range(0, 40, 3))
def test_an_interruption_leaves_no_state_behind(link, error, at, monkeypatch):
    model, x = Model(dropout=0.0), make_input(dtype=torch.float32)
    right = step(model, x)
    away, count = checkpointed(model, AWAY["matmuls"]), 0
    wait = SimulatedCopy.wait

    def interrupted(self):
        nonlocal count
        count += 1
        if count == at + 1:
            raise error("in the middle")
        wait(self)

    monkeypatch.setattr(SimulatedCopy, "wait", interrupted)
    try:
        step(away, x)
    except error:
        pass
    else:
        assert count <= at
    monkeypatch.undo()
    assert not hosts() and offload._last.region() is None
    assert_same(step(away, x), right)
    assert not hosts()


def test_a_retained_graph_works_after_an_interrupted_backward(link, monkeypatch):
    model, x = Model(dropout=0.0), make_input(dtype=torch.float32)
    right = step(model, x)
    y = checkpointed(model, AWAY["matmuls"])(x)
    wait = SimulatedCopy.wait
    left = 5

    def interrupted(self):
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        wait(self)

    monkeypatch.setattr(SimulatedCopy, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    monkeypatch.undo()
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], right[1]["x"])


def test_dropping_a_graph_frees_its_host_memory(link):
    y = checkpointed(Model(), AWAY["matmuls"])(make_input(dtype=torch.float32))
    assert hosts()
    del y
    assert not hosts()


def test_nothing_is_offloaded_without_a_link_or_without_gradients():
    model, x = Model(), make_input(dtype=torch.float32)
    away = checkpointed(model, AWAY["matmuls"])
    assert_same(step(away, x), step(checkpointed(model, "matmuls"), x))
    with simulated_copies(1e9) as link, torch.no_grad():
        away(x)
    assert not link.log and not hosts()


def test_every_thread_has_its_own_regions(link):
    model = Model(dropout=0.0)
    away = checkpointed(model, AWAY["matmuls"])
    inputs = [make_input(dtype=torch.float32) for _ in range(4)]
    rights = [torch.autograd.grad(model(x).sum(), x)[0] for x in inputs]
    got = [None] * len(inputs)

    def run(i):
        got[i] = torch.autograd.grad(away(inputs[i]).sum(), inputs[i])[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, rights, strict=True))


def test_saved_tensor_hooks_take_precedence(link):
    model, x = Model(dropout=0.0), make_input(dtype=torch.float32)
    right = step(model, x)
    away = checkpointed(model, AWAY["matmuls"], respect_saved_tensors_hooks=True)
    with torch.autograd.graph.save_on_cpu():
        assert_same(step(away, x), right)
    assert not link.log


@pytest.mark.filterwarnings("ignore")
def test_compiled_and_traced_code_refuses_by_name():
    linear = so.CheckpointWrapper(
        nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()), policy=AWAY["matmuls"]
    )
    x = torch.randn(4, 8, requires_grad=True)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"says 'offload' for aten.mm.*compiled or traced"):
        torch.compile(linear, backend="aot_eager")(x)
    with pytest.raises(RuntimeError, match=r"says 'offload' for aten.mm.*compiled or traced"):
        so.graph.trace_step(lambda x: linear(x).sum().backward(), x)


def test_policies_that_save_offload_and_recompute_combine():
    def ask(policy, op=aten.mm.default):
        policy = policy.begin() if hasattr(policy, "begin") else policy
        ctx = torch.utils.checkpoint.SelectiveCheckpointContext(is_recompute=False)
        return policy(ctx, op)

    away = policies.offload(policies.matmuls)
    save, recompute = (torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE,
                   torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE)  # fmt: skip
    assert ask(away) == "offload" and ask(away, aten.sin.default) == recompute
    assert ask(policies.union(away, policies.matmuls)) == save
    assert ask(policies.union(away, policies.attention)) == "offload"
    assert ask(policies.difference(away, policies.save("aten.mm"))) == recompute
    assert ask(policies.difference(policies.matmuls, away)) == recompute
    assert ask(policies.every_kth(away, 2)) == "offload"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.randn(4, requires_grad=True)
        with pytest.raises(ValueError, match="Expected a bool, 'offload', or"):
            region(torch.sin, lambda *a, **k: "offlaod")(x)


def test_reading_an_offloaded_tensor_is_an_error(link):
    class Spy(nn.Module):
        def forward(self, x):
            h = x.sin()
            spied.append(weakref.ref(h.untyped_storage()))
            return h.cos().exp()

    spied = []
    x = torch.randn(64, requires_grad=True)
    y = region(torch.tan)(region(Spy())(x))
    storage = spied[0]()
    assert storage is not None and storage.nbytes() == 0
    if so.info()["guard"]:
        with pytest.raises(RuntimeError, match="in host memory, by a policy that says 'offload'"):
            torch.empty(0).set_(storage, 0, (64,)).sum()
    y.sum().backward()


def test_a_config_names_ops_to_offload(link):
    model, x = Model(), make_input(dtype=torch.float32)
    right = step(model, x)
    cfg = so.ActivationCheckpointConfig.from_dict(
        {"layer_names": ["layers.*"], "ops_to_offload": ["aten.mm"], "ops_to_save": ["aten.bmm"]}
    )
    assert cfg.effective_mode == "selective"
    assert_same(step(so.apply_activation_checkpoint(copy.deepcopy(model), cfg), x), right)
    assert link.log
    table = so.explain_policy(model.layers[0], x, policy=cfg)
    assert {(row.op, row.saved) for row in table.rows if row.saved} == {
        ("aten.mm", "offload"), ("aten.bmm", True)
    }  # fmt: skip
    assert "offloaded" in str(table)
    with pytest.raises(ValueError, match="ops_to_offload"):
        so.ActivationCheckpointConfig(layer_names=["x"], ops_to_offload=["aten.m"])
