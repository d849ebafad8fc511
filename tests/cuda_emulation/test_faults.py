"""What the emulation is for: each fault that is planted in the kernel is found."""

import os
import re

import pytest

from .faults import FAULTS, found, plant, planted


@pytest.fixture(scope="module")
def kernel(compiled, tmp_path_factory):
    return planted(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_planted_faults_are_found_and_nothing_else(kernel, fault):
    kernel.seed(int.from_bytes(os.urandom(4), "little"))
    plant(kernel, fault)
    says = found(kernel)
    if fault:
        assert re.search(FAULTS[fault][-1], says)
    else:
        assert says == ""
