import math

import pytest

from trainer.loops.pretrain import bits_per_byte


def test_bits_per_byte_of_a_uniform_guess_over_bytes_is_eight():
    assert bits_per_byte(math.log(256), num_trained=10, num_bytes=10) == pytest.approx(8)


def test_bits_per_byte_do_not_depend_on_how_text_is_cut_into_tokens():
    assert bits_per_byte(3.0, 10, 40) == pytest.approx(bits_per_byte(1.5, 20, 40))
