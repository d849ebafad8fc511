"""Checkpointed and tiled modules under torch.fx, and torch.func inside of regions."""

import pytest
import torch
from torch import nn

import storage_ops as so


@pytest.mark.parametrize("way", ["full", "selective", "output_discard", "reentrant", "tile"])
def test_symbolic_traces_are_those_of_the_plain_model(way):
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4))
    plain = torch.fx.symbolic_trace(model).graph
    if way == "tile":
        so.tile(inner, 2, dim=0)
    else:
        how = {"use_reentrant": True} if way == "reentrant" else {"mode": way}
        if way == "selective":
            how["policy"] = "matmuls"
        so.apply_activation_checkpoint(model, {"layer_names": ["1"], **how})
    traced, x = torch.fx.symbolic_trace(model), torch.randn(4, 4)
    assert str(traced.graph) == str(plain)
    assert torch.allclose(traced(x), model(x))


def test_transforms_of_torch_func_in_a_region_are_refused_by_name():
    class Forces(nn.Module):
        def forward(self, x):
            return torch.func.grad(lambda t: t.sin().sum())(x)

    x = torch.randn(4, requires_grad=True)
    for run in (so.CheckpointWrapper(Forces()), so.output_discard(Forces(), torch.square)):
        with pytest.raises(RuntimeError, match=r"Forces calls a transform of torch.func.*Expected"):
            run(x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize(
    "module", [nn.Conv1d(4, 4, 1), nn.Sequential(nn.Conv2d(4, 8, 1), nn.GELU())]
)
def test_convolutions_cannot_be_tiled(module):
    with pytest.raises(TypeError, match="is a convolution, whose channels are in dimension 1"):
        so.tile(module, 2)
    assert not isinstance(module, so.checkpoint.tile.Tiled)
