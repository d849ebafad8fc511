"""Policies save the ops that they name, and the gradients are right."""

import pickle
import warnings
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import storage_ops as so
from storage_ops import policies
from storage_ops.checkpoint.selective import policies as rules
from storage_ops.checkpoint.selective import selective

from .blocks import Model, Ops, assert_same, make_input, step

aten = torch.ops.aten
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def ask(policy, op, *args):
    return policy(SimpleNamespace(is_recompute=False), op, *args)


def region(fn, policy):
    return lambda *args: checkpoint(
        fn, *args, use_reentrant=False, context_fn=partial(policies.contexts, policy)
    )


def gradient(fn, x):
    torch.manual_seed(3)
    out = fn(x)
    return torch.autograd.grad(out.square().sum(), x)[0], torch.get_rng_state()


def same_as_eager(fn, policy, x):
    for a, b in zip(gradient(region(fn, policy), x), gradient(fn, x), strict=True):
        assert torch.equal(a, b)


def test_named_policies_save_their_ops():
    collectives = torch.ops._c10d_functional
    table = {
        policies.matmuls: [
            aten.mm.default,
            aten.addmm.default,
            aten.bmm.dtype,
            aten.baddbmm.default,
        ],
        policies.attention: [
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_efficient_attention.default,
        ],
        policies.communication: [
            collectives.all_gather_into_tensor.default,
            collectives.reduce_scatter_tensor.default,
        ],
    }
    for policy, ops in table.items():
        for other in table:
            assert {ask(other, op) for op in ops} == {SAVE if policy is other else RECOMPUTE}
    assert ask(policies.everything, aten.sin.default) == SAVE
    assert ask(policies.everything, aten.t.default) == RECOMPUTE
    assert ask(policies.everything, aten.add_.Tensor) == RECOMPUTE
    from torch.nn.attention.flex_attention import flex_attention  # noqa: F401

    assert ask(policies.attention, torch.ops.higher_order.flex_attention) == SAVE


def test_combinations_are_those_of_sets():
    mm, bmm = aten.mm.default, aten.bmm.default
    both = policies.union(policies.save("aten.mm"), policies.save(aten.bmm))
    assert [ask(both, op) for op in (mm, bmm, aten.sin.default)] == [SAVE, SAVE, RECOMPUTE]
    only = policies.difference(policies.matmuls, both)
    assert [ask(only, op) for op in (mm, bmm, aten.addmm.default)] == [RECOMPUTE, RECOMPUTE, SAVE]
    for policy in (both, only, policies.every_kth(both, 2)):
        assert pickle.loads(pickle.dumps(policy)) == policy


def test_every_kth_counts_within_a_region():
    policy = policies.every_kth(policies.save("aten.mm"), 3)
    fresh = policy.begin()
    ops = [aten.mm.default, aten.sin.default] * 5
    assert [ask(fresh, op) == SAVE for op in ops if op is aten.mm.default] == [1, 0, 0, 1, 0]
    x = make_input()[0].detach().requires_grad_()
    layer = lambda x: (x @ x.t() @ x @ x.t() @ x @ x.t()).sin()  # noqa: E731
    for _ in range(2):
        y = region(layer, policy)(x).sum()
        with Ops() as ops:
            y.backward()
        # Of five products, the first and fourth are saved. The backward itself has ten.
        assert ops.count["mm"] == 10 + 3


@pytest.mark.parametrize("policy", ["matmuls", None, 3])
@pytest.mark.parametrize(
    "function",
    [
        lambda policy: policies.union(policies.matmuls, policy),
        lambda policy: policies.difference(policy, policies.matmuls),
        lambda policy: policies.difference(policies.matmuls, policy),
        lambda policy: policies.every_kth(policy, 2),
        policies.offload,
    ],
    ids=["union", "difference", "other", "every_kth", "offload"],
)
def test_a_policy_must_be_a_function(function, policy):
    kind = type(policy).__name__
    with pytest.raises(
        TypeError, match=rf"got the policy '?{policy}'?, a {kind}\. Expected a func"
    ):
        function(policy)


