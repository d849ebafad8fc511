"""Side effects of a region happen once, and a region gets the caller's own objects."""

import contextlib
import copy
import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops as so
from storage_ops.checkpoint.region.region import Region

KINDS = ("full", "selective", "output_discard", "reentrant", "region", "composed", "chain")


class LayerAndHead(nn.Module):
    """A layer, and a head that consumes its output."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(6, 3)

    def forward(self, x, *args):
        return self.head(self.layer(x, *args))


def checkpointed(kind, model):
    """Return a function like `model` in which the layer is a region."""
    layer, head = model.layer, model.head
    if kind == "region":

        def run(x, *args):
            ckpt = so.OutputDiscardCheckpoint()
            h = ckpt.checkpoint(layer, x, *args)
            with ckpt.consumer():
                y = head(h)
            ckpt.discard_output_and_register_recompute()
            assert so.is_discarded(h)
            return y

        return run
    if kind == "composed":
        return so.output_discard(layer, head)
    if kind == "chain":

        def run(x, *args):
            with so.OutputDiscardChain() as chain:
                return head(chain.checkpoint(torch.sigmoid, chain.checkpoint(layer, x, *args)))

        return run
    options = {"use_reentrant": True} if kind == "reentrant" else {"mode": kind}
    if kind == "selective":
        options["ops_to_save"] = ["aten.mm", "aten.addmm"]
    return so.apply_activation_checkpoint(model, {"layer_names": ["layer"], **options})


def pair(kind, make):
    """Return (function, model) without a region, and with one. The models are equal."""
    model = LayerAndHead(make())
    if kind == "chain":
        plain = copy.deepcopy(model)
        return (
            lambda x, *a: plain.head(plain.layer(x, *a).sigmoid()),
            plain,
            checkpointed(kind, model),
            model,
        )
    other = copy.deepcopy(model)
    return other, other, checkpointed(kind, model), model


def same_state(got, right):
    right = right.state_dict()
    for name, t in got.state_dict().items():
        assert torch.equal(t, right[name]), name


def steps(fn, model, inputs, retain=False):
    """Return the gradients of some steps, each with two forwards and one backward."""
    gradients = []
    for x in inputs:
        model.zero_grad()
        x = x.clone().requires_grad_()
        torch.manual_seed(0)
        first, second = fn(x).square().sum(), fn(x * 2).cos().sum()
        if retain:
            first.backward(retain_graph=True)
        (first + second).backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    return gradients


class State(nn.Module):
    """Reads its state, and writes it in place."""

    def __init__(self, how="copy"):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 6), how
        self.register_buffer("h", torch.randn(6))

    def forward(self, x):
        h = torch.tanh(self.linear(x) + self.h.clone())
        new = h.detach().mean(0)
        if self.how == "copy":
            self.h.copy_(new)
        elif self.how == "data":
            self.h.data.mul_(0.5).add_(new)
        elif self.how == "rebind":
            self.h = new
        return h


class Attribute(State):
    """Has its state in a plain attribute instead of a buffer."""

    def __init__(self, how="copy"):
        super().__init__(how)
        del self.h
        self.h = torch.randn(6)


class Tupled(nn.Module):
    """Has its state in a tuple, and logs a tensor with an autograd graph."""

    def __init__(self):
        super().__init__()
        self.linear, self.h, self.logged = nn.Linear(4, 6), (torch.ones(6), 0), None

    def forward(self, x):
        h = torch.tanh(self.linear(x) * self.h[0])
        self.h, self.logged = (h.detach().mean(0), self.h[1] + 1), h.square().mean()
        return h


class Counts(nn.Module):
    """Counts the load of experts, and computes a loss from it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.register_buffer("load", torch.zeros(6, dtype=torch.long))
        self.register_buffer("table", torch.randn(300, 300))  # too large to be copied every time

    def forward(self, x):
        logits = self.linear(x) - self.load * 0.1
        self.load.add_(F.one_hot(logits.argmax(-1), 6).sum(0))
        self.table[0, 0] += 1
        return logits.softmax(-1) * self.table[0, 0].item()


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 24), nn.BatchNorm2d(6)

    def forward(self, x):
        return self.norm(self.linear(x).view(-1, 6, 2, 2)).sigmoid().mean((2, 3))


