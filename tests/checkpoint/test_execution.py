"""The recompute runs under the state of the forward: random numbers, modes and defaults."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import storage_ops as so
from storage_ops.checkpoint.saved.saved import Saved


class Tracker:
    """Named random states that a region switches between, as Megatron-LM's tracker does."""

    def __init__(self):
        self.states = {"model": torch.Generator().manual_seed(1).get_state()}

    def get_states(self):
        return copy.copy(self.states)

    def set_states(self, states):
        self.states = states

    def dropout(self, x):
        generator = torch.Generator()
        generator.set_state(self.states["model"])
        mask = torch.rand(x.shape, generator=generator) > 0.5
        self.states["model"] = generator.get_state()
        return x * mask


def run(producer, *inputs, change=lambda: None, **options):
    """Return gradients and output of `producer` and a square. Call `change` before the backward."""
    results = []
    for discards in (False, True):
        torch.manual_seed(7)
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        ckpt = so.OutputDiscardCheckpoint(**options)
        h = ckpt.checkpoint(producer, *leaves) if discards else producer(*leaves)
        y = h * h
        if discards:
            ckpt.discard_output_and_register_recompute(y)
            change()
        results.append((y.detach().clone(), *torch.autograd.grad(y.sum(), leaves)))
    return results


def same(results):
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_the_states_of_a_tracker_are_repeated_and_restored(path):
    tracker, x = Tracker(), torch.randn(64)
    handle = so.register_rng_tracker(tracker)
    try:
        start = copy.copy(tracker.states)

        def producer(x):
            tracker.states = copy.copy(start)
            return draws(x)

        def draws(x):
            return tracker.dropout(x.sin())

        ckpt = so.OutputDiscardCheckpoint()
        leaf = x.clone().requires_grad_()
        h = ckpt.checkpoint(draws, leaf)
        mask = h != 0
        y = h * h
        ckpt.discard_output_and_register_recompute(y)
        tracker.dropout(x)  # moves on, as later layers do
        moved = tracker.states["model"].clone()
        y.sum().backward()
        assert torch.equal(tracker.states["model"], moved)
        right = 2 * x.sin() * x.cos() * mask
        torch.testing.assert_close(leaf.grad, right)
    finally:
        handle.remove()


def test_generators_in_arguments_and_closures_of_a_region(path):
    shared, x = torch.Generator().manual_seed(3), torch.randn(64)

    def noise(x, generator=None):
        return x * torch.randn(x.shape, generator=generator or shared)

    for arguments in ({}, {"generator": torch.Generator().manual_seed(4)}):
        leaf = x.clone().requires_grad_()
        ckpt = so.OutputDiscardCheckpoint()
        h = ckpt.checkpoint(noise, leaf, **arguments)
        factor = (h / leaf).detach()
        y = h * h
        ckpt.discard_output_and_register_recompute(y)
        y.sum().backward()
        torch.testing.assert_close(leaf.grad, 2 * x * factor * factor, rtol=1e-4, atol=1e-5)


def test_register_rng_tracker_refuses_objects_without_states():
    with pytest.raises(TypeError, match=r"`tracker` is int\. Expected"):
        so.register_rng_tracker(3)


def test_training_mode(path):
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    x = torch.randn(16, 8)
    for producer in (module, lambda x: module(x).sin(), module.forward):
        module.train()
        same(run(producer, x, change=module.eval))
        assert not module.training and not module[1].training
        same(run(producer, x, change=module.train))
        assert module.training and module[1].training


def test_default_dtype_and_device(path):
    x = torch.randn(16)
    try:
        same(run(lambda x: x * torch.full((16,), 1 / 3), x.double(),
                 change=lambda: torch.set_default_dtype(torch.float64)))  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
    ckpt = so.OutputDiscardCheckpoint()
    leaf = x.clone().requires_grad_()
    h = ckpt.checkpoint(lambda x: x * torch.ones(16).sin(), leaf)
    y = h * h
    ckpt.discard_output_and_register_recompute(y)
    with torch.device("meta"):
        y.backward(torch.ones(16, device="cpu"))
    torch.testing.assert_close(leaf.grad, 2 * x * torch.ones(16).sin() ** 2)


def test_deterministic_mode(path):
    seen = []

    def producer(x):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return x.sin()

    try:
        run(producer, torch.randn(4), change=lambda: torch.use_deterministic_algorithms(True))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, False, False]


