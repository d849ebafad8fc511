import collections
import functools
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from storage_ops.foundation.functions import names_of_globals
from storage_ops.foundation.values import LONG, is_leaf, is_opaque
from storage_ops.foundation.walk import walk

SHARED = {"scale": torch.ones(1)}
NOTHING = None


class Holder:
    __slots__ = ("__weakref__", "slot")

    def __init__(self, slot):
        self.slot = slot


class Items(dict):
    pass


def names_of(value, **options):
    return {v.name: v.value for v in walk([("x", value)], **options)}


def reads_globals():
    global NOTHING
    NOTHING = torch.zeros(1)
    return SHARED["scale"]


def calls_a_helper():
    return reads_globals()


def test_every_kind_of_holder():
    t = torch.ones(2)
    bound = Holder(t)
    bound_method = SimpleNamespace(run=functools.partial(max, t, key=t))
    for value, name in [
        ([[t]], "x[0][0]"),
        ({"a": (t,)}, "x['a'][0]"),
        (collections.deque([t]), "x[0]"),
        ({t}, "x"),
        (Items(a=t), "x['a']"),
        (bound, "x.slot"),
        (bound_method, "x.run.args[0]"),
        (bound_method, "x.run.keywords['key']"),
        (SimpleNamespace(inner=weakref.ref(bound)), "x.inner.slot"),
        (collections.UserDict(a=t), "x.data['a']"),
        (lambda: t, "t"),
        (lambda value=t: value, "x.__defaults__[0]"),
        (calls_a_helper, "SHARED['scale']"),
    ]:
        visits = [v for v in walk([("x", value)]) if isinstance(v.value, torch.Tensor)]
        assert name in [v.name for v in visits]
        assert all(v.read() is v.value for v in visits)


def test_writable_places_can_be_written():
    layer, items = nn.Linear(2, 2), [torch.ones(1)]
    layer.extra = torch.ones(1)
    new = torch.zeros(1)
    for value, name in [(layer, "x.extra"), (items, "x[0]"), ((lambda: new, items), "x[1][0]")]:
        visit = next(v for v in walk([("x", value)]) if v.name == name)
        visit.write(new)
        assert visit.read() is new
    fixed = next(v for v in walk([("x", (new,))]) if v.name == "x[0]")
    assert not fixed.is_writable


def test_reads_follow_replaced_holders():
    holder = SimpleNamespace(model=nn.Linear(2, 2))
    weight = next(v for v in walk([("x", holder)]) if v.name == "x.model.weight")
    holder.model = nn.Linear(2, 2)
    assert weight.read() is holder.model.weight


def test_a_value_at_two_places_is_first_at_only_one():
    t = torch.ones(1)
    visits = [v for v in walk([("x", {"a": t, "b": t})]) if v.value is t]
    assert [(v.name, v.is_first) for v in visits] == [("x['a']", True), ("x['b']", False)]


def test_modules_gradients_and_hooks():
    layer, seen = nn.Linear(2, 2), [torch.ones(3)]
    layer.weight.grad = torch.ones(2, 2)
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen[0])
    layer.register_forward_hook(lambda *_: seen[0])
    names = names_of(nn.Sequential(layer))
    assert names["x.0.weight"] is layer.weight and names["x.0.weight.grad"] is layer.weight.grad
    assert names["seen[0]"] is seen[0]


def test_assigned_globals_are_named():
    assert names_of_globals(reads_globals.__code__) == ("NOTHING", "SHARED", "torch")
    assert "NOTHING" in names_of(reads_globals)


def test_globals_of_other_packages_are_named_but_not_followed():
    scope = {"found": [torch.ones(1)], "__name__": "elsewhere.module"}
    exec("def step():\n    return found", scope)
    step = scope["step"]
    assert "found" not in names_of(lambda: step())
    assert "found" in names_of(step)


def test_functions_are_omitted_on_request():
    t = torch.ones(1)
    assert "t" not in names_of({"f": lambda: t}, into_functions=False)


def test_layers_and_states_are_searched_but_data_is_not():
    assert len(list(walk([("x", list(range(LONG + 1)))]))) == 1
    assert len(list(walk([("x", [torch.ones(1)] * (LONG + 1))]))) == LONG + 2
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(LONG + 1)]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for p in parameters:
        p.grad = torch.ones(1)
    optimizer.step()
    state = optimizer.state[parameters[-1]]["momentum_buffer"]
    assert any(v.value is state for v in walk([("x", [[[[[optimizer]]]]])]))


@pytest.mark.parametrize("cls", [type(iter([])), torch.device, collections.Counter, Holder])
def test_objects_of_python_and_torch_are_opaque(cls):
    assert is_opaque(cls) == (cls not in (collections.Counter, Holder))


def test_cycles_end():
    x = []
    x.append(x)
    assert len(list(walk([("x", x)]))) == 2


def test_one_of_several_views_that_cannot_say_whether_it_is_a_leaf():
    base = nn.Parameter(torch.ones(4))
    view, _ = base.split(2)
    with torch.no_grad():
        base.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        _ = view.is_leaf
    assert not is_leaf(view)
    assert [v.value for v in walk([("x", view)])] == [view]
