"""`remat` on graphs of torch.compile, in which tags say what each backward pass recomputes."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from storage_ops import graph
from storage_ops.graph.nodes import copy_of
from storage_ops.graph.recompute import rng

from .compiled import (
    TRACES_GRAD,
    boxed,
    by_torch,
    check_against_eager,
    check_against_torch,
    compiled,
    graph_of,
    joint_of,
    shape_of,
    torch_pass,
)
from .models import count, leaves, selective

aten = torch.ops.aten
MM, ADDMM, GELU = aten.mm.default, aten.addmm.default, aten.gelu.default
needs_grad = pytest.mark.skipif(not TRACES_GRAD, reason="this torch.compile traces no grad")
needs_pass = pytest.mark.skipif(torch_pass is None, reason="this torch has no such pass")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tag(gm, backward_from, policy=CheckpointPolicy.PREFER_RECOMPUTE):
    """Tag all forward nodes of a make_fx graph with one policy, as torch.compile does."""
    backward = False
    for node in gm.graph.nodes:
        if node.op == "call_function":
            backward = backward or node.target is backward_from
            node.meta.update({"autograd_backward": True} if backward else {"recompute": policy})


def product(x, w):
    loss = checkpoint(lambda x: (x @ w).sin(), x, use_reentrant=False).sum()
    return loss.detach(), *torch.autograd.grad(loss, (x, w))


def sigmoid(x, w):
    loss = checkpoint(lambda x: (x @ w).sin().sigmoid(), x, use_reentrant=False).sum()
    return loss.detach(), *torch.autograd.grad(loss, (x, w))


def mlp(x, w1, w2, **options):
    y = checkpoint(lambda x: F.gelu(x @ w1) @ w2, x, use_reentrant=False, **options)
    loss = y.square().sum()
    return loss.detach(), *torch.autograd.grad(loss, (x, w1, w2))


def selective_mlp(x, w1, w2):
    return mlp(x, w1, w2, context_fn=selective())


class Block(nn.Module):
    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), dropout
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout)


class Blocks(nn.Module):
    def __init__(self, layers=2, dropout=0.0, **options):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))
        self.head, self.options = nn.Linear(8, 8), {"use_reentrant": False, **options}
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return self.head(x)

    def step(self, x):
        loss = self(x).square().mean()
        return loss.detach(), *torch.autograd.grad(loss, list(self.parameters()))


def double(*shape):
    return torch.randn(shape, dtype=torch.double)


STEPS = {
    "product": (product, lambda: leaves((4, 4), (4, 4)), [MM], 4),
    "sigmoid": (sigmoid, lambda: leaves((4, 4), (4, 4)), [MM], 4),
    "mlp": (mlp, lambda: leaves((4, 8), (8, 16), (16, 8)), [MM, GELU], 10),
    "selective": (selective_mlp, lambda: leaves((4, 8), (8, 16), (16, 8)), [MM, GELU], 8),
    "blocks": (Blocks().step, lambda: [double(2, 4, 8)], [ADDMM], 7),
    "rows": (Blocks(context_fn=selective()).step, lambda: [double(4, 8)], [ADDMM], 5),
}


@pytest.mark.slow
@needs_pass
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_recomputes_what_torchs_pass_recomputes(name, dynamic):
    step, inputs, ops, number = STEPS[name]
    before, after = check_against_eager(step, *inputs(), dynamic=dynamic)
    assert count(after, *ops) == number
    check_against_torch(before, after)


@pytest.mark.in_turn
def test_memory_falls_with_the_number_of_checkpoints():
    wide = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))

    def fn(x):
        for part in (wide[:4], wide[4:]):
            x = checkpoint(part, x, use_reentrant=False)
        return x.sum()

    before = joint_of(fn, torch.randn(4096, 64))
    after = graph.remat(before, verify=True)
    saved = graph.schedule(before).peak_bytes - graph.schedule(after).peak_bytes
    assert (
        saved >= 2 * 4096 * 64 * 4
    )  # four of eight activations, plus tensors that the other four need
    if torch_pass is not None:
        check_against_torch(before, after)


@pytest.mark.parametrize("name", ["mlp", "blocks", "statistics"])
def test_joint_graphs(name):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8))
    w1, w2 = leaves((8, 16), (16, 8))
    fn, x, expected = {
        "mlp": (
            lambda x: checkpoint(lambda x: F.gelu(x @ w1) @ w2, x, use_reentrant=False).cos(),
            double(4, 8).requires_grad_(), {MM: 8, GELU: 2},
        ),
        "blocks": (Blocks(), double(2, 4, 8), {ADDMM: 7, GELU: 4}),
        "statistics": (
            lambda x: checkpoint(model, x, use_reentrant=False).cos(),
            torch.randn(4, 8), {ADDMM: 4, GELU: 2},
        ),
    }[name]  # fmt: skip
    before = joint_of(fn, x)
    after = graph.remat(before, verify=True)
    assert {op: count(after, op) for op in expected} == expected
    if torch_pass is not None:
        check_against_torch(before, after)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_joint_graph_can_still_be_partitioned(dropout):
    w1, w2 = leaves((8, 16), (16, 8))

    def body(x):
        return F.dropout(F.gelu(x @ w1), dropout) @ w2

    def fn(x):
        return checkpoint(body, x, use_reentrant=False).square().sum()

    for partition in (
        partitioners.default_partition,
        partitioners.min_cut_rematerialization_partition,
    ):
        backend = aot_autograd(
            fw_compiler=boxed,
            partition_fn=lambda gm, *a, p=partition, **k: p(graph.remat(gm, verify=True), *a, **k),
        )
        torch._dynamo.reset()
        results, x = [], double(4, 8)
        for run in (fn, torch.compile(fn, backend=backend, fullgraph=True)):
            torch.manual_seed(0)
            results.append(torch.autograd.grad(run(x), (w1, w2)))
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


RANDOM = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "rand_like": lambda h: h * torch.rand_like(h),
    "twice": lambda h: F.dropout(h, 0.3) * F.dropout(h, 0.3),
    "unread": lambda h: h,
    "attention": lambda h: F.scaled_dot_product_attention(*[h[None, None]] * 3, dropout_p=0.2)[
        0, 0
    ],
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.4),
}


@pytest.mark.in_turn
@needs_grad
@pytest.mark.parametrize("options", [{}, {"context_fn": selective()}])
@pytest.mark.parametrize("name", RANDOM)
def test_a_recompute_has_the_random_numbers_of_its_forward(name, options, monkeypatch):
    w1, w2 = leaves((6, 6), (6, 6))

    def body(x):
        h = RANDOM[name](x @ w1).sin() @ w2
        return h + torch.rand_like(h) if name == "unread" else h

    def step(x):
        for _ in range(2):
            x = checkpoint(body, x, use_reentrant=False, **options)
        loss = x.sum() if name == "unread" else x.square().sum()
        return loss.detach(), torch.rand(2), *torch.autograd.grad(loss, (w1, w2))

    before, after = check_against_eager(step, double(6, 6))
    replays = count(after, run_with_rng_state)
    assert replays == count(after, run_and_save_rng_state)
    # No gradient reads noise that is only added, unless a saved product outside reads it.
    assert (replays == 0) == (name == "unread" and not options)
    if replays:
        monkeypatch.setattr(rng, "replay", lambda *args: None)
        with pytest.raises(RuntimeError, match=r"differs by"):
            graph.remat(before, verify=True)


@needs_grad
@pytest.mark.parametrize("options", [{}, {"context_fn": selective()}])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_several_backward_passes(dropout, options):
    """Each chunk of a loss has a backward pass and a checkpoint, followed by the model's."""
    w1, w2, head = leaves((8, 8), (8, 8), (8, 5))
    kept = {"use_reentrant": False, **options}

    def body(x):
        return F.dropout((x @ w1).tanh(), dropout) @ w2

    def part_of_loss(h):
        return F.dropout(h @ head, dropout).logsumexp(-1).sum()

    def step(x):
        h = checkpoint(body, x, **kept)
        total, d_head, d_h = 0, 0, []
        for chunk in h.detach().chunk(2):
            leaf = chunk.clone().requires_grad_()
            part = checkpoint(part_of_loss, leaf, **kept)
            d_chunk, d = torch.autograd.grad(part, (leaf, head))
            total, d_head, d_h = total + part.detach(), d_head + d, [*d_h, d_chunk]
        return total, d_head, *torch.autograd.grad(h, (w1, w2), torch.cat(d_h))

    before, after = check_against_eager(step, double(8, 8))
    extra = count(after, MM) - count(before, MM)
    assert extra == (0 if options else 3)
    assert count(after, aten.tanh.default) == 2 * count(before, aten.tanh.default)


