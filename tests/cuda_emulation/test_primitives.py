"""Emulated barriers, votes, shuffles and shared memory behave as CUDA documents."""

import ctypes
import re

import numpy as np
import pytest
import torch

from . import build
from .ops import SANITIZER

KERNELS = [
    "exchange", "rotate", "unwritten", "two_barriers", "two_masks", "beyond", "unaligned",
    "copies", "early_reads", "copies_without_waiting", "unaligned_copies", "letters",
    "letters_before_all_blocks_begin", "letters_to_another_cluster", "letters_that_do_not_come",
    "letters_in_a_closed_mailbox", "a_block_that_leaves",
]  # fmt: skip
pytestmark = pytest.mark.skipif(SANITIZER != "", reason="some of the kernels are wrong on purpose")


@pytest.fixture(scope="module")
def library(compiled):
    return ctypes.CDLL(str(build.built(kernels=[build.HERE / "primitives.cu"])))


@pytest.fixture
def run(library):
    """Return a function that runs a kernel and returns the threads' output and error message."""
    library.emulation_seed(ctypes.c_uint64(torch.initial_seed() % 2**32))

    def run(kernel, blocks, threads, cluster=1, dynamic_bytes=0):
        out = np.zeros(blocks * threads + 64, dtype=np.uint32)
        message = ctypes.create_string_buffer(500)
        library.run_primitive(
            KERNELS.index(kernel), blocks, threads, cluster, ctypes.c_size_t(dynamic_bytes),
            out.ctypes.data_as(ctypes.c_void_p), message, ctypes.c_size_t(500),
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


def test_a_copy_lands_when_its_thread_has_waited(run):
    numbers = 100 + np.arange(64)
    numbers[3::4] = 0  # the copies are of three numbers each
    out, error = run("copies", 1, 64, dynamic_bytes=256)
    assert error == "" and np.array_equal(out[0], numbers[::-1])


def test_copies_of_a_later_group_have_not_landed(run):
    out, error = run("early_reads", 1, 64, dynamic_bytes=512)
    assert error == "" and np.array_equal(out[0, ::4], 100 + np.arange(0, 64, 4))
    assert (out[0, 1::4] == 0xFFFFFFFF).all()


@pytest.mark.parametrize("cluster", [1, 2, 8])
def test_blocks_of_a_cluster_send_letters_to_each_other(run, cluster):
    out, error = run("letters", 16, 32, cluster)
    sums = (1 + np.arange(16)).reshape(-1, cluster).sum(1) * (1 + 2 + 3 + 4)
    assert error == "" and (out.reshape(16 // cluster, -1) == sums[:, None]).all()


@pytest.mark.parametrize(
    "kernel, expected",
    [
        ("two_barriers", "__syncthreads at primitives.cu"),
        ("two_masks", "another mask|does not end"),
        ("beyond", "outside of its tensors"),
        ("unaligned", "not aligned"),
        ("unaligned_copies", "not aligned"),
        ("copies_without_waiting", "without waiting for its copies"),
        ("letters_before_all_blocks_begin", "may not have begun"),
        ("letters_to_another_cluster", "outside of its cluster"),
        ("letters_that_do_not_come", "does not end: .*Mailbox::wait at primitives.cu"),
        ("letters_in_a_closed_mailbox", "not open"),
        ("a_block_that_leaves", "cluster_barrier at primitives.cu.* has returned"),
    ],
)
def test_undefined_behaviour_that_a_gpu_may_ignore_is_an_error(run, kernel, expected):
    for _ in range(5):
        error = run(kernel, 2, 64, 2, 256)[1]
        assert re.search(expected, error), error
    assert run("rotate", 2, 64)[1] == ""  # the error does not affect later kernels


@pytest.mark.parametrize(
    "launch, error",
    [((1, 0), 9), ((0, 32), 9), ((1, 1025), 9), ((3, 32, 2), 9), ((16, 32, 16), 912),
     ((1, 32, 1, 1 << 16), 1)],
)  # fmt: skip
def test_launches_that_a_gpu_refuses(run, launch, error):
    assert run("rotate", *launch)[1] == f"launch error {error}"
