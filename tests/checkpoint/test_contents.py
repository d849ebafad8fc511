"""Copies of tensors that a region may write are dropped in time, and code that writes is found."""

import types
import weakref

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops.checkpoint.state import code_writes, contents
from storage_ops.checkpoint.state.contents import Contents


class Comparison:
    """A comparison on a GPU. The test decides when it ends."""

    def __init__(self, differs):
        self.differs, self.ready, self.waited, self.event = differs, False, False, self

    def query(self):
        return self.ready

    def synchronize(self):
        self.waited = not self.ready


def compared(differs):
    t = torch.zeros(contents.SMALL)  # four times the bytes of a small tensor
    contents_ = Contents(t, False, True)
    contents_._comparison = Comparison(differs)
    return t, contents_, contents_._comparison


def test_a_copy_is_dropped_when_the_device_has_compared_it():
    queue = contents._Compared()
    first, second, third = (compared(differs) for differs in (False, True, False))
    for _, copy, _ in (first, second):
        queue.append(copy)
    assert first[1].nbytes and second[1].nbytes  # the device has not ended
    first[2].ready = second[2].ready = True
    queue.append(third[1])
    assert first[1].nbytes == 0 and second[1].nbytes and third[1].nbytes
    assert third[1].changed() is None and third[1].nbytes == 0 and third[2].waited
    assert second[0] in contents.written and first[0] not in contents.written


def test_copies_that_wait_for_the_device_keep_to_the_budget(monkeypatch):
    monkeypatch.setattr(contents, "BUDGET", 9 * contents.SMALL)
    queue, each = contents._Compared(), [compared(False) for _ in range(4)]
    dropped = weakref.ref(compared(False)[1])
    queue._waiting.append(dropped)
    for _, copy, _ in each:
        queue.append(copy)
    assert [copy.nbytes > 0 for _, copy, _ in each] == [False, False, True, True]
    assert dropped() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.T, lambda t: t[::2], lambda t: t.conj()])
def test_a_nan_counts_as_unchanged_and_a_flipped_bit_as_changed(dtype, view):
    t = view(torch.randn(300, 400).to(dtype))
    if dtype.is_floating_point:
        t[0, 0] = float("nan")
    for change in (False, True):
        copy = Contents(t, False, True)
        copy._is_small = False
        sums = Contents(t, False, False, summed=True)
        if change:
            last = t.data[-1, -1]
            last.copy_(~last if dtype is torch.bool else last + 1)
        copy.finish(), sums.finish()
        assert (copy.nbytes > 0) is change and (sums.lost() is not None) is change


UNSEEN = code_writes.IN_PLACE | code_writes.UNSEEN


class Plain(nn.Module):
    def forward(self, x):
        return self.helper(x)

    def helper(self, x):
        return x + 1

    def reset(self):
        self.weight.data.fill_(0)


class Writes(Plain):
    @torch.no_grad()
    def helper(self, x):
        x[0] = 1
        return x


def write_unseen(t):
    t.data.mul_(2)


class Unseen(Plain):
    def helper(self, x):
        write_unseen(self.state)
        return x


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, state):
        write_unseen(state)
        return x


class ByAClass(Plain):
    def helper(self, x):
        return Scale.apply(x, self.state)


HELPERS = types.ModuleType("helpers")
HELPERS.write = write_unseen


class ByAnotherModule(Plain):
    def helper(self, x):
        HELPERS.write(self.state)
        return x


LIBRARY = types.FunctionType(write_unseen.__code__, {"__name__": "safetensors.torch"})


class BySaving(Plain):
    def helper(self, x):
        LIBRARY(self.state)
        return x


class Imports(Plain):
    def helper(self, x):
        import numpy as np

        return np is x


class Child(Plain):
    def advance(self):
        write_unseen(self.state)


class Parent(Plain):
    def helper(self, x):
        self.child.advance()
        return x


@pytest.mark.parametrize(
    "classes, writes",
    [((Plain,), 0), ((Writes,), code_writes.IN_PLACE | code_writes.WITHOUT_GRAD),
     ((Unseen,), UNSEEN), ((nn.Linear,), 0), ((ByAClass,), UNSEEN), ((ByAnotherModule,), UNSEEN),
     ((Parent, Child), UNSEEN), ((Child,), 0), ((BySaving,), 0), ((Imports,), 0)],
)  # fmt: skip
def test_kinds_of_writes_in_code_that_the_forward_runs(classes, writes):
    assert code_writes.of_calls(classes) == writes


@pytest.mark.in_turn
def test_a_hook_that_names_a_whole_model_copies_no_parameters(copied):
    """Some methods of the model write `.data`, but the hook never calls them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, use_cache=False,
    )  # fmt: skip
    model, seen = transformers.LlamaForCausalLM(config).train(), []
    so.apply_activation_checkpoint(model, {"layer_classes": ["LlamaDecoderLayer"]})
    layer = model.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: seen.append([type(m) for m in model.modules()]))
    ids = torch.randint(0, 64, (2, 8))
    if transformers.__version__ < "5":  # has code that may write, so the first forward decides
        model(input_ids=ids, labels=ids).loss.backward()
        seen.clear(), copied.clear()
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(seen) == 2 and not any(isinstance(t, nn.Parameter) for t in copied)
