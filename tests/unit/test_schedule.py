import pytest

from trainer.config.scheduler import ConstantConfig, CosineConfig, LinearConfig, WSDConfig
from trainer.schedule import build_schedule


def test_no_warmup_step_is_wasted_at_zero():
    factor = build_schedule(ConstantConfig(warmup_steps=4), 10)
    assert [factor(n) for n in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_its_floor_at_the_end():
    factor = build_schedule(LinearConfig(min_lr_ratio=0.5), 10)
    assert [factor(n) for n in (0, 5, 10, 99)] == [1.0, 0.75, 0.5, 0.5]


def test_cosine_is_half_way_in_the_middle():
    factor = build_schedule(CosineConfig(warmup_ratio=0.5), 8)
    assert factor(3) == 1.0
    assert factor(6) == pytest.approx(0.5)
    assert factor(8) == pytest.approx(0.0)


def test_wsd_warms_up_stays_and_decays():
    factor = build_schedule(WSDConfig(warmup_ratio=0.2, decay_ratio=0.4, decay="linear"), 10)
    assert [round(factor(n), 3) for n in range(10)] == [
        0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25,
    ]  # fmt: skip


def test_one_step_of_any_schedule_trains():
    for config in (ConstantConfig(), LinearConfig(), CosineConfig(warmup_ratio=0.1), WSDConfig()):
        assert build_schedule(config, 1)(0) == 1.0


def test_phases_that_do_not_fit_are_refused():
    message = r"warmup_steps=8 and scheduler.decay_steps=5 with max_steps=10: 8 warm-up and 5 decay"
    with pytest.raises(ValueError, match=message):
        build_schedule(WSDConfig(warmup_steps=8, decay_steps=5), 10)
