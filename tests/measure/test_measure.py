import copy
import re
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity

import storage_ops as so
from storage_ops.measure.owners import Marks, history

MIB = 1 << 20


def test_peak_kept_and_timeline():
    before = torch.empty(MIB)
    with so.memory.measure() as m:
        kept = torch.empty(MIB)  # float32: 4 MiB
        temporary = torch.empty(2 * MIB)
        del temporary
        late = torch.empty(MIB // 2)
    assert m.peak_bytes == 12 * MIB and m.kept_bytes == 6 * MIB
    assert [s.nbytes // MIB for s in m.timeline] == [4, 12, 4, 6]
    assert [s.seconds for s in m.timeline] == sorted(s.seconds for s in m.timeline)
    assert m.timeline[0].seconds == 0 and before.numel() == kept.numel() > late.numel()


def test_freeing_an_earlier_tensor_gives_negative_kept_bytes():
    with so.memory.measure():  # torch knows the sizes of tensors that were allocated under it
        t = torch.empty(MIB)
    with so.memory.measure() as m:
        del t
    assert m.kept_bytes == -4 * MIB and m.peak_bytes == 0


def test_results_are_not_available_before_the_block_ends():
    with so.memory.measure() as m:
        torch.empty(MIB)
        with pytest.raises(
            AttributeError, match="`peak_bytes` is known only after the block of mea"
        ):
            print(m.peak_bytes)
        with pytest.raises(AttributeError, match="'Measurement' object has no attribute 'peak'"):
            print(m.peak)
        assert str(copy.deepcopy(m)) == "Measurement(of a block that has not ended)"
    assert m.peak_bytes == 4 * MIB and copy.deepcopy(m) == m


def test_an_error_in_the_block_ends_the_measurement():
    with pytest.raises(ZeroDivisionError), so.memory.measure() as m:
        kept = torch.empty(MIB)
        1 / 0  # noqa: B018
    assert m.kept_bytes == kept.nbytes


def test_a_block_without_allocations():
    with so.memory.measure() as m:
        pass
    assert (m.peak_bytes, m.kept_bytes, m.timeline) == (0, 0, [])


def test_forward_and_backward_agree_with_arithmetic():
    x = torch.randn(512, 512, requires_grad=True)
    size = x.nbytes
    with so.memory.measure() as m:
        y = x.sin().exp()
        y.sum().backward()
        del y
    assert m.kept_bytes == size  # x.grad
    assert 3 * size <= m.peak_bytes <= 5 * size


def test_an_exception_is_raised_and_the_block_is_measured():
    with pytest.raises(KeyError), so.memory.measure() as m:
        t = torch.empty(MIB)
        raise KeyError
    assert m.peak_bytes == t.nbytes


def test_one_profiler_at_a_time():
    with so.memory.measure() as outer:
        with pytest.raises(RuntimeError, match="a torch profiler or another measure is running"):
            so.memory.measure().__enter__()
        t = torch.empty(MIB)
    assert outer.peak_bytes == t.nbytes
    for profile in (torch.profiler.profile, torch.autograd.profiler.profile):
        with (
            pytest.raises(RuntimeError, match="a torch profiler began inside the block"),
            so.memory.measure(),
        ):
            with profile():
                pass
            torch.empty(MIB)
        with pytest.raises(ZeroDivisionError), so.memory.measure(), profile():
            1 / 0  # noqa: B018


def test_profilers_of_other_threads():
    """Two profilers in two threads would end the process."""

    def other():
        with pytest.raises(RuntimeError, match="is running, perhaps in another thread"):
            so.memory.measure().__enter__()
        refused.append(True)

    refused = []
    for profile in (so.memory.measure, torch.profiler.profile):
        with profile():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
    assert len(refused) == 2
    with so.memory.measure("cpu:0") as m:
        torch.empty(MIB)
    assert m.peak_bytes == 4 * MIB


def test_after_a_block_that_has_ended_the_profiler():
    with pytest.raises(RuntimeError, match="a torch profiler began inside"), so.memory.measure():
        torch.autograd._disable_profiler()
    with so.memory.measure() as m:
        torch.empty(MIB)
    assert m.peak_bytes == 4 * MIB


def test_an_interrupt_at_the_end_of_the_block(monkeypatch):
    def interrupt(marks):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Marks, "close", interrupt)
        with pytest.raises(KeyboardInterrupt), so.memory.measure():
            pass
    with so.memory.measure() as m:
        torch.empty(MIB)
    assert m.peak_bytes == 4 * MIB


def test_a_measure_that_is_used_twice_has_two_results():
    measure = so.memory.measure()
    with measure as first:
        torch.empty(MIB)
    with measure as second:
        torch.empty(2 * MIB)
    assert (first.peak_bytes, second.peak_bytes) == (4 * MIB, 8 * MIB)


@pytest.mark.parametrize("device", ["meta", "gpu", "h100", 3.5, print])
def test_unknown_device(device):
    message = re.escape(f"`device` is {device!r}. Expected 'cpu' or a CUDA device")
    with pytest.raises(ValueError, match=message):
        so.memory.measure(device)
    with pytest.raises(ValueError, match=message), so.memory.limit("1 GiB", device):
        pass
    if device != "meta":  # explain_oom can follow storages on the meta device
        with pytest.raises(ValueError, match=message), so.memory.explain_oom(device):
            pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu():
    with pytest.raises(
        ValueError, match=r"`device` is 'cuda', but torch finds no GPU\. Expected 'cpu'"
    ):
        so.memory.measure(device="cuda")
    with pytest.raises(ValueError, match="`device` is 'cuda:1', but torch finds no GPU"):
        so.memory.explain_oom("cuda:1").__enter__()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_profiler_does_not_record_cuda_events(device, monkeypatch, capfd):
    for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated", "current_device"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock(return_value=0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    start = mock.Mock(wraps=torch.autograd.profiler._prepare_profiler)
    monkeypatch.setattr(torch.autograd.profiler, "_prepare_profiler", start)
    with so.memory.measure(device) as m, torch.profiler.record_function("mine"):
        t = torch.empty(MIB)
    assert "Warning" not in capfd.readouterr().err  # about kinds of events that were left out
    (_, activities), options = start.call_args
    assert activities == {ProfilerActivity.CPU}
    filters = options.get("activity_filter", {ProfilerActivity.CPU: set()})
    assert not any("CUDA" in name for name in filters[ProfilerActivity.CPU])
    assert m.peak_bytes == (7 if device == "cuda" else t.nbytes)


def test_timelines_are_drawn():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with so.memory.measure() as m:
        t = torch.empty(MIB)
    figure, axes = pyplot.subplots()
    so.memory.plot_timelines(axes, {"one": m, "none": so.memory.Measurement(0, 0)})
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["one (peak 4 MiB)", "none (peak 0 MiB)"] and t.nbytes == 4 * MIB
    assert max(axes.lines[0].get_ydata()) == 4 and axes.get_ylabel().startswith("MiB ")
    axes.clear()
    large = so.memory.Measurement(24 << 30, 0, [so.memory.Sample(0.0, 24 << 30)])
    so.memory.plot_timelines(axes, {"large": large})
    assert axes.get_legend().get_texts()[0].get_text() == "large (peak 24.0 GiB)"
    assert list(axes.lines[0].get_ydata()) == [24] and axes.get_ylabel().startswith("GiB ")
    pyplot.close(figure)


@pytest.mark.parametrize("ending, package", [(".png", "matplotlib"), (".html", "plotly")])
def test_a_missing_plotting_package_is_named(monkeypatch, ending, package):
    with so.memory.measure() as m:
        torch.empty(64)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {package}, .* pip install {package}$"):
        m.plot(f"memory{ending}")


def allocator_event(at, ptr, nbytes, total):
    device = torch.device("cuda", 0)
    fields = SimpleNamespace(device=device, ptr=ptr, alloc_size=nbytes, total_allocated=total)
    return SimpleNamespace(name="[memory]", start_time_ns=at, extra_fields=fields, children=[])


def test_releases_without_an_event_are_inferred_from_the_total():
    events = [
        allocator_event(1, 16, 4, 14),
        allocator_event(2, 32, 8, 22),
        allocator_event(3, 16, 2, 20),  # the first block was released in between
        allocator_event(4, 16, -2, 10),  # and now the second
    ]
    changes, taken = history(events, "cuda", 0, entry_bytes=10)
    assert changes == [(1, 4), (2, 8), (3, -2), (4, -10)]
    assert [(t.nbytes, t.start, t.end) for t in taken] == [(4, 0, 2), (8, 1, None), (2, 2, 3)]
