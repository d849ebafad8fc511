"""Traced steps with shared tensors, gradients that fn sets, and objects that hold tensors."""

import collections
import contextlib
import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from storage_ops import graph


def assert_equals_eager(make, calls=3):
    """Compare traced and eager steps. `make` returns a step, arguments, and tensors to compare."""
    ends = []
    for traced in (False, True):
        state = torch.get_rng_state()
        step, args, kept = make()
        step = graph.trace_step(step, *args) if traced else step
        losses = [step(*args) for _ in range(calls)]
        torch.set_rng_state(state)
        leaves = [t for k in kept for t in (k.parameters() if isinstance(k, nn.Module) else [k])]
        ends.append((losses, [t.detach() for t in leaves], [t.grad for t in leaves if t.is_leaf]))
    torch.testing.assert_close(ends[1], ends[0])
    assert not any(type(t).__name__ == "FakeTensor" for t in leaves)


checkpoint = functools.partial(torch_checkpoint, use_reentrant=False)


def linear(*sizes):
    return nn.Linear(*sizes).double()


def rows(*shape):
    return torch.randn(shape, dtype=torch.double)


def test_one_tensor_in_several_arguments():
    w, x = rows(5, 3).requires_grad_(), rows(4, 3)

    def step(p, x):
        (x @ p["embedding"].t() @ p["head"]).square().mean().backward()

    tied = {"embedding": w, "head": w}
    step(tied, x)
    expected, w.grad = w.grad, None
    traced = graph.trace_step(step, tied, x)
    traced(tied, x)
    torch.testing.assert_close(w.grad, expected)
    other = rows(5, 3).requires_grad_()
    with pytest.raises(ValueError, match=r"\['head'\] and .*\['embedding'\] are two tensors"):
        traced({"embedding": w, "head": other}, x)
    untied = graph.trace_step(step, {"embedding": w, "head": other}, x)
    with pytest.raises(ValueError, match=r"\['embedding'\] and .*\['head'\] are one tensor"):
        untied(tied, x)


def test_a_batch_passed_twice_may_differ_later_unless_it_is_modified():
    x = rows(3)
    traced = graph.trace_step(lambda a, b: (a * b).sum(), x, x)
    a, b = rows(3), rows(3)
    torch.testing.assert_close(traced(a, b), (a * b).sum())
    torch.testing.assert_close(traced(x, x), (x * x).sum())
    writes = graph.trace_step(lambda a, b: a.add_(1) * b, a, b)
    with pytest.raises(ValueError, match=r"args\[0\] and args\[1\] are one tensor.* is modified"):
        writes(x, x)


def test_arguments_that_share_memory():
    """A recompute reads `b` after the step has modified `a`."""
    w = rows(4, 4).requires_grad_()

    def step(a, b, call=checkpoint):
        y = call(lambda x: (x @ w + b).sin(), torch.ones_like(b))
        a.add_(1)
        return torch.autograd.grad(y.sum(), w)

    def eager(a, b):
        return step(a, b, lambda fn, x: fn(x))

    def shared(memory):
        return memory[:3], memory[2:5]

    memory = rows(6, 4)
    separate = graph.trace_step(step, rows(3, 4), rows(3, 4))
    expected = eager(memory[:3].clone(), memory[3:].clone())
    torch.testing.assert_close(separate(*memory.clone().chunk(2)), expected)
    before = memory.clone()
    with pytest.raises(ValueError, match=r"args\[0\] and args\[1\] share memory, and the step"):
        separate(*shared(memory))
    assert torch.equal(memory, before)
    traced = graph.trace_step(step, *shared(memory))
    torch.testing.assert_close(traced(*shared(memory.clone())), eager(*shared(memory.clone())))


def test_arguments_that_are_also_closed_over():
    def make():
        model = linear(3, 4)

        def step(x, parameters):
            model.zero_grad()
            model(x).square().mean().mul(100).backward()
            return nn.utils.clip_grad_norm_(parameters, 0.1)

        return step, (rows(5, 3), list(model.parameters())), [model]

    assert_equals_eager(make)
    step, (x, parameters), _ = make()
    traced = graph.trace_step(step, x, parameters)
    with pytest.raises(ValueError, match=r"args\[1\]\[0\] and model\.weight are two tensors"):
        traced(x, [p.detach().requires_grad_() for p in parameters])


@pytest.mark.parametrize("tied", [True, False])
def test_weights_tied_or_untied_after_the_trace(tied):
    a, b, x = linear(3, 3), linear(3, 3), rows(2, 3)
    if tied:
        b.weight = a.weight
    traced = graph.trace_step(lambda x: b(a(x)).square().sum().backward(), x)
    traced(x)
    b.weight = nn.Parameter(a.weight.detach().clone()) if tied else a.weight
    grad = a.weight.grad.clone()
    with pytest.raises(ValueError, match="are two tensors" if tied else "are one tensor"):
        traced(x)
    assert torch.equal(a.weight.grad, grad)


