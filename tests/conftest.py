"""What holds for every test: properties are tried on the same examples, without a clock."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "trainer",
    deadline=None,
    derandomize=True,
    # It would fail a test on a busy machine.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("trainer")
