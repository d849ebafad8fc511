"""Misuse raises an error that names the region, frees nothing, and never crashes the process."""

import numpy as np
import pytest
import torch
from torch import nn

import storage_ops as so

from ..refused import refused


def region(x):
    return x.sin()


def make():
    ckpt = so.OutputDiscardCheckpoint(debug=True)
    x = torch.randn(4, 4, requires_grad=True)
    return ckpt, x, ckpt.checkpoint(region, x)


def test_discard_without_a_region():
    with pytest.raises(RuntimeError, match=r"checkpoint\(\) was not called"):
        so.OutputDiscardCheckpoint().discard_output_and_register_recompute(torch.ones(1))


@pytest.mark.parametrize("hook", [None, torch.ones(2), 3])
def test_hook_tensor_without_a_gradient(hook):
    ckpt, _, h = make()
    with pytest.raises(RuntimeError, match="`hook_tensor` for the region region needs no grad"):
        ckpt.discard_output_and_register_recompute(hook)
    assert not so.is_discarded(h)
    y = h * h
    ckpt.discard_output_and_register_recompute(y)
    y.sum().backward()


def test_a_second_region_before_the_first_is_finished():
    ckpt, x, h = make()
    with pytest.warns(UserWarning, match="the output of region was not discarded and stays"):
        second = ckpt.checkpoint(region, x)
    ckpt.clear()
    (second * h).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.sin() * x.cos())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        refused(ValueError, "`determinism_check` is 'maybe'", determinism_check="maybe"),
        refused(ValueError, "`determinism_check` is array", determinism_check=np.zeros(2)),
        refused(TypeError, "`preserve_rng_state` is None", preserve_rng_state=None),
        refused(TypeError, "`debug` is 1", debug=1),
        refused(TypeError, "`context_fn` is 0", context_fn=0),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=rf"{message}.*\. Expected"):
        so.OutputDiscardCheckpoint(**options)


@pytest.mark.parametrize("make", [so.output_discard, so.OutputDiscard])
def test_functions_that_cannot_be_called(make):
    for producer, consumer, message in ((None, region, "producer"), (region, 3, "consumer")):
        with pytest.raises(TypeError, match=rf"`{message}` is (None|3)\. Expected a function"):
            make(producer, consumer)
    with so.OutputDiscardChain() as chain:
        for checkpoint in (so.OutputDiscardCheckpoint().checkpoint, chain.checkpoint):
            with pytest.raises(TypeError, match=r"`fn` is None\. Expected a function"):
                checkpoint(None, torch.ones(2, requires_grad=True))


@pytest.mark.skipif(not so.info()["guard"], reason="this torch or path has no guard")
def test_reading_the_output_after_the_discard_names_region_and_line():
    ckpt, _, h = make()
    y = h * 2
    ckpt.discard_output_and_register_recompute(y)
    with pytest.raises(RuntimeError, match=r"output of the region region .*errors\.py:\d+"):
        h + 1
    y.sum().backward()


@pytest.mark.skipif(not so.info()["guard"], reason="this torch or path has no guard")
def test_a_consumer_that_the_hook_tensor_does_not_cover():
    ckpt, _, h = make()
    y, other = h * h, h * h * 3
    ckpt.discard_output_and_register_recompute(y)
    with pytest.raises(RuntimeError, match="output of the region region"):
        other.sum().backward()


def test_input_changed_before_backward(path):
    ckpt, x, h = make()
    inner = x * 1
    ckpt.clear()
    h = ckpt.checkpoint(region, inner)
    y = h * h
    ckpt.discard_output_and_register_recompute(y)
    with torch.no_grad():
        inner.add_(1)
    with pytest.raises(RuntimeError, match="argument 0 of region, or a tensor in it"):
        y.sum().backward()


@pytest.mark.parametrize("alias", [lambda h: h, lambda h: h.view(-1)], ids=["output", "view"])
def test_a_hook_tensor_that_is_the_output_itself(alias):
    ckpt, _, h = make()
    with pytest.raises(RuntimeError, match="`hook_tensor` is the output of the region region"):
        ckpt.discard_output_and_register_recompute(alias(h))
    assert not so.is_discarded(h)


def test_output_changed_by_the_consumer(path):
    ckpt, _, h = make()
    y = h.mul_(2) * h
    with pytest.raises(RuntimeError, match="output 0 of region was modified in place after"):
        ckpt.discard_output_and_register_recompute(y)
    assert not so.is_discarded(h)
    ckpt.clear()
    y.sum().backward()


@pytest.mark.parametrize("frozen", [False, True])
def test_parameter_changed_before_backward(path, frozen):
    layer, ckpt = nn.Linear(4, 4).requires_grad_(not frozen), so.OutputDiscardCheckpoint()
    x = torch.randn(2, 4, requires_grad=True)
    h = ckpt.checkpoint(lambda x: layer(x).sin(), x)
    y = h * h
    ckpt.discard_output_and_register_recompute(y)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="was modified in place between forward and recompute"):
        y.sum().backward()


