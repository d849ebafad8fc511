"""Side effects that cannot be undone before a recompute raise a clear error."""

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import storage_ops as so
from storage_ops import policies
from storage_ops.checkpoint.state import contents, effects, execution

from .test_effects import KINDS, pair, steps


@pytest.fixture
def no_copies(monkeypatch):
    """Let regions copy no tensor that they may write."""
    monkeypatch.setattr(effects, "SMALL", 0)
    monkeypatch.setattr(effects, "BUDGET", 0)
    monkeypatch.setattr(effects, "LARGE_BUDGET", 0)


class Late(nn.Linear):
    """Writes a large buffer from a later step on."""

    writes = False

    def __init__(self, inputs, outputs, how="add_"):
        super().__init__(inputs, outputs)
        self.register_buffer("table", torch.randn(300, 300))
        self.how = how

    def forward(self, x):
        factor = self.table[0, 0].item()
        if self.writes and self.how == "add_":
            self.table.add_(1)
        elif self.writes:
            self.table.data.mul_(0.5)
        return super().forward(x * factor).sin()


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_copy_a_late_write_is_an_error_once(no_copies, kind):
    plain, plain_model, fn, model = pair(kind, lambda: Late(4, 6))
    inputs = [torch.randn(2, 4)]
    assert all(map(torch.equal, steps(fn, model, inputs)[0], steps(plain, plain_model, inputs)[0]))
    plain_model.layer.writes = model.layer.writes = True
    plain(inputs[0])
    y = fn(inputs[0].clone().requires_grad_())
    with pytest.raises(
        RuntimeError,
        match=r"itself modifies a tensor .* From the next forward on the tensor is copied",
    ):
        y.sum().backward()
    got, right = steps(fn, model, inputs), steps(plain, plain_model, inputs)
    equal = partial(torch.allclose, atol=1e-6) if kind == "reentrant" else torch.equal
    assert all(map(equal, got[0], right[0])) and torch.equal(
        model.layer.table, plain_model.layer.table
    )


@pytest.mark.parametrize("kind", ["full", "selective", "output_discard"])
@pytest.mark.parametrize("change", [lambda t: t.mul_(2), lambda t: t.copy_(t.roll(1, 0))])
def test_without_a_copy_a_write_that_keeps_the_version_is_an_error(no_copies, change, kind):
    class Unseen(nn.Linear):
        def forward(self, x):
            change(self.table.data)
            return super().forward(x * self.table[0, 0]).sin()

    _, _, fn, model = pair(kind, lambda: Unseen(4, 6))
    model.layer.register_buffer("table", torch.randn(300, 301))
    y = fn(torch.randn(3, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"itself modifies a tensor of shape \(300, 301\)"):
        y.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_to_a_tensor_that_cannot_be_copied_is_named(no_copies, kind):
    class Clipped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x).sin()

    _, _, fn, _ = pair(kind, lambda: Clipped(4, 6))
    y = fn(torch.randn(3, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="itself modifies a parameter of shape"):
        y.sum().backward()


@pytest.mark.parametrize("way", ["region", "composed", "layer"])
def test_a_parameter_replaced_behind_a_loop_index_is_an_error(way):
    """The region closes over the index only, so its layer is unknown until it runs."""
    layers = [nn.Linear(4, 4) for _ in range(3)]
    x = h = torch.randn(2, 4, requires_grad=True)

    class Calls(nn.Module):
        def forward(self, x):
            return layers[i](x).tanh()

    for i in range(3):
        if way == "region":
            ckpt = so.OutputDiscardCheckpoint()
            t = ckpt.checkpoint(lambda x: layers[i](x).tanh(), h)  # noqa: B023
            h = t.sin()
            ckpt.discard_output_and_register_recompute(h)
        elif way == "composed":
            h = so.output_discard(lambda x: layers[i](x).tanh(), torch.sin)(h)  # noqa: B023
        else:
            h = so.CheckpointWrapper(Calls())(h)
    with pytest.raises(
        RuntimeError, match=r"another parameter of shape .* was replaced after the forward"
    ):
        h.sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["add_", "data"])
@pytest.mark.parametrize("place", ["buffer", "attribute"])
def test_a_large_tensor_that_a_later_step_writes_is_written_once(place, how, kind):
    plain, plain_model, fn, model = pair(kind, lambda: Late(4, 6, how))
    if place == "attribute":
        for module in (plain_model.layer, model.layer):
            table = module._buffers.pop("table")
            module.table = table
    inputs = [torch.randn(2, 4)]
    equal = partial(torch.allclose, atol=1e-6) if kind == "reentrant" else torch.equal
    for writes in (False, True, True, False):
        plain_model.layer.writes = model.layer.writes = writes
        got, right = steps(fn, model, inputs), steps(plain, plain_model, inputs)
        assert all(map(equal, got[0], right[0]))
        assert torch.equal(model.layer.table, plain_model.layer.table)


@pytest.mark.parametrize("kind", ["full", "output_discard"])
def test_checksums_detect_data_that_the_caller_replaced(kind):
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 3)
    )
    options = {"mode": kind, "determinism_check": "checksum"}
    so.apply_activation_checkpoint(model, {"layer_names": ["0"], **options})
    y, weight = model(torch.randn(2, 4)), model[0][0].weight
    weight.data = weight.data + 1
    with pytest.raises(RuntimeError, match=r"checksum .* in forward and is .* checksum"):
        y.sum().backward()


class Interrupt(TorchDispatchMode):
    """Raises an error at one op."""

    def __init__(self, at):
        super().__init__()
        self.at, self.ops = at, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops += 1
        if self.ops == self.at + 1:
            raise KeyboardInterrupt
        return op(*args, **(kwargs or {}))


def test_an_interrupt_at_any_op_of_the_backward_leaves_the_buffers():
    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(4, 6)
            self.register_buffer("state", torch.rand(6))

        def forward(self, x):
            y = super().forward(x) * self.state.clone()
            self.state.mul_(0.5).add_(y.detach().mean(0))
            return y.sin()

    raised = 0
    for at in range(200):
        layer = so.CheckpointWrapper(Counts())
        y = layer(torch.randn(3, 4))
        state = layer.state.clone()
        try:
            with Interrupt(at) as mode:
                y.sum().backward()
        except KeyboardInterrupt:
            raised += 1
        assert torch.equal(layer.state, state), at
        if mode.ops <= at:
            break
    assert raised > 20


@pytest.mark.walks_twice  # in C++ there are no lines
def test_an_interrupt_at_any_line_that_restores_state_leaves_the_buffers():
    """A signal can arrive between two lines of Python, where no op runs."""
    x, files = torch.randn(5, 4, requires_grad=True), (execution.__file__, contents.__file__)
    before, raised = sys.gettrace(), 0
    for at in range(2000):
        layer = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        y, lines = so.CheckpointWrapper(layer, policy=policies.everything)(x), 0
        state = [*map(torch.clone, layer.buffers()), torch.get_rng_state()]

        def trace(frame, event, argument, at=at):
            nonlocal lines
            lines += event == "line"
            if event == "line" and lines == at + 1:
                raise KeyboardInterrupt
            return trace

        sys.settrace(lambda frame, *_: trace if frame.f_code.co_filename in files else None)
        try:
            y.sum().backward()
        except KeyboardInterrupt:
            raised += 1
        finally:
            sys.settrace(before)
        assert all(map(torch.equal, [*layer.buffers(), torch.get_rng_state()], state)), at
        if lines <= at:
            break
    assert raised > 100