@needs_grad
def test_each_backward_pass_through_a_checkpoint_recomputes_it():
    """As in eager mode, no tensor of the checkpoint is kept between the passes."""
    w = leaves((64, 64))[0]

    def step(x):
        y = checkpoint(lambda x: F.dropout((x @ w).sin(), 0.3) @ w, x, use_reentrant=False)
        (first,) = torch.autograd.grad(y.sum(), w, retain_graph=True)
        (second,) = torch.autograd.grad((y * first.detach()).sum(), w)
        return first, second

    before, after = check_against_eager(step, double(64, 64))
    assert count(after, MM) == count(before, MM) + 2
    assert count(after, run_with_rng_state) == 2


@needs_grad
def test_statistics_are_updated_once():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8))
    plain = copy.deepcopy(model)

    def step(x, model, run):
        loss = run(model, x).square().mean()
        return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))

    x = torch.randn(6, 8)
    expected = step(x, plain, lambda model, x: model(x))
    _, (results, _) = compiled(
        lambda x: step(x, model, lambda m, x: checkpoint(m, x, use_reentrant=False)), x,
        rewrite=lambda gm: graph.remat(gm, verify=True),
    )  # fmt: skip
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def by_hand(x, w, g):
    """Run a forward, and a backward that begins with the cosine."""
    h = x @ w
    return h.sin(), x.t() @ (g * h.cos())


