"""The same test on the CPU, where its body is tried, and on a GPU, where it matters."""

import contextlib

import pytest
import torch

from storage_ops.memory import Measurement, measure

each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def raises(device):
    """Whether values that break a promise raise; a GPU would have to be waited for to know them."""
    return device == "cpu"


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def side_stream(device):
    """Run a block on a stream of its own, after and before all else; on the CPU just run it."""
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
    """What replays a step as a CUDA graph, after warm-up; on the CPU the step itself.

    The step must leave its results in tensors that exist before, or return them: they are then the
    same tensors at every replay.
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
    """Peak and kept bytes as they were asked for.

    What the caching allocator of a GPU counts as allocated may be up to a MiB more for each block.
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
    """The arguments of a call with every tensor on a device, as leaves where they were leaves."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to(device).requires_grad_(tree.requires_grad)
    if isinstance(tree, (tuple, list)):
        return type(tree)(moved(item, device) for item in tree)
    if isinstance(tree, dict):
        return {key: moved(value, device) for key, value in tree.items()}
    return tree
