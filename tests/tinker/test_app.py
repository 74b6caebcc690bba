"""The service over HTTP without the SDK: futures, keys, hostile requests, and its end."""

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.parse import quote

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logitless.cli.main import main
from logitless.errors import ConfigurationError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.tinker.service import GO_ON, Service
from logitless.tinker.store import Store
from logitless.tinker.trainer import Trainer
from tests.tinker.test_trainer import CONFIG

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette", reason="needs pip install 'logitless[serve]'")

from logitless.http_server import HttpServer, listening  # noqa: E402
from logitless.tinker import app as module  # noqa: E402
from logitless.tinker.app import ROUTES, app  # noqa: E402

KEY, OTHER = "tml-a", "tml-b"


class Client:
    """Requests to a service that runs in this process."""

    def __init__(self, folder):
        trainer = Trainer(
            load_model(CONFIG, random_weights=True, seed=1), character_tokenizer("abcdefgh"), row_invariant=False
        )
        self.service = Service(trainer, Store(folder), names=["m"], tokenizer_name="m")
        self.http = HttpServer(app(self.service, secret=b"secret"), listening(0))
        self.connection = httpx.Client(base_url=f"{self.http.url}/api/v1", timeout=300)

    def close(self):
        self.service.close()
        self.connection.close()
        self.http.close()

    def ask(self, route, body=None, key=KEY, **path):
        method, place = route.split()
        for name, value in path.items():
            place = place.replace(f"{{{name}}}", quote(value, safe=""))
        content = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
        return self.connection.request(method, place, content=content, headers={"x-api-key": key})

    def post(self, name, key=KEY, **body):
        reply = self.ask(f"POST /{name}", body, key)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def answer(self, promise, key=KEY):
        return self.post("retrieve_future", key, request_id=promise["request_id"])

    def session(self, key=KEY):
        return self.post("create_session", key)["session_id"]

    def model(self, session, number=0):
        lora = {"rank": 2}
        promise = self.post("create_model", session_id=session, model_seq_id=number, base_model="m", lora_config=lora)
        return promise, f"{session}:train:{number}"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with closing(Client(tmp_path_factory.mktemp("saved"))) as made:
        yield made


@pytest.fixture(scope="module")
def owned(client):
    """What a key has, by the names of path parameters and fields."""
    session = client.session()
    promise, model = client.model(session)
    assert client.answer(promise)["model_id"] == model
    path = client.answer(client.post("save_weights", model_id=model, seq_id=1, path="a"))["path"]
    sampler = client.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="m")
    run, kind, name = path.removeprefix("tinker://").split("/")
    ids = {"session": session, "run": run, "kind": kind, "name": name, "sampler": sampler["sampling_session_id"]}
    return {**ids, "model": model, "path": path, "request": promise["request_id"]}


