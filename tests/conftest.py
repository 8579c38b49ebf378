"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# An example that takes long on a busy machine is no finding: nothing here is asserted about seconds.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")
