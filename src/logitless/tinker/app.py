"""The service over HTTP on loopback: routes, keys, bodies, and errors as statuses in words."""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from logitless.errors import RefusedError
from logitless.http_server import Endpoint, application
from logitless.tinker import wire
from logitless.tinker.service import Service, owner_of
from logitless.tinker.sessions import FailedError, Session
from logitless.tinker.store import KINDS, Checkpoint
from logitless.tinker.wire import MAX_BODY_BYTES

PROTOBUF = "application/x-protobuf"

POLL_SECONDS = 20.0
"""``retrieve_future`` answers ``try_again`` after so long; the SDK waits 45 s."""

URL_SECONDS = 900
"""For so long a download URL is valid."""

Handler: TypeAlias = Callable[["Call"], Awaitable[Any]]


class Call:
    """One HTTP request, with the service that answers it; ``body`` is not compressed."""

    def __init__(self, service: Service, body: bytes, http: Request) -> None:
        self.service, self.body, self.http = service, body, http

    @property
    def key(self) -> str:
        """The client's API key. Clients with another key see nothing of what it owns."""
        if not (key := self.http.headers.get("x-api-key")):
            raise RefusedError(401, "no X-API-Key: set TINKER_API_KEY to tml- and anything")
        return str(key)

    @property
    def owner(self) -> str:
        return owner_of(self.key)

    @property
    def digest(self) -> bytes:
        """Equal for a request and its repetition, different for any other request."""
        return hashlib.blake2b(self.http.url.path.encode() + b"\0" + self.body, digest_size=16).digest()

    def path(self, name: str) -> str:
        return str(self.http.path_params[name])

    def number(self, name: str, default: int) -> int:
        """A number of the query; raises RefusedError if it is none."""
        given = self.http.query_params.get(name, str(default))
        if not given.isdecimal() or len(given) > 15:
            raise RefusedError(400, f"{name}: a number from 0 to 999999999999999 is needed")
        return int(given)


# --- endpoints


async def healthz(call: Call) -> Any:
    if not call.service.is_serving:
        raise RefusedError(503, "the thread that serves has ended: start the service again")
    return {"status": "ok"}


async def client_config(call: Call) -> Any:
    """Flags of the SDK; those that are left out have its defaults."""
    wire.parsed(wire.Anything, call.body)
    # On loopback bodies need no compression.
    return {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False}


async def dynamic_config(_: Call) -> Any:
    """Flags that the SDK asks for again and again."""
    return {"sample_cancel_enabled": True}


async def capabilities(call: Call) -> Any:
    """The base model under each of its names."""
    return {
        "supported_models": [
            {
                "model_name": name,
                "max_context_length": call.service.trainer.limit,
                "trainable": True,
                "sampleable": True,
            }
            for name in call.service.names
        ]
    }


async def telemetry(_: Call) -> Any:
    """The SDK's events, which are dropped."""
    return {"status": "accepted"}


async def finish_session(call: Call) -> Any:
    wire.parsed(wire.Anything, call.body)
    call.service.finish(call.path("session"), call.key)


async def forward_backward(call: Call) -> Any:
    return call.service.forward_backward(call.body, call.key, call.digest)


def _asked(kind: type[wire.M], serve: Callable[[Service, wire.M, str], Any]) -> Handler:
    """An endpoint with a JSON body that is answered at once."""

    async def ask(call: Call) -> Any:
        return serve(call.service, wire.parsed(kind, call.body), call.key)

    return ask


def _promised(kind: type[wire.M], serve: Callable[[Service, wire.M, str, bytes], Any]) -> Handler:
    """An endpoint with a JSON body that is answered by a future; a repeated request gets the same one."""

    async def ask(call: Call) -> Any:
        return serve(call.service, wire.parsed(kind, call.body), call.key, call.digest)

    return ask


def _in_turn(kind: type[wire.M], serve: Callable[[Service, wire.M, str, bytes], Any]) -> Handler:
    """``_promised`` for requests with a place in their model's order, which a refused request uses up too."""
    promised = _promised(kind, serve)

    async def ask(call: Call) -> Any:
        try:
            return await promised(call)
        except RefusedError as refused:
            if refused.status not in (400, 404, 422):
                raise
            return call.service.refuse_in_turn(refused, call.body, call.key, call.digest)

    return ask


