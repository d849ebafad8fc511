"""C++ code and Python note the same versions and flags of a region's parameters."""

import torch
from torch import nn

from storage_ops.checkpoint.state import parameters

from .paths import both_paths

path = both_paths(parameters)


def test_writes_and_frozen_parameters(path):
    with torch.inference_mode():
        without_version = nn.Parameter(torch.ones(1))
    tensors = [*(nn.Parameter(torch.ones(2)) for _ in range(3)), without_version]
    noted = parameters.noted(tensors)
    assert isinstance(noted, parameters.Noted) == (path == "Python")
    assert noted.written() == [] and noted.frozen_or_not() == []
    with torch.no_grad():
        tensors[1].mul_(2)
        tensors[1].add_(1)
    with torch.inference_mode():
        without_version.mul_(2)
    tensors[0].requires_grad_(False)
    assert noted.written() == [(1, 0)]
    assert noted.frozen_or_not() == [(0, True)]
    noted.note_versions()
    assert noted.written() == []
    with torch.no_grad():
        tensors[1].add_(1)
    assert noted.written() == [(1, 2)]
    tensors[0].requires_grad_(True)
    assert noted.frozen_or_not() == []
    assert parameters.noted([]).written() == []