@pytest.mark.parametrize("how", ["set", "delete", "zeros", "set and read", "halve", "a buffer"])
def test_gradients_that_fn_sets_or_deletes(how):
    def make():
        model, buffer = linear(3, 4), rows(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            parameters = list(model.parameters())
            for p in parameters:
                if how == "delete":
                    del p.grad
                elif how == "zeros":
                    p.grad = torch.zeros_like(p)
            loss = model(x).square().mean()
            if how in ("delete", "zeros"):
                loss.backward()
            else:
                for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    p.grad = g
                    if how == "halve":
                        p.grad = p.grad / 2
            if how == "a buffer":
                model.weight.grad = buffer
            if how == "set and read":
                optimizer.step()
            return loss.detach()

        return step, (rows(5, 3),), [model]

    assert_equals_eager(make)


def test_two_optimizers_in_one_step():
    def make():
        first, second = linear(3, 4), linear(4, 1)
        optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (first, second)]

        def step(x):
            for optimizer in optimizers:
                optimizer.zero_grad()
                loss = second(first(x)).square().mean()
                loss.backward()
                optimizer.step()
            return loss.detach()

        return step, (rows(5, 3),), [first, second]

    assert_equals_eager(make)


def test_a_gradient_that_is_missing_in_the_trace_stays_missing():
    used, unused = linear(3, 4), linear(3, 4)
    optimizer = torch.optim.SGD([*used.parameters(), *unused.parameters()], 0.1, weight_decay=0.1)

    def step(x):
        used(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    x, before = rows(2, 3), unused.weight.detach().clone()
    traced = graph.trace_step(step, x)
    traced(x)
    assert torch.equal(unused.weight, before)
    unused.weight.grad = rows(4, 3)
    with pytest.raises(RuntimeError, match=r"\.grad is set"):
        traced(x)
    assert torch.equal(unused.weight, before)


def test_replacing_the_memory_of_a_tensor_is_refused():
    model, x = linear(3, 4), rows(2, 3)
    before = model.weight.detach().clone()

    def exchanges(x):
        model.weight.data = model.weight.data * 2
        return model(x)

    def flat(x):
        nn.utils.vector_to_parameters(x.flatten().repeat(3)[:16], model.parameters())

    for step in (exchanges, flat):
        with pytest.raises(RuntimeError, match=r"sets \.data of model\.weight.* \.copy_"):
            graph.trace_step(step, x)
    assert torch.equal(model.weight, before)
    kept = graph.trace_step(lambda x: model.to("cpu").double()(x), x)
    torch.testing.assert_close(kept(x), model(x).detach())


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = linear(3, 3), nn.Dropout(0.0)
        self.h, self._h = rows(3), rows(3)

    def forward(self, x):
        self.h, self._h = self.h + self._h, (self.layer(x) + self.h).detach().mean(0)
        return self.dropout(self.layer(x) + self.h).square().sum()


def test_modules_and_optimizers_as_arguments():
    def make():
        model = Stateful()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)

        def step(model, optimizer, x):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, (model, optimizer, rows(5, 3)), [model]

    assert_equals_eager(make)
    step, (model, optimizer, x), _ = make()
    traced = graph.trace_step(step, model, optimizer, x)
    assert type(model.h) is type(model._h) is torch.Tensor and model.layer.weight.grad is None
    model.eval()
    with pytest.raises(ValueError, match=r"args\[0\]\.training is False. Expected True"):
        traced(model, optimizer, x)
    with pytest.raises(ValueError, match=r"args\[0\] is another Stateful than when traced"):
        traced(copy.deepcopy(model), optimizer, x)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class Slots:
    x: torch.Tensor


class Private(nn.Module):
    def __init__(self, x):
        super().__init__()
        self._x = x

    x = property(lambda self: self._x, lambda self, x: setattr(self, "_x", x))


@pytest.mark.parametrize("kind", [Batch, Slots, Private, collections.UserDict, collections.deque])
@pytest.mark.parametrize("argument", [True, False])
def test_objects_that_hold_tensors_are_read_at_each_call(kind, argument):
    by_key = kind in (collections.UserDict, collections.deque)
    if by_key:
        holder = collections.deque([rows(3)]) if kind is collections.deque else kind({0: rows(3)})
    else:
        holder = kind(rows(3))

    def read(obj):
        return obj[0] if by_key else obj.x

    if argument and kind is collections.deque:  # a deque is a pytree
        return
    step = (lambda obj: read(obj) * 2) if argument else (lambda: read(holder) * 2)
    args = (holder,) if argument else ()
    traced = graph.trace_step(step, *args)
    if by_key:
        holder[0] = rows(3)
    else:
        holder.x = rows(3)
    torch.testing.assert_close(traced(*args), read(holder) * 2)


