"""HTTP on loopback: host check, bodies of bounded size, and errors as statuses."""

import json
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeAlias

from logitless.errors import ConfigurationError, InputError
from logitless.rollout.serving import protocol

MAX_BODY_BYTES = 8 << 20
_HOSTS = ("127.0.0.1", "localhost")

Get: TypeAlias = Callable[[str], Mapping[str, Any]]
"""path -> reply"""

Post: TypeAlias = Callable[[str, bytes], tuple[protocol.Request, Mapping[str, Any]]]
"""(path, body) -> (parsed request, reply)"""


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection.

    Args:
        get, post: give the replies; a ``RefusedError`` becomes its status.
        of_connection: arguments of ``BaseHTTPRequestHandler``.
    """

    protocol_version = "HTTP/1.1"

    def __init__(self, get: Get, post: Post, *of_connection: Any) -> None:
        self._get, self._post = get, post
        super().__init__(*of_connection)

    def do_GET(self) -> None:
        """Reply in JSON."""
        try:
            self._send_json(200, self._get(self.path))
        except protocol.RefusedError as refused:
            self._send_json(refused.status, protocol.error(str(refused), refused.code))

    def do_POST(self) -> None:
        """Reply in JSON, or as a stream of events if the request asks for one."""
        try:
            request, reply = self._post(self.path, self._body())
            if request.stream:
                self._send(200, "text/event-stream", protocol.events(reply, request.stream_options or {}))
            else:
                self._send_json(200, reply)
        except protocol.RefusedError as refused:
            self._send_json(refused.status, protocol.error(str(refused), refused.code))
        except (InputError, ConfigurationError) as refused:
            self._send_json(400, protocol.error(str(refused), "invalid_request_error"))
        except Exception as failure:
            self._send_json(500, protocol.error(f"{type(failure).__name__}: {failure}", "server_error"))

    def _body(self) -> bytes:
        # A web page can reach loopback under a name of its own (DNS rebinding); its Host header gives it away.
        if (self.headers.get("Host") or "").rpartition(":")[0] not in _HOSTS:
            raise protocol.RefusedError(403, "asked for by another name than loopback's", "forbidden")
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY_BYTES:
            self.close_connection = True
            raise protocol.RefusedError(413, f"over {MAX_BODY_BYTES} bytes")
        return self.rfile.read(length)

    def _send_json(self, status: int, content: Mapping[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _send(self, status: int, content_type: str, content: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            self.close_connection = True  # the client is gone

    def log_message(self, *_: Any) -> None:
        """Log nothing: completions belong in the run's records."""