def test_misuse():
    with pytest.raises(ValueError, match=r"every_kth: `k` is 0\. Expected"):
        policies.every_kth(policies.matmuls, 0)
    with pytest.raises(RuntimeError, match="counts the ops of one region and was not told where"):
        ask(policies.every_other_mm, aten.mm.default)
    x = make_input()
    for wrong, error in ((lambda *a, **k: None, ValueError), (lambda ctx, op: True, RuntimeError)):
        with pytest.raises(error, match=r"The policy .* Expected a"):
            region(lambda x: x @ x.transpose(1, 2), wrong)(x)


def test_a_saved_random_op_leaves_later_masks_as_they_were():
    """torch's own selective checkpoint gives wrong gradients here, without an error."""
    x = make_input()

    def layer(x):
        noise = torch.rand_like(x)  # saved, so the recompute draws no numbers for it
        return F.dropout((x * noise).sin(), 0.5)  # must repeat the mask of the forward

    same_as_eager(layer, policies.save("aten.rand_like"), x)
    same_as_eager(layer, policies.everything, x)
    same_as_eager(lambda x: layer(layer(x).cos()), policies.save("aten.rand_like", "aten.sin"), x)


def test_a_result_modified_in_place_is_recomputed_with_a_warning():
    x = make_input()

    def layer(x):
        y = x @ x.transpose(-1, -2)
        y.add_(1)
        return y.sin() * y

    with pytest.warns(
        UserWarning, match=r"modifies in place results of aten.bmm that .* are recomputed"
    ):
        same_as_eager(layer, policies.matmuls, x)
    with pytest.warns(UserWarning, match=r"results of aten.mm that .* are recomputed"):
        same_as_eager(lambda x: layer(x) @ x, policies.matmuls, x[0].detach().requires_grad_())


def test_a_saved_result_modified_after_the_region_is_recomputed():
    x = make_input()

    def two(x):
        h = x.sin() @ x.sigmoid().transpose(1, 2)
        return h, h.sin()

    (right,) = torch.autograd.grad(two(x)[1].sum(), x)
    for policy in (policies.everything, policies.matmuls):
        h, y = region(two, policy)(x)
        h.mul_(3)
        with pytest.warns(UserWarning, match=r"result of aten.bmm .* was modified in place after"):
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], right)


def test_in_place_relu_and_views():
    x = make_input()

    def layer(x):
        h = F.relu(x @ x.transpose(1, 2), inplace=True)
        return (h.transpose(0, 1).reshape(-1, 6) * 2).exp().view(2, 6, 6)

    for policy in (policies.save("aten.exp", "aten._unsafe_view"), policies.save("aten.mul")):
        same_as_eager(layer, policy, x)


def test_a_policy_that_saves_nothing_warns_and_lists_the_ops():
    block = so.CheckpointWrapper(nn.Linear(4, 4), ops_to_save=["aten.mm"])
    with pytest.warns(
        UserWarning, match=r"saves nothing in Linear, .* Its ops are .*aten.addmm x1"
    ) as record:
        block(torch.randn(2, 4, requires_grad=True)).sum().backward()
    places = [w.filename for w in record if "saves nothing in Linear" in str(w.message)]
    assert places == [__file__]


@pytest.mark.parametrize("change", ["more calls", "other shapes"])
def test_work_that_differs_when_it_is_recomputed_is_an_error(change):
    x, calls = make_input(), []

    def layer(x):
        calls.append(1)
        if len(calls) == 2:
            x = x.exp() if change == "more calls" else x[:1]
        return x.exp().sin().expand(2, -1, -1).sin()

    y = region(layer, policies.save("aten.exp"))(x)
    first = "aten.exp" if change == "more calls" else "aten.slice"
    with pytest.raises(RuntimeError, match=rf"op . was .* in forward and {first}.*use_cache=False"):
        y.sum().backward()


