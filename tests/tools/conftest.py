"""Hypothesis, for the tests of the tools: without its own limits on time, which a busy machine exceeds."""

from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
