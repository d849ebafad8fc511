"""Every patched type of transformers has its own loss and gradients, or is refused by name."""

import os

import pytest

pytest.importorskip("transformers", minversion="5.0")

from . import sweep

EVERY = 16 if os.environ.get("CI") else 1  # test one in so many types


@pytest.mark.slow
@pytest.mark.parametrize("family", sweep.FAMILIES)
def test_every_type(family, monkeypatch):
    types = sweep.families()
    some = dict(list(types[family].items())[::EVERY])
    monkeypatch.setattr(sweep, "families", lambda: {family: some})
    rows = sweep.sweep()
    verdicts = [row[2] for row in rows]
    assert [row for row in rows if row[2] in ("different", "refused late")] == []
    assert verdicts.count("equal") > len(rows) // 2
    assert sweep.page(rows).count("|") > 10


def test_some_types_and_a_wrong_loss(monkeypatch):
    rows = sweep.sweep(["llama", "fsmt"])
    assert {row[1]: row[2] for row in rows} == {"llama": "equal", "fsmt": "refused"}
    assert "FSMTForConditionalGeneration" in rows[-1][3]
    monkeypatch.setattr(sweep.storage_ops, "patch_causal_lm", doubled)
    assert sweep.sweep(["llama"])[0][2] == "different"


def doubled(model, logits):
    """Patch a model with a wrong loss."""
    original = type(model).forward

    def forward(self, **kwargs):
        outputs = original(self, **kwargs)
        outputs.loss = outputs.loss * 2
        return outputs

    model.__class__ = type(type(model).__name__, (type(model),), {"forward": forward})
