import threading

import pytest

from trainer.checkpoint.background import BackgroundWrite


def test_waiting_for_nothing_returns_at_once():
    BackgroundWrite().wait()


def test_function_runs_on_a_thread_of_its_own_and_is_waited_for():
    write, go, ran_on = BackgroundWrite(), threading.Event(), []

    def work() -> None:
        assert go.wait(10)
        ran_on.append(threading.current_thread())

    write.start(work)
    assert ran_on == []
    go.set()
    write.wait()
    assert ran_on
    assert ran_on != [threading.current_thread()]


def test_failure_is_raised_once_where_it_is_waited_for():
    write = BackgroundWrite()

    def fail() -> None:
        raise OSError("disk full")

    write.start(fail)
    with pytest.raises(OSError, match="disk full"):
        write.wait()
    write.wait()
