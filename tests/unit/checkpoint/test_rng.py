import random

import numpy as np
import torch

from trainer.checkpoint.rng import restore_rng, rng_state


def draw() -> tuple:
    return (
        torch.rand(3).tolist(),
        np.random.standard_normal(3).tolist(),
        random.random(),
        random.gauss(0, 1),
    )


def test_generators_continue_where_they_were():
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    draw()  # an odd number of Gaussians leaves one in store in each generator
    states = rng_state()
    expected = draw()
    draw()
    restore_rng(states)
    assert draw() == expected


def test_states_are_byte_tensors():
    assert {state.dtype for state in rng_state().values()} == {torch.uint8}
