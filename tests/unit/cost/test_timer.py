"""Seconds by the clock and of the processor."""

import time

from shoal.cost.timer import Timer


def test_waiting_takes_time_but_is_no_work():
    timer = Timer()
    with timer("wait") as waited:
        time.sleep(0.2)
    with timer("work") as worked:
        begun = time.process_time()
        while time.process_time() - begun < 0.05:
            pass
    assert waited.cpu_s < 0.1 < waited.seconds
    assert worked.cpu_s >= 0.05
    assert set(timer.seconds) == {"wait", "work"}
