"""A time limit by the clock."""

import threading
import time

import pytest

from resnet8ptq.core.alarm import AlarmError, time_limit


def test_code_beyond_its_limit_is_interrupted():
    begun_s = time.monotonic()
    with pytest.raises(AlarmError, match="minutes="), time_limit(0.05):
        while time.monotonic() - begun_s < 10:
            time.sleep(0.01)
    assert time.monotonic() - begun_s < 5


def test_nothing_is_interrupted_after_the_block():
    with time_limit(0.05):
        pass
    time.sleep(0.1)


@pytest.mark.parametrize("seconds", [None, 10.0])
def test_code_within_its_limit_ends(seconds):
    with time_limit(seconds):
        done = sum(range(10))
    assert done == 45


def test_another_thread_has_no_limit():
    ended: list[bool] = []

    def work() -> None:
        with time_limit(0.01):
            time.sleep(0.05)
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [True]
