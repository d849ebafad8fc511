"""The table of ops: all rows with products, and the lookup of rows."""

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from storage_ops import policies
from storage_ops.foundation import ops

aten = torch.ops.aten
BATCH, ROWS, INNER, COLUMNS = 2, 16, 8, 24
PRODUCTS = sorted(name for name, row in ops.described().items() if "product" in row)


def overload(name):
    """Return the default overload of an op by its name. Skip the test if torch lacks it."""
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if packet is None:
        pytest.skip(f"this torch has no {name}")
    return packet.default


def factors(name, product):
    """Return two factors for a row, the op's other arguments and the number of multiplications."""
    batch = (BATCH,) if "bmm" in name else ()
    left, right = torch.rand(*batch, ROWS, INNER), torch.rand(*batch, INNER, COLUMNS)
    expected = 2 * ROWS * INNER * COLUMNS * (BATCH if batch else 1)
    if product.form == "vector":
        left = left[0] if name.endswith("dot") else left
        right, expected = torch.rand(INNER), 2 * left.numel()
    elif product.form == "transposed":
        right = right.mT.contiguous()
    elif product.form == "groups":
        right, expected = torch.rand(BATCH, INNER, COLUMNS), expected
    return left, right, expected


def arguments(name, product):
    left, right, expected = factors(name, product)
    before = []
    if product.left:  # the product is added to this
        before = [torch.zeros(ROWS) if product.form == "vector" else torch.zeros(COLUMNS)]
        if name == "aten::baddbmm":
            before = [torch.zeros(BATCH, 1, COLUMNS)]
    return [*before, left, right], expected


@pytest.mark.parametrize("name", PRODUCTS)
def test_operations_of_products(name):
    product = ops.described()[name]["product"]
    args, expected = arguments(name, product)
    op = overload(name)
    assert ops.flops_of(op, args, {}, None) == expected
    assert ops.facts_of(op).product is product
    assert policies.matmuls(None, op) == CheckpointPolicy.MUST_SAVE
    formula = flop_registry.get(op.overloadpacket)
    if (
        formula is not None and product.form != "groups" and "scaled" not in name
    ):  # others have more arguments
        assert formula(*args, out_val=None) == expected


LOW = ("aten::_int_mm", "aten::_scaled", "aten::mkldnn", "transformers::")


@pytest.mark.parametrize("name", [n for n in PRODUCTS if not n.startswith(LOW)])
def test_products_are_linear_in_each_factor(name):
    product, op = ops.described()[name]["product"], overload(name)
    args, _ = arguments(name, product)
    more = {}
    if product.form == "groups":
        args = [t.bfloat16() for t in args]
        more = {"offs": torch.tensor([4, ROWS], dtype=torch.int32)}
    if name == "aten::_addmm_activation":
        args = [t + 1 for t in args]  # a ReLU of positive numbers
        args[0].zero_()
    once = op(*args, **more)
    for place in (product.left, product.right):
        doubled = list(args)
        doubled[place] = 2 * doubled[place]
        torch.testing.assert_close(op(*doubled, **more), 2 * once)


def test_a_row_of_an_overload_comes_before_those_of_an_op_and_of_a_tag(monkeypatch):
    monkeypatch.setattr(ops, "_rows", dict(ops._rows))
    monkeypatch.setattr(ops, "_facts", {})
    ops.describe("tag::view_copy", nanoseconds=1.0)
    assert ops.facts_of(aten.view_copy.default).nanoseconds == 1.0
    ops.describe("view_copy", nanoseconds=2.0)
    ops.describe("view_copy.dtype", nanoseconds=3.0)
    assert ops.facts_of(aten.view_copy.default).nanoseconds == 2.0
    assert ops.facts_of(aten.view_copy.dtype).nanoseconds == 3.0
    with pytest.raises(ValueError, match=r"aten::view_copy has \['nanoseconds'\] already"):
        ops.describe("view_copy", nanoseconds=2.0)


def test_every_row_names_an_op():
    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    # Ops of later versions of torch and of other libraries are absent.
    names = {name.partition(".")[0] for name in ops.described() if name.startswith("aten::")}
    later = {"aten::_scaled_mm_v2", "aten::_scaled_grouped_mm_v2", "aten::_fused_rms_norm"}
    assert names - known <= later | {"aten::_grouped_mm", "aten::_scaled_grouped_mm"}
