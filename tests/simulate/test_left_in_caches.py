"""A simulation leaves no fake tensors in caches outside of the model that its forward fills."""

import functools
import gc
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import storage_ops as so

MASKS, PAIRS, MASK = {}, [], None
HOLDER = SimpleNamespace()


def mask_of(n):
    return torch.full((n, n), float("-inf")).triu(1)


@functools.lru_cache(None)
def unlimited(n):
    return mask_of(n)


@functools.lru_cache(4)
def limited(n):
    return (mask_of(n), n)


def in_dictionary(n):
    if n not in MASKS:
        MASKS[n] = {"mask": mask_of(n)}
    return MASKS[n]["mask"]


def in_list(n):
    if not any(size == n for size, _ in PAIRS):
        PAIRS.append((n, mask_of(n)))
    return next(mask for size, mask in PAIRS if size == n)


def as_global(n):
    global MASK
    if MASK is None or len(MASK) < n:
        MASK = mask_of(n)
    return MASK[:n, :n]


class Shared:
    mask = None

    @classmethod
    def of_class(cls, n):
        if cls.mask is None or len(cls.mask) < n:
            cls.mask = mask_of(n)
        return cls.mask[:n, :n]


def remembering(fn):
    known = {}

    def call(n):
        if n not in known:
            known[n] = fn(n)
        return known[n]

    call.known = known
    return call


in_closure = remembering(mask_of)
ELSEWHERE = {"MASKS": {}, "mask_of": mask_of, "__name__": "elsewhere.module"}
exec("def far(n):\n    return MASKS.setdefault('deep', {}).setdefault(n, mask_of(n))", ELSEWHERE)


class Layer(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.linear, self.__dict__["mask"] = nn.Linear(8, 8), mask

    def forward(self, x):
        scores = x @ x.transpose(1, 2) + self.mask(x.shape[1])
        return x + scores.softmax(-1) @ self.linear(x)


class OfClass(Layer, Shared):
    def __init__(self):
        super().__init__(self.of_class)


CACHES = {
    "unlimited": (lambda: Layer(unlimited), unlimited.cache_clear, lambda: unlimited(4)),
    "limited": (lambda: Layer(limited_mask), limited.cache_clear, lambda: limited(4)[0]),
    "dictionary": (lambda: Layer(in_dictionary), MASKS.clear, lambda: MASKS[4]["mask"]),
    "list": (lambda: Layer(in_list), PAIRS.clear, lambda: PAIRS[0][1]),
    "global": (lambda: Layer(as_global), lambda: globals().update(MASK=None), lambda: MASK),
    "class": (OfClass, lambda: delattr(OfClass, "mask"), lambda: OfClass.mask),
    "closure": (lambda: Layer(in_closure), in_closure.known.clear, lambda: in_closure.known[4]),
    "elsewhere": (
        lambda: Layer(ELSEWHERE["far"]), ELSEWHERE["MASKS"].clear,
        lambda: ELSEWHERE["MASKS"]["deep"][4],
    ),
}  # fmt: skip


def limited_mask(n):
    return limited(n)[0]


def step(model, x):
    model(x).sum().backward()
    model.zero_grad()


RUNS = {
    "simulate_step": lambda model, x: so.memory.simulate_step(model, x, device="cpu"),
    "fit": lambda model, x: so.fit(model, x, "1GiB"),
    "estimate": lambda model, x: so.memory.estimate(lambda x: step(model, x), x),
}


PAIRED = [
    (c, r) for c in CACHES for r in RUNS if r != "fit" or c in ("limited", "global", "elsewhere")
]


@pytest.mark.in_turn
@pytest.mark.parametrize(("cache", "run"), PAIRED)
def test_caches_hold_no_fake_tensors_afterwards(cache, run):
    make, clear, first = CACHES[cache]
    model, x = nn.Sequential(make(), make(), make()), torch.randn(2, 6, 8)
    step(model, x[:, :4])
    before = first()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RUNS[run](model, x)
    if cache != "limited":  # a limited cache may drop entries
        assert first() is before
    step(model, x)
    step(model, x[:, :4])
    clear()


def test_a_model_on_meta_leaves_no_cache_entries_for_a_real_model():
    with torch.device("meta"):
        model, x = nn.Sequential(Layer(as_global), Layer(as_global)), torch.empty(2, 6, 8)
    with torch.device("meta"):
        so.memory.will_it_fit(model, x, budget="1GiB")
    assert MASK is None
    step(nn.Sequential(Layer(as_global), Layer(as_global)), torch.randn(2, 6, 8))
    globals().update(MASK=None)


def test_an_error_leaves_nothing_in_caches():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    model = nn.Sequential(Layer(unlimited), Fails())
    with pytest.raises(KeyboardInterrupt):
        so.memory.simulate_step(model, torch.randn(2, 6, 8))
    assert type(unlimited(6)) is torch.Tensor
    unlimited.cache_clear()


@pytest.mark.parametrize("tensors", [10, 200])
def test_an_interrupt_ends_with_few_searches_of_the_process(monkeypatch, tensors):
    """Each search visits all objects. One for each tensor took half a minute in real models."""
    searches = []

    class Interrupted(nn.Module):
        def forward(self, x):
            outputs = [x + 1 for _ in range(tensors)]
            raise KeyboardInterrupt(len(outputs))

    def counted(search):
        return lambda *values: searches.append(1) or search(*values)

    for name in ("get_objects", "get_referrers"):
        monkeypatch.setattr(gc, name, counted(getattr(gc, name)))
    with pytest.raises(KeyboardInterrupt):
        so.memory.simulate_step(nn.Sequential(nn.Linear(8, 8), Interrupted()), torch.randn(2, 8))
    assert 2 <= len(searches) < 10


def test_probes_of_the_forward_leave_nothing_in_caches():
    model = nn.Sequential(Layer(unlimited), Layer(as_global))
    so.apply_activation_checkpoint(model, {"layer_classes": ["Layer"]})
    so.checkpoint_report(model, torch.randn(2, 6, 8))
    assert MASK is None and unlimited.cache_info().currsize == 0
    step(model, torch.randn(2, 6, 8))
    unlimited.cache_clear(), globals().update(MASK=None)


def test_a_trace_leaves_nothing_in_caches():
    model, x = nn.Sequential(Layer(unlimited), Layer(limited_mask)), torch.randn(2, 6, 8)
    so.graph.trace_step(lambda x: model(x).sum().backward(), x)
    assert unlimited.cache_info().currsize == limited.cache_info().currsize == 0
    step(model, x)
    unlimited.cache_clear(), limited.cache_clear()
