"""Memory is freed, nothing leaks, and a call takes little time."""

import gc
import os
import timeit
import weakref
from pathlib import Path

import pytest
import torch

import storage_ops as so

from ..conftest import NATIVE_PATH

NBYTES = 4 << 20


def block():
    return torch.empty(NBYTES // 4)


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_discard_frees_the_bytes(path):
    with so.memory.measure() as m:
        t = block()
        so.discard_storage(t)
    assert m.peak_bytes == NBYTES and m.kept_bytes == 0


def test_shared_bytes_are_freed_with_their_last_user(path, zero_copy):
    with so.memory.measure() as m:
        dst, src = block(), block()
        so.discard_storage(dst)
        so.share_storage(dst, src)
        del src
    assert m.kept_bytes == NBYTES
    # Binding needs no extra memory. The copy path briefly has both.
    assert m.peak_bytes == 2 * NBYTES
    with so.memory.measure() as m:
        so.discard_storage(dst)
    assert m.kept_bytes == -NBYTES


def test_peak_of_a_share(path, zero_copy):
    dst, src = block(), block()
    so.discard_storage(dst)
    with so.memory.measure() as m:
        so.share_storage(dst, src)
    assert m.peak_bytes == (0 if zero_copy else NBYTES)


@pytest.mark.in_turn
def test_memory_does_not_grow_in_ten_thousand_calls(path):
    dst, src = torch.empty(1 << 16), torch.empty(1 << 16)

    def loop(calls):
        nonlocal src
        for _ in range(calls):
            so.discard_storage(dst)
            other = torch.empty(1 << 16)
            so.share_storage(dst, other)
            so.share_storage(dst, src)
            so.share_storage(src, other)

    loop(500)
    before = resident_bytes()
    loop(10_000)
    gc.collect()
    assert resident_bytes() - before < 2 << 20


def test_repeated_shares_of_one_source_build_no_chain(path):
    src = torch.ones(16)
    for _ in range(20_000):
        dst = torch.empty(16)
        so.share_storage(dst, src)
    del src, dst  # a chain of owners would overflow the stack here


def test_storages_are_freed_without_the_garbage_collector(path):
    gc.disable()
    try:
        dst, src = torch.ones(4), torch.ones(4)
        so.share_storage(dst, src)
        storages = [weakref.ref(t.untyped_storage()) for t in (dst, src)]
        del dst, src
        assert [ref() for ref in storages] == [None, None]
    finally:
        gc.enable()


@pytest.mark.skipif(NATIVE_PATH != "binding", reason="the bound is that of the native binding")
def test_share_storage_costs_microseconds():
    dst, src = torch.empty(8), torch.empty(8)
    so.share_storage(dst, src)
    calls = 1000  # so few that a busy machine does not interrupt every repeat
    best = min(timeit.repeat(lambda: so.share_storage(dst, src), number=calls, repeat=100)) / calls
    assert best < 5e-6


@pytest.mark.parametrize("shared", [False, True])
def test_a_stream_is_recorded_on_the_owner_of_the_bytes(path, zero_copy, shared):
    """The test stores the records, because an allocator of a CPU does not use them."""
    records, (cpu, cuda) = [], (0, 1)  # numbers of these kinds of device
    with torch.library._scoped_library("aten", "IMPL") as aten:
        aten.impl("record_stream", lambda t, stream: records.append((t, stream)), "CPU")
        t, src = torch.zeros(64), torch.ones(64)
        if shared:
            so.share_storage(t, src)
        torch.ops.storage_ops._record_stream(t[3:], 5, 0, cuda)
        assert not records
        torch.ops.storage_ops._record_stream(t[3:], 5, 0, cpu)
        ((recorded, stream),) = records
        storage = recorded.untyped_storage()
        assert (stream.stream_id, stream.device) == (5, torch.device("cpu", 0))
        assert (storage.data_ptr(), storage.nbytes()) == (t.data_ptr(), t.nbytes)
        hidden = storage._cdata not in (t.untyped_storage()._cdata, src.untyped_storage()._cdata)
        assert hidden == (shared and zero_copy)
        del storage, recorded
        so.discard_storage(t)
        torch.ops.storage_ops._record_stream(t, 5, 0, cpu)
        assert len(records) == 1