def test_autocast_and_a_layer_in_two_regions():
    """In the forward, the second region reuses the cast weight. Its recompute must cast it."""
    first, second, x = nn.Linear(16, 16), nn.Linear(16, 16), make_input(dtype=torch.float32)
    grads = []
    for policy in (None, policies.matmuls, policies.save("aten._to_copy"), policies.everything):
        one, two = (lambda x: first(x.sin()).tanh()), (lambda x: second(first(x)).float().exp())
        if policy is not None:
            one, two = region(one, policy), region(two, policy)
        with torch.autocast("cpu", torch.bfloat16):
            out = two(one(x)).square().sum()
        grads.append(torch.autograd.grad(out, (x, first.weight, second.weight)))
    for got in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, grads[0], strict=True))


def test_a_second_backward_without_retain_graph_names_the_region():
    x = make_input()
    y = region(lambda x: x.sin().exp() + 1, policies.save("aten.exp"))(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match=r"a second time|second backward pass"):
        y.sum().backward()


def test_saved_results_are_freed_with_the_backward():
    x = torch.randn(256, 256, requires_grad=True)
    with so.memory.measure() as m:
        y = region(lambda x: (x @ x).sin(), policies.matmuls)(x)
        y.sum().backward()
        x.grad = None
        del y
    assert m.kept_bytes < 256 * 256


def test_nested_regions():
    x = make_input()
    inner = region(lambda x: F.dropout((x @ x.transpose(1, 2)).sin(), 0.3), policies.matmuls)
    plain = lambda x: F.dropout((x @ x.transpose(1, 2)).sin(), 0.3)  # noqa: E731
    for policy in (policies.save("aten.exp"), policies.matmuls, policies.everything):
        got = gradient(region(lambda x: (inner(x) @ inner(x)).exp() * 1e-3, policy), x)
        right = gradient(lambda x: (plain(x) @ plain(x)).exp() * 1e-3, x)
        for a, b in zip(got, right, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("policy", [policies.matmuls, policies.everything])
def test_nested_tensors(policy):
    layer = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    parts = [torch.randn(3, 4), torch.randn(5, 4)]
    grads = []
    for call in (layer, region(layer, policy)):
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        call(x).values().square().sum().backward()
        grads.append(x.grad.values())
    assert torch.equal(*grads)


OPS = [
    lambda x: x.sin(),
    lambda x: F.dropout(x, 0.3),
    lambda x: x * torch.rand_like(x),
    lambda x: (x @ x.transpose(-1, -2)).tanh() @ x,
    lambda x: F.relu(x * 2, inplace=True),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: torch.addcmul(x, x, x).tanh(),
    lambda x: x.softmax(-1) + x.sigmoid().bernoulli(),
    lambda x: x.clone().mul_(0.5).add_(x),
    lambda x: torch.cat(x.chunk(2, -1), 0).reshape(x.shape),
]
NAMES = [
    "sin", "rand_like", "bmm", "tanh", "mul", "relu", "native_layer_norm", "addcmul", "_softmax",
    "bernoulli", "clone", "cat", "add", "empty_like",
]  # fmt: skip


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(range(len(OPS))), min_size=1, max_size=6),
    st.lists(st.sampled_from(NAMES), max_size=6),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2**31),
)
@pytest.mark.filterwarnings("ignore:.*selective checkpoint:UserWarning")
def test_any_policy_gives_the_gradients_of_eager(ops, names, k, invert, seed):
    def layer(x):
        for index in ops:
            x = OPS[index](x)
        return x

    policy = policies.save(*(f"aten.{name}" for name in names))
    if invert:
        policy = policies.difference(policies.everything, policy)
    torch.manual_seed(seed)
    same_as_eager(layer, policies.every_kth(policy, k), make_input())


