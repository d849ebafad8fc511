"""Run a test's function on several gloo ranks."""

import datetime
import gc
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60  # seconds; what hangs is an error


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
    gc.collect()  # models go before the group that they communicate in, or the exit may hang
    dist.barrier()
    dist.destroy_process_group()


def run_on_ranks(work, world):
    """Call `work(rank)`, a function of a module, in `world` processes with one random seed."""
    mp.spawn(_rank, (work, world, free_port(), int(torch.randint(1 << 30, ()))), nprocs=world)
