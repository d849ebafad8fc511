"""Emulated barriers, votes, shuffles and shared memory behave as CUDA documents."""

import ctypes

import numpy as np
import pytest
import torch

from . import build
from .ops import SANITIZER

KERNELS = [
    "exchange", "rotate", "unwritten", "two_barriers", "two_masks", "beyond", "unaligned",
]  # fmt: skip
pytestmark = pytest.mark.skipif(SANITIZER != "", reason="some of the kernels are wrong on purpose")


@pytest.fixture(scope="module")
def library(compiled):
    return ctypes.CDLL(str(build.built(kernels=[build.HERE / "primitives.cu"])))


@pytest.fixture
def run(library):
    """Return a function that runs a kernel and returns the threads' output and error message."""
    library.emulation_seed(ctypes.c_uint64(torch.initial_seed() % 2**32))

    def run(kernel, blocks, threads):
        out = np.zeros(blocks * threads + 64, dtype=np.uint32)
        message = ctypes.create_string_buffer(500)
        library.run_primitive(
            KERNELS.index(kernel), blocks, threads, out.ctypes.data_as(ctypes.c_void_p), message,
            ctypes.c_size_t(500),
        )  # fmt: skip
        return out[: blocks * threads].reshape(blocks, threads), message.value.decode()

    return run


def test_lanes_vote_and_exchange_numbers_in_halves_of_a_warp(run):
    out, error = run("exchange", 3, 96)
    threads = np.arange(3 * 96, dtype=np.uint32)
    sums = np.repeat(threads.reshape(-1, 16).sum(1, dtype=np.uint32), 16)
    votes = sum(1 << lane for lane in range(0, 32, 3))
    assert error == "" and np.array_equal(out.ravel(), sums ^ np.uint32(votes))


@pytest.mark.parametrize("threads", [32, 1024])
def test_barriers_order_the_memory_of_a_warp_and_of_a_block(run, threads):
    out, error = run("rotate", 5, threads)
    own = np.arange(threads).reshape(-1, 32)
    for block in range(5):
        lanes = 100 * block + np.roll(own, -1, axis=1).ravel()
        right = 1000 * lanes + 100 * block + np.roll(own.ravel(), -1)
        assert error == "" and np.array_equal(out[block], right)


def test_shared_memory_is_not_zero_before_it_is_written(run):
    assert (run("unwritten", 4, 32)[0] == 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    "kernel, expected",
    [
        ("two_barriers", "__syncthreads at primitives.cu"),
        ("two_masks", "another mask|does not end"),
        ("beyond", "outside of its tensors"),
        ("unaligned", "not aligned"),
    ],
)
def test_undefined_behaviour_that_a_gpu_may_ignore_is_an_error(run, kernel, expected):
    for _ in range(5):
        error = run(kernel, 2, 64)[1]
        assert any(words in error for words in expected.split("|")), error
    assert run("rotate", 2, 64)[1] == ""  # the error does not affect later kernels


@pytest.mark.parametrize("blocks, threads", [(1, 0), (0, 32), (1, 1025)])
def test_launches_that_a_gpu_refuses(run, blocks, threads):
    assert run("rotate", blocks, threads)[1] == "launch error 9"
