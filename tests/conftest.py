"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# That an example or its making takes long on a busy machine is no finding: nothing is asserted about seconds.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")
