"""Kernels compile for a GPU that is not here, fit into it, and keep their values in registers.

Those of attention and experts are compiled where their code is looked at.
"""

import pytest

from tests.support.separate_process import compiled


@pytest.mark.kernel_change
def test_norms_rotation_sampling_and_copies_compile_for_compute_capability_9_without_spilling():
    compiled("compile_cases_small")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_configuration_of_the_shapes_that_are_measured_fits_too():
    compiled("compile_targets")
