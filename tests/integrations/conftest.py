import os
import sys

import pytest
import torch


@pytest.fixture
def batch():
    ids = torch.randint(3, 97, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.fixture(autouse=True)
def no_state_of_accelerate():
    """Reset Accelerate's state: Trainer of transformers 4 reuses an earlier mixed precision."""
    yield
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