def _save(kind: str) -> Handler:
    return _in_turn(wire.SaveWeights, lambda service, *asked: service.save(kind, *asked))


async def retrieve_future(call: Call) -> Any:
    """The result of a request; ``try_again`` if it has none yet."""
    request_id = wire.parsed(wire.RetrieveFuture, call.body).request_id
    try:
        future = call.service.future(request_id, call.key)
    except RefusedError as refused:
        if refused.status != 410:
            raise
        return {"error": str(refused), "category": "server"}  # of a 410 the SDK would drop the words
    await _done(future, POLL_SECONDS)
    if not future.done():
        return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    with suppress(RefusedError):  # the session has ended since the future was found
        call.service.retrieved(request_id, call.key)
    error = future.exception()
    if isinstance(error, FailedError):
        return {"error": str(error), "category": error.category}
    answer = future.result()
    return Response(answer, media_type=PROTOBUF) if isinstance(answer, bytes) else answer


async def _done(future: "Future[Any]", seconds: float) -> None:
    """Wait for a future of another thread. If the client leaves, the wait is cancelled and the future is not."""
    await asyncio.wait({asyncio.wrap_future(_shadow(future))}, timeout=seconds)


def _shadow(future: "Future[Any]") -> "Future[None]":
    """A future that completes with the given one, and can be cancelled without it."""
    shadow: Future[None] = Future()

    def told(_: "Future[Any]") -> None:
        if shadow.set_running_or_notify_cancel():
            shadow.set_result(None)

    future.add_done_callback(told)
    return shadow


async def cancel_future(call: Call) -> Any:
    call.service.cancel(wire.parsed(wire.RetrieveFuture, call.body).request_id, call.key)


async def get_sampler(call: Call) -> Any:
    sampler = call.service.sampler(call.path("sampler"), call.key)
    path = None if sampler.checkpoint is None else sampler.checkpoint.path
    return {"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": path}


async def weights_info(call: Call) -> Any:
    """Base model and shape of a checkpoint."""
    found = call.service.checkpoint(wire.parsed(wire.WeightsInfo, call.body).tinker_path, call.key)
    shape = found.shape
    return {
        "base_model": found.base_model,
        "is_lora": True,
        "lora_rank": shape.rank,
        "train_unembed": shape.unembed,
        "train_mlp": shape.mlp,
        "train_attn": shape.attention,
    }


async def memory(call: Call) -> Any:
    """The service's own endpoint: see ``Service.held``."""
    return call.service.held(call.key)


async def list_sessions(call: Call) -> Any:
    return {"sessions": _page(call, [session.id for session in call.service.sessions(call.key)])[0]}


async def get_session(call: Call) -> Any:
    session = call.service.session(call.path("session"), call.key)
    return {
        "training_run_ids": list(session.models),
        "sampler_ids": list(session.samplers),
        "user_metadata": _texts(session.user_metadata),
        "display_name": session.display_name,
    }


async def training_runs(call: Call) -> Any:
    """The client's models, and models of ended sessions that left checkpoints; newest first."""
    chosen, cursor = _page(call, _runs(call))
    return {"training_runs": chosen, "cursor": cursor}


async def training_run(call: Call) -> Any:
    wanted = call.path("run")
    for run in _runs(call):
        if run["training_run_id"] == wanted:
            return run
    raise RefusedError(404, f"there is no training run {wanted!r:.120}")


async def checkpoints_of_run(call: Call) -> Any:
    return {"checkpoints": [_checkpoint(c) for c in call.service.store.all(call.owner, call.path("run"))]}


async def checkpoints(call: Call) -> Any:
    chosen, cursor = _page(call, call.service.store.all(call.owner))
    return {"checkpoints": [_checkpoint(each) for each in chosen], "cursor": cursor}


def _named(call: Call) -> Checkpoint:
    return call.service.checkpoint(f"tinker://{call.path('run')}/{call.path('kind')}/{call.path('name')}", call.key)


