"""HTTP on loopback, by Starlette and uvicorn: a check of the host, bodies of bounded size, errors as statuses in words.

Needs the extra ``serve``.
"""

import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from logitless.errors import ConfigurationError, LogitlessError, RefusedError, UnavailableError

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as absent:
    raise UnavailableError(
        needed="Starlette and uvicorn, which serve HTTP",
        given=str(absent),
        remedy="Run pip install 'logitless[serve]'.",
    ) from absent

_HOSTS = ("127.0.0.1", "localhost")

Endpoint: TypeAlias = Callable[[Request, bytes], Awaitable[Any]]
"""(request, body) -> a response, or content for JSON"""


def application(
    routes: Mapping[str, Endpoint], *, error: Callable[[RefusedError], Mapping[str, Any]], max_bytes: int
) -> Starlette:
    """An ASGI application.

    Args:
        routes: endpoints by method and path, such as ``GET /files/{name}``. A ``RefusedError`` becomes its status, a
            ``LogitlessError`` that is a ``ValueError`` 400, and other errors 500.
        error: the JSON of a refusal.
        max_bytes: of a body.
    """

    def answering(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(http: Request) -> Response:
            said = await endpoint(http, await _body(http, max_bytes))
            return said if isinstance(said, Response) else _json(200, {} if said is None else said)

        return answer

    async def refuse(http: Request, failure: Exception) -> Response:
        refused = _refusal(http, failure)
        return _json(refused.status, error(refused))

    found = []
    for name, endpoint in routes.items():
        method, path = name.split()
        found.append(Route(path, answering(endpoint), methods=[method]))
    # Those under the name Exception itself are logged too.
    failures = (HTTPException, RefusedError, LogitlessError, ClientDisconnect, Exception)
    return Starlette(routes=found, exception_handlers=dict.fromkeys(failures, refuse))


def _refusal(http: Request, failure: Exception) -> RefusedError:
    if isinstance(failure, RefusedError):
        return failure
    if isinstance(failure, HTTPException):  # Starlette's own
        said = f"{http.method} {http.url.path} is no operation of this server; is the client a newer one?"
        return RefusedError(404, said, "not_found")
    if isinstance(failure, LogitlessError) and isinstance(failure, ValueError):
        return RefusedError(400, str(failure))
    return RefusedError(500, f"{type(failure).__name__}: {failure}", "server_error")


def _json(status: int, content: Any) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


async def _body(http: Request, max_bytes: int) -> bytes:
    # A web page can reach loopback under a name of its own (DNS rebinding); its Host header gives it away.
    if http.headers.get("host", "").rpartition(":")[0] not in _HOSTS:
        raise RefusedError(403, "asked for by another name than loopback's", "forbidden")
    parts, size = [], int(http.headers.get("content-length", 0))
    if size <= max_bytes:
        size = 0
        async for part in http.stream():
            size += len(part)
            if size > max_bytes:
                break
            parts.append(part)
    if size > max_bytes:
        raise RefusedError(413, f"more than {max_bytes} bytes")
    return b"".join(parts)


def listening(port: int) -> socket.socket:
    """A socket on 127.0.0.1, to be had before a model is loaded.

    Args:
        port: 0 takes a free one.

    Raises:
        ConfigurationError: the port is taken, or there is none of this number.
    """
    # By its number of the protocol asyncio knows TCP, and turns off the delay of a response's second packet (40 ms).
    found = socket.socket(proto=socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
        found.listen()
    except (OSError, OverflowError) as error:
        found.close()
        raise ConfigurationError(
            needed=f"port {port} on 127.0.0.1", given=str(error), remedy="Name another --port; 0 takes a free one."
        ) from error
    return found


class HttpServer:
    """Serves an application in a thread until it is closed.

    Args:
        served: of ``application``.
        connection: of ``listening``, which is closed with the server.

    Attributes:
        url: of the server.
    """

    def __init__(self, served: Starlette, connection: socket.socket) -> None:
        self.url = f"http://127.0.0.1:{connection.getsockname()[1]}"
        config = uvicorn.Config(
            served,
            ws="none",
            log_config=None,
            log_level=logging.WARNING,
            proxy_headers=False,
            timeout_keep_alive=3600,  # a client may think for long between two requests of a connection
            timeout_graceful_shutdown=5,  # for a client that does not send the rest of its body
        )
        self._server = uvicorn.Server(config)
        self._connection = connection
        self._thread = threading.Thread(
            target=self._server.run, args=([connection],), name="logitless-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening, answer requests under way, and close all connections."""
        self._server.should_exit = True
        self._thread.join()
        self._connection.close()