def bodies(ids, session):
    """A body of each operation that names something: ``ids`` are of its owner, ``session`` of who asks."""
    of_model = {"model_id": ids["model"], "seq_id": 7}
    saving = {**of_model, "path": "b"}
    prompt = {"prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"max_tokens": 2}}
    place = {"sampling_session_seq_id": 9, "session_id": ids["session"]}
    return {
        "session_heartbeat": {"session_id": ids["session"]},
        "create_model": {"session_id": ids["session"], "model_seq_id": 9, "base_model": "m"},
        "get_info": {"model_id": ids["model"]},
        "optim_step": of_model,
        "save_weights": saving,
        "save_weights_for_sampler": saving,
        "save_weights_external": saving,
        "load_weights": {"path": ids["path"], "optimizer": False, "session_id": session, "model_seq_id": 9},
        "create_sampling_session": {**place, "session_id": session, "model_path": ids["path"]},
        "asample": {**prompt, "sampling_session_id": ids["sampler"], "seq_id": 0},
        "retrieve_future": {"request_id": ids["request"]},
        "cancel_future": {"request_id": ids["request"]},
        "weights_info": {"tinker_path": ids["path"]},
        "PUT ttl": {"ttl_seconds": 9},
    }


def body_of(route, bodies):
    method, path = route.split()
    return bodies.get(path[1:], bodies["PUT ttl"] if method == "PUT" else {} if method == "POST" else None)


OPEN = {
    *("GET /healthz", "GET /memory", "POST /client/config", "POST /client/dynamic_config"),
    *("GET /get_server_capabilities", "POST /telemetry", "POST /create_session"),
}
"""Operations that name nothing of anybody's."""

PROTOBUF = {"POST /forward_backward"}
"""tests/tinker/test_sdk.py asks it."""

LISTS = {"GET /sessions", "GET /training_runs", "GET /checkpoints", "GET /training_runs/{run}/checkpoints"}

DELETING = {"DELETE /training_runs/{run}/checkpoints/{kind}/{name}", "POST /sessions/{session}/finish"}

NOT_SERVED = {route for route, handler in ROUTES.items() if handler.__name__ == "refuse"}


def test_a_future_answers_try_again_until_it_has_a_result(client, monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    go, create = threading.Event(), client.service.trainer.create
    monkeypatch.setattr(
        client.service.trainer, "create", lambda *given, **more: (go.wait(300), create(*given, **more))[1]
    )
    promise, model = client.model(client.session())
    waiting = {"type": "try_again", "request_id": promise["request_id"], "queue_state": "active"}
    assert [client.answer(promise) for _ in range(2)] == [waiting] * 2
    go.set()
    monkeypatch.setattr(module, "POLL_SECONDS", 300.0)
    assert client.answer(promise) == client.answer(promise) == {"type": "create_model", "model_id": model}


def test_a_client_that_waits_is_told_when_the_service_ends_and_one_that_leaves_amid_its_body_disturbs_nobody(tmp_path):
    with closing(Client(tmp_path)) as client, ThreadPoolExecutor(1) as thread:
        host, port = client.http.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as half:
            half.sendall(
                f"POST /api/v1/create_session HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 9\r\n\r\n{{".encode()
            )
        _, model = client.model(client.session())
        missing = client.post("optim_step", model_id=model, seq_id=2)  # 1 never comes
        waiting = thread.submit(client.answer, missing)
        client.service.close()
        assert waiting.result() == {"error": f"the service has ended: {GO_ON}", "category": "server"}


def test_who_waits_for_an_answer_of_a_session_that_is_gone_is_told_in_words(client):
    """Of a 410 the SDK would say only that a promise is broken."""
    session = client.session()
    promise, _ = client.model(session)
    client.post(f"sessions/{session}/finish")
    for request in (promise["request_id"], "s-1:train:0:1"):
        said = client.post("retrieve_future", request_id=request)
        assert said["category"] == "server"
        assert "gone: it was finished, silent, or of a service that was restarted" in said["error"]
        assert said["error"].endswith(GO_ON)


def test_who_waits_for_an_answer_when_its_session_ends_is_told_in_words(client, monkeypatch):
    waits, done = threading.Event(), module._done

    async def told(*given):
        waits.set()
        await done(*given)

    monkeypatch.setattr(module, "_done", told)
    session = client.session()
    _, model = client.model(session)
    missing = client.post("optim_step", model_id=model, seq_id=2)  # 1 never comes
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(client.answer, missing)
        assert waits.wait(300)
        client.post(f"sessions/{session}/finish")
        assert waiting.result() == {"error": "the session was finished", "category": "server"}


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_does_not_exist_is_refused(port):
    with pytest.raises(ConfigurationError, match="Name another --port"):
        listening(port)


@pytest.mark.parametrize("wrong", [("--memory", "0"), ("--name", ""), ("--tokens-per-row", "0")])
def test_an_option_that_nothing_could_be_served_with_is_refused_before_the_model_is_loaded(wrong, capsys):
    assert main(["serve-tinker", "no-such-model", *wrong]) == 2
    assert f"{wrong[0]} of at least 1" in capsys.readouterr().err


@pytest.mark.tinker  # without the SDK the command line refuses before it looks for the folder
def test_a_folder_that_cannot_be_had_is_refused_before_the_model_is_loaded(tmp_path, capsys):
    pytest.importorskip("tinker", reason="the Tinker SDK is not installed: make test-tinker")
    (tmp_path / "file").touch()
    assert main(["serve-tinker", "no-such-model", "--folder", str(tmp_path / "file")]) == 1
    assert "Name another --folder" in capsys.readouterr().err


def test_a_request_that_is_out_of_memory_fails_alone_and_says_what_to_do(client, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no room")

    _, model = client.model(client.session())
    with monkeypatch.context() as patch:
        patch.setattr(client.service.trainer, "optim_step", full)
        failed = client.answer(client.post("optim_step", model_id=model, seq_id=1))
    assert failed["category"] == "server"
    assert "out of memory: no room; send less at once" in failed["error"]
    assert "metrics" in client.answer(client.post("optim_step", model_id=model, seq_id=2))


def test_capabilities_are_the_models_names_and_positions(client):
    limit = CONFIG["max_position_embeddings"]
    expected = {"model_name": "m", "max_context_length": limit, "trainable": True, "sampleable": True}
    assert client.ask("GET /get_server_capabilities").json() == {"supported_models": [expected]}


@pytest.mark.parametrize("route", sorted({*ROUTES} - OPEN - PROTOBUF - LISTS - NOT_SERVED))
def test_what_another_key_owns_is_refused_and_untouched(client, owned, route):
    other = client.session(OTHER)
    path = {name: owned[name] for name in ("session", "run", "kind", "name", "sampler") if f"{{{name}}}" in route}
    reply = client.ask(route, body_of(route, bodies(owned, other)), OTHER, **path)
    expected = 404 if route == "GET /training_runs/{run}" else 403
    assert (reply.status_code, route) == (expected, route), reply.text
    assert client.ask("GET /sessions/{session}", session=owned["session"]).status_code == 200
    assert client.post("weights_info", tinker_path=owned["path"])["lora_rank"] == 2


@pytest.mark.parametrize("route", sorted(LISTS))
def test_lists_hold_what_the_key_owns(client, owned, route):
    for key, expected in ((KEY, True), ("tml-nobody", False)):
        [(_, found), *_] = client.ask(route, key=key, run=owned["run"]).json().items()
        assert bool(found) == expected


FUZZED = sorted({*ROUTES} - PROTOBUF - NOT_SERVED)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_request_is_answered_with_a_failure_of_the_service(client, owned, data):
    # what is deleted here, the others do not need
    ids = (
        owned | {"session": "s-1", "run": "s-1"} if (route := data.draw(st.sampled_from(FUZZED))) in DELETING else owned
    )
    named = [part[1:-1] for part in route.split()[1].split("/") if part.startswith("{")]
    path, body = {name: ids[name] for name in named}, body_of(route, bodies(ids, ids["session"]))
    text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
    if named and data.draw(st.booleans()):
        path[data.draw(st.sampled_from(named))] = data.draw(text)
    if body and data.draw(st.booleans()):
        body = body | {data.draw(st.sampled_from([*body])): data.draw(json_values)}
    else:
        body = data.draw(st.binary(max_size=20) | json_values)
    query = f"?limit={quote(data.draw(text))}" if data.draw(st.booleans()) else ""
    assert client.ask(route + query, body, **path).status_code < 500


def test_the_second_packet_of_a_response_does_not_wait_for_the_first_to_be_acknowledged():
    async def without_delay(connection):
        told = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda _, writer: told.set_result(writer), sock=connection)
        async with server:
            _, client = await asyncio.open_connection(*connection.getsockname())
            writer = await told
            found = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for each in (client, writer):
                each.close()
                await each.wait_closed()
        return found

    with listening(0) as connection:
        assert asyncio.run(without_delay(connection))
