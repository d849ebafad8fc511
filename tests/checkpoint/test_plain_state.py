"""Numbers, flags and containers in attributes are state that a region restores."""

import collections
import types
import weakref

import pytest
import torch
from torch import nn

import storage_ops as so

from .test_effects import KINDS, pair, steps


class Counts(nn.Linear):
    """Multiplies its output by a number that `change(self, output)` returns."""

    def __init__(self, change):
        super().__init__(4, 6)
        self.change, self.number, self.key, self.table = change, 0, None, None
        self.list, self.dict, self.set = [1], {"a": 1}, {1, 2, 3}
        self.deque, self.nested = collections.deque([1, 2], maxlen=3), {"a": [1]}
        self.tensors, self.object = [], types.SimpleNamespace(number=0, list=[])
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        y = super().forward(x)
        return (y * self.change(self, y.detach())).sin()


def count(layer, y):
    layer.number += 1
    return layer.number


def mean(layer, y):
    layer.number += 1
    layer.mean.add_((y.mean(0) - layer.mean) / layer.number)
    return layer.mean.clone()


def cached_table(layer, y):
    if layer.key != tuple(y.shape):
        layer.key, layer.table = tuple(y.shape), torch.arange(y.shape[0], dtype=y.dtype)[:, None]
    return layer.table


def merged_weight(layer, y):
    if layer.list:
        layer.list.pop()
        layer.weight.data.mul_(2)
    return layer.weight.sum()


def append(layer, y):
    layer.list.append(len(layer.list))
    return len(layer.list)


def replace(layer, y):
    layer.list = [*layer.list, 1]
    return len(layer.list)


def item(layer, y):
    layer.dict["a"] += 1
    layer.dict.setdefault("b", len(layer.dict))
    return layer.dict["a"]


def pop(layer, y):
    last = max(layer.set, default=7)
    layer.set.discard(last)
    return last


def turn(layer, y):
    layer.deque.append(layer.deque[-1] + 1)
    return layer.deque[0]


def nested(layer, y):
    layer.nested["a"].append(2)
    return len(layer.nested["a"])


def tensors(layer, y):
    layer.tensors.append(y.mean(0) + sum(layer.tensors))
    return layer.tensors[-1]


def new_tensors(layer, y):
    before = layer.tensors[-1] if layer.tensors else 1
    layer.tensors = [y.mean(0) + before]
    return before


def attribute_of_object(layer, y):
    layer.object.number += 1
    layer.object.list.append(1)
    return layer.object.number + len(layer.object.list)


CHANGES = [
    *(count, mean, cached_table, merged_weight, append, replace, item, pop, turn, nested),
    *(tensors, new_tensors, attribute_of_object),
]


def state_of(layer):
    attributes = {**vars(layer), **vars(layer.object)}
    names = ("number", "key", "list", "dict", "set", "deque", "nested")
    return [*(attributes[name] for name in names), [t.tolist() for t in layer.tensors]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda fn: fn.__name__)
def test_a_recompute_sees_the_state_of_the_forward(change, kind):
    plain, plain_model, fn, model = pair(kind, lambda: Counts(change))
    inputs = [torch.randn(5, 4), torch.randn(5, 4), torch.randn(3, 4)]
    right, got = steps(plain, plain_model, inputs), steps(fn, model, inputs)
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b)
    assert state_of(model.layer) == state_of(plain_model.layer)
    assert model.layer.deque.maxlen == 3


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_backward_inside_of_the_forward_sees_the_state(kind):
    class Forces(Counts):
        def forward(self, x):
            x = x.detach().requires_grad_()
            y = super().forward(x)
            return torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum(1, keepdim=True) * y

    for change in (count, append, item):
        plain, plain_model, fn, model = pair(kind, lambda change=change: Forces(change))
        results = []
        for call, module in ((plain, plain_model), (fn, model)):
            x = torch.ones(5, 4)
            call(x).square().sum().backward()
            results.append([p.grad for p in module.parameters()])
            assert module.layer.number == (change is count)
        torch.testing.assert_close(*results)


def test_changes_by_the_caller_before_the_backward_stay():
    """The caller removes from a list what the forward appended, as trainers do with losses."""
    layer = Counts(append)
    fn = so.CheckpointWrapper(layer)
    y = fn(torch.randn(2, 4, requires_grad=True))
    layer.list.clear()
    layer.number = 5
    y.sum().backward()
    assert layer.list == [] and layer.number == 5


@pytest.mark.parametrize("how", ["replaced", "added"])
def test_outputs_in_a_list_keep_no_earlier_step_alive(how):
    class Logs(nn.Linear):
        log = ()

        def forward(self, x):
            y = super().forward(x).sin()
            if how == "replaced":
                self.log = [y]
            else:
                self.log.append(y)
                del self.log[:-1]
            return y

    layer, refs = Logs(4, 4), []
    layer.log = []
    fn = so.CheckpointWrapper(layer)
    for _ in range(5):
        y = fn(torch.randn(2, 4, requires_grad=True) * 1)
        refs.append(weakref.ref(y))
        del y
    assert [ref() is not None for ref in refs] == [False] * 4 + [True]


@pytest.mark.walks_twice  # a walk that finds other objects each time never becomes known
def test_objects_that_a_forward_replaces_are_not_restored():
    """They may hold the graph of an earlier step."""

    class Held:
        n = 1

    class Makes(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.held, self.list = Held(), [Held()]

        def forward(self, x):
            n = self.held.n + self.list[0].n
            self.held, self.list[0] = Held(), Held()
            self.held.n = self.list[0].n = 2
            return super().forward(x) * n

    layer = Makes()
    refs = [weakref.ref(layer.held), weakref.ref(layer.list[0])]
    y = so.CheckpointWrapper(layer)(torch.randn(2, 4))
    assert [ref() for ref in refs] == [None, None]
    y.sum().backward()
    assert layer.held.n == layer.list[0].n == 2
