"""JSON over HTTP to a server at a given address: one request, or one that is repeated until a deadline.

No redirects are followed and no proxies asked, so that a key goes where the recipe says and nowhere else.
"""

import http.client
import ipaddress
import json
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

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAX_ERROR_BYTES = 1 << 16
T = TypeVar("T")


class Fault(Exception):
    """A request that came to nothing; what was wrong is the message."""


class PassingFault(Fault):
    """The server was not there, too slow, or failed: the same request may succeed later."""


class UnusableAnswer(PassingFault):
    """The server answered, and the answer lacks what was asked for."""


class Refusal(Fault):
    """The server will not do it however often it is asked.

    Args:
        status: of HTTP.
        why: what the server said.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"HTTP {status}: {why}")
        self.status = status


class HttpClient:
    """Requests to one server, from any number of threads.

    Args:
        url: ``http://127.0.0.1:8000`` or the like; a path is put before every other.
        api_key: sent as a bearer token; only to loopback or over TLS.
        seconds: that a request may take.
        max_bytes: of an answer.

    Raises:
        ConfigurationError: another kind of address, or a key that would cross a network in the clear.
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
        """What the server says at a path."""
        return self.request("GET", path)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = None) -> Any:
        """What the server answers to JSON."""
        return self.request("POST", path, body or {}, seconds=seconds)

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = None
    ) -> Any:
        """One request; what came as JSON is parsed, other text is text, and an empty answer is None.

        Raises:
            PassingFault: no connection, no answer in time, an answer cut off, or a status that says so.
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
            connected = connection.sock  # which the connection gives away as soon as an answer begins
            with self._lock:
                if self._times_given_up != before:  # in between: nobody would end it
                    raise ConnectionAbortedError("the request was given up")
                self._open.add(connected)
            headers = {"Content-Type": "application/json", "Connection": "close"}
            if self._key is not None:
                headers["Authorization"] = f"Bearer {self._key}"
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, content, headers)
            with connection.getresponse() as response:  # which keeps the socket, the connection having given it away
                max_bytes = self.max_bytes if 200 <= response.status < 300 else _MAX_ERROR_BYTES
                content = _read(response, connected, end, max_bytes)
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
        """End every request under way; whoever waits for one gets a ``PassingFault``."""
        with self._lock:
            self._times_given_up += 1
            for connected in self._open:
                with suppress(OSError):  # it has just ended
                    connected.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Patience:
    """How long failing requests are repeated.

    Args:
        give_up_seconds: after the first failure in a row.
        first_wait_seconds: before the first repetition; each further wait is twice as long.
        longest_wait_seconds: bounds the wait.
        max_unusable: answers in a row that lack something, which no waiting mends.

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
    max_unusable: int = 3

    def until_done(
        self,
        attempt: Callable[[], T],
        *,
        what: str,
        where: str,
        between: Callable[[Fault], None] | None = None,
        stopped: threading.Event | None = None,
    ) -> T:
        """The result of the first attempt that succeeds.

        Args:
            attempt: one request.
            what, where: for the error.
            between: called before each repetition with the fault; it may raise what ends everything.
            stopped: set when nobody waits for the result any more.

        Raises:
            EngineError: a refusal, one fault after the other until the deadline, or too many unusable answers.
        """
        stopped = stopped or threading.Event()
        first, wait, unusable, attempts = None, self.first_wait_seconds, 0, 0
        while True:
            attempts += 1
            try:
                if stopped.is_set():  # before this attempt began: ``give_up`` ends only what is under way
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
                over = late or unusable >= self.max_unusable or stopped.wait(wait)
                if not over and between is not None:
                    between(fault)
                if over or stopped.is_set():
                    raise EngineError(
                        needed=f"{what} from {where}",
                        given=f"{fault} ({attempts} attempts in {now - first:.0f} s)",
                        remedy="Look into the server's log and go on with --resume; raise give_up_seconds of"
                        " rollout.engine for a server that takes longer to come back."
                        if not unusable
                        else "Use a version of vLLM that docs/servers.md names, and the flags that stand there.",
                    ) from fault
                wait = min(2 * wait, self.longest_wait_seconds)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its name or number alone.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("10.0.0.1")
        (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def api_key(file: str | None, variable: str | None) -> str | None:
    """A key from a file or a variable of the environment; None where neither is named.

    Raises:
        ConfigurationError: it is named and not there, or empty.

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


def _read(response: http.client.HTTPResponse, connected: socket.socket, end: float, max_bytes: int) -> bytes:
    """The body, or its first ``max_bytes`` and some more.

    The socket's timeout bounds one wait, which a server that sends a byte at a time never exceeds: it is set anew for
    each.
    """
    content = bytearray()
    while len(content) <= max_bytes:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError("the answer did not end in time")
        connected.settimeout(left)
        if not (piece := response.read1(1 << 16)):
            if response.length:
                raise http.client.IncompleteRead(bytes(content), response.length)
            break
        content += piece
    return bytes(content)


def _parsed(status: int, kind: str, content: bytes, max_bytes: int) -> Any:
    if status in _PASSING:
        raise PassingFault(f"HTTP {status}: {_said(content)}")
    if not 200 <= status < 300:
        raise Refusal(status, _said(content))
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


def _said(content: bytes) -> str:
    """The message in an error of OpenAI's kind, or the beginning of whatever came."""
    text = content.decode("utf-8", "replace")
    try:
        said = json.loads(text)
        said = said.get("error", said.get("detail", said))
        text = said["message"] if isinstance(said, dict) and "message" in said else json.dumps(said)
    except (ValueError, AttributeError, RecursionError):
        pass
    return f"{text:.500}" or "no message"


def _remedy(status: int) -> str:
    if status == 401:
        return "Give the server's key in api_key_file or api_key_variable of rollout.engine."
    if status in (403, 404):
        return "Start the server with the flags that docs/servers.md lists, and name its model in rollout.engine.model."
    return "Repair what the server names."
