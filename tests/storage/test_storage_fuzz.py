"""Random programs of view, slice, discard, share and read, against a model of tensors' values."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

import storage_ops as so
from storage_ops.storage.kernels import storage_path

from ..conftest import PATHS

next_id = itertools.count().__next__


class Memory:
    """A block of values that several storages may share."""

    def __init__(self, values):
        self.values = values


class Slot:
    """The model of a storage.

    Attributes:
        memory: the expected values, or None if the storage is discarded.
        needed: the number of elements that a source must have.
        since: orders the storages that received the same bytes, by the time of sharing.
        origin: `since` of the first of these storages.
    """

    def __init__(self, memory, needed):
        self.memory, self.needed = memory, needed
        self.since = self.origin = next_id()


def has_elements(owned, read):
    """Return whether a source with elements `owned` of its storage has the elements `read`."""
    if not read or len(owned) == len(read):
        return not read or owned == read
    return set(read) <= set(owned) and owned == list(range(owned[0], owned[-1] + 1))


class Programs(RuleBasedStateMachine):
    """Each entry is (tensor, slot, offsets of its elements)."""

    path = "copy"
    tensors = Bundle("tensors")

    def __init__(self):
        super().__init__()
        native = so.info()["storage_path"] == self.path == "binding"
        self.stack = contextlib.ExitStack()
        if not native:
            self.stack.enter_context(storage_path(self.path))
        self.guarded = native and so.info()["guard"]
        self.entries = []
        self.next_value = 0.0

    def teardown(self):
        self.stack.close()

    def keep(self, entry):
        self.entries.append(entry)
        return entry

    @rule(target=tensors, size=st.integers(1, 12))
    def create(self, size):
        t = torch.arange(self.next_value, self.next_value + size)
        self.next_value += size
        return self.keep((t, Slot(Memory(t.tolist()), size), list(range(size))))

    @rule(target=tensors, entry=tensors, data=st.data())
    def slice(self, entry, data):
        t, slot, offsets = entry
        if slot.memory is None or t.numel() == 0:
            return entry
        begin = data.draw(st.integers(0, t.numel()))
        end = data.draw(st.integers(begin, t.numel()))
        step = data.draw(st.integers(1, 3))
        return self.keep((t[begin:end:step], slot, offsets[begin:end:step]))

    @rule(target=tensors, entry=tensors)
    def view(self, entry):
        t, slot, offsets = entry
        return self.keep((t.detach(), slot, offsets))

    @rule(entry=tensors)
    def discard(self, entry):
        so.discard_storage(entry[0])
        slot = entry[1]
        slot.memory = None
        slot.since = slot.origin = next_id()

    @rule(dst=tensors, src=tensors)
    def share(self, dst, src):
        (to, to_slot, read), (source, source_slot, owned) = dst, src
        if to_slot is source_slot:
            so.share_storage(to, source)
            return
        if source_slot.memory is None:
            error = "is discarded"
        elif len(source_slot.memory.values) < to_slot.needed:
            error = "Expected at least"
        elif not has_elements(owned, read):
            error = "`src` has (strides|elements|no elements)"
        elif source_slot.origin == to_slot.origin and source_slot.since > to_slot.since:
            error = "reference cycle"
        else:
            so.share_storage(to, source)
            copied = Memory(list(source_slot.memory.values))
            to_slot.memory = copied if self.path == "copy" else source_slot.memory
            to_slot.needed = len(to_slot.memory.values)
            to_slot.origin, to_slot.since = source_slot.origin, next_id()
            return
        with pytest.raises(RuntimeError, match=error):
            so.share_storage(to, source)

    @rule(entry=tensors, data=st.data())
    def write(self, entry, data):
        t, slot, offsets = entry
        if slot.memory is None or not offsets:
            return
        position = data.draw(st.integers(0, len(offsets) - 1))
        self.next_value += 1
        t[position] = self.next_value
        slot.memory.values[offsets[position]] = self.next_value

    @invariant()
    def every_tensor_has_the_values_of_the_model(self):
        for t, slot, offsets in self.entries:
            if slot.memory is not None:
                assert t.tolist() == [slot.memory.values[i] for i in offsets]
                assert not so.is_discarded(t)
            elif offsets:
                assert so.is_discarded(t)
                check = contextlib.nullcontext() if self.guarded else so.check_discarded()
                with check, pytest.raises(RuntimeError, match="discarded"):
                    t + 1


@pytest.mark.parametrize("path", PATHS)
def test_random_programs(path):
    machine = type(f"Programs_{path}", (Programs,), {"path": path}).TestCase
    machine.settings = settings(
        max_examples=60,
        stateful_step_count=30,
        suppress_health_check=list(HealthCheck),
    )
    machine().runTest()
