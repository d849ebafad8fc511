"""Selective checkpoints whose recompute does not run all ops of the forward."""

import contextlib
import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import storage_ops as so
from storage_ops import policies

from .blocks import Calls, Ops

POLICIES = [policies.matmuls, policies.everything, policies.every_other_mm]


def with_policy(module, policy, way):
    """Checkpoint a module with a policy: `so.CheckpointWrapper`, or torch's checkpoint."""
    if way == "wrapper":
        return so.CheckpointWrapper(module, policy=policy)
    return lambda *args: checkpoint(
        module, *args, use_reentrant=False, context_fn=partial(policies.contexts, policy)
    )


def gradients(call, module, x):
    torch.manual_seed(1)
    y = call(x)
    with Ops() as ops:
        y.square().sum().backward()
    results = [x.grad, *(p.grad for p in module.parameters())]
    x.grad = None
    module.zero_grad()
    return results, ops.count


def assert_as_eager(make, policy, way):
    """Compare the first two steps of a module with those of an equal plain module."""
    torch.manual_seed(0)
    plain, module = make().double(), make().double()
    module.load_state_dict(plain.state_dict())
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    call = with_policy(module, policy, way)
    for _ in range(2):
        right, _ = gradients(plain, plain, x)
        got, count = gradients(call, module, x)
        for a, b in zip(got, right, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    return count


class InnerBackward(nn.Module):
    """Runs a backward pass in its forward, as models do that compute forces from an energy."""

    def __init__(self, create_graph):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.create_graph = create_graph

    def forward(self, x):
        z = x.detach().requires_grad_()
        energy = self.b(F.dropout(self.a(z).tanh(), 0.2)).square().sum()
        (force,) = torch.autograd.grad(energy, z, create_graph=self.create_graph)
        return self.b(F.dropout(self.a(x + force), 0.2).tanh())


@pytest.mark.parametrize("way", ["wrapper", "torch"])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_forward_that_runs_a_backward_pass(policy, create_graph, way):
    assert_as_eager(lambda: InnerBackward(create_graph), policy, way)


TABLES = {
    "a product": lambda w: torch.arange(16.0).double().view(4, 4) @ torch.eye(4).double(),
    "a linear": lambda w: F.linear(torch.eye(4).double(), w),
    "a sine": lambda w: w.sin(),
    "constants": lambda w: torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 4).double(),
}


class Cached(nn.Module):
    """Creates a table in its first forward, at the beginning or between its layers."""

    def __init__(self, table, late):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.fixed = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.table, self.late, self.tables = table, late, {}

    def find_table(self):
        if not self.tables:
            with torch.no_grad():
                self.tables[0] = TABLES[self.table](self.fixed)
        return self.tables[0]

    def forward(self, x):
        first, second, third = self.layers
        x = first(x).tanh() * self.find_table() if self.late else first(x * self.find_table())
        return third(second(F.dropout(x, 0.2)).sin() * x)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_table_that_only_the_first_forward_computes(policy, table, late):
    for way in ("wrapper", "torch"):
        assert_as_eager(lambda: Cached(table, late), policy, way)


def test_saved_results_are_used_although_the_recompute_skips_ops():
    torch.manual_seed(0)
    module = so.CheckpointWrapper(Cached("a product", late=True).double(), policy="matmuls")
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        _, count = gradients(module, module, x)
        assert count["mm"] == 6  # all of the backward


def test_a_saved_result_that_may_belong_to_another_call_is_an_error():
    fixed, table = torch.ones(4, 4), []

    def layer(x):
        if not table:
            table.append(fixed.cos())
        return x.detach().cos() * x.sin() * table[0]

    context_fn = partial(policies.contexts, policies.save("aten.cos"), "Layer")
    x = torch.eye(4, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False, context_fn=context_fn)
    ran = r"(aten.sin|did not run)"  # autograd saves the argument of sin before it runs
    with pytest.raises(
        RuntimeError,
        match=rf"Layer does other work .*op 1 was aten.cos in forward and {ran} when it was",
    ):
        y.sum().backward()