def tagged_by_hand(policy=CheckpointPolicy.PREFER_RECOMPUTE):
    gm = make_fx(by_hand, tracing_mode="fake")(*(double(4, 4) for _ in range(3)))
    tag(gm, aten.t.default, policy)
    return gm


@pytest.mark.parametrize("policy", CheckpointPolicy)
def test_policies_keep_their_meaning(policy):
    gm = tagged_by_hand(policy)
    after = graph.remat(gm, verify=True)
    assert count(after, MM) == 2 + policy.name.endswith("_RECOMPUTE")
    args = [double(4, 4) for _ in range(3)]
    torch.testing.assert_close(after(*args), by_hand(*args), rtol=0, atol=0)


def test_tensors_that_a_backward_hook_reads_are_kept():
    gm = tagged_by_hand()
    product, sine = (node for node in gm.graph.nodes if "recompute" in node.meta)
    for node, mms in ((sine, 3), (product, 3)):  # the sine in the checkpoint reads the product
        node.meta["has_backward_hook"] = True
        assert count(graph.remat(gm, verify=True), MM) == mms
    del sine.meta["recompute"]
    assert count(graph.remat(gm, verify=True), MM) == 2
    del product.meta["has_backward_hook"]
    assert count(graph.remat(gm, verify=True), MM) == 3


def test_inputs_of_a_later_checkpoint_are_kept():
    gm = tagged_by_hand()
    product, sine = (node for node in gm.graph.nodes if "recompute" in node.meta)
    for first, second, mms in ((0, 1, 2), (1, 1, 3), (1, 0, 3)):
        product.meta["ac_graph_id"], sine.meta["ac_graph_id"] = first, second
        assert count(graph.remat(gm, verify=True), MM) == mms


@pytest.mark.parametrize("must", [False, True])
def test_communication_is_repeated_only_if_the_policy_requires_it(fake_group, must):
    def fn(x, g):
        h = torch.ops._c10d_functional.all_reduce(x.sin(), "sum", fake_group.group_name)
        h = torch.ops._c10d_functional.wait_tensor(h)
        return h.cos(), g.t() * h

    gm = make_fx(fn, tracing_mode="fake")(double(4, 4), double(4, 4))
    policy = CheckpointPolicy.MUST_RECOMPUTE if must else CheckpointPolicy.PREFER_RECOMPUTE
    tag(gm, aten.t.default, policy)
    after = graph.remat(gm, verify=True)
    assert count(after, torch.ops._c10d_functional.all_reduce.default) == 1 + must
    assert count(after, torch.ops._c10d_functional.wait_tensor.default) == 1 + must


