"""Levels of graphs with known nodes and blocks, compared with levels counted by hand."""

import random

import torch

from storage_ops.foundation.lifetimes import Moment, levels_during


def test_a_block_lives_until_its_last_reader():
    moments = [
        Moment("a", {"a": 8}),
        Moment("b", {"b": 4}, ["a"]),
        Moment("c", {"c": 2}, ["b"]),  # a was freed
        Moment("output", reads=["c"]),
    ]
    assert levels_during(moments) == [8, 12, 6, 2]


def test_unread_blocks_end_at_once():
    assert levels_during([Moment("a", {"a": 8}), Moment("b", {"b": 4})]) == [8, 4]


def test_blocks_that_no_node_allocates_do_not_count():
    assert levels_during([Moment("a", {"a": 8}, ["input"])]) == [8]


def test_a_block_that_is_named_twice_is_allocated_once():
    moments = [Moment("a", {"a": 8}), Moment("view", {"a": 8}, ["a"]), Moment("b", {"b": 1}, ["a"])]
    assert levels_during(moments) == [8, 8, 9]


def test_scratch_is_allocated_only_during_its_node():
    moments = [Moment("a", {"a": 8}, scratch=3), Moment("b", {"b": 1}, ["a"])]
    assert levels_during(moments) == [11, 9]


def test_one_block_is_overwritten_if_it_ends_and_has_the_size():
    steps = [Moment("a", {"a": 8}), Moment("b", {"b": 8}), Moment("c", {"c": 4}, ["a", "b"])]

    def last(overwrites, more=()):
        moments = [*steps, Moment("d", {"d": 8}, ["a", "b", "c"], overwrites=overwrites)]
        moments += [Moment("e", reads=[key, "d"]) for key in more]
        return levels_during(moments)[3]

    assert last([]) == 28
    assert last(["a"]) == last(["a", "b"]) == 20  # only one of them
    assert last(["c"]) == 28  # another size
    assert last(["a"], more=["a"]) == 28  # a later node reads it


def test_no_moments():
    assert levels_during([]) == []


def test_random_graphs_against_a_count_by_hand():
    draw = random.Random(torch.initial_seed())
    for _ in range(50):
        moments, keys = [], []
        for i in range(20):
            reads = draw.sample(keys, min(len(keys), draw.randint(0, 3)))
            makes = {(i, j): draw.randint(1, 9) for j in range(draw.randint(0, 2))}
            moments.append(Moment(str(i), makes, reads, draw.randint(0, 5)))
            keys += makes
        sizes = {key: n for m in moments for key, n in m.makes.items()}
        first = {key: i for i, m in enumerate(moments) for key in m.makes}
        last = {key: i for i, m in enumerate(moments) for key in (*m.makes, *m.reads)}
        expected = [
            sum(sizes[key] for key in sizes if first[key] <= i <= last[key]) + m.scratch
            for i, m in enumerate(moments)
        ]
        assert levels_during(moments) == expected
