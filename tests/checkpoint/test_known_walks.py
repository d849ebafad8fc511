"""A region notices changes of the objects around it when it reuses an earlier walk over them.

Each test calls a region until its walk is known, and then changes an object. The region must do the
same as with a walk in Python.
"""

import collections
import functools
import random
import types
import typing
import weakref

import pytest
import torch
from torch import nn

import storage_ops as so
from storage_ops.checkpoint.state import known_walks

from .paths import both_paths

path = both_paths(known_walks)


@pytest.fixture(autouse=True)
def own_class_state(monkeypatch):
    monkeypatch.setattr(Block, "shared", [1.0])


CALLS = 4  # after which a walk is known
SHIFT = nn.Linear(4, 4)


def draw(x):
    return x


class Block(nn.Module):
    """A module with every kind of attribute, container and global that a walk reads."""

    shared: typing.ClassVar[list[float]] = [1.0]

    def __init__(self):
        super().__init__()
        self.first, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.rates, self.options = [0.5, 2.0], {"scale": 3.0, "inner": [1.0]}
        self.config = types.SimpleNamespace(power=2)
        self.names, self.queue = {"one", "two"}, collections.deque([1.0])
        self.count, self.pair, self.call = 1, (1.0, 2.0), functools.partial(torch.mul, other=2)

    def forward(self, x, extra=(1.0,)):
        h = self.drop(self.first(x)) * self.rates[0] ** self.config.power + self.shared[0]
        h = SHIFT(h) * self.options["scale"] * self.pair[0] * self.count + sum(extra)
        h = h * len(self.names) + sum(self.queue)
        return self.call(draw(h) * sum(self.options["inner"])).sin()


def a_number(block, patch):
    block.count = 3


def another_kind_of_value(block, patch):
    block.count = torch.tensor(2.0)


def an_item(block, patch):
    block.rates[0] = 0.25


def an_item_more(block, patch):
    block.options["inner"].append(2.0)


def an_attribute_of_an_object(block, patch):
    block.config.power = 3


def an_object(block, patch):
    block.config = types.SimpleNamespace(power=1)


def an_item_of_a_set(block, patch):
    block.names.add("three")


def an_item_of_a_queue(block, patch):
    block.queue.append(2.0)


def a_tuple(block, patch):
    block.pair = (4.0, 0.0)


def a_partial(block, patch):
    block.call = functools.partial(torch.add, other=2)


def a_parameter(block, patch):
    block.first.weight = nn.Parameter(torch.ones(4, 4))


def a_module(block, patch):
    block.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def a_module_in_a_global(block, patch):
    patch.setitem(globals(), "SHIFT", nn.Linear(4, 4))


def a_function_in_a_global(block, patch):
    patch.setitem(globals(), "draw", torch.cos)


def a_list_of_the_class(block, patch):
    patch.setattr(Block, "shared", [2.0])


def an_item_of_the_class(block, patch):
    Block.shared[0] = 5.0


def a_default(block, patch):
    patch.setattr(Block.__mro__[0].forward, "__defaults__", ((3.0,),))


def another_mode(block, patch):
    block.eval()


def a_hook(block, patch):
    block.first.register_forward_hook(lambda module, args, out: out * 2)


def a_hook_of_all(block, patch):
    hooks = torch.nn.modules.module._global_forward_hooks
    patch.setitem(hooks, -1, lambda module, args, out: out * 2)


def a_forward(block, patch):
    block.first.forward = lambda x: x.exp()


def a_buffer(block, patch):
    block.first.register_buffer("seen", torch.ones(4))


def frozen(block, patch):
    block.first.weight.requires_grad_(False)


CHANGES = [
    a_number, another_kind_of_value, an_item, an_item_more, an_attribute_of_an_object, an_object,
    an_item_of_a_set, an_item_of_a_queue, a_tuple, a_partial, a_parameter, a_module,
    a_module_in_a_global, a_function_in_a_global, a_list_of_the_class, an_item_of_the_class,
    a_default, another_mode, a_hook, a_hook_of_all, a_forward, a_buffer, frozen,
]  # fmt: skip


def known(block):
    """Return a checkpointed block whose walk is known, and its input."""
    fn, x = so.CheckpointWrapper(block), torch.randn(2, 4, requires_grad=True)
    for _ in range(CALLS):
        fn(x).sum().backward()
    x.grad = None
    fn.zero_grad()
    SHIFT.zero_grad()
    return fn, x


def gradients(fn, x, seed, between=lambda: None):
    torch.manual_seed(seed)
    leaf = x.detach().requires_grad_()
    y = fn(leaf)
    between()
    y.square().sum().backward()
    leaves = [leaf.grad, *(p.grad for p in (*fn.parameters(), *SHIFT.parameters()))]
    for p in (*fn.parameters(), *SHIFT.parameters()):
        p.grad = None
    return [y.detach(), *leaves]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_before_the_forward(path, change, monkeypatch):
    fn, x = known(Block())
    change(fn, monkeypatch)
    for _ in range(2):  # the second time, the new walk is known
        with so.disable_checkpointing():
            right = gradients(fn, x, 1)
        for _ in range(CALLS):
            assert all(map(same, gradients(fn, x, 1), right))


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_forward(change, monkeypatch):
    """The recompute sees and leaves the same values as with a walk in Python."""
    outcomes = []
    for native in (known_walks._native, None):
        with monkeypatch.context() as patch:
            patch.setattr(known_walks, "_native", native)
            torch.manual_seed(0)
            patch.setattr(Block, "shared", [1.0])
            block = Block()
            fn, x = known(block)
            try:
                result = gradients(fn, x, 1, functools.partial(change, block, patch))
            except RuntimeError as error:
                result = [str(error)]
            names = [name for name, _ in (*block.named_buffers(), *block.named_modules())]
            attributes = sorted(vars(block))
            outcomes.append([*result, *names, str(block.count), block.training, attributes])
    assert all(map(same, *outcomes))


