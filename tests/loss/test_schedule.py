"""Run the steps of every schedule on numbers that identify logits."""

import collections
import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
from hypothesis import event, example, given, settings

from storage_ops.loss.planning import cost, devices, planner
from storage_ops.loss.planning.problem import Problem, padded
from storage_ops.loss.planning.schedule import (
    EXPONENTIALS,
    GRADIENT,
    INPUT,
    MERGE,
    RUNNING_RESCALE,
    TOKEN_CHUNKED,
    UPDATE,
    WEIGHT,
    waiting_widths,
)
from storage_ops.matmul.aten import Aten

WRITTEN, SUMS = -2, -3  # in the weight's buffer: its own gradient, and sums of the input's gradient


class Memory:
    """The tile buffer and the weight gradient's buffer, which store the numbers of logits."""

    def __init__(self, s):
        self.s, p = s, s.problem
        self.tile = np.full((s.tiles, s.rows * padded(s.columns)), -1)
        self.weight = np.full(p.vocab * p.hidden, -1)
        # A sum in fp32 takes the memory of two 16-bit numbers of the gradient.
        self.borrowed = s.borrowed * p.hidden
        self.weight[: self.borrowed] = SUMS

    def at(self, place, step):
        if place.borrowed is None:
            memory = self.tile[place.rows.start // self.s.rows % self.s.tiles]
        else:
            p = self.s.problem
            memory = self.weight[place.borrowed.start * p.hidden : place.borrowed.stop * p.hidden]
        high, wide = (part.stop - part.start for part in (place.rows, place.classes))
        assert high * padded(wide) <= len(memory)
        rows = slice(step.rows.start - place.rows.start, step.rows.stop - place.rows.start)
        first = place.classes.start
        classes = slice(step.classes.start - first, step.classes.stop - first)
        return memory[: high * padded(wide)].reshape(high, padded(wide))[rows, classes]

    def check_sums(self):
        assert (self.weight[: self.borrowed] == SUMS).all()


def numbers(step, vocab):
    rows, classes = (np.arange(part.start, part.stop) for part in (step.rows, step.classes))
    return rows[:, None] * vocab + classes


def carry_out(s):
    """Run a schedule. Return how often each logit passed each phase and was added to each sum."""
    p, memory = s.problem, Memory(s)
    shape = (p.tokens, p.vocab)
    seen = collections.defaultdict(lambda: np.zeros(shape, int))
    merged = np.zeros(p.tokens, int)
    for step in s.steps():
        part = step.rows, step.classes
        if step.phases == MERGE:
            assert (seen["update"][step.rows] == 1).all()
            merged[step.rows] += 1
            continue
        tile, right = memory.at(step.place, step), numbers(step, p.vocab)
        assert step.place.borrowed is None or not s.by_slice
        if step.source is None:
            tile[...] = right
            seen["multiplied"][part] += 1
        elif step.source is not step.place:
            tile[...] = memory.at(step.source, step)
        assert (tile == right).all()  # no other step has overwritten them
        if step.phases & GRADIENT and (p.several or not step.phases & UPDATE):
            assert (merged[step.rows] == 1).all()
        seen["update"][part] += bool(step.phases & UPDATE)
        seen["gradient"][part] += bool(step.phases & GRADIENT)
        if step.adds & INPUT and p.grads[0]:
            memory.check_sums()
            seen["input"][part] += 1
        if step.adds & WEIGHT:
            if step.classes.start >= s.borrowed:
                memory.check_sums()
            seen["weight"][part] += 1
            if p.grads[1]:
                memory.weight[step.classes.start * p.hidden : step.classes.stop * p.hidden] = (
                    WRITTEN
                )
    return seen


SIZE = st.integers(1, 30)
VOCAB = st.integers(1, 400) | st.integers(400, 3000)  # the larger ones have several waiting slices
PROBLEMS = st.builds(
    Problem, SIZE, SIZE, VOCAB, st.sampled_from([2, 4]).map(Aten),
    grads=st.just((True, True, False)) | st.tuples(*[st.booleans()] * 3),
    in_forward=st.sampled_from([True, True, True, False]),
    left_out=st.sampled_from([0, 3]), several=st.booleans(), alike=st.booleans(),
)  # fmt: skip


@st.composite
def schedules(draw):
    p = draw(PROBLEMS)
    p = replace(p, keeps=not p.in_forward and draw(st.booleans()))
    strategy = draw(st.just(planner.allowed(p)[0]) | st.sampled_from(planner.allowed(p)))
    rows, columns = draw(st.integers(1, p.tokens)), draw(st.integers(1, p.vocab))
    if draw(st.booleans()):
        rows = p.tokens
    widest, borrows = draw(st.sampled_from([0, 64, 192])), draw(st.booleans())
    return planner.schedule(p, strategy, rows, columns, widest, borrows)


def whole(*sizes, item=4, rows=None, columns=64, strategy="token-chunked"):
    p = Problem(*sizes, Aten(item))
    return planner.schedule(p, strategy, rows or p.tokens, columns, 0, True)


def deferred(*sizes, item=4, columns=64, borrows=True):
    p = Problem(*sizes, Aten(item), in_forward=False, keeps=True)
    s = planner.schedule(p, "token-chunked", p.tokens, columns, 0, borrows)
    assert s.deferred and s.keeps and bool(s.borrowed) == (borrows and item == 2)
    return s


@settings(max_examples=300)
@given(schedules())
@example(deferred(20, 25, 400))  # logits are in the weight gradient until the backward
@example(deferred(20, 25, 400, item=2))
@example(deferred(20, 25, 400, item=2, borrows=False))
@example(deferred(30, 18, 390))
@example(deferred(30, 18, 390, item=2))
@example(deferred(30, 18, 3000, columns=960))  # narrower slices wait, and others are parked
@example(deferred(30, 18, 3000, columns=960, item=2))
@example(whole(30, 18, 3000, columns=960))
@example(whole(30, 29, 3000, columns=960))  # all classes wait, in narrower slices
@example(whole(20, 25, 400))  # all logits are stored in the weight gradient
@example(whole(20, 25, 400, item=2))  # the rows of the first classes also store sums
@example(whole(30, 18, 390))  # the logits of some rows are stored
@example(whole(30, 18, 390, item=2))
@example(whole(30, 2, 390, item=2, columns=70))  # the weight gradient has no room
@example(whole(29, 18, 390, rows=16))
@example(whole(20, 25, 300, item=2, strategy="vocab-sliced"))
def test_every_logit_is_intact_when_read_and_is_added_once(s):
    p, seen = s.problem, carry_out(s)
    widths = waiting_widths(p, s.strategy, s.rows, s.columns, s.borrowed)
    event(s.strategy)
    event("waits" if any(step.place.borrowed for step in s.steps()) else "does not wait")
    event("shrinks" if widths and min(widths[1:], default=0) > widths[0] else "does not shrink")
    event("borrows" if s.borrowed else "borrows nothing")
    event("keeps" if s.keeps else "does not keep")
    borrowed = slice(0, s.borrowed)
    assert (seen["update"] == 1).all()
    if not any(p.grads):
        assert not seen["input"].any() and not seen["weight"].any() and not seen["gradient"].any()
        return
    if s.strategy == RUNNING_RESCALE:
        assert not seen["gradient"].any()
        assert all(step.phases == UPDATE | EXPONENTIALS for step in s.steps())
    else:
        assert (seen["gradient"][:, s.borrowed :] == 1).all()
        computed = seen["gradient"][:, borrowed]
        # With one chunk, one tile stays for the second gradient.
        assert (computed[:, : s.columns] == (1 if s.num_chunks == 1 else 2)).all()
        assert (computed[:, s.columns :] == 2).all()
        assert (seen["weight"] == 1).all()
    assert (seen["input"] == p.grads[0]).all()


@settings(max_examples=300)
@given(schedules())
def test_steps_by_size_are_all_steps(s):
    """The cost of a plan is the cost of each size of tile times its number."""
    counted = collections.Counter()
    for step in s.steps():
        rows, classes = step.rows.stop - step.rows.start, step.classes.stop - step.classes.start
        origin = 0 if step.source is None else 1 if step.source is step.place else 2
        if rows and classes:
            counted[rows, classes, origin, step.phases, step.adds] += step.times
    assert counted == s.work
    products = 0
    for (rows, classes, origin, _, adds), times in counted.items():
        added = bool(adds & INPUT and s.problem.grads[0]) + bool(
            adds & WEIGHT and s.problem.grads[1]
        )
        products += times * rows * classes * ((origin == 0) + added)
    flops, _, seconds = cost.predict(s, devices.GPUS["h200"])
    assert flops == 2 * products * s.problem.hidden and math.isfinite(seconds) and seconds > 0


def test_the_forward_of_a_deferred_schedule_reads_every_logit_and_adds_none():
    for s in (deferred(20, 25, 400), deferred(30, 18, 390), deferred(20, 25, 400, item=2)):
        forward, backward = list(s.statistics()), list(s.gradients(kept=True))
        assert forward + backward == list(s.steps())
        assert not any(step.adds or step.phases & GRADIENT for step in forward)
        assert not any(step.phases & UPDATE for step in backward)
        again = sum(carry_out(s)["multiplied"].ravel()) - 2 * s.borrowed * s.problem.tokens
        assert again < 1.6 * s.problem.tokens * s.problem.vocab


def test_slices_of_waiting_logits_become_narrower_with_more_tokens_than_the_hidden_size():
    cpu, gpu = (Problem(8192, 4096, 151936, Aten(2, cuda=cuda)) for cuda in (False, True))
    widths = waiting_widths(gpu, TOKEN_CHUNKED, 8192, 32704)
    assert widths == [1984, 4032, 8128, 16320, 32704]
    assert waiting_widths(cpu, TOKEN_CHUNKED, 8192, 32704) == [448, 960, *widths]
    # Chunks of tokens add to the weight's gradient, so no logits are stored there.
    assert waiting_widths(gpu, TOKEN_CHUNKED, 4096, 32704) == [32704]


def test_nearly_all_memory_keeps_logits():
    """With one chunk, logits are kept in the tile and in the rows of the weight's gradient."""
    p = Problem(8192, 4096, 151936, Aten(4, cuda=True), in_forward=False, keeps=True)
    for columns in (14000, 32704, 70000):
        again = planner.make(planner.schedule(p, TOKEN_CHUNKED, 8192, columns)).products - 3
        floor = max(1 - columns / p.vocab - p.hidden / p.tokens, 0)
        assert floor <= again <= floor + 0.01


def test_ranks_merge_a_chunk_while_the_next_is_multiplied():
    p = Problem(20, 8, 100, Aten(4), several=True)
    whole = planner.schedule(p, "token-chunked", 10, 100)
    tiles = [(step.rows.start // whole.rows, step.phases) for step in whole.steps()]
    u, m, g = UPDATE, MERGE, GRADIENT
    assert tiles == [(0, u), (0, m), (1, u), (1, m), (0, g), (1, g)]
    assert whole.tiles == 2
    sliced = planner.schedule(p, "vocab-sliced", 10, 50).statistics()
    assert [step.phases for step in sliced] == [u, u, u, m, u, m, m]
    # With slices of different sizes, ranks have different steps, so there is no second tile.
    uneven = planner.schedule(replace(p, alike=False), "token-chunked", 10, 100)
    assert uneven.tiles == 1 and 2 * cost.peak(uneven) > cost.peak(whole) > cost.peak(uneven)
    assert planner.schedule(p, "token-chunked", 20, 100).tiles == 1


def test_the_cost_of_thousands_of_tiles_takes_a_few_steps():
    p = Problem(8192, 4096, 128256, Aten(2, cuda=True))
    s = planner.schedule(p, "vocab-sliced", 8192, 64)
    assert s.num_slices == 2004
    assert len(list(s.steps(every=False))) <= 8 and len(list(s.steps())) == 2 * 2004 + 2
