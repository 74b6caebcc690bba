"""HTTP on loopback: bodies of bounded size, statuses, and no more than what the paths of an OpenAI endpoint are."""

import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from logitless.errors import ConfigurationError, InputError
from logitless.rollout.serving import protocol

if TYPE_CHECKING:
    from logitless.rollout.serving.server import EngineServer

MAX_BODY_BYTES = 8 << 20
_HOSTS = ("127.0.0.1", "localhost")


class Handler(BaseHTTPRequestHandler):
    """Answers what one connection asks.

    Args:
        endpoint: has the answers.
        of_connection: ``BaseHTTPRequestHandler``'s.
    """

    protocol_version = "HTTP/1.1"

    def __init__(self, endpoint: "EngineServer", *of_connection: Any) -> None:
        self._endpoint = endpoint
        super().__init__(*of_connection)

    def do_GET(self) -> None:
        """What there is to know about the model."""
        _, path = self._asked_for()
        if path == "v1/models":
            self._say(200, self._endpoint.models())
        elif path == "health":
            self._say(200, {"weights_version": self._endpoint.version})
        else:
            self._say(404, protocol.error(f"no {self.path}", "not_found"))

    def do_POST(self) -> None:
        """What the policy says; as a stream of events where the request wants one."""
        try:
            request, reply = self._answer(self._body())
            if request.stream:
                self._send(200, "text/event-stream", protocol.events(reply, request.stream_options or {}))
            else:
                self._say(200, reply)
        except protocol.RefusedError as refused:
            self._say(refused.status, protocol.error(str(refused), refused.code))
        except (InputError, ConfigurationError) as refused:
            self._say(400, protocol.error(str(refused), "invalid_request_error"))
        except Exception as failure:
            self._say(500, protocol.error(f"{type(failure).__name__}: {failure}", "server_error"))

    def _asked_for(self) -> tuple[str | None, str]:
        """The session, if any, and the path in it."""
        parts = self.path.partition("?")[0].strip("/").split("/")
        return (parts[1], "/".join(parts[2:])) if parts[0] == "session" and len(parts) > 2 else (None, "/".join(parts))

    def _body(self) -> bytes:
        if (self.headers.get("Host") or "").rpartition(":")[0] not in _HOSTS:
            raise protocol.RefusedError(403, "asked for by another name than loopback's", "forbidden")
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY_BYTES:
            self.close_connection = True
            raise protocol.RefusedError(413, f"over {MAX_BODY_BYTES} bytes")
        return self.rfile.read(length)

    def _answer(self, body: bytes) -> tuple[protocol.Request, dict[str, Any]]:
        session, path = self._asked_for()
        if path == "v1/chat/completions":
            chat = protocol.ChatRequest.of(body)
            return chat, self._endpoint.chat(chat, session)
        if path == "v1/completions" and session is None:
            request = protocol.CompletionRequest.of(body)
            return request, self._endpoint.complete(request)
        raise protocol.RefusedError(404, f"no {self.path}", "not_found")

    def _say(self, status: int, content: Mapping[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _send(self, status: int, kind: str, said: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)
        except OSError:
            self.close_connection = True  # whoever asked is gone

    def log_message(self, *_: Any) -> None:
        """Nothing is logged: what the policy says belongs to the run."""
