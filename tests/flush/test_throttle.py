"""The bandwidth limit."""

from __future__ import annotations

import pytest
import trio

from cachefs.flush.throttle import Throttle

MIB = 1 << 20


async def test_many_senders_together_stay_below_the_rate(autojump_clock):
    throttle = Throttle(10 * MIB)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(throttle.take, 2 * MIB)
    # The last one may start when the 98 MiB before it have had their time.
    assert trio.current_time() - began == pytest.approx((50 - 1) * 0.2)


async def test_an_idle_time_is_not_saved_up(autojump_clock):
    throttle = Throttle(10 * MIB)
    await throttle.take(10 * MIB)
    await trio.sleep(100)
    began = trio.current_time()
    await throttle.take(10 * MIB)
    await throttle.take(1)
    assert trio.current_time() - began == pytest.approx(1.0)


async def test_no_rate_is_no_limit(autojump_clock):
    began = trio.current_time()
    await Throttle(0).take(1 << 50)
    await Throttle(0).take(1)
    assert trio.current_time() == began
