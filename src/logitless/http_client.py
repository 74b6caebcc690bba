"""JSON over HTTP: one request, or one that is repeated until a deadline.

Redirects are not followed and proxies not used, so that an API key goes to the named server only.
"""

import http.client
import io
import ipaddress
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from logitless.errors import ConfigurationError, EngineError

logger = logging.getLogger("logitless")

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAX_ERROR_BYTES = 1 << 16
_MAX_UNUSABLE = 3
"""Unusable answers in a row at which a request is not repeated any more."""
_UNREACHABLE = (
    "Start it, look into its log, and go on with --resume. An engine's server may take rollout.engine.give_up_seconds"
    " to come back."
)
_UNUSABLE = "Use a version of vLLM that docs/servers.md names, with the flags listed there."
T = TypeVar("T")


class Fault(Exception):
    """A request failed; the message says why."""


class PassingFault(Fault):
    """The server was unreachable, too slow, or failed: the same request may succeed later."""


class UnusableAnswer(PassingFault):
    """The server's answer lacks what was requested."""


class Refusal(Fault):
    """The server refuses the request, and would again.

    Args:
        status: HTTP status.
        why: the server's message.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"HTTP {status}: {why}")
        self.status = status


class HttpClient:
    """Requests to one server, from any number of threads.

    Args:
        url: such as ``http://127.0.0.1:8000``; its path is a prefix of every request's path.
        api_key: sent as a bearer token; only to loopback or over TLS.
        seconds: the most time a request may take.
        max_bytes: the longest answer.

    Raises:
        ConfigurationError: another kind of address, or a key that would be sent unencrypted.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, seconds: float = 600.0, max_bytes: int = 1 << 30
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or "@" in parts.netloc:
            raise ConfigurationError(
                needed="an address such as http://127.0.0.1:8000",
                given=repr(url),
                remedy="Name the host and the port; a key belongs into a file or the environment.",
            )
        if api_key is not None and parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ConfigurationError(
                needed="https, or a server on loopback, where there is an API key",
                given=url,
                remedy="Use an https address, or a tunnel to loopback.",
            )
        self.url, self.seconds, self.max_bytes = url.rstrip("/"), seconds, max_bytes
        self._host, self._port, self._tls = parts.hostname, port, parts.scheme == "https"
        self._path, self._key = parts.path.rstrip("/"), api_key
        self._open: set[socket.socket] = set()
        self._times_given_up = 0
        self._lock = threading.Lock()

    def get(self, path: str) -> Any:
        """The answer to GET."""
        return self.request("GET", path)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = None) -> Any:
        """The answer to POST with a JSON body."""
        return self.request("POST", path, body or {}, seconds=seconds)

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = None
    ) -> Any:
        """One request. A JSON answer is parsed, other text stays text, an empty answer is None.

        Raises:
            PassingFault: no connection, no answer in time, an answer that breaks off, or a temporary status.
            Refusal: any other status than success, or an answer of over ``max_bytes``.
        """
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        seconds = self.seconds if seconds is None else seconds
        connection, end = kind(self._host, self._port, timeout=seconds), time.monotonic() + seconds
        with self._lock:
            before = self._times_given_up
        connected = None
        try:
            connection.connect()
            connected = connection.sock
            with self._lock:
                if self._times_given_up != before:  # give_up ran while this connected
                    raise ConnectionAbortedError("the request was given up")
                self._open.add(connected)
            headers = {"Content-Type": "application/json", "Connection": "close"}
            if self._key is not None:
                headers["Authorization"] = f"Bearer {self._key}"
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, content, headers)
            with http.client.HTTPResponse(connected, method=method) as response:
                response.fp = io.BufferedReader(_UntilEnd(response.fp, connected, end))
                response.begin()
                max_bytes = self.max_bytes if 200 <= response.status < 300 else _MAX_ERROR_BYTES
                content = _read(response, max_bytes)
                return _parsed(response.status, response.headers.get_content_type(), content, max_bytes)
        except ssl.SSLCertVerificationError as error:
            raise Refusal(0, f"the certificate of {self.url}: {error}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PassingFault(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        finally:
            if connected is not None:
                with self._lock:
                    self._open.discard(connected)
            connection.close()

    def give_up(self) -> None:
        """End every request under way; its caller gets a ``PassingFault``."""
        with self._lock:
            self._times_given_up += 1
            for connected in self._open:
                with suppress(OSError):  # it has just ended
                    connected.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Patience:
    """How long failing requests are repeated.

    Args:
        give_up_seconds: from the first failure in a row to the last attempt.
        first_wait_seconds: before the second attempt; each further wait is twice as long.
        longest_wait_seconds: the longest wait.

    Example:
        >>> tries = iter([PassingFault("down"), 7])
        >>> def ask():
        ...     answer = next(tries)
        ...     if isinstance(answer, Fault):
        ...         raise answer
        ...     return answer
        >>> Patience(first_wait_seconds=0.0).until_done(ask, what="an answer", where="a server")
        7
    """

    give_up_seconds: float = 300.0
    first_wait_seconds: float = 0.5
    longest_wait_seconds: float = 15.0

    def until_done(
        self,
        attempt: Callable[[], T],
        *,
        what: str,
        where: str,
        between: Callable[[Fault], None] | None = None,
        stopped: threading.Event | None = None,
    ) -> T:
        """The result of the first attempt that succeeds; each further one is logged.

        Args:
            attempt: one request.
            what, where: for the error.
            between: called with the fault before each further attempt; what it raises ends the attempts.
            stopped: set it to end the attempts from another thread.

        Raises:
            EngineError: a refusal, no success until the deadline, or too many unusable answers.
        """
        stopped = stopped or threading.Event()
        begun, first, wait, unusable, attempts = time.monotonic(), None, self.first_wait_seconds, 0, 0
        while True:
            attempts += 1
            try:
                if stopped.is_set():
                    raise PassingFault("the request was given up")
                return attempt()
            except Refusal as refusal:
                raise EngineError(
                    needed=f"{what} from {where}", given=f"a refusal, {refusal}", remedy=_remedy(refusal.status)
                ) from refusal
            except PassingFault as fault:
                now = time.monotonic()
                first = now if first is None else first
                unusable = unusable + 1 if isinstance(fault, UnusableAnswer) else 0
                late = now + wait - first > self.give_up_seconds
                over = late or unusable >= _MAX_UNUSABLE
                if not over:
                    left = self.give_up_seconds - (now - first)
                    logger.warning("%s: %s; asking again for %s, for %.0f s more", where, fault, what, left)
                    over = stopped.wait(wait)
                if not over and between is not None:
                    between(fault)
                if over or stopped.is_set():
                    raise EngineError(
                        needed=f"{what} from {where}",
                        given=f"{fault} ({_times(attempts)} in {now - begun:.0f} s)",
                        remedy=_UNUSABLE if unusable else _UNREACHABLE,
                    ) from fault
                wait = min(2 * wait, self.longest_wait_seconds)


def is_loopback(host: str) -> bool:
    """Whether a host is ``localhost`` or a loopback address.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("10.0.0.1")
        (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def api_key(file: str | None, variable: str | None) -> str | None:
    """The API key in a file or an environment variable; None if neither is named.

    Raises:
        ConfigurationError: it is missing or empty.

    Example:
        >>> api_key(None, None) is None
        True
    """
    if file is None and variable is None:
        return None
    where = f"the file {file}" if file is not None else f"the environment variable {variable}"
    try:
        key = Path(file).read_text().strip() if file is not None else os.environ.get(variable or "", "").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            needed=f"an API key in {where}", given=str(error), remedy="Write the key into it."
        ) from error
    if not key or not key.isprintable() or " " in key:
        raise ConfigurationError(
            needed=f"an API key in {where}", given="nothing, or more than one word", remedy="Write the key into it."
        )
    return key


class _UntilEnd(io.RawIOBase):
    """Reads what a socket receives until ``end``; the socket's own time-out begins anew with every byte."""

    def __init__(self, received: io.BufferedReader, connected: socket.socket, end: float) -> None:
        self._received, self._connected, self._end = received, connected, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if (left := self._end - time.monotonic()) <= 0:
            raise TimeoutError("the answer did not end in time")
        self._connected.settimeout(left)
        return self._received.readinto1(buffer)

    def close(self) -> None:
        self._received.close()
        super().close()


def _read(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    """The body; of a longer one, a little more than ``max_bytes``."""
    content = bytearray()
    while len(content) <= max_bytes:
        if not (piece := response.read1(1 << 16)):
            if response.length:
                raise http.client.IncompleteRead(bytes(content), response.length)
            break
        content += piece
    return bytes(content)


def _parsed(status: int, kind: str, content: bytes, max_bytes: int) -> Any:
    if status in _PASSING:
        raise PassingFault(f"HTTP {status}: {_message(content)}")
    if not 200 <= status < 300:
        raise Refusal(status, _message(content))
    if len(content) > max_bytes:
        raise Refusal(status, f"an answer of over {max_bytes} bytes")
    if not content.strip():
        return None
    if kind != "application/json":
        return content.decode("utf-8", "replace")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise PassingFault(f"an answer that is not JSON ({error}), {len(content)} bytes") from error


def _message(content: bytes) -> str:
    """The message of an OpenAI-style error, or the beginning of the answer."""
    text = content.decode("utf-8", "replace")
    try:
        answer = json.loads(text)
        error = answer.get("error", answer.get("detail", answer))
        text = error["message"] if isinstance(error, dict) and "message" in error else json.dumps(error)
    except (ValueError, AttributeError, RecursionError):
        pass
    return f"{text:.500}" or "no message"


def _times(attempts: int) -> str:
    return "1 attempt" if attempts == 1 else f"{attempts} attempts"


def _remedy(status: int) -> str:
    if status == 401:
        return "Give its key in api_key_file or api_key_variable of rollout.engine; a teacher's server must have none."
    if status in (403, 404):
        return (
            "Start the server with the flags that docs/servers.md lists; rollout.engine.model names the engine's model."
        )
    return "Correct what the server reports."
