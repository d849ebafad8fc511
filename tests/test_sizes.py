"""torch.compile needs at most two graphs for changing numbers of tokens."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import storage_ops as so
from storage_ops import losses

from .checkpoint.blocks import MLP

V, D, E = 61, 16, 24
# Sequences, and tokens of each. All differ, since Dynamo uses one symbol for equal sizes.
SIZES = [(4, 5), (6, 9), (12, 7), (8, 18), (10, 21), (14, 11), (2, 13), (18, 6), (22, 30), (26, 15)]
REDUCTIONS = "mean", "sum", "none"


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def tokens(*shape):
    """Return hidden states and class indices, some of them ignored."""
    target = torch.randint(V - 1, shape)
    target[..., :2] = -100
    return torch.randn(*shape, D, requires_grad=True), target


def heads():
    """Return the heads of a model and a frozen teacher, and a bias."""
    weights = torch.randn(V, D), torch.randn(V, E), torch.randn(V)
    return tuple(w.requires_grad_(w.shape != (V, E)) for w in weights)


def reductions(x, w, head, b, target, *_):
    for reduction in REDUCTIONS:
        yield so.linear_cross_entropy(x, w, target, reduction=reduction)
        yield so.linear_cross_entropy(
            x, w, target, reduction=reduction, linear_bias=b, shift=2, label_smoothing=0.1,
            z_loss=0.01, softcap=9.0, logit_scale=0.7,
        )  # fmt: skip


def options(x, w, head, b, target, numbers, into):
    """Yield losses with options that contain sizes or values of tokens."""
    numbers = numbers.detach()
    count, weight = target.numel(), numbers[..., 0]
    for more in (
        {"max_valid": count, "memory_budget": 40_000 * count},
        {"max_valid": "sync", "token_weight": weight, "weight": numbers[0, 0]},
        {"reduction": "sum", "divisor": count, "shift": True},
        {"reduction": "sum", "divisor": weight.sum()},
        {"valid_classes": V - 1, "accumulate_into": into},
    ):
        yield so.linear_cross_entropy(x, w, target, **more)


def results(x, w, head, b, target, numbers, _):
    names = "loss", "nll", "lse", "entropy", "argmax", "correct", "z_loss", "selected", "topk"
    ids = target[..., None].expand(*target.shape, 2)
    *values, (logps, classes) = so.linear_cross_entropy(
        x, w, target, shift=True, z_loss=0.1, returns=names, selected_ids=ids, top_k=3
    )
    yield from (*values, logps, classes)


def distributions(x, w, head, b, target, numbers, _):
    q = numbers.softmax(-1)
    for reduction in REDUCTIONS:
        yield so.linear_cross_entropy(x, w, q, reduction=reduction, linear_bias=b)
    yield so.linear_cross_entropy(x, w, q.detach(), shift=1, token_weight=numbers[..., 0].detach())


def positions(x, w, head, b, target, numbers, _):
    w, target = (w[:, None] * head[0, :2, None]), target.flatten()[:, None].expand(-1, 2)
    for reduction in REDUCTIONS:
        yield so.linear_cross_entropy(x.flatten(0, 1), w, target, reduction=reduction)


def divergences(x, w, head, b, target, numbers, _):
    teacher, weight = numbers[..., :E].detach(), numbers[..., 0].detach()
    for divergence in ("forward", "reverse", "jsd", "tvd", "cosine"):
        yield so.linear_kl_div(
            x, w, teacher, head, divergence=divergence, token_weight=weight, linear_bias=b
        )
    yield so.linear_kl_div(x, w, teacher, head, reduction="none", shift=True, softcap=9.0)
    yield so.linear_kl_div(
        x, w, teacher, head, target=target, temperature=2.0, scale_by_temperature=True,
        max_valid=target.numel(), memory_budget=40_000 * target.numel(),
    )  # fmt: skip
    stored = tuple(numbers.detach().log_softmax(-1).topk(4))
    yield so.linear_kl_div(x, w, teacher_topk=stored)
    yield so.linear_kl_div(x, w, teacher_topk=stored, teacher_tail="renormalize", reduction="none")


CALLS = reductions, options, results, distributions, positions, divergences


def compare(function, counter, cases, **compiled):
    """Compare results and gradients of a compiled and a plain function for each size."""
    step = torch.compile(function, fullgraph=True, backend=counter, **compiled)
    for arguments in cases:
        copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in arguments]
        got, right = step(*arguments), function(*copies)
        torch.testing.assert_close(got, right)
        for values, leaves in ((got, arguments), (right, copies)):
            sum(v.square().sum() for v in values if v.requires_grad).backward()
            assert any(t.grad is not None for t in leaves)
        for ours, wanted in zip(arguments, copies, strict=True):
            torch.testing.assert_close(ours, wanted)
            torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-4, atol=1e-4)


def arguments_of_sizes(sizes):
    for shape in sizes:
        x, target = tokens(*shape)
        w, head, b = heads()
        numbers = torch.rand(*shape, V, requires_grad=True)
        yield x, w, head, b, target, numbers, torch.zeros(V, D)


@pytest.mark.in_turn
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_two_graphs_serve_all_sizes(call):
    counter = CompileCounterWithBackend("aot_eager")
    compare(lambda *args: list(call(*args)), counter, arguments_of_sizes(SIZES))
    assert counter.frame_count <= 2


def padded(x, w, head, target, advantages, old_logps):
    teacher = {"ref_input": x.detach(), "ref_weight": w.detach()}
    args = x, w, target
    yield losses.kd(x, w, x.detach(), head, target, shift=True)
    yield losses.dpo(*args, **teacher, shift=True, return_metrics=True)[0]
    yield losses.cpo(*args, shift=True)
    yield losses.grpo(
        *args, advantages, **teacher, shift=True, old_logps=old_logps, kl_weight=0.1,
        entropy_weight=0.1,
    )  # fmt: skip
    yield losses.dr_grpo(*args, advantages, max_length=64)
    yield losses.dapo(*args, advantages)


def packed(x, w, head, target, advantages, old_logps, cu_seqlens):
    args, options = (x, w, target), {"shift": True, "cu_seqlens": cu_seqlens}
    yield losses.sft(*args, **options)
    yield losses.kto(*args, advantages > 0.5, ref_logps=-advantages, **options)
    yield losses.orpo(*args, **options, nll_target=target)
    yield losses.simpo(*args, **options)
    yield losses.gspo(*args, advantages, old_logps=old_logps, **options)


def batches(sizes, packs):
    for sequences, length in sizes:
        shape = (1, sequences * length) if packs else (sequences, length)
        x, target = tokens(*shape)
        w, head = torch.randn(V, D, requires_grad=True), torch.randn(V, D)
        sampled = torch.rand(sequences), torch.rand(*target[:, 1:].shape).log()
        bounds = torch.arange(0, shape[1] + 1, length, dtype=torch.int32)
        yield x, w, head, target, *sampled, *([bounds] if packs else [])


@pytest.mark.in_turn
@pytest.mark.parametrize("call", [padded, packed], ids=lambda call: call.__name__)
def test_two_graphs_serve_all_sizes_of_every_loss(call):
    counter = CompileCounterWithBackend("eager")
    sizes = [(count, length) for count, length in SIZES if count != 2]  # half of a pair is one
    compare(lambda *args: list(call(*args)), counter, batches(sizes, call is packed))
    assert counter.frame_count <= 2


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MLP(D, 0.0) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = so.LinearCrossEntropyLoss(D, V, bias=True)

    def forward(self, x):
        return self.loss(x, x[..., 0].abs().long())


def checkpointed(**options):
    config = so.ActivationCheckpointConfig(layer_classes=["MLP"], **options)
    return so.apply_activation_checkpoint(Layers(), config)


def in_place(x):
    h = x * 2
    y = h.sin()
    so.discard_storage(h)
    so.share_storage(h, x * 2)
    return y * h


MODULES = {
    "loss": Loss,
    "storage ops": lambda: in_place,
    "full": checkpointed,
    "reentrant": lambda: checkpointed(use_reentrant=True),
    "selective": lambda: checkpointed(ops_to_save=["aten.mm"]),
    "discarding": lambda: checkpointed(mode="output_discard"),
    "output_discard": lambda: so.output_discard(nn.Linear(D, E), nn.Linear(E, D)),
    "tiles": lambda: so.tile(MLP(D, 0.0), tiles=3),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("name", MODULES)
def test_two_graphs_serve_all_sizes_of_a_module(name):
    counter, function = CompileCounterWithBackend("aot_eager"), MODULES[name]()
    cases = ([torch.randn(*shape, D, requires_grad=True)] for shape in SIZES)
    compare(lambda x: [function(x)], counter, cases)
    assert counter.frame_count <= 2


class Exported(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.teacher = nn.Linear(D, V), nn.Linear(E, V)

    def forward(self, x, target):
        w, b = self.head.weight, self.head.bias
        teacher = x.repeat(1, 1, 2)[..., :E]
        wide = w.unflatten(0, (-1, 1)).expand(-1, 2, -1)
        return (
            so.linear_cross_entropy(x, w, target, linear_bias=b, shift=True, max_valid=x.numel()),
            so.linear_cross_entropy(x, w, target, returns=("nll", "entropy", "argmax")),
            so.linear_cross_entropy(x[:, 0], wide, target[:, -2:]),
            so.linear_kl_div(x, w, teacher, self.teacher.weight, reduction="none"),
            losses.orpo(x, w, target, nll_target=target),
        )


def exported(model):
    """Export a model for any number of sequences and tokens."""
    sequences = 2 * torch.export.Dim("pairs", min=2, max=64)
    sizes = {0: sequences, 1: torch.export.Dim("length", min=3, max=4096)}
    shapes = {"x": sizes, "target": sizes}
    return torch.export.export(model, tokens(4, 9), dynamic_shapes=shapes, strict=False)


@pytest.mark.parametrize(
    "package", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["export", "AOTInductor"]
)
def test_export_with_dims(package, tmp_path):
    model = Exported()
    program = exported(model)
    run = program.module()
    if package:
        path = str(tmp_path / "model.pt2")
        path = torch._inductor.aoti_compile_and_package(program, package_path=path)
        run = torch._inductor.aoti_load_package(path)
    for shape in ((4, 9), (6, 30), (10, 4)):
        arguments = tokens(*shape)
        torch.testing.assert_close(run(*arguments), model(*arguments))