async def delete_checkpoint(call: Call) -> Any:
    call.service.store.delete(_named(call))


async def set_ttl(call: Call) -> Any:
    found, seconds = _named(call), wire.parsed(wire.SetTtl, call.body or b"{}").ttl_seconds
    call.service.store.expire(found, None if seconds is None else time.time() + seconds)


async def download_urls(call: Call) -> Any:
    """A URL for each file of a checkpoint, valid for ``URL_SECONDS`` without a key."""
    found, until = _named(call), int(time.time()) + URL_SECONDS
    place = call.service.store.place(found.run, found.kind, found.name)
    base = f"{str(call.http.base_url).rstrip('/')}/files/{found.run}/{found.kind}/{found.name}"
    files = [file.name for file in sorted(place.iterdir()) if file.name != "checkpoint.json"]
    urls = {
        name: f"{base}/{name}?until={until}&signature={_signature(call, found.path, name, until)}" for name in files
    }
    return {"urls": urls, "expires": datetime.fromtimestamp(until, UTC).isoformat()}


async def download(call: Call) -> Any:
    """A file of a checkpoint, for a URL of ``download_urls``."""
    path = f"tinker://{call.path('run')}/{call.path('kind')}/{call.path('name')}"
    name, until, signature = call.path("file"), call.number("until", 0), call.http.query_params.get("signature", "")
    wanted = _signature(call, path, name, until)
    if until < time.time() or not hmac.compare_digest(signature.encode(), wanted.encode()):
        raise RefusedError(403, "the URL has expired or was not made here: ask for another")
    found = call.service.store.find(path)
    return FileResponse(Path(call.service.store.place(found.run, found.kind, found.name)) / name)


def _signature(call: Call, path: str, file: str, until: int) -> str:
    secret: bytes = call.http.app.state.secret
    return hmac.new(secret, f"{path}/{file}/{until}".encode(), hashlib.sha256).hexdigest()


def _not_served(why: str) -> Handler:
    async def refuse(_: Call) -> Any:
        raise RefusedError(400, why)  # of 5xx the SDK would try again for minutes

    return refuse


_ALONE = "one machine without accounts, projects, billing or a console: a checkpoint is a folder below --folder"

ROUTES: dict[str, Handler] = {
    "GET /healthz": healthz,
    "POST /client/config": client_config,
    "POST /client/dynamic_config": dynamic_config,
    "GET /get_server_capabilities": capabilities,
    "POST /telemetry": telemetry,
    "POST /create_session": _asked(wire.CreateSession, Service.create_session),
    "POST /session_heartbeat": _asked(wire.OfSession, Service.heartbeat),
    "POST /sessions/{session}/finish": finish_session,
    "GET /memory": memory,
    "GET /sessions": list_sessions,
    "GET /sessions/{session}": get_session,
    "POST /create_model": _promised(wire.CreateModel, Service.create_model),
    "POST /get_info": _asked(wire.OfModel, Service.info),
    "POST /forward_backward": forward_backward,
    "POST /optim_step": _in_turn(wire.OptimStep, Service.optim_step),
    "POST /save_weights": _save("weights"),
    "POST /save_weights_for_sampler": _save("sampler_weights"),
    "POST /save_weights_external": _save("external_weights"),
    "POST /load_weights": _in_turn(wire.LoadWeights, Service.load),
    "POST /create_sampling_session": _asked(wire.CreateSamplingSession, Service.create_sampler),
    "POST /asample": _promised(wire.Sample, Service.sample),
    "POST /retrieve_future": retrieve_future,
    "POST /cancel_future": cancel_future,
    "GET /samplers/{sampler}": get_sampler,
    "POST /weights_info": weights_info,
    "GET /training_runs": training_runs,
    "GET /training_runs/{run}": training_run,
    "GET /training_runs/{run}/checkpoints": checkpoints_of_run,
    "GET /checkpoints": checkpoints,
    "DELETE /training_runs/{run}/checkpoints/{kind}/{name}": delete_checkpoint,
    "PUT /training_runs/{run}/checkpoints/{kind}/{name}/ttl": set_ttl,
    "GET /training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls": download_urls,
    "POST /retrieve_futures": _not_served("futures are polled one by one (retrieve_future)"),
    "POST /join_sampling_session": _not_served("clones of a sampler choose their ids themselves"),
    "POST /create_custom_loss": _not_served("custom losses run in the client, by forward_backward_custom"),
    "POST /copy_weights": _not_served(_ALONE),
    "POST /auth/token": _not_served("API keys are taken as they are"),
    "GET /auth/apikey/me": _not_served(_ALONE),
    "DELETE /auth/apikey/me": _not_served(_ALONE),
    "GET /audit": _not_served(_ALONE),
    "GET /billing/usage/events": _not_served(_ALONE),
    "GET /billing/usage/checkpoints/current": _not_served(_ALONE),
    "POST /training_runs/{run}/checkpoints/{kind}/{name}/publish": _not_served(_ALONE),
    "DELETE /training_runs/{run}/checkpoints/{kind}/{name}/publish": _not_served(_ALONE),
    "PUT /sessions/{session}/project": _not_served(_ALONE),
    "GET /sessions/{session}/trace_export": _not_served("no trace is kept"),
    "POST /sessions/search": _not_served("sessions are listed (GET sessions), not searched"),
}
"""Every operation of the SDK, below ``/api/v1``; and ``memory``."""


