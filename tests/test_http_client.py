"""Where a key goes, which addresses are taken, and how long a failing request is repeated."""

import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse, IncompleteRead

import pytest

from logitless.errors import ConfigurationError, EngineError
from logitless.http_client import (
    HttpClient,
    PassingFault,
    Patience,
    Refusal,
    UnusableAnswer,
    api_key,
)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a:1", "http://", "http://key@127.0.0.1:1", "http://a:port"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigurationError, match=r"http://127\.0\.0\.1:8000"):
        HttpClient(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1/v0", "http://[::1]:1", "https://far.org"])
def test_a_key_goes_to_loopback_or_over_tls(url):
    HttpClient(url, api_key="secret")


def test_a_key_does_not_cross_a_network_in_the_clear():
    with pytest.raises(ConfigurationError, match="https, or a server on loopback"):
        HttpClient("http://10.0.0.1:8000", api_key="secret")
    HttpClient("http://10.0.0.1:8000")


def test_a_key_is_read_from_a_file_or_the_environment(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("secret\n")
    monkeypatch.setenv("A_KEY", "other")
    assert api_key(str(tmp_path / "key"), None) == "secret"
    assert api_key(None, "A_KEY") == "other"


def test_a_key_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("A_KEY", raising=False)
    (tmp_path / "empty").write_text(" \n")
    for file, variable in ((str(tmp_path / "absent"), None), (str(tmp_path / "empty"), None), (None, "A_KEY")):
        with pytest.raises(ConfigurationError, match="an API key in"):
            api_key(file, variable)


def test_a_request_that_is_given_up_while_it_connects_ends(monkeypatch):
    connect = HTTPConnection.connect
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = HttpClient(f"http://127.0.0.1:{silent.getsockname()[1]}")

        def given_up(connection):
            client.give_up()
            connect(connection)

        monkeypatch.setattr(HTTPConnection, "connect", given_up)
        with pytest.raises(PassingFault, match="given up"):
            client.get("/")


@contextmanager
def client_of_a_server(answers, **options):
    """A client of a server that takes one request and then does what ``answers`` does with the socket."""

    def answered():
        with server.accept()[0] as accepted:
            accepted.recv(1 << 16)
            answers(accepted)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answered)
        thread.start()
        yield HttpClient(f"http://127.0.0.1:{server.getsockname()[1]}", **options)
        thread.join()


def test_a_request_that_is_given_up_in_the_middle_of_its_answer_ends(monkeypatch):
    read, reading = HTTPResponse.read1, threading.Event()

    def noted(response, size):
        reading.set()
        return read(response, size)

    def half(accepted):
        accepted.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        reading.wait(300)
        client.give_up()
        accepted.recv(1)  # until the client ends it

    monkeypatch.setattr(HTTPResponse, "read1", noted)
    with (
        client_of_a_server(half, seconds=60.0) as client,
        pytest.raises(PassingFault, match="IncompleteRead"),  # and not the 60 seconds of a request
    ):
        client.get("/")


def test_an_answer_that_breaks_off_leaves_no_socket_open(monkeypatch):
    connect, sockets = HTTPConnection.connect, []

    def noted(connection):
        connect(connection)
        sockets.append(connection.sock)

    def cut_off(accepted):
        accepted.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset

    monkeypatch.setattr(HTTPConnection, "connect", noted)
    with client_of_a_server(cut_off) as client, pytest.raises(PassingFault) as fault:
        client.get("/")
    assert isinstance(fault.value.__cause__, (ConnectionResetError, IncompleteRead))
    assert [each.fileno() for each in sockets] == [-1]


def endless(head, pause, count=1, after=b"\r\n\r\n"):
    """An answer of so many bytes after the other, until the client ends it."""

    def answers(accepted):
        with suppress(OSError):
            accepted.sendall(b"HTTP/1.0 " + head + after)
            while True:
                accepted.sendall(b"a" * count)
                time.sleep(pause)

    return answers


@pytest.mark.parametrize("after", [b"\r\n\r\n", b"\r\nA: ", b""], ids=["body", "headers", "status line"])
def test_an_answer_that_never_ends_is_given_up_after_the_seconds_of_a_request(after):
    answers = endless(b"200 OK", 0.01, 1000, after)
    with client_of_a_server(answers, seconds=0.3) as client, pytest.raises(PassingFault) as fault:
        client.get("/")
    assert isinstance(fault.value.__cause__, TimeoutError)


@pytest.mark.parametrize(
    ("head", "fault", "says"),
    [
        (b"200 OK", Refusal, "an answer of over 100 bytes"),
        (b"404 No", Refusal, "HTTP 404: aaaa"),
        (b"503 No", PassingFault, "HTTP 503: aaaa"),
    ],
)
def test_no_more_of_an_answer_is_read_than_its_bound(head, fault, says):
    with client_of_a_server(endless(head, 0, 4096), max_bytes=100) as client, pytest.raises(fault, match=says):
        client.get("/")


def _failing(*faults):
    left = list(faults)

    def attempt():
        if left:
            raise left.pop(0)
        return "done"

    return attempt


QUICK = Patience(give_up_seconds=30.0, first_wait_seconds=0.0)


def test_passing_faults_are_repeated_with_a_call_in_between_and_logged(caplog):
    seen = []
    done = QUICK.until_done(
        _failing(PassingFault("a"), PassingFault("b")),
        what="x",
        where="y",
        between=lambda fault: seen.append(str(fault)),
    )
    assert (done, seen) == ("done", ["a", "b"])
    assert [line.partition("; asking again for x")[0] for line in caplog.messages] == ["y: a", "y: b"]


def test_a_refusal_is_not_repeated():
    with pytest.raises(EngineError, match=r"x from y; given a refusal, HTTP 404: no. .*docs/servers.md"):
        QUICK.until_done(_failing(Refusal(404, "no")), what="x", where="y")


def test_waiting_ends_at_the_deadline_and_the_last_fault_is_named():
    with pytest.raises(EngineError, match=r"given b \(2 attempts in \d+ s\).*--resume"):
        Patience(give_up_seconds=0.03, first_wait_seconds=0.02).until_done(
            _failing(PassingFault("a"), PassingFault("b"), PassingFault("c")), what="x", where="y"
        )


@pytest.mark.parametrize("when", ["while it waits", "in what lies between"])
def test_what_is_stopped_is_not_asked_again(when):
    stopped, asked = threading.Event(), []

    def attempt():
        asked.append(1)
        if when == "while it waits":
            threading.Timer(0.05, stopped.set).start()
        raise PassingFault("down")

    wait = 300.0 if when == "while it waits" else 0.0
    with pytest.raises(EngineError, match="x from y; given down"):
        Patience(give_up_seconds=600.0, first_wait_seconds=wait).until_done(
            attempt, what="x", where="y", between=lambda fault: stopped.set(), stopped=stopped
        )
    assert asked == [1]


def test_unusable_answers_are_not_waited_for_as_long():
    faults = [UnusableAnswer("half")] * 3
    with pytest.raises(EngineError, match=r"given half \(3 attempts.*version of vLLM"):
        QUICK.until_done(_failing(*faults), what="x", where="y")
    mixed = [UnusableAnswer("half"), PassingFault("down"), UnusableAnswer("half"), UnusableAnswer("half")]
    assert QUICK.until_done(_failing(*mixed), what="x", where="y") == "done"
