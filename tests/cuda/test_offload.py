"""On a GPU, offloaded results are in host memory between forward and backward."""

import copy

import pytest
import torch

import storage_ops as so
from storage_ops import policies

from ..checkpoint.blocks import Model, assert_same, make_input, step
from ..link import simulated_copies
from .devices import DTYPES, busy, each_device, requested, side_stream, synchronize

MATMULS = policies.offload(policies.matmuls)


def checkpointed(model, policy):
    cfg = so.ActivationCheckpointConfig(layer_names=["layers.*"], policy=policy)
    return so.apply_activation_checkpoint(copy.deepcopy(model), cfg)


def slowed(model, device):
    """Delay each layer by a busy stream, so that copies and kernels overlap differently."""
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: busy(device))
        layer.register_full_backward_pre_hook(lambda *_: busy(device))
    return model


@each_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", [MATMULS, policies.offload(policies.everything)])
@pytest.mark.parametrize("slow", [False, True])
def test_gradients_are_those_of_eager_bit_for_bit(device, dtype, policy, slow):
    model = Model(layers=6, width=64).to(device, dtype)
    away = checkpointed(model, policy)
    if slow:
        slowed(away, device)
    with simulated_copies(1e12):  # has no effect on a GPU, where copies are real
        for _ in range(3):  # later rounds reuse the memory
            x = make_input(64, dtype).detach().to(device).requires_grad_()
            right, got = step(model, x), step(away, x)
            assert_same(got, right)


@each_device
def test_on_another_stream(device):
    model = Model(layers=4, width=64, dropout=0.0).to(device, torch.float32)
    away = slowed(checkpointed(model, MATMULS), device)
    x = make_input(64, torch.float32).detach().to(device).requires_grad_()
    right = step(model, x)
    with simulated_copies(1e12), side_stream(device):
        assert_same(step(away, x), right)
    synchronize(device)


@each_device
def test_bytes_are_on_the_host_between_forward_and_backward(device):
    model = Model(layers=8, width=256, dropout=0.0).to(device, torch.float32)
    x = make_input(256, torch.float32).detach().to(device).requires_grad_()
    kept = {}
    for name, policy in {"saved": policies.matmuls, "away": MATMULS}.items():
        layers = checkpointed(model, policy)
        with simulated_copies(1e12):
            for _ in range(2):
                with requested(device) as memory:
                    y = layers(x)
                y.sum().backward()
        kept[name] = memory.kept_bytes
    linear = 4 * 2 * 6 * (3 * 256 + 256 + 4 * 256 + 256)
    assert kept["saved"] - kept["away"] >= 6.9 * linear


@pytest.mark.cuda
def test_dropping_a_graph_during_copies_is_safe():
    model = Model(layers=4, width=256, dropout=0.0).cuda().float()
    away = checkpointed(model, MATMULS)
    x = make_input(256, torch.float32).detach().cuda().requires_grad_()
    right = step(model, x)
    for _ in range(20):
        y = away(x)
        del y  # copies may still run, so new tensors must not reuse their memory
        assert torch.ones(1 << 16, device="cuda").sum() == 1 << 16
        assert_same(step(away, x), right)


@pytest.mark.cuda
def test_capture_is_refused():
    away = checkpointed(Model(layers=2).cuda().float(), MATMULS)
    x = make_input(dtype=torch.float32).detach().cuda().requires_grad_()
    step(away, x)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="'offload' while a CUDA graph is captured"),
        torch.cuda.graph(graph),
    ):
        away(x)
