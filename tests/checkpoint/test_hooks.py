"""A recompute runs the hooks of the forward, and none that were added later."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import storage_ops as so
from storage_ops.checkpoint.state.calls import _OF_A_MODULE, HOOKS_OF_ALL_MODULES

from .test_effects import KINDS, pair

ERRORS = (RuntimeError, KeyboardInterrupt, GeneratorExit)


class Layer(nn.Module):
    """Squares every matrix product, so that gradients depend on the hooks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.second(self.first(x).square()).square()


class Forward:
    """Replaces the forward of a module until `remove` is called."""

    def __init__(self, module):
        self.module = module
        module.forward = lambda x: nn.Linear.forward(module, x.sin())

    def remove(self):
        del self.module.forward


def for_linear(module, hook):
    """Return a global hook that acts only on linear layers of size 6."""
    return lambda m, *args: hook(m, *args) if getattr(m, "in_features", 0) == 6 else None


ADD = {
    "pre hook": lambda m: m.second.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,)),
    "pre hook with an op": lambda m: m.second.register_forward_pre_hook(
        lambda m, args: (args[0].sin(),)
    ),
    "pre hook with kwargs": lambda m: m.first.register_forward_pre_hook(
        lambda m, args, kwargs: ((), {"input": args[0] * 1.5}), with_kwargs=True
    ),
    "hook": lambda m: m.second.register_forward_hook(lambda m, args, out: out * 1.5),
    "hook with kwargs": lambda m: m.first.register_forward_hook(
        lambda m, args, kwargs, out: out.sin(), with_kwargs=True
    ),
    "hook that is always called": lambda m: m.first.register_forward_hook(
        lambda m, args, out: out.sin(), always_call=True
    ),
    "backward hook": lambda m: m.second.register_full_backward_hook(
        lambda m, inputs, outputs: (inputs[0] * 2,)
    ),
    "backward pre hook": lambda m: m.second.register_full_backward_pre_hook(
        lambda m, outputs: (outputs[0] * 2,)
    ),
    "pre hook of every module": lambda m: torch_module.register_module_forward_pre_hook(
        for_linear(m, lambda m, args: (args[0] * 1.5,))
    ),
    "hook of every module": lambda m: torch_module.register_module_forward_hook(
        for_linear(m, lambda m, args, out: out.sin())
    ),
    "forward": lambda m: Forward(m.second),
}  # fmt: skip