# --- what they share


def _page(call: Call, every: list[Any]) -> tuple[list[Any], dict[str, int]]:
    offset, limit = call.number("offset", 0), call.number("limit", 20)
    return every[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(every)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    return None if metadata is None else {name: str(value) for name, value in metadata.items()}


def _checkpoint(found: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{found.kind}/{found.name}",
        "checkpoint_type": KINDS[found.kind],
        "time": _time(found.created),
        "tinker_path": found.path,
        "size_bytes": found.size,
        "user_metadata": found.user_metadata,
        "expires_at": None if found.expires is None else _time(found.expires),
    }


def _runs(call: Call) -> list[dict[str, Any]]:
    saved: dict[str, list[Checkpoint]] = {}
    for each in call.service.store.all(call.owner):
        saved.setdefault(each.run, []).append(each)
    found: dict[str, tuple[float, dict[str, Any]]] = {}
    sessions: list[Session] = call.service.sessions(call.key)
    for model in [model for session in sessions for model in session.models.values() if model.adapter is not None]:
        assert model.adapter is not None
        about = {
            "base_model": model.base_model,
            "lora_rank": model.adapter.shape.rank,
            "user_metadata": _texts(model.user_metadata),
        }
        found[model.id] = model.last_request, about
    for run, kept in saved.items():
        found.setdefault(run, (kept[0].created, {"base_model": kept[0].base_model, "lora_rank": kept[0].shape.rank}))

    def last(run: str, kind: str) -> dict[str, Any] | None:
        return next((_checkpoint(each) for each in saved.get(run, []) if each.kind == kind), None)

    newest_first = sorted(found.items(), key=lambda item: item[1][0], reverse=True)
    return [
        {
            "training_run_id": run,
            "model_owner": "local",
            "is_lora": True,
            "last_request_time": _time(when),
            "last_checkpoint": last(run, "weights"),
            "last_sampler_checkpoint": last(run, "sampler_weights"),
            **about,
        }
        for run, (when, about) in newest_first
    ]


def app(service: Service, *, secret: bytes) -> Starlette:
    """The service as an ASGI application; ``secret`` signs download URLs."""

    def endpoint(handler: Handler) -> Endpoint:
        async def answer(http: Request, body: bytes) -> Any:
            return await handler(Call(service, wire.inflated(body, http.headers.get("content-encoding", "")), http))

        return answer

    routes = {name.replace(" ", " /api/v1"): endpoint(handler) for name, handler in ROUTES.items()}
    routes["GET /files/{run}/{kind}/{name}/{file}"] = endpoint(download)
    made = application(routes, error=_error, max_bytes=MAX_BODY_BYTES)
    made.state.secret = secret
    return made


def _error(refused: RefusedError) -> dict[str, str]:
    return {"error": str(refused), "detail": str(refused)}
