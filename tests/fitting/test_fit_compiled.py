"""A model with a plan may be compiled: what the plan recomputes is recomputed there too."""

import copy
import re

import pytest
import torch

import storage_ops

from .models import gpt, llama
from .test_fit import gradients

ADAM = torch.optim.AdamW


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: gpt(0.0), llama], ids=["gpt", "llama"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_gradients_of_a_compiled_model_with_a_plan(make, share):
    torch._dynamo.reset()
    model, batch = make()
    plain = copy.deepcopy(model)
    high = storage_ops.memory.simulate_step(model, batch, optimizer=ADAM).peak_bytes
    with pytest.raises(ValueError, match="smallest") as error:
        storage_ops.fit(model, batch, 1, None, ADAM)
    low = int(re.findall(r"\((\d+) bytes\)", str(error.value))[-1])
    storage_ops.fit(model, batch, int(low + share * (high - low)), None, ADAM).apply()
    saved = []

    def pack(t):
        saved.append(t.untyped_storage())
        return t

    def kept(model):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            gradients(model, batch)
        return sum({s.data_ptr(): s.nbytes() for s in saved}.values())

    ours, right = (torch.compile(m, backend="aot_eager") for m in (model, plain))
    for one, other in zip(gradients(ours, batch)[:-1], gradients(plain, batch)[:-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert kept(ours) < kept(right)
