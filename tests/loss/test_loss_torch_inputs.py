"""PyTorch's own inputs for nn.functional.linear_cross_entropy, those with a matrix as weight."""

import pytest
import torch
from torch.nn import functional as F

import storage_ops as so

pytest.importorskip("expecttest")  # which torch's test inputs import
from torch.testing._internal.common_methods_invocations import op_db

INFOS = [info for info in op_db if info.name.endswith("linear_cross_entropy")]
pytestmark = pytest.mark.skipif(not INFOS, reason="this torch has no linear_cross_entropy")


def ours(sample):
    options = {k: v for k, v in sample.kwargs.items() if k != "options"}
    return so.linear_cross_entropy(sample.input, *sample.args, **options)


@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.variant_test_name or "plain")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_samples(info, dtype):
    count = 0
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        weight, target = sample.args
        if weight.dim() != 2:
            continue
        options = {k: v for k, v in sample.kwargs.items() if k not in ("options", "linear_bias")}
        options["ignore_index"] = options.get("ignore_index") or -100
        bias = sample.kwargs.get("linear_bias")
        right = F.cross_entropy(F.linear(sample.input, weight, bias), target, **options)
        result, count = ours(sample), count + 1
        torch.testing.assert_close(result, right)
        leaves = [
            t for t in (sample.input, weight, bias, target) if t is not None and t.requires_grad
        ]
        got, expected = (torch.autograd.grad(v.sum(), leaves) for v in (result, right))
        if not right.isnan().any():
            torch.testing.assert_close(got, expected)
    assert count > 20


@pytest.mark.parametrize("info", INFOS[:1], ids=lambda info: info.variant_test_name or "plain")
def test_error_inputs(info):
    count = 0
    for error in info.error_inputs("cpu"):
        if error.sample_input.args[0].dim() <= 2:
            count += 1
            with pytest.raises(
                (ValueError, TypeError), match=r"linear_cross_entropy: .*; expected"
            ):
                ours(error.sample_input)
    assert count >= 4
