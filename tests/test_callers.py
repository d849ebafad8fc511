"""Warnings that show a line of the user's program."""

import functools
import gc
import runpy
import warnings
import weakref

import pytest
import torch

from storage_ops._callers import warn_caller


def test_a_warning_shows_the_callers_line():
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        torch.utils._pytree.tree_map(lambda _: warn_caller("here"), [1])
    assert [(str(w.message), w.filename) for w in record] == [("here", __file__)]


@pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
def test_a_library_in_another_folder_than_torch_is_not_shown(tmp_path, monkeypatch, name):
    folder = tmp_path / name
    folder.mkdir()
    trainer = folder / "trainer.py"
    trainer.write_text("def train(step):\n    step()\n")
    monkeypatch.syspath_prepend(folder)
    train = runpy.run_path(str(trainer))["train"]
    with pytest.warns(UserWarning, match="from a step") as record:
        train(functools.partial(warn_caller, "from a step"))
    assert [w.filename for w in record] == [__file__]


def test_variables_of_callers_are_freed_without_a_collection():
    """A frame in a cycle would keep the activations of every call around it."""

    def layer():
        activation = torch.ones(4)
        warn_caller("once more")
        return weakref.ref(activation)

    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert layer()() is None
    finally:
        gc.enable()
