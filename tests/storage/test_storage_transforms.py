"""The storage ops under torch.func, functionalization and torch.jit.trace."""

import pytest
import torch
from torch import func
from torch.testing._internal.two_tensor import TwoTensor

import storage_ops as so


def plain(x):
    return ((x * 2).sin() * (x * 2)).sum(-1)


def freeing(x):
    """`plain`, with its intermediate result discarded and bound again."""
    h = x * 2
    y = h.sin()
    assert not so.is_discarded(h)
    so.discard_storage(h)
    so.share_storage(h, x * 2)
    assert not so.is_discarded(h)
    return (y * h).sum(-1)


TRANSFORMS = {
    "grad": func.grad,
    "hessian": func.hessian,
    "jacfwd": func.jacfwd,
    "jacrev of jacrev": lambda f: func.jacrev(func.jacrev(f)),
    "jvp": lambda f: lambda x: func.jvp(f, (x,), (torch.ones_like(x),)),
    "vjp": lambda f: lambda x: func.vjp(f, x)[1](torch.ones(())),
    "vmap": lambda f: lambda x: func.vmap(f)(x.view(2, 3)),
    "vmap in 1": lambda f: lambda x: func.vmap(f, in_dims=1)(x.view(2, 3)),
    "vmap of vmap": lambda f: lambda x: func.vmap(func.vmap(f, 1), 2)(x.view(1, 2, 3)),
    "vmap of grad": lambda f: lambda x: func.vmap(func.grad(f))(x.view(2, 3)),
    "grad of vmap": lambda f: lambda x: func.grad(lambda x: func.vmap(f)(x).sum())(x.view(2, 3)),
    "functionalize": func.functionalize,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func(path, name):
    x = torch.randn(6)
    transform = TRANSFORMS[name]
    torch.testing.assert_close(transform(freeing)(x), transform(plain)(x))


@pytest.mark.parametrize("transform", [func.grad, lambda f: lambda x: func.vmap(f)(x).sum()])
def test_a_tensor_discarded_in_a_transform_is_freed(path, transform):
    def left(x):
        h = x * 2
        so.discard_storage(h)
        answers.append(so.is_discarded(h))
        return x.sum()

    answers = []
    transform(left)(torch.ones(2, 3))
    assert answers == [True]


def test_a_whole_batch_is_freed_and_bound(path, zero_copy):
    batch, src = torch.randn(3, 4), torch.randn(3, 4)
    func.vmap(lambda t, s: so.share_storage(t, s) or t.sum())(batch, src)
    assert torch.equal(batch, src) and (batch.data_ptr() == src.data_ptr()) == zero_copy


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 1)])
def test_samples_at_other_places_in_the_source_are_refused(path, in_dims):
    dst, src = torch.randn(3, 3), torch.randn(3, 3)
    before = dst.clone()
    with pytest.raises(
        RuntimeError, match="share_storage: `src` is batched by vmap along dimension"
    ):
        func.vmap(lambda d, s: so.share_storage(d, s) or d.sum(), in_dims=in_dims)(dst, src)
    assert torch.equal(dst, before)


def test_a_graph_of_jit_trace_frees_nothing_and_binds(path):
    """Its backward has no hooks to bind the bytes again, so the graph must keep them."""
    x = torch.randn(6, requires_grad=True)
    traced = torch.jit.trace(freeing, x)
    names = [node.kind() for node in traced.graph.nodes()]
    assert "storage_ops::share_storage" in names
    assert {n for n in names if "storage_ops" in n} == {"storage_ops::share_storage"}
    for _ in range(3):  # the executor optimizes after the first
        x = torch.randn(6, requires_grad=True)
        y, right = traced(x), plain(x)
        torch.testing.assert_close(y, right)
        grads = torch.autograd.grad(y, x)[0], torch.autograd.grad(right, x)[0]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("guard", [None, "gone"])
def test_a_discard_is_not_in_a_graph_of_jit_trace(path, guard):
    def step(x):
        h = x * 2
        y = h.sin()  # saves h for a backward of the traced function
        so.discard_storage(h, guard=guard)
        torch.ops.storage_ops.discard_storage(h)
        answers.append((torch._C._get_tracing_state() is None, so.is_discarded(h)))
        return y

    answers = []
    x = torch.randn(3, requires_grad=True)
    traced = torch.jit.trace(step, x)
    assert set(answers) == {(False, False), (True, True)}  # tracing also compares with a plain call
    assert "storage_ops" not in str(traced.graph)
    torch.testing.assert_close(torch.autograd.grad(traced(x).sum(), x)[0], 2 * (x * 2).cos())


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_contain_no_discard(strict):
    class Step(torch.nn.Module):
        def forward(self, x):
            h = x * 2
            so.discard_storage(h)
            so.share_storage(h, x * 3)
            return h.sin()

    exported = torch.export.export(Step(), (torch.ones(3),), strict=strict).run_decompositions()
    assert "discard" not in str(exported.graph)
    x = torch.randn(3)
    torch.testing.assert_close(exported.module()(x), (x * 3).sin())


def test_wrapper_subclasses_in_compiled_code():
    def step(x):
        h = x * 2
        so.discard_storage(h)
        so.share_storage(h, x * 3)
        return h.sin()

    torch._dynamo.reset()
    x = TwoTensor(torch.randn(3), torch.randn(3))
    y = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close((y.a, y.b), ((x.a * 3).sin(), (x.b * 3).sin()))


def test_compiled_code_discards_nothing_of_a_jagged_tensor():
    def step(x):
        h = x * 2
        y = h.sin()
        so.discard_storage(h)
        return y * h

    torch._dynamo.reset()
    parts = [torch.randn(2), torch.randn(3)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    y = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y.values(), torch.cat([(2 * p).sin() * 2 * p for p in parts]))
