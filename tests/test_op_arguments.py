"""The functions for an op's tensors return the tensors of pytree in the same order."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from storage_ops._op_arguments import tensors_in, with_tensors

LEAVES = st.one_of(
    st.builds(torch.ones, st.integers(0, 3)),
    st.sampled_from([None, 2, 0.5, "sum", torch.float32, torch.device("cpu")]),
)
VALUES = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), parts),
    ),
    max_leaves=8,
)


@given(VALUES)
def test_tensors_are_listed_and_replaced_as_by_pytree(value):
    expected = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    listed = tensors_in(value)
    assert list(map(id, listed)) == list(map(id, expected))
    numbers = {id(t): n for n, t in enumerate(listed)}
    changed = with_tensors(lambda t: numbers[id(t)], value)
    assert changed == tree_map_only(Tensor, lambda t: numbers[id(t)], value)


def test_named_results_of_torch_are_tuples():
    out = torch.ones(2, 3).max(1)
    assert tensors_in(out) == [out.values, out.indices]
