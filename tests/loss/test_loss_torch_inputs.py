"""PyTorch's own test inputs for nn.functional.linear_cross_entropy give the same results here."""

import warnings

import pytest
import torch
from torch.nn import functional as F

import storage_ops as so

pytest.importorskip("expecttest")  # torch's test inputs import it
from torch.testing._internal.common_methods_invocations import op_db

INFOS = [info for info in op_db if info.name.endswith("linear_cross_entropy")]
NAMES = [info.variant_test_name or "plain" for info in INFOS]
pytestmark = pytest.mark.skipif(not INFOS, reason="this torch has no linear_cross_entropy")


def ours(sample):
    return so.linear_cross_entropy(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.in_turn
@pytest.mark.parametrize("info", INFOS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_samples(info, dtype):
    count = {2: 0, 3: 0}
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        weight, target = sample.args
        bias = sample.kwargs.get("linear_bias")
        result = ours(sample)
        count[min(weight.dim(), 3)] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it computes all logits
            options = {**sample.kwargs, "options": None}
            right = F.linear_cross_entropy(sample.input, weight, target, **options)
        torch.testing.assert_close(result, right)
        leaves = [
            t for t in (sample.input, weight, bias, target) if t is not None and t.requires_grad
        ]
        got, expected = (torch.autograd.grad(v.sum(), leaves) for v in (result, right))
        if not right.isnan().any():
            torch.testing.assert_close(got, expected)
    assert min(count.values()) > 20


@pytest.mark.parametrize("info", INFOS[:1], ids=NAMES[:1])
def test_error_inputs(info):
    count = 0
    for error in info.error_inputs("cpu"):
        count += 1
        with pytest.raises((ValueError, TypeError), match=r"linear_cross_entropy: .*. Expected"):
            ours(error.sample_input)
    assert count >= 4


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("options", [
    {}, {"reduction": "sum", "weight": torch.rand(9)},
    {"reduction": "none", "label_smoothing": 0.1},
    {"weight": torch.rand(9), "token_weight": torch.rand(4, 2, 3)}, {"returns": ("nll", "argmax")},
])  # fmt: skip
def test_options_at_every_position(options, dense):
    """Each position has its own loss. A mean divides by the sum of weights over all positions."""
    module = so.LinearCrossEntropyLoss(5, 9, True, out_features=(2, 3))
    x, w = torch.randn(4, 5), module.linear.weight.view(9, 2, 3, 5)
    b = module.linear.bias.view(9, 2, 3)
    target = torch.randn(4, 9, 2, 3).softmax(1) if dense else torch.randint(9, (4, 2, 3))
    got = so.linear_cross_entropy(x, w, target, linear_bias=b, **options)
    flat = target.movedim(1, -1).reshape(24, 9) if dense else target.reshape(24)
    rest = {**options}
    if "token_weight" in rest:
        rest["token_weight"] = rest["token_weight"].reshape(24)
    # Write the loss as one token for each (x, position), with the position's logits as its input.
    logits = (torch.einsum("nd,cijd->nijc", x, w) + b.movedim(0, -1)).reshape(24, 9)
    right = so.linear_cross_entropy(logits, torch.eye(9), flat, **rest)
    for ours, whole in zip(
        *(v if isinstance(v, tuple) else (v,) for v in (got, right)), strict=True
    ):
        torch.testing.assert_close(ours.flatten(), whole.flatten())
    assert "out_features=(2, 3)" in repr(module)
    own = module(x, target, token_weight=options.get("token_weight"))
    own.sum().backward()
    assert module.linear.weight.grad.shape == (18 * 3, 5)


def test_wrong_arguments_of_positions():
    x, w, t = torch.randn(4, 5), torch.randn(9, 2, 5), torch.randint(9, (4, 2))
    for message, changed in [
        (r"`input` has shape \(2, 2, 5\). Expected \(N, D\)", {"input": x.view(2, 2, 5)}),
        (r"`target` has shape \(4, 3\). Expected \(4, 2\)", {"target": torch.zeros(4, 3).long()}),
        (r"`linear_bias` has shape \(9,\). Expected \(9, 2\)", {"linear_bias": torch.zeros(9)}),
        (r"`weight` has shape \(0,\). Expected \(9,\)", {"weight": torch.ones(0)}),
        ("`weight` is on meta. Expected cpu", {"weight": torch.ones(9, device="meta")}),
        ("`ignore_index` is 'a'. Expected an int", {"ignore_index": "a"}),
        ("`reduction` is 'mean'. Expected 'sum' with a divisor", {"divisor": 3.0}),
        ("`shift` is given. Expected none with a 3-D weight", {"shift": 1}),
        ("`options` is 'auto'. Expected torch.nn.LinearCross", {"options": "auto"}),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            so.linear_cross_entropy(**{"input": x, "linear_weight": w, "target": t, **changed})


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_of_many_positions_are_summed_in_float32(compiled):
    x, w = torch.randn(8, 16).bfloat16().requires_grad_(), torch.randn(4, 96, 16).bfloat16()
    target = torch.randint(4, (8, 96))

    def of_x(x):
        return so.linear_cross_entropy(x, w, target, reduction="sum")

    loss = torch.compile(of_x, backend="aot_eager", fullgraph=True) if compiled else of_x
    (got,) = torch.autograd.grad(loss(x), x)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(
        so.linear_cross_entropy(wide, w.double(), target, reduction="sum"), wide
    )
    assert (got - want).norm() < 0.004 * want.norm()  # sums in bfloat16 have an error of 0.01