def fails(ctx, op, *args, **kwargs):
    raise ValueError("a policy that fails")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("policy", POLICIES)
def test_nested_tensors_of_each_layout(policy, layout):
    layer = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    parts, grads = [torch.randn(2, 4), torch.randn(3, 4)], []
    wrapped = with_policy(copy.deepcopy(layer), policy, "wrapper")
    for call in (layer, wrapped):
        x = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
        torch.nested.to_padded_tensor(call(x), 0.0).square().sum().backward()
        grads.append(torch.nested.to_padded_tensor(x.grad, 0.0))
    assert torch.equal(*grads)
    # C++ code asks for layouts where an exception ends the process.
    with pytest.raises(ValueError, match="a policy that fails"):
        with_policy(layer, fails, "wrapper")(x)
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.filterwarnings("ignore:.*saves nothing in Attention")
def test_jagged_attention():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            q = self.q(x).unflatten(-1, [2, 2]).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2)
            return self.out(y.flatten(-2))

    plain = Attention()
    parts, grads = [torch.randn(2, 4), torch.randn(3, 4)], []
    for policy in (None, *POLICIES, policies.attention):
        call = plain if policy is None else with_policy(copy.deepcopy(plain), policy, "wrapper")
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        call(x).values().square().sum().backward()
        grads.append(x.grad.values())
    assert all(torch.equal(grads[0], grad) for grad in grads[1:])


class ReadTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (_, _), (_, y) = ctx.saved_tensors, ctx.saved_tensors
        return gradient * y


READS = {
    "saved tensors read twice": lambda x: ReadTwice.apply(x.sin()).cos(),
    "noise that is written last": lambda x: F.rrelu(x.sin(), 0.1, 0.9, training=True),
    "noise, then other ops": lambda x: F.rrelu(x.sin(), 0.1, 0.9, training=True).exp().sin(),
    "random numbers first": lambda x: F.dropout(x.sin() * torch.rand_like(x), 0.5).exp(),
}


@pytest.mark.parametrize("how", ["at once", "by hand before", "in turn", "retained"])
@pytest.mark.parametrize("layer", READS)
def test_saved_tensors_that_are_read_more_than_once(layer, how):
    x, grads = torch.randn(5, requires_grad=True), []
    fn = lambda x: (READS[layer](x), x.cos().exp())  # noqa: E731
    for way in ("plain", "wrapper"):
        torch.manual_seed(2)
        call = fn if way == "plain" else with_policy(Calls(fn), policies.everything, way)
        y, z = call(x)
        if how == "by hand before":
            assert torch.equal(z.grad_fn._saved_result, z)
            assert torch.equal(z.grad_fn._saved_result, z)
        if how == "retained":
            y.sum().backward(retain_graph=True)
        if how == "in turn":
            y.sum().backward()
            z.sum().backward()
        else:
            (y.sum() + z.sum()).backward()
        grads.append(x.grad)
        x.grad = None
    assert torch.equal(*grads)


