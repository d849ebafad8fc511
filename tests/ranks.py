"""Run a test's function on several gloo ranks."""

import datetime
import gc
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60  # seconds, after which a hang is an error
# Ranks are forked from a process that has imported these once. An import per rank takes seconds.
PRELOADED = [
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "storage_ops",
]  # fmt: skip


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _rank(rank, work, world, port, seed):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    torch.manual_seed(seed)
    work(rank)
    gc.collect()  # models must be freed before their group, or the exit may hang
    dist.barrier()
    dist.destroy_process_group()


def forked():
    """Return a context whose processes are forked from one that has imported PRELOADED."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _process(rank, work, arguments):
    gc.freeze()  # `measure` collects garbage, but not among imported objects
    work(rank, *arguments)


def run_in_processes(work, arguments, count):
    """Call `work(rank, *arguments)`, a module-level function, in `count` processes."""
    start = forked().get_start_method()
    mp.start_processes(_process, (work, arguments), count, start_method=start)


def run_on_ranks(work, world):
    """Call `work(rank)`, a module-level function, in `world` processes with one random seed."""
    arguments = (work, world, free_port(), int(torch.randint(1 << 30, ())))
    run_in_processes(_rank, arguments, world)


BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def assert_same(ours, right, dtype=None):
    """Check that two tensors agree up to rounding: 1e-12 in fp64, 2e-6 in fp32.

    The error is relative to the largest number, or to 1 if that is larger.

    `dtype`: the dtype of the inputs, if the results have another.
    """
    largest = max(1.0, float(right.detach().abs().max())) if right.numel() else 1.0
    bound = largest * BOUNDS.get(dtype or ours.dtype, 0)
    torch.testing.assert_close(ours.to(right.dtype), right, rtol=0, atol=bound)