def test_a_subgraph_in_a_checkpoint_is_recomputed():
    def fn(x, w, g):
        def run(op):
            return lambda a: op(a @ w)

        h = torch.cond(x.sum() > 0, run(torch.sin), run(torch.cos), (x,))
        return h.tan(), g.t() * h

    args = [double(4, 4) for _ in range(3)]
    gm = make_fx(fn, tracing_mode="fake")(*args)
    tag(gm, aten.t.default)
    after = graph.remat(gm, verify=True)
    assert count(after, torch.ops.higher_order.cond) == 2
    torch.testing.assert_close(after(*args), fn(*args), rtol=0, atol=0)


@needs_pass
def test_arguments_of_an_op_are_recomputed_in_the_order_of_the_forward():
    def fn(x, w, g):
        h, k = x @ w, x.exp()
        return h * k, torch.addcmul(g.t(), k, h)

    gm = make_fx(fn, tracing_mode="fake")(*(double(4, 4) for _ in range(3)))
    tag(gm, aten.t.default)
    check_against_torch(gm, graph.remat(gm, verify=True))


def test_the_caller_can_choose_the_backward_passes():
    def fn(x, w, g):
        h = x @ w
        return h.sin(), x.t() @ (g * h.cos()), (h * 2).tanh(), g * h.exp()

    gm = make_fx(fn, tracing_mode="fake")(*(double(4, 4) for _ in range(3)))
    tag(gm, aten.t.default)
    assert count(graph.remat(gm, verify=True), MM) == 3
    chosen = [n for n in gm.graph.nodes if n.target is aten.exp.default]
    chosen += [n for n in gm.graph.nodes if n.target is aten.mul.Tensor][-1:]
    for node in chosen:
        node.meta["custom"] = {"phase": "backward"}
    after = graph.remat(gm, verify=True)
    products = [node for node in after.graph.nodes if node.target is MM]
    assert len(products) == 3
    assert [user.target for user in products[-1].users] == [aten.exp.default]
    if torch_pass is not None:
        check_against_torch(gm, after)


def test_a_graph_that_already_recomputes_does_not_change():
    joint = joint_of(Blocks(dropout=0.5), double(2, 4, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        after = graph.remat(joint, verify=True)
        assert graph.remat(after, verify=True) is after
        bare = copy_of(after)
        bare.meta.clear()
        assert shape_of(graph.remat(bare, verify=True)) == shape_of(after)
    assert any("recompute" in node.meta for node in joint.graph.nodes)


@needs_pass
def test_a_graph_after_torchs_own_pass_does_not_change():
    before = graph_of(Blocks().step, double(2, 4, 8))
    theirs = by_torch(before)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = graph.remat(theirs, verify=True)
    assert shape_of(ours) == shape_of(theirs)
    assert shape_of(by_torch(graph.remat(before))) == shape_of(theirs)


def test_a_forward_without_a_backward_does_not_change():
    gm = tagged_by_hand()
    for node in gm.graph.nodes:
        node.meta.pop("autograd_backward", None)
        if "recompute" in node.meta:
            node.meta["ac_graph_id"] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert shape_of(graph.remat(gm, verify=True)) == shape_of(gm)


def test_a_graph_without_tags_causes_a_warning():
    gm = tagged_by_hand()
    for node in gm.graph.nodes:
        node.meta.pop("recompute", None)
    with pytest.warns(UserWarning, match="graph does not say what was checkpointed"):
        after = graph.remat(gm)
    assert shape_of(after) == shape_of(gm)


def test_recomputes_read_the_values_from_before_a_later_modification():
    def fn(x, w, g):
        h = x @ w
        y = h.sin()
        x.mul_(2)
        return y, g.t() * h.cos()

    gm = make_fx(fn, tracing_mode="fake")(*(double(4, 4) for _ in range(3)))
    tag(gm, aten.t.default)
    for node in gm.graph.nodes:
        if node.target is aten.mul_.Tensor:
            del node.meta["recompute"]
    args = [double(4, 4) for _ in range(3)]
    copies = [t.clone() for t in args]
    after = graph.remat(gm)
    right, got = fn(*args), after(*copies)
    assert all(map(torch.equal, got, right)) and all(map(torch.equal, copies, args))
    assert count(after, aten.mm.default) == 2