def test_unsupported_operations_in_a_step_are_refused():
    model, x = linear(3, 4), rows(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def schedules(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        scheduler.step()

    with pytest.raises(RuntimeError, match=r"changes lr of parameter group 0 of SGD from 0\.1 to"):
        graph.trace_step(schedules, x)
    assert optimizer.param_groups[0]["lr"] == 0.1 and scheduler.last_epoch == 0

    def seeds(x):
        torch.manual_seed(0)
        return F.dropout(x)

    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"calls torch\.manual_seed"):
        graph.trace_step(seeds, x)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match=r"returns a Batch, which holds a tensor of the step"):
        graph.trace_step(lambda x: Batch(x * 2), x)
    untied = linear(3, 4)
    traced = graph.trace_step(lambda x: optimizer.step() or model(x), x)
    optimizer.add_param_group({"params": untied.parameters()})
    with pytest.raises(ValueError, match=r"number of parameter groups of SGD is 2\. Expected 1"):
        traced(x)


@pytest.mark.parametrize("kind", ["SparseAdam", "Adagrad"])
def test_optimizers_that_take_sparse_gradients_apart_are_refused(kind):
    """In a trace, a sparse tensor has no elements, so these optimizers would change nothing."""
    table, tokens = torch.nn.Embedding(6, 3, sparse=True), torch.tensor([1, 4, 4])
    optimizer = getattr(torch.optim, kind)(table.parameters(), lr=0.1)

    def step(tokens):
        optimizer.zero_grad()
        table(tokens).square().sum().backward()
        optimizer.step()

    step(tokens)
    before = copy.deepcopy((table.weight, optimizer.state_dict()["state"]))
    with pytest.raises(RuntimeError, match=r"calls coalesce\(\) of a sparse tensor"):
        graph.trace_step(step, tokens)
    torch.testing.assert_close((table.weight, optimizer.state_dict()["state"]), before)


def test_an_optimizer_that_counts_its_steps_in_a_number_is_refused():
    class Warm(torch.optim.SGD):
        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
                p.data.add_(p.grad, alpha=-0.1 / self.state[p]["step"])

    model, x = linear(3, 4), rows(2, 3)
    optimizer = Warm(model.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step(x)
    with pytest.raises(RuntimeError, match=r"state 'step' of parameter 0 .* of Warm from 1 to 2"):
        graph.trace_step(step, x)
    assert [state["step"] for state in optimizer.state.values()] == [1, 1]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["COO", "CSR"])
def test_sparse_matrices(layout):
    w, x = torch.nn.Parameter(rows(4, 3)), rows(4, 3)
    matrix = (rows(4, 4) > 0).to(w).to_sparse(layout=layout)

    def step(x, read):
        return torch.autograd.grad(((read() @ w) * x).sum(), w)

    for traced, args in (
        (graph.trace_step(lambda x: step(x, lambda: matrix), x), (x,)),
        (graph.trace_step(lambda x, m: step(x, lambda: m), x, matrix), (x, matrix)),
    ):
        torch.testing.assert_close(traced(*args), step(x, lambda: matrix))


def test_momentum_of_sparse_gradients():
    def train(traced):
        torch.manual_seed(0)
        table, tokens = torch.nn.Embedding(6, 3, sparse=True), torch.tensor([1, 4, 4])
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)

        def step(tokens):
            optimizer.zero_grad()
            table(tokens).square().sum().backward()
            optimizer.step()

        step(tokens)
        run = graph.trace_step(step, tokens) if traced else step
        for first in range(3):
            run(torch.tensor([first, 4, 4]))
        return table.weight

    torch.testing.assert_close(train(True), train(False))


def test_autocast_around_a_step():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8)), torch.randn(3, 4)
    autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)

    def step(x):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach(), *(p.grad for p in model.parameters())

    for around, other, text in (
        (contextlib.nullcontext, autocast, r"cpu is on with torch\.bfloat16\. Expected off"),
        (autocast, contextlib.nullcontext, r"cpu is off\. Expected on with torch\.bfloat16"),
    ):
        with around():
            traced = graph.trace_step(step, x)
            expected = step(x)
            torch.testing.assert_close(traced(x), expected, rtol=0, atol=0)
        with other(), pytest.raises(ValueError, match=text):
            traced(x)
        torch.testing.assert_close([p.grad for p in model.parameters()], [*expected[1:]])


def test_lstm_in_single_precision():
    def make():
        model = nn.LSTM(3, 4, num_layers=2, batch_first=True)

        def step(x):
            model.zero_grad()
            loss = model(x)[0].square().sum()
            loss.backward()
            return loss.detach()

        return step, (torch.randn(2, 3, 3),), [model]

    assert_equals_eager(make, calls=2)
    assert torch.backends.mkldnn.enabled


def test_a_step_without_tensor_arguments():
    model, x = linear(3, 4), rows(2, 3)
    torch.testing.assert_close(graph.trace_step(lambda: model(x))(), model(x).detach())
    flag = graph.trace_step(lambda double: model(x) * (2 if double else 1), True)
    torch.testing.assert_close(flag(True), 2 * model(x).detach())


def test_a_view_whose_is_leaf_raises():
    def make():
        model = linear(3, 3)
        base = torch.randn(8, requires_grad=True) * 1
        model.views = list(base.chunk(2))
        base.mul_(2)  # FSDP1 leaves views of its flat parameter in this state
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, (rows(4, 3),), [model]

    assert_equals_eager(make)
