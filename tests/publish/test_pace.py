"""How often members look."""

from __future__ import annotations

import pytest

from cachefs.publish.pace import BUSY, RATE, busy, pace


@pytest.mark.parametrize(("members", "seconds"), [(1, 1.0), (3, 1.0), (50, 1.0), (51, 1.02), (512, 10.24)])
def test_members_of_a_busy_run_share_a_rate(members: int, seconds: float) -> None:
    """The default poll of 15 s plays no part while something is open."""
    assert busy(members, 15.0) == pytest.approx(seconds)
    assert members / busy(members, 15.0) <= RATE


def test_a_short_poll_is_a_bound_for_every_look() -> None:
    """Who asks for looks every 0.2 s gets them, while few share the rate."""
    assert busy(3, 0.2) == 0.2 < BUSY
    assert busy(100, 0.2) == 2.0
    assert pace(3, 15.0) == 15.0
