"""Gradients, memory and number of runs of tiled modules, and modules that `tile` refuses."""

import copy
import pickle

import pytest
import torch
from torch import nn

import storage_ops
from storage_ops.checkpoint.layers.tile import tiling_of
from storage_ops.memory import measure

from .blocks import Ops


class Mlp(nn.Module):
    def __init__(self, hidden=16, width=48, dropout=0.0, bias=True):
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=bias)
        self.up = nn.Linear(hidden, width, bias=bias)
        self.down = nn.Linear(width, hidden, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, scale=1.0):
        return self.down(self.dropout(nn.functional.silu(self.gate(x)) * self.up(x))) * scale


def gradients(module, x, *args, **kwargs):
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x, *args, **kwargs)
    (y * torch.linspace(0.5, 2.0, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("tiles", [1, 2, 5, 11, 400])
@pytest.mark.parametrize("shape", [(2, 11, 16), (11, 16), (2, 3, 11, 16), (0, 11, 16)])
def test_gradients_are_those_of_the_whole(tiles, shape):
    plain = Mlp().double()
    tiled = storage_ops.tile(copy.deepcopy(plain), tiles)
    x = torch.randn(shape, dtype=torch.float64)
    for ours, theirs in zip(gradients(tiled, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_another_dimension_of_tokens():
    plain = Mlp().double()
    tiled = storage_ops.tile(copy.deepcopy(plain), 3, dim=0)
    x = torch.randn(7, 2, 16, dtype=torch.float64)
    for ours, theirs in zip(gradients(tiled, x, 2.0), gradients(plain, x, scale=2.0), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_the_recompute_repeats_its_random_numbers(training):
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            return self.dropout(self.dropout(x))

    module = storage_ops.tile(Same().train(training), 3)
    x = torch.ones(2, 50, 8, requires_grad=True)
    torch.manual_seed(3)
    y = module(x)
    after = torch.get_rng_state()
    torch.rand(5)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # both are the scaled mask, because x is ones
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    pieces = [Same().train(training)(t) for t in torch.tensor_split(x.detach(), 3, 1)]
    assert torch.equal(torch.cat(pieces, 1), y.detach())
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bit_weights_are_in_float32(dtype):
    plain = nn.Linear(4, 4, bias=False).to(dtype)
    tiled = storage_ops.tile(copy.deepcopy(plain), 512)
    x = torch.ones(1, 512, 4, dtype=dtype)
    tiled(x).sum().backward()
    assert torch.equal(tiled.weight.grad, torch.full((4, 4), 512.0, dtype=dtype))
    y = torch.randn(1, 512, 4, dtype=dtype)
    tiled.zero_grad()
    tiled(y).sum().backward()
    exact = y.double().sum((0, 1)).expand(4, 4)
    torch.testing.assert_close(tiled.weight.grad.double(), exact, rtol=2**-8, atol=0.05)


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("checkpoint", ["ours", "torch", "selective"])
def test_inside_a_checkpoint_the_forward_also_runs_twice_in_all(checkpoint):
    plain = Block(Mlp(dropout=0.4)).double()
    block = copy.deepcopy(plain)
    storage_ops.tile(block.mlp, 4)
    x = torch.randn(2, 1024, 16, dtype=torch.float64, requires_grad=True)
    block(x)  # the first call checks that the module is token-wise
    calls = []
    block.mlp.up.register_forward_hook(lambda *_: calls.append(1))

    def run():
        if checkpoint == "torch":
            return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        options = {"ops_to_save": ["aten.native_layer_norm"]} if checkpoint == "selective" else {}
        return storage_ops.CheckpointWrapper(block, **options)(x)

    torch.manual_seed(0)
    run().square().sum().backward()
    assert len(calls) == 8
    ours = [x.grad, *(p.grad for p in block.parameters())]
    x.grad = None
    torch.manual_seed(0)
    with storage_ops.disable_checkpointing():
        pieces = [plain.mlp(t) for t in torch.tensor_split(plain.norm(x), 4, 1)]
        (x + torch.cat(pieces, 1)).square().sum().backward()
    for mine, theirs in zip(ours, [x.grad, *(p.grad for p in plain.parameters())], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_the_peak_falls_with_the_number_of_tiles():
    def peak(module, x, g):
        module(x).backward(g)
        module.zero_grad()
        x.grad = None
        with measure() as m:
            module(x).backward(g)
        return m.peak_bytes

    hidden, width, tokens = 32, 512, 2048
    x = torch.randn(1, tokens, hidden, requires_grad=True)
    g = torch.randn(1, tokens, hidden)
    fixed = 3 * hidden * width * 4 + 2 * x.nbytes  # gradients, output and the input's gradient
    whole = peak(Mlp(hidden, width, bias=False), x, g)
    wide = tokens * width * 4
    for tiles in (2, 4, 8, 16):
        tiled = peak(storage_ops.tile(Mlp(hidden, width, bias=False), tiles), x, g)
        # Seven tensors of the width of the MLP at most live at once, and one weight's gradient.
        assert tiled <= fixed + 7 * wide / tiles + hidden * width * 4 + 3 * x.nbytes / tiles + 4096
        assert tiled < whole * 1.1 / tiles + fixed


@pytest.mark.in_turn
def test_a_budget_bounds_the_memory_of_a_tile():
    x = torch.randn(2, 512, 32, requires_grad=True)
    g = torch.randn(2, 512, 32)
    fixed = 3 * 32 * 256 * 4 + 2 * x.nbytes + 2 * torch.get_rng_state().nbytes
    numbers = []
    for budget in ("4MiB", "1MiB", "300KiB"):
        module = storage_ops.tile(Mlp(32, 256, bias=False), budget=budget)
        module(x).backward(g)
        numbers.append(*tiling_of(module).tiles_by_call.values())
        module.zero_grad()
        x.grad = None
        with measure() as m:
            module(x).backward(g)
        assert m.peak_bytes <= fixed + storage_ops.quantities.parse_bytes(budget, "") * 1.05
    assert numbers == sorted(numbers) and numbers[0] < numbers[-1]
    with pytest.raises(ValueError, match="for one token, and `budget` is 1000 B"):
        storage_ops.tile(Mlp(32, 256), budget=1000)(x)


def test_autocast_is_repeated():
    plain = Mlp()
    tiled = storage_ops.tile(copy.deepcopy(plain), 3)
    x = torch.randn(2, 12, 16)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = [plain(x), x]
        y = tiled(x.requires_grad_())
        uncached = tiled.up(x)  # the cache of autocast has nothing of the tiles
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    torch.testing.assert_close(y.float(), theirs[0].float(), rtol=0.02, atol=0.02)
    assert uncached.requires_grad and tiled.up.weight.grad is not None
    theirs[0].float().sum().backward()
    for ours, other in zip(tiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=0.05, atol=0.05)


def test_double_use_nested_use_and_retained_graphs():
    plain = nn.Sequential(Mlp(), nn.LayerNorm(16)).double()
    tiled = copy.deepcopy(plain)
    storage_ops.tile(tiled[0], 2)
    storage_ops.tile(tiled, 3)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    for module in (plain, tiled):
        module.zero_grad()
        y = module(module(x)).square().sum()
        y.backward(retain_graph=True)
        y.backward()
    for ours, theirs in zip(tiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
    y = tiled(x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second backward pass"):
        y.backward()


def test_gradients_of_some_inputs_only():
    plain = Mlp().double()
    tiled = storage_ops.tile(copy.deepcopy(plain), 3)
    x = torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
    for wanted in ([0], [1], [0, 2]):
        results = []
        for module in (plain, tiled):
            inputs = [x, *module.parameters()]
            results.append(torch.autograd.grad(module(x).sum(), [inputs[i] for i in wanted]))
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    tiled.up.requires_grad_(False)
    tiled(x.detach()).sum().backward()
    assert tiled.up.weight.grad is None and tiled.down.weight.grad is not None
    with torch.no_grad():
        assert not tiled(x).requires_grad


def test_hooks_of_parameters_run_once_on_the_sum():
    module = storage_ops.tile(Mlp(), 4)
    seen = []
    module.up.weight.register_hook(lambda g: (seen.append(g.clone()), g * 2)[1])
    module(torch.randn(1, 8, 16)).sum().backward()
    assert len(seen) == 1 and torch.equal(module.up.weight.grad, 2 * seen[0])


def test_names_hooks_copies_and_pickles_stay():
    module = Mlp()
    outputs = []
    module.register_forward_hook(lambda m, a, out: outputs.append(out.shape))
    names = list(module.state_dict())
    assert storage_ops.tile(module, 2) is module and storage_ops.tile(module, 2) is module
    assert list(module.state_dict()) == names and type(module).__name__ == "Mlp"
    module(torch.randn(1, 6, 16))
    assert outputs == [(1, 6, 16)]
    module._forward_hooks.clear()
    assert tiling_of(copy.deepcopy(module)).tiles == 2
    assert tiling_of(pickle.loads(pickle.dumps(module))).tiles == 2
    with pytest.raises(RuntimeError, match="tiled already"):
        storage_ops.tile(module, 3)
    storage_ops.remove_activation_checkpoint(module)
    assert type(module) is Mlp and tiling_of(module) is None


@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["eager", "aot_eager"])
def test_compiled(how):
    plain = Mlp().double()
    tiled = storage_ops.tile(copy.deepcopy(plain), 3)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    compiled = torch.compile(tiled, backend=how, fullgraph=True)
    for ours, theirs in zip(gradients(compiled, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.compiler.reset()
    storage_ops.remove_activation_checkpoint(tiled)
    storage_ops.tile(tiled, budget="1MiB")
    with pytest.raises(Exception, match="compiled with a budget"):
        torch.compile(tiled, backend=how, fullgraph=True)(x)


def test_under_torch_func():
    plain = Mlp().double()
    tiled = storage_ops.tile(copy.deepcopy(plain), 3)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    values = dict(plain.named_parameters())

    def loss(module):
        return lambda v: torch.func.functional_call(module, v, (x,)).square().sum()

    ours, theirs = (torch.func.grad(loss(m))(values) for m in (tiled, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    # Replaced parameters get the gradients.
    leaves = {k: v.detach().clone().requires_grad_() for k, v in values.items()}
    loss(tiled)(leaves).backward()
    torch.testing.assert_close({k: v.grad for k, v in leaves.items()}, theirs)


class Sum(nn.Module):
    def forward(self, x):
        return x + x.mean(-2, keepdim=True)


class ResponseNorm(nn.Module):
    """Normalises over tokens like ConvNeXt V2, hidden at first by a gate of zeros."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        norms = x.norm(dim=-2, keepdim=True)
        return x + self.gate * x * norms / norms.mean(-1, keepdim=True)


class Gated(nn.Module):
    """Mixes tokens by an attention whose gate is 0 at first."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gate.tanh() * ((x @ x.mT).softmax(-1) @ x)


@pytest.mark.parametrize(
    "module",
    [
        Sum(),
        nn.Sequential(nn.Linear(16, 16), ResponseNorm(), nn.Linear(16, 16)),
        nn.Sequential(nn.Linear(16, 16), Gated()),
        nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)),
        nn.TransformerEncoderLayer(16, 2, batch_first=True),
    ],
)
def test_a_module_that_is_not_token_wise_is_refused(module):
    x = torch.randn(2, 8, 16)
    if any(isinstance(m, nn.BatchNorm1d) for m in module.modules()):
        x = x[0]
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    for inputs in (x, x.relu(), torch.zeros_like(x)):
        with pytest.raises(ValueError, match="is not token-wise"):
            storage_ops.tile(module, 2)(inputs)
    assert all(torch.equal(v, module.state_dict()[k]) for k, v in before.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_check_works_for_parameters_that_are_zero():
    """The check temporarily replaces zeros, also in shared weights."""
    plain = Mlp().double()
    with torch.no_grad():
        plain.down.weight.zero_()
    tied = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)).double()
    tied[2].weight = tied[0].weight
    tied[0].weight.data[3] = 0
    x = torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
    for module in (plain, tied):
        tiled = storage_ops.tile(copy.deepcopy(module), 3)
        ours, theirs = (
            torch.autograd.grad(m(x).square().sum() + m(x).sum(), (x, *m.parameters()))
            for m in (tiled, module)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_tensor_that_would_get_no_gradient_is_refused():
    other = nn.Linear(16, 16)

    class Uses(nn.Module):
        def forward(self, x):
            return other(x)

    module = storage_ops.tile(Uses(), 2)
    with pytest.raises(RuntimeError, match="neither its input nor a parameter"):
        module(torch.randn(1, 8, 16, requires_grad=True))
    tiling_of(module).checked = True
    y = module(torch.randn(1, 8, 16, requires_grad=True))
    with pytest.raises(RuntimeError, match="neither its input nor a parameter"):
        y.sum().backward()


def test_wrong_arguments():
    mlp = Mlp()
    for wrong, message in [
        ({}, "Expected a value for exactly one of them"),
        ({"tiles": 2, "dim": None}, "`dim` is None. Expected a whole number"),
        ({"tiles": 2, "budget": 3}, "Expected a value for exactly one of them"),
        ({"tiles": 0}, "`tiles` is 0"),
        ({"tiles": True}, "`tiles` is True"),
        ({"budget": "many"}, "`budget` is 'many'"),
        ({"tiles": 2, "dim": -1}, "`dim` is -1"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            storage_ops.tile(mlp, **wrong)
    with pytest.raises(TypeError, match="`module` is 3"):
        storage_ops.tile(3, 2)
    assert type(mlp) is Mlp
    storage_ops.tile(mlp, 2)
    with pytest.raises(ValueError, match=r"input of shape \(16,\)"):
        mlp(torch.randn(16))
    with pytest.raises(TypeError, match="got 2 tensors"):
        mlp(torch.randn(1, 4, 16), torch.ones(()))
    y = mlp(torch.randn(1, 4, 16, requires_grad=True))
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(y.sum(), list(mlp.parameters()), create_graph=True)


def test_parameters_and_inputs_modified_before_backward_are_errors():
    for modify in (lambda m, x: m.up.weight.mul_(2), lambda m, x: x.mul_(2)):
        module = storage_ops.tile(Mlp(), 2)
        x = torch.randn(1, 8, 16, requires_grad=True) * 1
        y = module(x)
        with torch.no_grad():
            modify(module, x)
        with pytest.raises(RuntimeError, match="modified"):
            y.sum().backward()


def test_a_traced_step():
    plain = Mlp().double()
    tiled = storage_ops.tile(copy.deepcopy(plain), 3)
    x = torch.randn(2, 12, 16, dtype=torch.float64)

    def step(model, x):
        loss = model(x).square().sum()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    traced = storage_ops.graph.trace_step(step, tiled, x)
    torch.testing.assert_close(traced(tiled, x), step(plain, x), rtol=1e-12, atol=1e-12)


class Products(nn.Module):
    """Matrix products, followed by an op that a recompute must run or may skip."""

    def __init__(self, ending):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.ending = ending

    def forward(self, x):
        return self.ending(self.second(self.first(x)))


class Saves(torch.autograd.Function):
    """Reads its input in backward only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0].abs() < 0.3)


def hooked(y, read=lambda y: y):
    if y.requires_grad:
        read = read(y)
        y.register_hook(lambda g: g * (read.abs() < 0.3))
    return y


ENDINGS = {
    "nothing": (lambda y: y, 0),
    "a view": (lambda y: y.transpose(0, 1).transpose(0, 1), 0),
    "an op": (lambda y: y.exp(), 4),
    "an op in place": (lambda y: y.add_(1).square(), 4),
    "the product twice": (lambda y: y * y, 4),
    "a function that saves it": (Saves.apply, 4),
    "a view that is saved": (lambda y: Saves.apply(y.transpose(0, 1)).transpose(0, 1), 4),
    "a hook that reads it": (hooked, 4),
    "a hook that reads an alias": (lambda y: hooked(y, torch.Tensor.detach), 4),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_product_that_ends_a_tile_runs_once(ending):
    fn, repeated = ENDINGS[ending]
    plain = Products(fn).double()
    tiled = storage_ops.tile(copy.deepcopy(plain), 4)
    x = torch.randn(2, 12, 8, dtype=torch.float64, requires_grad=True)
    out = tiled(x)  # the first call also checks the module
    out = tiled(x)
    with Ops() as ops:  # only around the backward: a mode around the forward adds a run
        out.square().sum().backward()
    # Each of the four tiles recomputes one product, and runs four for gradients.
    assert ops.count["mm"] == 4 * (1 + 4) + repeated
    got, x.grad = x.grad, None
    right = plain(x)
    right.square().sum().backward()
    torch.testing.assert_close((out, got), (right, x.grad))
    for a, b in zip(tiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
