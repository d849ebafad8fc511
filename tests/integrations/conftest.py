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
