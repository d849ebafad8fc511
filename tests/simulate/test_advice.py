"""Warnings of `will_it_fit` and `fit` about arguments that are allowed and rarely meant."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import storage_ops
from storage_ops import cli

from .. import hf_config


class Labelled(nn.Linear):
    """A model that computes its loss if it gets labels, as those of transformers do."""

    def forward(self, x, labels=None):
        y = super().forward(x)
        return y if labels is None else F.cross_entropy(y, labels)


MODEL, X, LABELS = Labelled(8, 8), torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)
WITH_LABELS = [(X, LABELS), {"x": X, "labels": LABELS}, [(X, LABELS), (X, LABELS)]]
WITHOUT = [X, {"x": X}, {"x": X, "labels": None}, [(X, LABELS), (X,)]]


def calls_of(model, batch, **options):
    return {
        "will_it_fit": lambda: storage_ops.memory.will_it_fit(model, batch, "1GiB", **options),
        "fit": lambda: storage_ops.fit(model, batch, "1GiB", **options),
    }


@pytest.mark.parametrize("name", ["will_it_fit", "fit"])
@pytest.mark.parametrize("batch", WITHOUT, ids=["tensor", "dict", "None", "list"])
def test_a_batch_without_labels_warns(name, batch):
    with pytest.warns(UserWarning, match=f"{name}: `batch` has no labels, so the loss is the sum"):
        calls_of(MODEL, batch)[name]()


@pytest.mark.parametrize("name", ["will_it_fit", "fit"])
@pytest.mark.parametrize(
    ("model", "batch", "options"),
    [*((MODEL, batch, {}) for batch in WITH_LABELS), (nn.Linear(8, 8), X, {}),
     (MODEL, X, {"loss": lambda y: y.sum()})],
    ids=["tuple", "dict", "list", "no labels in forward", "loss"],
)  # fmt: skip
def test_other_batches_do_not_warn(name, model, batch, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls_of(model, batch, **options)[name]()


@pytest.mark.in_turn
@pytest.mark.parametrize("options", [[], ["--autocast", "bf16"]], ids=["", "autocast"])
def test_a_command_without_labels_does_not_warn(options, tmp_path, capsys):
    """`--labels none` asks for the sum of the output."""
    pytest.importorskip("transformers")
    path = hf_config.write(tmp_path, hidden_size=64, num_hidden_layers=2, vocab_size=128)
    words = ["will-it-fit", "--hf-config", path, "--seq", "16", "--labels", "none", *options]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cli.main(words) == 0
    assert not [w for w in caught if "has no labels" in str(w.message)]