@settings(max_examples=15)
@given(
    st.sampled_from([None, "matmuls", "attention", "every_other_mm", "communication"]),
    st.sampled_from(["Block", "MLP", "Attention", "Linear", "GELU"]),
    st.integers(1, 2),
    st.booleans(),
)
@pytest.mark.filterwarnings("ignore:.*selective checkpoint:UserWarning")
def test_any_config_gives_the_gradients_of_eager(policy, layer, k, discard):
    model, x = Model(layers=2).double(), make_input()
    right = step(model, x)
    mode = "output_discard" if discard and policy is None and layer != "Block" else None
    cfg = so.ActivationCheckpointConfig([layer], policy=policy, every_k=k, mode=mode)
    assert_same(step(so.apply_activation_checkpoint(model, cfg), x), right)


def test_single_calls_are_saved():
    saved = []

    def run(x):
        for _ in range(3):
            x = (x @ x).sin()
        return x

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            saved.append(op)
            return op(*args, **(kwargs or {}))

    x = torch.randn(4, 4, requires_grad=True)
    policy = policies.save_calls([("aten::mm", 0), ("aten::mm", 2)])
    context_fn = partial(policies.contexts, policy)
    y = checkpoint(run, x, use_reentrant=False, context_fn=context_fn)
    with Seen():
        y.sum().backward()
    assert saved.count(torch.ops.aten.mm.default) == 1 + 6  # the second one, and gradients
    with pytest.raises(TypeError, match="Expected pairs such as"):
        policies.save_calls(["aten::mm"])
    for number in (-1, 1 << 31):
        with pytest.raises(ValueError, match="Expected a number of a call from 0"):
            policies.save_calls([("aten::mm", number)])
    with pytest.raises(RuntimeError, match="save_calls counts the ops of one region"):
        policy(None, torch.ops.aten.mm.default)


ASKED = {
    "matmuls": policies.matmuls,
    "attention": policies.attention,
    "communication": policies.communication,
    "everything": policies.everything,
    "save": policies.save("aten.mm", "aten.sin"),
    "save_calls": policies.save_calls([("aten::mm", 1)]),
    "shapes": policies.save_mm_shapes([(4, 4)]),
    "union": policies.union(policies.attention, policies.every_kth(policies.matmuls, 2)),
    "difference": policies.difference(policies.matmuls, policies.every_kth(policies.matmuls, 2)),
    "offload": policies.offload(policies.save("aten.mm")),
    "every_kth": policies.every_kth(policies.save("aten.mm"), 2),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_policy_that_skips_ops_saves_the_same_results(name):
    """A policy that counts calls is asked about every call that it counts."""

    class Function:
        """Has no `may_save`, so it is asked about every call."""

        def __init__(self, policy):
            self.policy = policy

        def begin(self):
            return Function(rules.begin(self.policy))

        def __call__(self, ctx, op, *args, **kwargs):
            return self.policy(ctx, op, *args, **kwargs)

    def forward(x):
        for _ in range(3):
            x = (x @ x).sin().view(2, 8).view(4, 4).relu()
        q = x.view(1, 1, 4, 4)
        return nn.functional.scaled_dot_product_attention(q, q, q).softmax(-1)

    saved = []
    for policy in (ASKED[name], Function(ASKED[name])):
        x = torch.ones(4, 4, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some policies save nothing here
            for _ in range(2):  # in the second call, the ops to ask about are known
                recording, replaying = selective.contexts(policy)
                with recording:
                    forward(x)
        with Ops() as ops, replaying:
            forward(x)
        del ops.count["detach"]  # Python modes run additional detaches
        saved.append(ops.count)
    assert saved[0] == saved[1]
    asked = rules.may_save(ASKED[name], torch.ops.aten.relu.default)
    assert asked == (name == "everything")
    assert rules.may_save(Function(ASKED[name]), torch.ops.aten.relu.default)


def test_cached_answers_of_a_policy_do_not_keep_it_alive():
    def policy(ctx, op, *args, **kwargs):
        return False

    known = weakref.ref(policy)
    assert rules.asked_about(policy) is rules.asked_about(policy)
    del policy
    assert known() is None
    without_hash = type("P", (), {"__hash__": None, "__call__": lambda self, *a: False})()
    assert rules.asked_about(without_hash) == {}