class Catches(nn.Module):
    """Catches the error of an op, and runs another op instead."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        y = self.a(x)
        for other in (torch.ones(5, 5), torch.eye(4)):
            with contextlib.suppress(RuntimeError):
                y = y @ other.to(y)
        for other in (torch.ones(3), torch.ones(4)):
            with contextlib.suppress(RuntimeError):
                y = y.sin() + other.to(y)
        return self.b(y.tanh())


@pytest.mark.parametrize("way", ["wrapper", "torch"])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_op_that_fails_and_is_caught(policy, way):
    assert_as_eager(Catches, policy, way)


@pytest.mark.parametrize("policy", [*POLICIES, policies.save("aten._to_copy")])
def test_casts_that_autocast_cached_before_the_region(policy):
    """Autocast has cast the input and a weight that is not a parameter."""
    torch.manual_seed(0)
    x, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    layer = lambda x: (F.linear(F.linear(x, weight).float().sin(), weight) * x).exp()  # noqa: E731
    grads = []
    for call in (layer, with_policy(Calls(layer), policy, "wrapper")):
        with torch.autocast("cpu", torch.bfloat16):
            y = call(F.linear(x, weight)).sum() + call(x).sum()
        grads.append(torch.autograd.grad(y, (x, weight)))
    assert all(map(torch.equal, *grads))


VIEWS = (
    lambda t: t,
    lambda t: t.view(4, 6, 4),
    lambda t: t.view(6, 4, 4).transpose(0, 1),
    lambda t: t.view(24, 4)[None],
    lambda t: t.t().view(4, 24, 1).squeeze(-1).t(),
    lambda t: t.view(4, 24, 1).expand(4, 24, 2).permute(1, 2, 0)[:12],
    lambda t: t.view(24, 2, 2).unbind(1)[0].repeat_interleave(2, 1),
    lambda t: t.view(24, 4).split(12)[1],
    lambda t: t.view(24, 2, 2).diagonal(dim1=1, dim2=2).repeat(1, 2),
    lambda t: t.view(96).unfold(0, 4, 4),
    lambda t: torch.view_as_real(torch.view_as_complex(t.view(4, 12, 2))).view(24, 4),
    lambda t: t.as_strided((24, 4), (4, 1)),
)


def copies():
    """Return hooks that keep copies of saved tensors, as offloading does."""
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)


def in_checkpoint(region):
    return lambda x: checkpoint(region, x, use_reentrant=False)


def under_copies(region):
    def call(x):
        with copies():
            return region(x)

    return call


FUNCTION = lambda ctx, op, *args, **kwargs: "mm" in str(op)  # noqa: E731


@pytest.mark.in_turn
@pytest.mark.parametrize("around", [in_checkpoint, under_copies])
@pytest.mark.parametrize("policy", [None, *POLICIES[:2], FUNCTION])
def test_arguments_that_the_recompute_gets_as_other_tensors(policy, around):
    """Hooks around a region return an argument without its base, and with another version."""
    layer = nn.Linear(4, 4)
    options = {} if policy is None else {"policy": policy}
    region = so.CheckpointWrapper(copy.deepcopy(layer), **options)
    leaf, parameter = torch.randn(96, requires_grad=True), nn.Parameter(torch.randn(96))
    frozen, data = nn.Parameter(torch.randn(96), requires_grad=False), torch.randn(96).mul_(2)
    with torch.no_grad():
        for t in (leaf, parameter, frozen):
            t.mul_(2)
    roots = (leaf.sin, lambda: leaf, lambda: parameter, lambda: frozen, lambda: data)
    for view, root in itertools.product(VIEWS, roots):
        grads = []
        for module, call in ((layer, layer), (region, around(region))):
            leaves = [*module.parameters(), leaf, parameter]
            y = call(view(root().view(24, 4)))
            grads.append(torch.autograd.grad(y.square().sum(), leaves, allow_unused=True))
        for a, b in zip(*grads, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


class Holder(nn.Module):
    """Multiplies by a leaf that the caller sets for the forward only."""

    def forward(self, x):
        return torch.mm(x, self.factor).sin()


@pytest.mark.parametrize("policy", [POLICIES[0], FUNCTION])
def test_a_leaf_that_an_attribute_held(policy):
    module, x = Holder(), torch.randn(4, 4, requires_grad=True)
    factor = torch.randn(4, 4)
    module.factor = factor.clone().requires_grad_()
    (right,) = torch.autograd.grad(module(x).sum(), x)
    module.factor = factor.clone().requires_grad_()
    y = with_policy(module, policy, "wrapper")(x).sum()
    module.factor = None
    assert torch.equal(torch.autograd.grad(y, x)[0], right)