class FakeQuantized(nn.Module):
    def __init__(self, observer="MovingAverageMinMaxObserver", **options):
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.quantize = torch.ao.quantization.FakeQuantize(
            getattr(torch.ao.quantization, observer), averaging_constant=0.5, **options
        )

    def forward(self, x):
        return self.quantize(self.linear(x)).sin()


class Codebook(nn.Module):
    """Moves its codebook towards the mean of its inputs, by writing `.data`."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.register_buffer("codes", torch.randn(5, 6))

    def forward(self, x):
        z = self.linear(x)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        quantised = z + (self.codes[nearest] - z).detach()
        chosen = F.one_hot(nearest, 5).to(z.dtype)
        mean = chosen.T @ z.detach() / chosen.sum(0).clamp(min=1)[:, None]
        self.codes.data.lerp_(mean, 0.3)
        return quantised * z


def normed():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Dropout(0.3))


WRITES = {
    "batch norm": normed,
    "batch norm 2d": Convolution,
    "instance norm": lambda: nn.Sequential(
        nn.Linear(4, 6), nn.Unflatten(0, (1, -1)), nn.InstanceNorm1d(8, track_running_stats=True),
        nn.Flatten(0, 1),
    ),
    "copied state": State,
    "state by .data": lambda: State("data"),
    "replaced state": lambda: State("rebind"),
    "attribute": Attribute,
    "attribute by .data": lambda: Attribute("data"),
    "replaced attribute": lambda: Attribute("rebind"),
    "tuple": Tupled,
    "counts": Counts,
    "fake quantised": FakeQuantized,
    "fake quantised by channel": lambda: FakeQuantized(
        "MovingAveragePerChannelMinMaxObserver", ch_axis=1
    ),
    "codebook": Codebook,
    "spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 6)), nn.Tanh()),
    "parametrised": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITES)
def test_effects_happen_once_and_gradients_are_those_of_eager(name, kind):
    plain, plain_model, fn, model = pair(kind, WRITES[name])
    inputs = [torch.randn(8, 4) for _ in range(3)]
    right = steps(plain, plain_model, inputs)
    got = steps(fn, model, inputs)
    # The reentrant checkpoint adds gradients in another order.
    equal = partial(torch.allclose, atol=1e-6) if kind == "reentrant" else torch.equal
    for a, b in zip(got, right, strict=True):
        assert all(map(equal, a, b))
    same_state(model, plain_model)
    if "attribute" in name:
        assert torch.equal(model.layer.h, plain_model.layer.h)


@pytest.mark.parametrize("kind", KINDS)
def test_a_logged_value_keeps_no_earlier_region_alive(kind):
    _, _, fn, model = pair(kind, Tupled)
    known = {id(o) for o in gc.get_objects() if type(o) is Region}
    steps(fn, model, [torch.randn(8, 4) for _ in range(6)])
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) is Region and id(o) not in known]
    assert len(alive) <= 2  # regions of the last step, whose logged value exists


@pytest.mark.parametrize("kind", ["full", "composed"])
@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
def test_effects_of_torchscript_modules_happen_once(kind):
    traced = torch.jit.trace(nn.BatchNorm1d(6), torch.randn(5, 6))
    scripted = torch.jit.script(nn.Linear(6, 6))
    layers = (nn.Linear(4, 6), scripted, traced, nn.Tanh())
    for p in (*scripted.parameters(), *traced.parameters()):
        p.requires_grad_(False)  # copies of trained parameters would not be leaves
    plain, plain_model, fn, model = pair(kind, lambda: nn.Sequential(*layers))
    inputs = [torch.randn(8, 4) for _ in range(2)]
    right, got = steps(plain, plain_model, inputs), steps(fn, model, inputs)
    torch.testing.assert_close(got, right)
    same_state(model, plain_model)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "reentrant"])
@pytest.mark.parametrize("name", ["batch norm", "copied state", "replaced state"])
def test_effects_happen_once_however_many_backwards(path, name, kind):
    plain, plain_model, fn, model = pair(kind, WRITES[name])
    inputs = [torch.randn(8, 4) for _ in range(2)]
    right = steps(plain, plain_model, inputs, retain=True)
    got = steps(fn, model, inputs, retain=True)
    for a, b in zip(got, right, strict=True):
        assert all(map(torch.equal, a, b))
    same_state(model, plain_model)


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_that_are_only_read_do_not_change(kind):
    """Their versions and bytes stay the same."""
    _, _, fn, model = pair(kind, lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).eval()))
    norm = model.layer[1]
    norm.register_buffer("large", torch.randn(300, 300))
    before = {n: (b.clone(), b._version, b.data_ptr()) for n, b in norm.named_buffers()}
    for _ in range(2):
        fn(torch.randn(8, 4, requires_grad=True)).sum().backward()
    for name, b in norm.named_buffers():
        t, version, pointer = before[name]
        assert torch.equal(b, t) and (b._version, b.data_ptr()) == (version, pointer)


@pytest.mark.parametrize("kind", KINDS)
def test_list_and_dictionary_arguments_are_the_callers_own(kind):
    class Layer(nn.Linear):
        def forward(self, x, losses, cache):
            h = super().forward(x)
            losses.append(h.square().mean())
            cache.setdefault("keys", []).append(h.detach())
            return h * len(losses)

    plain, plain_model, fn, model = pair(kind, lambda: Layer(4, 6))
    warns = pytest.warns(UserWarning, match="Layer puts a tensor into one of its arguments")
    results = []
    for run, module in ((plain, plain_model), (fn, model)):
        x, losses, cache = torch.ones(2, 4, requires_grad=True), [], {}
        with warns if kind == "reentrant" and run is fn else contextlib.nullcontext():
            y = run(x, losses, cache)
        with_aux = 0 if kind == "reentrant" else sum(losses)
        (y.sum() + with_aux).backward()
        assert len(losses) == len(cache["keys"]) == 1
        results.append([x.grad, losses[0], cache["keys"][0], module.layer.weight.grad])
    assert all(map(torch.equal, *results))


class Cache:
    """A cache like the one for keys and values in transformers."""

    def __init__(self):
        self.layers, self.seen = [], 0

    def update(self, k):
        self.layers.append(k)
        self.seen += len(k)
        return torch.cat(self.layers)


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_argument_is_written_once(kind):
    class Layer(nn.Linear):
        def forward(self, x, cache):
            k = super().forward(x)
            return k + cache.update(k.detach()).mean(0) * cache.seen

    plain, plain_model, fn, model = pair(kind, lambda: Layer(4, 6))
    results = []
    for run, module in ((plain, plain_model), (fn, model)):
        x, cache = torch.ones(2, 4, requires_grad=True), Cache()
        (run(x, cache) + run(x * 2, cache)).sum().backward()
        assert len(cache.layers) == 2 and cache.seen == 4
        results.append([x.grad, *cache.layers, module.layer.weight.grad])
    assert all(map(torch.equal, *results))


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "reentrant"])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_recompute_gets_the_tensors_of_the_forward(path, kind, hooked):
    seen = []

    class Layer(nn.Linear):
        def forward(self, x, p, mask, leaf):
            seen.append([x, p, mask, leaf])
            scaled = [t * getattr(t, "scale", 1.0) for t in (x, p, mask, leaf)]
            return super().forward(scaled[0] * scaled[2] + scaled[1]) * scaled[3]

    plain, _, fn, _ = pair(kind, lambda: Layer(4, 6))
    results = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    for run in (plain, fn):
        seen.clear()
        torch.manual_seed(0)
        z = torch.randn(2, 4, requires_grad=True)
        p, mask = nn.Parameter(torch.randn(4)), torch.rand(4).as_subclass(Tagged)
        leaf, x = torch.randn(6, requires_grad=True), z * 1
        x.scale, p.scale, mask.scale, leaf.scale = 3.0, 2.0, 5.0, 0.5
        with hooks if hooked else contextlib.nullcontext():
            y = run(x, p, mask, leaf)
        y.sum().backward()
        results.append([z.grad, p.grad, leaf.grad])
    assert all(map(torch.equal, *results))
    first, again = seen[0], seen[-1]
    assert len(seen) > 1 and type(again[2]) is Tagged and type(again[1]) is nn.Parameter
    assert [t.is_leaf for t in again] == [False, True, True, True]
    assert again[1] is first[1] and again[3] is first[3]
    assert hooked or all(a is b for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_a_region_registers_on_its_input_run_once(kind):
    calls = []

    class Layer(nn.Linear):
        def forward(self, x):
            x.register_hook(lambda g: calls.append(1))
            return super().forward(x).sin()

    _, _, fn, _ = pair(kind, lambda: Layer(4, 6))
    x = torch.randn(2, 4, requires_grad=True) * 1
    if kind == "reentrant":
        return  # its forward has no graph, so only the recompute registers the hook
    fn(x).sum().backward()
    assert calls == [1]


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "reentrant"])
def test_a_node_gets_the_same_object_for_a_saved_tensor_without_grad(kind):
    table = torch.arange(6.0)
    table.note = "mine"

    class Uses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(table)
            return x * table

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            assert saved is table and saved.note == "mine"
            return grad * saved

    class Layer(nn.Linear):
        def forward(self, x):
            return Uses.apply(super().forward(x))

    plain, plain_model, fn, model = pair(kind, lambda: Layer(4, 6))
    inputs = [torch.randn(3, 4)]
    right, got = steps(plain, plain_model, inputs), steps(fn, model, inputs)
    assert all(map(torch.equal, got[0], right[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_recompute_uses_the_parameters_that_the_forward_had(path, kind):
    make = lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))  # noqa: E731
    plain, plain_model, fn, model = pair(kind, make)
    new = {
        n: torch.randn_like(p, requires_grad=True)
        for n, p in model.named_parameters()
        if kind in ("full", "selective", "output_discard", "reentrant") or n.startswith("layer")
    }
    x = torch.randn(3, 4, requires_grad=True)
    results = []
    for run, module in ((plain, plain_model), (fn, model)):
        with _exchanged(module, new):
            y = run(x)
        y.sum().backward()
        results.append([x.grad, *(t.grad for t in new.values())])
        x.grad = None
        for t in new.values():
            t.grad = None
        assert all(p.grad is None for n, p in module.named_parameters() if n in new)
    assert all(map(torch.equal, *results))


@contextlib.contextmanager
def _exchanged(module, new):
    """Replace parameters as torch.func.functional_call does, around any call of the module."""
    with torch.nn.utils.stateless._reparametrize_module(module, new):
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_were_assigned(kind):
    plain, plain_model, fn, model = pair(kind, lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh()))
    x, results = torch.randn(3, 4, requires_grad=True), []
    for run, module in ((plain, plain_model), (fn, model)):
        y, weight = run(x), module.layer[0].weight
        module.layer[0].weight = nn.Parameter(torch.zeros(6, 4))
        y.sum().backward()
        assert module.layer[0].weight is not weight and module.layer[0].weight.grad is None
        results.append([x.grad, weight.grad])
        x.grad = None
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("kind", ["region", "composed", "chain"])
def test_the_recompute_sees_the_loop_variable_of_the_forward(kind):
    layers, head = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3)

    def step(checkpoint):
        x = h = torch.ones(2, 4, requires_grad=True)
        for layer in layers:
            h = checkpoint(lambda t: layer(t).tanh(), h)  # noqa: B023
        return torch.autograd.grad(head(h).sum(), (x, *layers.parameters()))

    def region(fn, h):
        if kind == "composed":
            return so.output_discard(fn, torch.sin)(h)
        if kind == "chain":
            with so.OutputDiscardChain() as chain:
                return chain.checkpoint(fn, h).sin()
        ckpt = so.OutputDiscardCheckpoint()
        h = ckpt.checkpoint(fn, h)
        y = h.sin()
        ckpt.discard_output_and_register_recompute(y)
        return y

    assert all(map(torch.equal, step(region), step(lambda fn, h: fn(h).sin())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_modified_before_backward_is_an_error(path, kind, frozen):
    _, _, fn, model = pair(kind, lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh()))
    model.layer[0].bias.requires_grad_(not frozen)
    y = fn(torch.randn(3, 4, requires_grad=True))
    with torch.no_grad():
        model.layer[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="was modified in place between forward and recompute"):
        y.sum().backward()
