"""No unit test fails because the machine is slow."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")
