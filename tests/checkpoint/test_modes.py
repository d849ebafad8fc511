"""A recompute enters the Python modes that were active only around the forward."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import storage_ops as so

WAYS = {
    "full": so.CheckpointWrapper,
    "selective": lambda layer: so.CheckpointWrapper(layer, policy="matmuls"),
    "reentrant": lambda layer: so.CheckpointWrapper(layer, use_reentrant=True),
    "discard": lambda layer: so.output_discard(layer, torch.square),
    "tile": lambda layer: so.tile(layer, 2, dim=0),
}


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 2 if function is F.gelu else out


class Shifted(TorchDispatchMode):
    """Changes the result of an op of the forward and of an op of the backward."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        return out + 1 if op.overloadpacket in (torch.ops.aten.gelu, torch.ops.aten.mm) else out


class Scaled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        return out * 3 if function is F.gelu else out


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.exp(F.gelu(x @ self.weight) * 0.1)


def gradients(layer, way, forward, backward, x):
    """Return the gradients with one mode around the forward and another around the backward."""
    run = layer if way is None else WAYS[way](layer)
    with forward:
        y = run(x)
        y = y if way == "discard" else y.square()
    with backward:
        y.sum().backward()
    results = [x.grad, layer.weight.grad]
    x.grad = layer.weight.grad = None
    so.remove_activation_checkpoint(layer)
    return results


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", [Doubled, Shifted])
def test_a_mode_around_the_forward(way, mode):
    # In float64, because a sum over tiles rounds entries near zero in another way.
    layer, x = Layer().double(), torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    forward = mode()
    arounds = [mock.MagicMock(), Doubled()]
    if way != "tile":  # a tiled module runs other products in backward
        arounds.append(forward)
    for backward in arounds:
        right = gradients(layer, None, forward, backward, x)
        got = gradients(layer, way, forward, backward, x)
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("way", WAYS)
def test_backward_of_a_tensor_subclass_runs_without_its_functions(way):
    layer, x = Layer(), torch.randn(6, 4).as_subclass(Scaled).requires_grad_()
    nothing = mock.MagicMock()
    right = gradients(layer, None, nothing, nothing, x)
    torch.testing.assert_close(gradients(layer, way, nothing, nothing, x), right)


def test_only_the_modes_that_have_ended_are_entered():
    outer, inner, entered = Shifted(), Shifted(), []
    outer.name, inner.name = "outer", "inner"

    class Region(nn.Module):
        def forward(self, x):
            stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            entered.append([mode.name for mode in stack if type(mode) is Shifted])
            return x.sin()

    x = torch.randn(4, requires_grad=True)
    layer = so.CheckpointWrapper(Region(), early_stop=False)
    with outer:
        with inner:
            y = layer(x)
        y.sum().backward()
    assert entered == [["outer", "inner"]] * 2
    with outer, inner:
        y = layer(x)
    message = r"modes \[Shifted\] active.* in \[Shifted, Shifted\]"
    with inner, pytest.raises(RuntimeError, match=message):
        y.sum().backward()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._get_torch_function_state() == torch._C._TorchFunctionState.ENABLED


def test_modes_end_when_the_recompute_raises():
    def region(x):
        if seen:
            raise KeyError("recompute")
        seen.append(1)
        return x.sin()

    x, seen = torch.randn(4, requires_grad=True), []
    with Doubled(), Shifted():
        y = so.output_discard(region, torch.square)(x)
    with pytest.raises(KeyError):
        y.sum().backward()
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_counters_of_torch_count_only_the_forward():
    layer, x = so.CheckpointWrapper(Layer()), torch.randn(6, 4, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = layer(x)
    forward = counter.get_total_flops()
    y.sum().backward()
    assert forward > 0 and counter.get_total_flops() == forward


@pytest.mark.parametrize("way", WAYS)
def test_attention_that_is_replaced_during_the_forward(way):
    class Attention(Layer):
        def forward(self, x):
            q = (x @ self.weight)[:, None, None]
            return F.scaled_dot_product_attention(q, q, q).flatten(1).exp()

    before = F.scaled_dot_product_attention
    layer, x = Attention(), torch.randn(6, 4, requires_grad=True)
    exchanged = lambda q, k, v: before(q, k, v) * 0.3  # noqa: E731
    patches = [mock.patch.object(F, "scaled_dot_product_attention", exchanged) for _ in range(2)]
    right = gradients(layer, None, patches[0], mock.MagicMock(), x)
    got = gradients(layer, way, patches[1], mock.MagicMock(), x)
    torch.testing.assert_close(got, right)
    assert F.scaled_dot_product_attention is before