class Writes(nn.Module):
    """A module whose forward changes values that the next forward reads."""

    def __init__(self, change):
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4), change
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", None)
        self.count, self.rates, self.options = 1, [0.5], {"scale": 1.0}
        self.names = {"one"}
        self.changes = False

    def forward(self, x):
        h = (
            self.layer(x)
            * self.count
            * sum(self.rates)
            * len(self.names)
            * sum(self.options.values())
            + self.mean
        )
        h = h if self.last is None else h + self.last
        if self.changes:
            self.change(self)
        return h.sin()


def count(module):
    module.count += 1


def replace_a_buffer(module):
    module.mean = module.mean + 1


def write_a_buffer(module):
    module.mean += 1


def fill_a_buffer(module):
    module.last = torch.ones(4) if module.last is None else None


def append(module):
    module.rates.append(2.0)


def add_to_a_set(module):
    module.names.add(len(module.names))


def set_an_item(module):
    module.options["scale"] += 1.0


def add_an_attribute(module):
    module.extra = 1


def change_the_mode(module):
    module.layer.train(not module.layer.training)


@pytest.mark.parametrize(
    "change",
    [
        count, replace_a_buffer, write_a_buffer, fill_a_buffer, append, add_to_a_set, set_an_item,
        add_an_attribute, change_the_mode,
    ],
)  # fmt: skip
def test_a_change_by_the_forward(path, change):
    """The change happens once, and each recompute sees the values that its forward saw."""
    torch.manual_seed(0)
    plain, fn = Writes(change), so.CheckpointWrapper(Writes(change))
    fn.load_state_dict(plain.state_dict())
    x = torch.randn(2, 4, requires_grad=True)
    for _ in range(CALLS):
        fn(x).sum().backward()
    fn.zero_grad()
    plain.changes = fn.changes = True  # a bool is a number, so the walk stays known
    for _ in range(CALLS):
        outcomes = []
        for call in (plain, fn):
            leaf = x.detach().requires_grad_()
            y = call(leaf)
            y.sum().backward()
            state = (
                call.count,
                call.rates,
                call.options,
                call.names,
                call.layer.training,
                hasattr(call, "extra"),
            )
            outcomes.append(
                [y.detach(), leaf.grad, call.layer.weight.grad, call.mean, call.last, state]
            )
        assert all(map(same, *outcomes))


def test_walks_are_known():
    if known_walks._native is None:
        pytest.skip("there is no library for this torch")
    fn, _ = known(Block())
    start = known_walks.start_of(functools.partial(Block.forward, fn), [])
    walk, reads = known_walks.find(start)
    assert walk is not None and reads is None
    assert walk.is_unchanged() and set(walk.objects().modules) == {SHIFT, *fn.modules()}
    assert walk.contents(vars(fn)) == vars(fn)
    fn.count += 1
    assert not walk.is_unchanged()
    assert known_walks.find(start)[0] is not None  # a changed number does not need a new walk


def test_hooks_of_all_modules_hinder_a_walk_only_while_they_exist():
    if known_walks._native is None:
        pytest.skip("there is no library for this torch")
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    fn, x = known(Block())
    start = known_walks.start_of(functools.partial(Block.forward, fn), [])
    assert known_walks.known_from(start) is None
    handle.remove()
    for _ in range(CALLS):
        fn(x).sum().backward()
    assert known_walks.known_from(start) is not None


def test_a_known_walk_keeps_no_model(path):
    fn, _ = known(Block())
    reference = weakref.ref(fn)
    del fn
    assert reference() is None


def test_a_container_that_the_library_does_not_compare(path):
    numbers = collections.OrderedDict({0.5: 1})
    run = so.CheckpointWrapper(Sums(numbers))
    x = torch.randn(3, requires_grad=True)
    for _ in range(CALLS):
        (right,) = torch.autograd.grad((x * sum(numbers)).sin().sum(), x)
        (got,) = torch.autograd.grad(run(x).sum(), x)
        assert torch.equal(got, right)


class Sums(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers

    def forward(self, x):
        return (x * sum(self.numbers)).sin()


def test_normal_numbers_of_float_and_double(path):
    """torch's generator draws normal numbers in pairs, and keeps the second for the next call."""

    class Noise(nn.Module):
        def forward(self, x):
            return x * torch.randn(1) * torch.randn(1, dtype=torch.float64) * random.random()

    handle = so.register_rng_tracker(random)
    try:
        x = torch.randn(3, requires_grad=True)
        torch.randn(1)
        y = so.CheckpointWrapper(Noise())(x)
        after = torch.get_rng_state()
        (got,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(torch.get_rng_state(), after)
        torch.testing.assert_close(got.double(), (y / x).detach())
    finally:
        handle.remove()


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_new_module_at_the_address_of_another_can_become_known():
    if known_walks._native is None:
        pytest.skip("there is no library for this torch")
    fn, x = known(Block())
    key = known_walks.start_of(functools.partial(Block.forward, fn), []).key
    fn.hidden = torch.randn(4)  # a walk with a tensor in an attribute never becomes known
    for _ in range(2 * CALLS):
        fn(x).sum().backward()
    assert known_walks._known[key].walk is None
    entry, others = known_walks._known.pop(key), known(Block())
    start = known_walks.start_of(functools.partial(Block.forward, others[0]), [])
    del fn
    known_walks._known[start.key] = entry  # as if the new module had the same address
    for _ in range(CALLS):
        others[0](x).sum().backward()
    assert known_walks._known[start.key].walk is not None
