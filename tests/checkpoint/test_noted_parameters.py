"""What a region notes of parameters is the same in the library and in Python."""

import torch
from torch import nn

from storage_ops.checkpoint.state import parameters

from .paths import both_paths

path = both_paths(parameters)


def test_writes_and_frozen_parameters(path):
    with torch.inference_mode():
        without_version = nn.Parameter(torch.ones(1))
    given = [*(nn.Parameter(torch.ones(2)) for _ in range(3)), without_version]
    noted = parameters.noted(given)
    assert isinstance(noted, parameters.Noted) == (path == "Python")
    assert noted.written() == [] and noted.frozen_or_not() == []
    with torch.no_grad():
        given[1].mul_(2)
        given[1].add_(1)
    with torch.inference_mode():
        without_version.mul_(2)
    given[0].requires_grad_(False)
    assert noted.written() == [(1, 0)]
    assert noted.frozen_or_not() == [(0, True)]
    noted.note_versions()
    assert noted.written() == []
    with torch.no_grad():
        given[1].add_(1)
    assert noted.written() == [(1, 2)]
    given[0].requires_grad_(True)
    assert noted.frozen_or_not() == []
    assert parameters.noted([]).written() == []