def test_the_recompute_uses_the_attention_kernel_of_the_forward(path):
    seen = []

    def producer(x):
        seen.append((torch._C._get_math_sdp_enabled(), torch._C._get_flash_sdp_enabled()))
        return x.sin() + F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 8, 8, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        h = ckpt.checkpoint(producer, x)
        y = h * h
    ckpt.discard_output_and_register_recompute(y)
    y.sum().backward()
    assert seen == [(True, False)] * 2 and torch._C._get_flash_sdp_enabled()


def test_cudnn_is_disabled_in_the_recompute_if_it_was_in_the_forward(path):
    seen = []

    def producer(x):
        seen.append(torch.backends.cudnn.enabled)
        return x.sin()

    ckpt = so.OutputDiscardCheckpoint()
    x = torch.randn(4, requires_grad=True)
    with torch.backends.cudnn.flags(enabled=False):
        h = ckpt.checkpoint(producer, x)
        y = h * h
    ckpt.discard_output_and_register_recompute(y)
    y.sum().backward()
    assert seen == [False, False] and torch.backends.cudnn.enabled


def test_the_recompute_uses_the_autocast_of_the_forward(path):
    w = torch.randn(8, 8)
    ckpt = so.OutputDiscardCheckpoint()
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        h = ckpt.checkpoint(lambda x: x @ w, x)
        y = h.float() * h.float()
    ckpt.discard_output_and_register_recompute(y)
    y.sum().backward()
    with torch.autocast("cpu", torch.float16):
        y = so.output_discard(lambda x: x.double() @ w.double(), torch.square)(x)
    assert y.dtype == torch.float64 or y.dtype == torch.float16
    y.sum().backward()


