"""LightMode, the base class of the package's dispatch modes, also under Dynamo."""

import pytest
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.testing import CompileCounter

from storage_ops.checkpoint.saved.light_mode import LightMode


class Doubles(LightMode):
    """Doubles the result of a sine."""

    def __init__(self):
        super().__init__()
        self.frames = []

    def dispatch(self, op, args, kwargs):
        self.frames.append(get_eval_frame_callback())
        out = op(*args, **kwargs)
        return self.twice(out) if op is torch.ops.aten.sin.default else out

    def twice(self, out):
        return out * 2


def test_a_mode_sees_ops_and_replaces_their_results():
    x = torch.randn(3, dtype=torch.float64)
    with Doubles() as mode:
        got = x.sin() + x.cos()
    torch.testing.assert_close(got, 2 * x.sin() + x.cos())
    assert mode.frames and not any(mode.frames)


def test_ops_outside_of_a_mode_do_not_change():
    x = torch.randn(3)
    before = x.sin()
    with Doubles(), pytest.raises(ZeroDivisionError):
        x.sin()
        raise ZeroDivisionError
    torch.testing.assert_close(x.sin(), before, rtol=0, atol=0)


@pytest.mark.parametrize("is_reset", [False, True])
def test_dynamo_does_not_trace_a_mode_after_a_graph_break(is_reset):
    counter, mode = CompileCounter(), Doubles()

    def inner(x):
        return x.cos() + 1

    def outer(x):
        with mode:
            torch._dynamo.graph_break()
            return inner(x.sin())

    x = torch.randn(3)
    if is_reset:
        torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        got = torch.compile(outer, backend=counter)(x)
    torch.testing.assert_close(got, (2 * x.sin()).cos() + 1)
    assert mode.frames and not any(mode.frames)
    assert counter.frame_count == 1, "the user's inner function is compiled, and nothing else"
    assert not torch._dynamo.utils.counters["graph_break"], "a frame of the mode was looked at"
