"""Hypothesis draws the same examples every time: a red test is the change's doing, never the day's."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("simtrain", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("simtrain")
