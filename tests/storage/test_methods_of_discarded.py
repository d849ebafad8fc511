"""Methods of discarded tensors and storages that read bytes without an op raise an error."""

import numpy as np
import pytest
import torch

import storage_ops as so

READS = {
    "repr": repr,
    "format": lambda t: f"{t}",
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "asarray": np.asarray,
    "apply_": lambda t: t.apply_(abs),
    "map_": lambda t: t.map_(torch.ones(300, 300), max),
    "map_ from": lambda t: torch.ones(300, 300).map_(t, max),
    "dlpack": lambda t: t.__dlpack__(),
}


@pytest.mark.parametrize("read", READS)
def test_check_discarded_detects_reads_without_an_op(path, read):
    t = torch.ones(300, 300)
    so.discard_storage(t, guard=None)
    with so.check_discarded():
        with pytest.raises(so.DiscardedTensorError, match=r"reads a tensor of shape \(300, 300\)"):
            READS[read](t)
        assert torch.ones(2).tolist() == [1, 1] and repr(torch.ones(1)) == "tensor([1.])"
    so.share_storage(t, torch.ones(300, 300))
    READS[read](t)


ASKED = {
    "tensor": lambda t: t.is_shared(),
    "storage": lambda t: t.untyped_storage().is_shared(),
    "module": lambda t: torch.nn.ParameterList([t]).share_memory(),
}


@pytest.mark.skipif(not so.info()["guard"], reason="torch has no guard")
@pytest.mark.parametrize("ask", ASKED)
def test_is_shared_of_a_discarded_tensor_is_an_error(ask):
    """Torch's method ended the process."""
    t = torch.ones(4)
    so.discard_storage(t, guard="gone")
    with pytest.raises(RuntimeError, match="gone"):
        ASKED[ask](t)
    so.share_storage(t, torch.zeros(4))
    assert not t.is_shared() and not torch.empty(0).is_shared()
    assert torch.ones(4).share_memory_().is_shared()
