"""Sets of ops, of shapes and of calls, to which policies are reduced for the library."""

import torch

from storage_ops import policies
from storage_ops.checkpoint.selective import op_sets


def test_sets_of_offloaded_ops():
    mm = policies.save("aten.mm.default")
    both = policies.union(mm, policies.save("aten.bmm.default"))
    shaped, away = policies.save_mm_shapes([(1, 2)]), policies.offload(both)
    every = frozenset({"aten::mm", "aten::bmm"})
    assert op_sets.ops_saved(away).offloaded == every
    second = op_sets.OpsSaved(dict.fromkeys(every, op_sets.ALL), 2, every)
    assert op_sets.ops_saved(policies.every_kth(away, 2)) == second
    assert op_sets.ops_saved(policies.offload(policies.every_kth(both, 2))) == second
    assert op_sets.ops_saved(policies.union(mm, away)).offloaded == {"aten::bmm"}
    assert op_sets.ops_saved(policies.difference(away, mm)).offloaded == {"aten::bmm"}
    assert op_sets.ops_saved(policies.difference(mm, away)) == ({}, 1, frozenset())
    assert op_sets.ops_saved(policies.union(shaped, away)) is None  # by the shape of each product


def test_sets_of_calls():
    mm = policies.save_calls([("aten::mm", 0), ("aten::mm", 2)])
    away = policies.offload(policies.save_calls([("aten::mm", 1), ("aten::mm", 2)]))
    calls = op_sets.ops_saved(policies.union(mm, away)).calls
    assert calls == {"aten::mm": op_sets.Calls("aten::mm", frozenset({0, 2}), frozenset({1}))}
    fused = op_sets.ops_saved(policies.save_calls([("attention", 3)])).calls
    assert len(fused) > 1 and set(fused.values()) == {op_sets.Calls("attention", frozenset({3}))}
    assert op_sets.ops_saved(policies.save_calls([("aten::view", 0)])).chosen == {}  # no result
    nothing = policies.save_mm_shapes([])
    assert op_sets.ops_saved(policies.union(nothing, mm, nothing)) == op_sets.ops_saved(mm)
    library = torch.library.Library("storage_ops_test_calls", "DEF")
    library.define("twice(Tensor x) -> Tensor")  # it may be composite, or share memory
    policy = policies.save_calls([("storage_ops_test_calls::twice", 0)])
    assert op_sets.ops_saved(policy) is None
    library._destroy()


def test_sets_of_shapes():
    shapes = [frozenset({(1, 2)}), frozenset({(1, 2), (3, 4)}), frozenset()]
    sets = [op_sets.Shapes(named, others) for named in shapes for others in (False, True)]

    def has(shapes, shape):
        return (shape in shapes.named) != shapes.others

    for first in sets:
        for second in sets:
            for shape in ((1, 2), (3, 4), (5, 6)):
                both = has(first, shape), has(second, shape)
                assert has(first.with_those_of(second), shape) == (both[0] or both[1])
                assert has(first.without(second), shape) == (both[0] and not both[1])
