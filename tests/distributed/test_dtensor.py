"""Linear cross-entropy of DTensors with any placements equals that of the whole tensors."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import storage_ops as so
from storage_ops.loss import reference

from ..ranks import assert_same, run_on_ranks

SHAPE, VOCAB, HIDDEN = (4, 6), 30, 8
LINE, PLANE = 2, 4  # ranks of a mesh with one dimension, and with 2 x 2
OPTIONS = [
    {},
    {"shift": 1, "token_weight": True, "weight": True, "softcap": 3.0},
    {"reduction": "sum", "divisor": 7.0, "label_smoothing": 0.1, "weight": True},
    {"reduction": "none", "shift": 2},
    {"returns": ("nll", "lse", "entropy"), "shift": True},
    {"returns": ("loss", "selected"), "selected_ids": True},
]


def placed(t, mesh, placements, grad=True):
    from torch.distributed.tensor import DTensor, Partial, Replicate

    # distribute_tensor does not take Partial, so each rank gets an equal share of the sum.
    pending = [d for d, p in enumerate(placements) if isinstance(p, Partial)]
    whole = [Replicate() if d in pending else p for d, p in enumerate(placements)]
    local = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    local = local.redistribute(mesh, whole).to_local()
    for d in pending:
        local = local / mesh.size(d)
    dtensor = DTensor.from_local(
        local.detach().clone(), mesh, placements, run_check=False, shape=t.shape, stride=t.stride()
    )
    return dtensor.requires_grad_(grad)


def compare(
    mesh, of_input, of_weight, of_target, options, bias=True, dtype=torch.float64, shape=SHAPE
):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    x, w = torch.randn(*shape, HIDDEN, dtype=dtype), torch.randn(VOCAB, HIDDEN, dtype=dtype)
    b, target, options = torch.randn(VOCAB, dtype=dtype), torch.randint(VOCAB, shape), dict(options)
    target[torch.rand(shape) < 0.2] = -100
    by_class = [p if p == Shard(0) else Replicate() for p in of_weight]
    whole, ours = dict(options), dict(options)
    for name, sizes, places in (
        ("token_weight", shape, of_target), ("weight", (VOCAB,), by_class)
    ):  # fmt: skip
        if name in options:
            whole[name] = torch.rand(sizes, dtype=dtype) + 0.5
            ours[name] = whole[name] if places is None else placed(whole[name], mesh, places, False)
    if "selected_ids" in options:
        whole["selected_ids"] = ours["selected_ids"] = torch.randint(VOCAB, (*shape, 3))
    if bias:
        ours["linear_bias"] = placed(b, mesh, by_class)
        whole["linear_bias"] = b.requires_grad_()
    mine, part = placed(x, mesh, of_input), placed(w, mesh, of_weight)
    labels = target if of_target is None else placed(target, mesh, of_target, False)
    got = so.linear_cross_entropy(mine, part, labels, **ours)
    right = reference.linear_cross_entropy(x.requires_grad_(), w.requires_grad_(), target, **whole)
    several = isinstance(got, tuple)
    for g, r in zip(got if several else [got], right if several else [right], strict=True):
        assert isinstance(g, DTensor)
        assert_same(g.full_tensor(), r)
    seeds = [torch.randn_like(r) for r in (right if several else [right])]
    torch.autograd.backward(right, seeds)
    pulled = [g * placed(s, mesh, [Replicate()] * mesh.ndim, False)
              for g, s in zip(got if several else [got], seeds, strict=True)]  # fmt: skip
    sum(p.sum().full_tensor() for p in pulled).backward()
    pairs = [(mine, x), (part, w), *([(ours["linear_bias"], b)] if bias else [])]
    for mine, right in pairs:
        assert_same(mine.grad.full_tensor(), right.grad)


def on_a_line(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (LINE,))
    inputs = (Shard(0), Shard(1), Shard(2), Replicate(), Partial())
    targets = itertools.cycle((None, [Shard(0)], [Replicate()], [Shard(1)]))
    for of_input, of_weight, options in itertools.product(
        inputs, (Shard(0), Shard(1), Replicate()), OPTIONS
    ):
        compare(mesh, [of_input], [of_weight], next(targets), options)


def with_unequal_parts(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (LINE,))
    places = (Shard(0), Shard(1))
    for of_input, of_weight, of_target, options in itertools.product(
        places, (Shard(0), Replicate()), places, OPTIONS
    ):
        compare(mesh, [of_input], [of_weight], [of_target], options, shape=(3, 5))


def on_a_plane(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for of_input, of_weight in (
        ([Shard(0), Replicate()], [Replicate(), Shard(0)]),  # data and tensor parallel
        ([Shard(0), Shard(1)], [Replicate(), Shard(0)]),  # also a sharded sequence
        ([Shard(0), Shard(0)], [Replicate(), Shard(0)]),
        ([Shard(0), Shard(1)], [Replicate(), Replicate()]),  # data and context parallel
        ([Shard(0), Replicate()], [Shard(1), Shard(0)]),
    ):
        for options in OPTIONS:
            compare(mesh, of_input, of_weight, [Shard(0), Replicate()], options)


needs_distributed = pytest.mark.skipif(not dist.is_available(), reason="torch has no distributed")


@pytest.mark.in_turn
@needs_distributed
def test_every_placement_on_a_mesh_with_one_dimension():
    run_on_ranks(on_a_line, LINE)


@pytest.mark.in_turn
@needs_distributed
def test_parts_of_different_sizes():
    run_on_ranks(with_unequal_parts, LINE)


@pytest.mark.in_turn
@needs_distributed
def test_placements_on_a_mesh_with_two_dimensions():
    run_on_ranks(on_a_plane, PLANE)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = so.LinearCrossEntropyLoss(HIDDEN, VOCAB + 1)

    def forward(self, x, target):
        return self.head(self.norm(x), target)


def in_a_plan(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh, whole = init_device_mesh("cpu", (LINE,)), Net()
    x, target = torch.randn(*SHAPE, HIDDEN), torch.randint(VOCAB, SHAPE)
    right = whole(x, target)
    right.backward()
    for compiled in (False, True):
        net = Net()
        net.load_state_dict(whole.state_dict())
        plan = {"norm": SequenceParallel(), "head.linear": ColwiseParallel()}
        parallelize_module(net, mesh, plan)
        call = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
        part = DTensor.from_local(x.chunk(LINE, 1)[rank].contiguous(), mesh, [Shard(1)])
        loss = call(part, target)
        loss.backward()
        torch.testing.assert_close(loss.full_tensor(), right)
        for name, p in net.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), whole.get_parameter(name).grad)
        plain = net.head(x, target)  # the loss is the same on every rank and no DTensor
        assert type(plain) is torch.Tensor
        torch.testing.assert_close(plain, whole.head(x, target))
    mine = whole.head.linear.weight.tensor_split(LINE)[rank]
    loss = so.linear_cross_entropy(x, mine, target, process_group=mesh)
    torch.testing.assert_close(loss, whole.head(x, target))


def compiled_for_any_size(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (LINE,))
    w, call = torch.randn(VOCAB, HIDDEN), so.linear_cross_entropy
    for of_input, of_weight in itertools.product((Shard(0), Replicate()), repeat=2):
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
        part = placed(w, mesh, [of_weight])
        for tokens in (4, 6):
            x, target = torch.randn(tokens, HIDDEN), torch.randint(VOCAB, (tokens,))
            of_compiled, right = (
                f(placed(x, mesh, [of_input]), part, target) for f in (compiled, call)
            )
            assert_same(of_compiled.full_tensor(), right.full_tensor())
            assert_same(
                *(torch.autograd.grad(t, part)[0].full_tensor() for t in (of_compiled, right))
            )


def with_a_count_of_tokens(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh, everywhere = init_device_mesh("cpu", (LINE,)), [Replicate()]
    x, w = torch.randn(*SHAPE, HIDDEN), torch.randn(VOCAB, HIDDEN)
    target = torch.randint(VOCAB, SHAPE).masked_fill(torch.rand(SHAPE) < 0.4, -100)
    right = so.linear_cross_entropy(x, w, target)
    for place in (Shard(0), Replicate()):
        labels = placed(target, mesh, [place], False)
        count = (labels != -100).sum()  # pending sums of the ranks if `place` is a shard
        options = {"reduction": "sum", "divisor": count}
        hidden = placed(x, mesh, [place])
        for head in (placed(w, mesh, [Shard(0)]), placed(w, mesh, everywhere)):
            loss = so.linear_cross_entropy(hidden, head, labels, **options)
            torch.testing.assert_close(loss.full_tensor(), right)
        torch.testing.assert_close(so.linear_cross_entropy(x, w, target, **options), right)


def refused(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    plane, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (PLANE,))
    everywhere = [Replicate()] * 2
    x, target = torch.randn(*SHAPE, HIDDEN), torch.randint(VOCAB, SHAPE)
    w, few = torch.randn(VOCAB, HIDDEN), torch.randn(5, HIDDEN)
    replicated = placed(x, plane, everywhere)
    for weight, options, message in (
        (placed(w, plane, [Shard(0), Shard(0)]), {}, "at most one dimension of the mesh"),
        (placed(w, line, [Shard(0)]), {}, "Expected one mesh"),
        (
            w,
            {"process_group": dist.group.WORLD},
            "`process_group` is .*. Expected None with DTensor",
        ),
        (w, {"input_grad": "partial"}, "`input_grad` is 'partial'. Expected 'replicate'"),
        (w, {"process_group": plane}, "`process_group` is a mesh of 2 dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            so.linear_cross_entropy(replicated, weight, target, **options)
    head = so.LinearCrossEntropyLoss(HIDDEN, VOCAB)
    fully_shard(head.linear, mesh=line)
    with pytest.raises(TypeError, match=r"Linear with hooks.* Call fully_shard with the whole"):
        head(x, target)
    with pytest.raises(ValueError, match=r"5 classes on 4 ranks\. Expected at least one"):
        so.linear_cross_entropy(x, distribute_tensor(few, line, [Shard(0)]), target)


@pytest.mark.in_turn
@needs_distributed
def test_compiled_with_dynamic_shapes():
    run_on_ranks(compiled_for_any_size, LINE)


@needs_distributed
def test_a_divisor_that_is_a_dtensor():
    run_on_ranks(with_a_count_of_tokens, LINE)


@pytest.mark.in_turn
@needs_distributed
def test_the_head_of_a_parallel_plan():
    run_on_ranks(in_a_plan, LINE)


@pytest.mark.in_turn
@needs_distributed
def test_unsupported_placements_are_refused_on_every_rank():
    run_on_ranks(refused, PLANE)
