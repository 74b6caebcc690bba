"""A signal once, twice, where nothing would be lost, and outside the main thread."""

import io
import signal
import threading
from unittest import mock

import pytest

from logitless.train.interrupt import Interrupt

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def _press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_scheduler_may_repeat_itself(number):
    said = []
    interrupt = Interrupt(said.append)
    with interrupt.heard():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert interrupt.signal == signal.SIGTERM
    assert len(said) == 1


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interrupt = Interrupt(print)
        with interrupt.heard():
            signal.raise_signal(signal.SIGHUP)
        assert not interrupt.requested
    finally:
        signal.signal(signal.SIGHUP, before)


class Pressed(io.RawIOBase):
    """Ctrl-C comes amid its first write."""

    pressed, written = False, b""

    def writable(self):
        return True

    def write(self, text):
        if not self.pressed:
            self.pressed = True
            _press()
        self.written += bytes(text)
        return len(text)


def test_a_press_amid_a_line_of_output_is_a_request_too_and_is_said(capfd):
    raw = Pressed()
    with io.TextIOWrapper(io.BufferedWriter(raw)) as stream:
        interrupt = Interrupt(lambda text: print(text, file=stream, flush=True))
        with interrupt.heard():
            print("block 1/3", file=stream, flush=True)
            assert interrupt.requested
    assert raw.written == b"block 1/3\n"
    assert capfd.readouterr().err == ("SIGINT: stopping after this step; Ctrl-C again stops at once without saving\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_is_a_request_that_is_said_by_name_and_ctrl_c_again_stops(number):
    said = []
    interrupt = Interrupt(said.append)
    with interrupt.heard():
        assert not interrupt.requested
        signal.raise_signal(number)
        assert interrupt.requested
        assert interrupt.signal == number
        assert len(said) == 1
        assert said[0].startswith(number.name)
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                _press()


def test_a_signal_amid_a_line_of_output_is_a_request_where_nothing_can_be_said_any_more(monkeypatch):
    monkeypatch.setattr("os.write", mock.Mock(side_effect=OSError(5, "the terminal is gone")))
    interrupt = Interrupt(mock.Mock(side_effect=RuntimeError("reentrant call")))
    with interrupt.heard():
        signal.raise_signal(signal.SIGHUP)
    assert interrupt.requested


@pytest.mark.parametrize("number", SIGNALS)
def test_work_that_can_be_given_up_stops_at_the_first_signal_and_its_giving_up_is_not_disturbed(number):
    interrupt, cleaned = Interrupt(print), []

    def work():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned.append(1)

    with interrupt.heard():
        with pytest.raises(KeyboardInterrupt), interrupt.at_once():
            work()
        assert interrupt.requested
        assert cleaned


def test_work_that_can_be_given_up_is_not_begun_after_a_request():
    interrupt = Interrupt(print)
    with interrupt.heard():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), interrupt.at_once():
            raise AssertionError("it was begun")


def test_afterwards_signals_are_what_they_were_before():
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupt(print).heard():
        assert all(signal.getsignal(n) != b for n, b in zip(SIGNALS, before, strict=True))
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_in_another_thread_nothing_is_touched():
    before, reached = signal.getsignal(signal.SIGINT), []

    def work():
        with Interrupt(print).heard():
            reached.append(signal.getsignal(signal.SIGINT) == before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert reached == [True]
