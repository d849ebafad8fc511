"""Outputs of patched models that are not the dict-like classes of transformers."""

import dataclasses
from typing import NamedTuple

import pytest
import torch

import storage_ops

from .test_deferred_logits import Toy, V


class Named(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass
class Fields:
    loss: torch.Tensor
    logits: torch.Tensor


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [Named, Fields, lambda **items: list(items.values())])
def test_types_of_outputs(kind, training):
    """A dict, as transformers returns, is not the only one."""

    class Other(Toy):
        def forward(self, ids, labels=None):
            return kind(**super().forward(ids, labels))

    model, ids = Other().train(training), torch.randint(V, (2, 5))
    expected = model(ids, labels=ids)
    with storage_ops.patch_causal_lm(model):
        outputs = model(ids, labels=ids)
    assert type(outputs) is type(expected)
    values, right = (
        value if isinstance(value, (tuple, list)) else list(vars(value).values())
        for value in (outputs, expected)
    )
    torch.testing.assert_close(values[0], right[0])
    assert values[1] is None if training else torch.equal(values[1], right[1])


def test_results_per_token_in_outputs_of_other_types():
    class Other(Toy):
        def forward(self, ids, labels=None):
            return self.kind(**super().forward(ids, labels))

    model, ids = Other(), torch.randint(V, (2, 5))
    storage_ops.patch_causal_lm(model, returns=("loss", "nll"))
    model.kind = Fields
    nll = model(ids, labels=ids).nll
    model.kind = Named
    assert torch.equal(model(ids, labels=ids)[-1], nll)
    model.kind = lambda loss, logits: loss
    with pytest.raises(TypeError, match=r"`returns` has nll, .* a Tensor, has no place"):
        model(ids, labels=ids)