@pytest.mark.parametrize(
    "again, message",
    [
        (lambda x: (x * 2).sin().cos(), r"saved 1 tensors in forward and 2"),
        (lambda x: x[:2].sin(), "saves was .* in forward and is"),
        (lambda x: x.sin()[:2] + 0, r"output 0 of .* was \(4, 4\)"),
    ],
)
def test_a_recompute_with_other_ops_is_an_error(path, again, message):
    calls = []

    def fickle(x):
        calls.append(1)
        return x.sin() if len(calls) == 1 else again(x)

    ckpt = so.OutputDiscardCheckpoint()
    x = torch.randn(4, 4, requires_grad=True)
    y = ckpt.checkpoint(fickle, x) ** 2
    ckpt.discard_output_and_register_recompute(y)
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


def test_illegal_in_place_inside_the_region(path):
    def illegal(x):
        a = x.exp()
        b = a * 1.5
        a.mul_(2)  # exp had saved its result
        return b + a

    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified in place after autograd had saved it"):
        so.output_discard(illegal, torch.sin)(x).sum().backward()


def test_exceptions_leave_nothing_behind(path):
    def fails(x):
        raise KeyError("inside")

    ckpt = so.OutputDiscardCheckpoint()
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(KeyError):
        ckpt.checkpoint(fails, x)
    h = ckpt.checkpoint(region, x)
    y = h * h
    ckpt.discard_output_and_register_recompute(y)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.sin() * x.cos())


def test_a_recompute_that_returns_fewer_outputs():
    fewer = []

    def producer(x):
        return (x.sin(),) if fewer else (x.sin(), x + 1)

    x = torch.randn(4, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint()
    pair = ckpt.checkpoint(producer, x)
    y = pair[0] * pair[1]
    ckpt.discard_output_and_register_recompute(y)
    fewer.append(1)
    with pytest.raises(RuntimeError, match=r"output 1 of .* is no tensor when it is"):
        y.sum().backward()


def test_an_error_while_freeing_restores_the_other_outputs(path):
    """Outputs that were freed before the error are recomputed immediately."""
    x = torch.randn(4, 4, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint()
    first, second = ckpt.checkpoint(lambda x: (x.sin(), x.cos()), x)
    y = (first * first + second * second * second).sum()
    seen = torch._lazy_clone(second.detach())
    with pytest.raises(RuntimeError, match=r"is a lazy copy \(copy-on-write\)"):
        ckpt.discard_output_and_register_recompute(y)
    assert torch.equal(first, x.sin()) and torch.equal(second, x.cos())
    y.backward()
    right = 2 * x.sin() * x.cos() - 3 * x.cos() ** 2 * x.sin()
    assert torch.allclose(x.grad, right, rtol=1e-4, atol=1e-5) and seen.shape == (4, 4)


def test_checksums_find_a_consumer_that_writes_through_data(path):
    """Such a write does not change the version of the output."""

    def consumer(h):
        h.data.clamp_(-0.1, 0.1)
        return h.square()

    x = torch.randn(4, 4, requires_grad=True)
    for _ in range(4):  # the first two regions run in Python
        with pytest.raises(RuntimeError, match="output 0 of region was modified in place"):
            so.output_discard(region, consumer, determinism_check="checksum")(x)
        ckpt = so.OutputDiscardCheckpoint(determinism_check="checksum")
        h = ckpt.checkpoint(region, x)
        y = consumer(h)
        with pytest.raises(RuntimeError, match="output 0 of region was modified in place"):
            ckpt.discard_output_and_register_recompute(y)
        assert torch.equal(h, x.sin().clamp(-0.1, 0.1))


def test_an_output_with_another_storage_offset_in_the_recompute(path):
    """At the offset of the forward, the recomputed storage has other values."""
    calls = []

    def either(x):
        calls.append(x)
        both = torch.cat([x.sin(), x.cos()])
        return both[:4] if len(calls) == 1 else both[4:]

    x = torch.randn(4, 4, requires_grad=True)
    ckpt = so.OutputDiscardCheckpoint()
    h = ckpt.checkpoint(either, x)
    y = h * h
    ckpt.discard_output_and_register_recompute(y)
    with pytest.raises(RuntimeError, match=r"`src` has strides .* and storage offset 16. Expected"):
        y.sum().backward()


def test_a_parameter_that_deepspeed_has_partitioned():
    """ZeRO-3 gathers the weight of a norm during its call, but its output is needed earlier."""
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).double()
    so.apply_activation_checkpoint(net, {"layer_names": ["0"], "mode": "output_discard"})
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    y, whole = net(x), net[0].weight.data
    net[0].weight.ds_status, net[0].weight.data = "NOT_AVAILABLE", torch.empty(0).double()
    with pytest.raises(
        RuntimeError, match=r"LayerNorm is recomputed after DeepSpeed \(ZeRO stage 3"
    ):
        y.sum().backward()
    net[0].weight.data = whole
    net(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(net(x).sum(), x)[0])