def gradients(fn, model, x, add, late):
    """Return the gradients of a step with a hook added before the forward, or after it."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    handle = None if late else add(model.layer)
    y = fn(x)
    if handle is not None:
        handle.remove()
    else:
        handle = add(model.layer)
    y.square().sum().backward()
    if late:
        handle.remove()
    return [x.grad, *(p.grad for p in model.parameters())]


def hooks_of(model):
    kept = [dict(getattr(m, name)) for m in model.modules() for name in _OF_A_MODULE]
    forwards = [vars(m).get("forward") for m in model.modules()]
    return kept, [dict(each) for each in HOOKS_OF_ALL_MODULES], forwards


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ADD)
def test_the_hooks_of_the_forward_are_repeated_and_no_others(name, late, kind):
    plain, plain_model, fn, model = pair(kind, Layer)
    x, before = torch.randn(3, 4), hooks_of(model)
    right = gradients(plain, plain_model, x, ADD[name], late)
    got = gradients(fn, model, x, ADD[name], late)
    equal = partial(torch.allclose, atol=1e-6) if kind == "reentrant" else torch.equal
    assert all(map(equal, got, right))
    assert hooks_of(model) == before


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_run_in_the_order_of_the_forward(kind):
    plain, plain_model, fn, model = pair(kind, Layer)
    results = []
    for call, module in ((plain, plain_model), (fn, model)):
        x = torch.full((3, 4), 0.3, requires_grad=True)
        first = module.layer.second.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        module.layer.second.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        y = call(x)
        first.remove()  # the recompute runs it before the other hook
        y.square().sum().backward()
        results.append(x.grad)
        assert len(module.layer.second._forward_pre_hooks) == 1
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_removes_itself_is_repeated(kind):
    plain, plain_model, fn, model = pair(kind, Layer)

    def once(layer):
        def hook(module, args):
            handle.remove()
            return (args[0] * 1.5,)

        handle = layer.second.register_forward_pre_hook(hook)
        return handle

    x = torch.randn(3, 4)
    right, got = gradients(plain, plain_model, x, once, False), gradients(fn, model, x, once, False)
    torch.testing.assert_close(got, right)
    assert not model.layer.second._forward_pre_hooks


class Recorder:
    """Records outputs of a module in an attribute and in a list."""

    def __init__(self, module):
        self.last, self.outputs = None, []
        self.handle = module.register_forward_hook(self.record)
        self.remove = self.handle.remove

    def record(self, module, args, out):
        self.last = out
        self.outputs.append(out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["object", "closure", "argument", "forward"])
def test_a_hook_that_was_removed_records_the_forward_only(how, kind):
    _, _, fn, model = pair(kind, Layer)
    second, outputs = model.layer.second, {"second": []}
    if how == "object":
        recorder = Recorder(second)
        outputs["second"] = recorder.outputs
        handle = recorder.handle
    elif how == "closure":
        handle = second.register_forward_hook(
            lambda m, args, out: outputs["second"].append(out.detach())
        )
    elif how == "argument":

        def record(m, args, out, to):
            to["second"].append(out.detach())

        handle = second.register_forward_hook(partial(record, to=outputs))
    else:
        handle = Forward(second)
        replaced = second.forward
        second.forward = lambda x: [outputs["second"].append(out := replaced(x)), out][1]
    y = fn(torch.randn(3, 4, requires_grad=True))
    handle.remove()
    first = list(outputs["second"])
    y.sum().backward()
    assert len(first) == 1 and list(map(id, outputs["second"])) == list(map(id, first))
    if how == "object":
        assert recorder.last is first[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_in_a_repeated_hook_leaves_no_hook_behind(error, kind):
    _, _, fn, model = pair(kind, Layer)
    fails = []

    def hook(module, args):
        if fails:
            raise error("on purpose")
        return (args[0] * 1.5,)

    before = hooks_of(model)
    handles = (
        model.layer.second.register_forward_pre_hook(hook),
        torch_module.register_module_forward_hook(lambda m, args, out: None),
    )
    y = fn(torch.randn(3, 4, requires_grad=True))
    for handle in handles:
        handle.remove()
    late = ADD["hook"](model.layer)
    fails.append(True)
    with pytest.raises(error, match="on purpose"):
        y.sum().backward()
    late.remove()
    assert hooks_of(model) == before


def test_hooks_in_a_region_within_a_region():
    plain = nn.Sequential(nn.Sequential(Layer(), nn.Linear(6, 4)), nn.Linear(4, 2))
    x, results = torch.randn(3, 4), []
    for nested in (False, True):
        if nested:
            so.CheckpointWrapper(plain[0][0])
            so.CheckpointWrapper(plain[0])
        t = x.clone().requires_grad_()
        handle = plain[0][0].second.register_forward_pre_hook(lambda m, args: (args[0].sin() * 2,))
        y = plain(t)
        handle.remove()
        results.append(torch.autograd.grad(y.sum(), [t, *plain.parameters()]))
    assert all(map(torch.equal, *results))


def test_hooks_of_a_tiled_module():
    modules, results = [], []
    x = torch.randn(2, 6, 4)
    torch.manual_seed(0)
    modules.append(Layer())
    modules.append(so.tile(Layer(), 3))
    modules[1].load_state_dict(modules[0].state_dict())
    for module in modules:
        t = x.clone().requires_grad_()
        handle = ADD["pre hook with an op"](module)
        y = module(t)
        handle.remove()
        results.append(torch.autograd.grad(y.square().sum(), [t, *module.parameters()]))
    assert all(map(partial(torch.allclose, rtol=1e-4, atol=1e-5), *results))


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_lives_until_the_backward(kind):
    _, _, fn, model = pair(kind, Layer)

    class Hook:
        def __call__(self, module, args):
            return (args[0] * 1.5,)

    hook = Hook()
    handle, alive = model.layer.second.register_forward_pre_hook(hook), weakref.ref(hook)
    y = fn(torch.randn(3, 4, requires_grad=True))
    handle.remove()
    del hook
    gc.collect()
    assert alive() is not None
    y.sum().backward()
    if kind == "reentrant":  # torch's node keeps the call
        del y
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_dictionary_argument_has_its_order_again(kind):
    """Items that were deleted after the forward return to their positions."""

    class Stacks(nn.Linear):
        def forward(self, x, terms):
            y = super().forward(x)
            for term in terms.items.values():
                y = (y + term).square()
            return y

    class Terms:
        pass

    plain, _, fn, _ = pair(kind, lambda: Stacks(4, 6))
    results = []
    for call in (plain, fn):
        terms, x = Terms(), torch.full((3, 4), 0.3, requires_grad=True)
        terms.items = {"a": 1.0, "b": 2.0}
        y = call(x, terms)
        del terms.items["a"]
        y.sin().sum().backward()
        results.append(x.grad)
        assert terms.items == {"b": 2.0}
    torch.testing.assert_close(*results)


class Average:
    """Moves the weight of a teacher towards the weight of its student."""

    def __init__(self, net):
        self.net = net

    def advance(self):
        for p, q in zip(self.net.teacher.parameters(), self.net.second.parameters(), strict=True):
            p.data.lerp_(q.data, 0.5)


def step_of(average):
    average.advance()


def direct(layer):
    return lambda m, args, out: (step_of(Average(layer)), layer.teacher(out))[1]


def by_object(layer):
    average = Average(layer)
    return lambda m, args, out: (step_of(average), layer.teacher(out))[1]


@pytest.mark.parametrize("make", [direct, by_object])
@pytest.mark.parametrize("kind", ["full", "selective", "output_discard"])
def test_a_hook_that_writes_parameters_of_the_module_around_writes_once(make, kind):
    """A method of an object writes them, and another function calls the method."""
    _, plain, fn, model = pair(kind, Layer)
    gradients = []
    for module, call in ((plain, plain), (model, fn)):
        module.layer.teacher = nn.Linear(6, 6)
        module.layer.teacher.load_state_dict(plain.layer.second.state_dict())
        with torch.no_grad():
            module.layer.teacher.weight.mul_(2)
        module.layer.first.register_forward_hook(make(module.layer))
        for _ in range(2):
            module.zero_grad()
            call(torch.ones(3, 4)).sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    assert torch.equal(plain.layer.teacher.weight, model.layer.teacher.weight)
    assert all(map(torch.equal, *gradients))
