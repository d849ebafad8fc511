"""Reading a discarded output never crashes: the guard or debug mode raises an error."""

import pytest
import torch

import storage_ops as so

GUARD = pytest.param(
    False,
    id="guard",
    marks=pytest.mark.skipif(not so.info()["guard"], reason="this torch or path has no guard"),
)
READS = {
    "add": lambda h: h + 1,
    "print": repr,
    "numpy": lambda h: h.detach().numpy(),
    "item": lambda h: h.sum().item(),
    "to list": lambda h: h.tolist(),
    "clone": torch.clone,
    "in place": lambda h: h.mul_(2),
    "matmul": lambda h: torch.ones(3, 4) @ h,
    "second consumer": torch.nn.Linear(4, 2),
    "out": lambda h: torch.add(torch.ones(4, 4), 1, out=h.detach()),
    "optimizer": lambda h: torch.optim.SGD([h.detach().requires_grad_()], 0.1).step(
        lambda: h.detach().sum()
    ),
}


def region(x):
    return x.sin()


@pytest.mark.parametrize("debug", [GUARD, pytest.param(True, id="debug")])
@pytest.mark.parametrize("name", READS)
def test_every_read_names_the_region_and_the_line(name, debug):
    ckpt = so.OutputDiscardCheckpoint(debug=debug)
    x = torch.randn(4, 4, requires_grad=True)
    h = ckpt.checkpoint(region, x)
    y = h * h
    ckpt.discard_output_and_register_recompute(y)
    with pytest.raises(
        RuntimeError, match=r"region region was discarded by .* at .*discard\.py:\d+"
    ):
        READS[name](h)
    assert h.shape == (4, 4) and h.dtype == torch.float32 and so.is_discarded(h)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.sin() * x.cos())
    assert torch.equal(h, x.sin()) and type(h) is torch.Tensor


@pytest.mark.parametrize("path_name", ["copy"])
def test_debug_mode_raises_without_a_guard(path_name):
    from storage_ops.storage.kernels import storage_path

    with storage_path(path_name):
        ckpt = so.OutputDiscardCheckpoint(debug=True)
        x = torch.randn(4, 4, requires_grad=True)
        h = ckpt.checkpoint(region, x)
        y = h * h
        ckpt.discard_output_and_register_recompute(y)
        for read in (READS["add"], READS["print"], READS["matmul"], READS["second consumer"]):
            with pytest.raises(so.DiscardedTensorError, match="region region was discarded"):
                read(h)
        y.sum().backward()
        assert torch.equal(h, x.sin())
