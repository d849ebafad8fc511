"""Helpers to run a test on a GPU, and on a CPU to check the test itself."""

import contextlib

import pytest
import torch

from storage_ops.memory import Measurement, measure

each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def raises(device):
    """Return True if wrong values raise an error. On a GPU, the host does not wait to read them."""
    return device == "cpu"


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def side_stream(device):
    """Run a block on its own stream, synchronised before and after. On a CPU, only run it."""
    if device == "cpu":
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def busy(device):
    """Keep the current stream busy for about a millisecond, so that a missing wait shows."""
    if device == "cuda":
        torch.cuda._sleep(2_000_000)


def captured(device, step, warm_up=3):
    """Return a function that replays a step as a CUDA graph, or on a CPU the step itself.

    The step must write its results to existing tensors, or return them. Every replay then returns
    the same tensors.
    """
    with side_stream(device):
        for _ in range(warm_up):
            step()
    if device == "cpu":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay():
        graph.replay()
        return results

    return replay


@contextlib.contextmanager
def requested(device):
    """Measure peak and kept bytes as requested from the allocator.

    The allocated bytes of a GPU's caching allocator may be up to a MiB more for each block.
    """
    if device == "cpu":
        with measure() as result:
            yield result
        return
    result = Measurement(0, 0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    yield result
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    result.peak_bytes = after["requested_bytes.all.peak"] - before
    result.kept_bytes = after["requested_bytes.all.current"] - before


def moved(tree, device):
    """Return arguments with every tensor on a device. Leaves stay leaves."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to(device).requires_grad_(tree.requires_grad)
    if isinstance(tree, (tuple, list)):
        return type(tree)(moved(item, device) for item in tree)
    if isinstance(tree, dict):
        return {key: moved(value, device) for key, value in tree.items()}
    return tree
