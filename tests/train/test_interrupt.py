"""Ctrl-C once, twice, where nothing would be lost, and outside the main thread."""

import signal
import threading

import pytest

from logitless.train.interrupt import Interrupt


def _press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_press_is_a_request_and_the_second_stops():
    said = []
    interrupt = Interrupt(said.append)
    with interrupt.heard():
        assert not interrupt.requested
        _press()
        assert interrupt.requested
        assert len(said) == 1
        with pytest.raises(KeyboardInterrupt):
            _press()


def test_work_that_can_be_given_up_stops_at_the_first_press():
    interrupt = Interrupt(print)
    with interrupt.heard():
        with pytest.raises(KeyboardInterrupt), interrupt.at_once():
            _press()
        assert interrupt.requested


def test_afterwards_ctrl_c_is_what_it_was_before():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt(print).heard():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_in_another_thread_nothing_is_touched():
    before, reached = signal.getsignal(signal.SIGINT), []

    def work():
        with Interrupt(print).heard():
            reached.append(signal.getsignal(signal.SIGINT) == before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert reached == [True]