def test_state_is_restored_if_the_recompute_raises(path):
    fails = []
    module = nn.Dropout(0.5)

    def producer(x):
        if fails:
            raise KeyError("recompute")
        return module(x).sin()

    x = torch.randn(8, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(producer, x)
    y = h * h
    ckpt.discard_output_and_register_recompute(y)
    fails.append(1)
    module.eval()
    state = torch.get_rng_state()
    with pytest.raises(KeyError):
        y.sum().backward(retain_graph=True)
    assert torch.equal(torch.get_rng_state(), state) and not module.training
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    fails.clear()
    y.sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("check", ["default", "checksum", "none"])
def test_checksums_name_the_first_tensor_that_differs(path, check):
    counter = []

    def producer(x):
        counter.append(1)
        return (x.sin() * len(counter)).exp().cos()  # sin saves x, exp its result

    x = torch.randn(5, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint(determinism_check=check)
    h = ckpt.checkpoint(producer, x)
    y = h * h
    ckpt.discard_output_and_register_recompute(y)
    if check != "checksum":
        y.sum().backward()
        return
    with pytest.raises(RuntimeError, match=r"tensor 1 that .*producer saves was \(5,\).*checksum"):
        y.sum().backward()


def test_checksums_of_an_output_that_no_node_saves(path):
    counter = []

    def producer(x):
        counter.append(1)
        return x + len(counter)

    x = torch.randn(5, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint(determinism_check="checksum")
    h = ckpt.checkpoint(producer, x)
    y = h * h
    ckpt.discard_output_and_register_recompute(y)
    with pytest.raises(RuntimeError, match=r"output 0 of .* checksum .* when it is"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("change", ["doubled", "reversed", "two exchanged"])
def test_checksums_differ_for_changes_that_an_xor_misses(dtype, change):
    # An xor of all elements misses "reversed" and "two exchanged", and sometimes "doubled".
    for _ in range(100):
        x = torch.rand(64).mul(99).add(1).to(dtype)
        other = x * 2 if change == "doubled" else x.flip(0)
        if change == "two exchanged":
            other = torch.cat((x[1:2] + 1, x[:1], x[2:]))
            x = torch.cat((x[:1], x[1:2] + 1, x[2:]))
        checksums = [int(Saved(t, checksum=True).checksum) for t in (x, other, x.clone())]
        assert checksums[0] == checksums[2]
        assert torch.equal(x, other) == (checksums[0] == checksums[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8])
def test_checksums_of_an_exact_recompute_agree(path, dtype):
    other = torch.randint(-9, 9, (7, 3)).to(dtype)
    producer = lambda x: (F.dropout(x.sin(), 0.3) * other * (x > 0)) * x[:0].sum()  # noqa: E731
    same(run(producer, torch.randn(7, 3), determinism_check="checksum"))


def _nested(values, layout):
    parts = values.split([2, len(values) - 2])
    return torch.nested.nested_tensor(list(parts), layout=layout)


COMPOSED = {
    "sparse": lambda t: t.to_sparse(),
    "by rows": lambda t: t.to_sparse_csr(),
    "by columns": lambda t: t.to_sparse_csc(),
    "strided parts": lambda t: _nested(t, torch.strided),
    "jagged parts": lambda t: _nested(t, torch.jagged),
    "two tensors": lambda t: TwoTensor(t, t.clone()),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.01, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", COMPOSED)
def test_checksums_of_tensors_that_consist_of_others(kind):
    x = torch.rand(4, 3) + 0.1
    other = x.flip(0)
    same, again, different = (
        Saved(COMPOSED[kind](t), checksum=True) for t in (x, x.clone(), other)
    )
    assert int(same.checksum) == int(again.checksum) != int(different.checksum)


def test_checksums_of_complex_numbers(path):
    x = torch.randn(7, 3, dtype=torch.complex64, requires_grad=True)
    right = torch.autograd.grad((x.sin() * x.sin().conj()).real.sum(), x)
    consumer = lambda h: (h * h.conj()).real  # noqa: E731
    y = so.output_discard(torch.sin, consumer, determinism_check="checksum")(x)
    gradient = torch.autograd.grad(y.sum(), x)[0]
    torch.testing.assert_close(gradient, right[0], rtol=1e-4, atol=1e-5)


def test_strides_are_compared():
    flip = []

    def producer(x):
        y = x.sin()
        return y.t().contiguous().t() if flip else y

    x = torch.randn(3, 4, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(producer, x)
    y = h * h
    ckpt.discard_output_and_register_recompute(y)
    flip.append(1)
    with pytest.raises(RuntimeError, match="with strides"):
        y.sum().backward()


@pytest.mark.parametrize("saves", [True, False])
def test_selective_policies_inside_of_a_region(path, saves):
    first, second = torch.randn(8, 16), torch.randn(16, 32)
    keep, recompute = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    products = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products.append(func is torch.ops.aten.mm.default)
            return func(*args, **(kwargs or {}))

    def policy(ctx, op, *args, **kwargs):
        return keep if saves and op == torch.ops.aten.mm.default else recompute

    producer = lambda x: (x @ first).sin() @ second  # noqa: E731
    for end in (torch.sin, lambda h: h):  # with `lambda h: h`, the saved product is the output
        x = torch.randn(4, 8)
        right = run(lambda x, end=end: end(producer(x)), x)[0]
        leaf = x.clone().requires_grad_()
        ckpt = so.OutputDiscardCheckpoint(
            context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
        h = ckpt.checkpoint(lambda x, end=end: end(producer(x)), leaf)
        y = h * h
        ckpt.discard_output_and_register_recompute(y)
        assert so.is_discarded(h) == (end is torch.sin or not saves)
        products.clear()
        with Count():
            gradient = torch.autograd.grad(y.sum(), leaf)[0]
        assert torch.allclose(gradient, right[1], rtol=1e-4, atol=1e-5)
        assert sum(products) == 2 + (0 if saves else 2)


@pytest.mark.parametrize("view", [
    lambda h: h.transpose(0, 1), lambda h: h[:, :1].expand(3, 4, 6), lambda h: h.unfold(1, 2, 1).mT,
])  # fmt: skip
def test_hooks_that_do_not_keep_strides(view):
    """`save_on_cpu(pin_memory=True)` returns contiguous tensors."""
    first, layer = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    x, wanted = torch.randn(3, 5, 6), (*first.parameters(), *layer.parameters())
    right = torch.autograd.grad(layer(view(first(x))).square().sum(), wanted)
    layer = so.CheckpointWrapper(layer)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.detach().clone(memory_format=torch.contiguous_format), lambda t: t
    ):
        y = layer(view(first(x)))
    assert all(map(torch.equal, torch.autograd.grad(y.square().sum(), wanted), right))


def test_strided_nested_tensors():
    layer = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    parts = [torch.randn(3, 6), torch.randn(2, 6)]
    results = []
    for run in (layer, so.CheckpointWrapper(copy.deepcopy(layer))):
        x = torch.nested.nested_tensor(parts, requires_grad=True)
        run(x).to_padded_tensor(0.0).square().sum().backward()
        results.append([*x.grad.unbind(), *(p.grad for p in run.parameters())])
    assert all(map(torch.equal, *results))
