"""Order, keys, sessions and failures, without HTTP and without the SDK."""

import threading
import time

import pytest

from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.tinker import service as module
from logitless.tinker import wire
from logitless.tinker.service import FailedError, Service
from logitless.tinker.store import Store
from logitless.tinker.trainer import Trainer
from logitless.tinker.wire import RefusedError
from tests.tinker.test_trainer import CONFIG

KEY = "tml-a"


@pytest.fixture
def service(tmp_path):
    tokenizer = character_tokenizer("abcdefgh")
    trainer = Trainer(load_model(CONFIG, random_weights=True, seed=1), tokenizer, row_invariant=False)
    made = Service(trainer, Store(tmp_path), names=["m"], tokenizer_name="m", session_seconds=5.0)
    yield made
    made.close()


def session_of(service, key=KEY):
    return service.create_session(wire.CreateSession(), key)["session_id"]


def model_of(service, session, number=0, key=KEY):
    request = wire.CreateModel(
        session_id=session, model_seq_id=number, base_model="m", lora_config=wire.LoraConfig(rank=2)
    )
    result(service, service.create_model(request, key, b"create"), key)
    return f"{session}:train:{number}"


def result(service, promise, key=KEY):
    return service.future(promise["request_id"], key).result(timeout=60)


def step(service, model, seq_id, rate=0.1, key=KEY):
    request = wire.OptimStep(model_id=model, seq_id=seq_id, adam_params=wire.AdamParams(learning_rate=rate))
    return service.optim_step(request, key, repr(request).encode())


def save(service, model, seq_id, **options):
    return service.save("weights", wire.SaveWeights(model_id=model, seq_id=seq_id, **options), KEY, b"save")


def test_requests_run_in_the_order_of_seq_id_whenever_they_arrive(service):
    model = model_of(service, session_of(service))
    saved = save(service, model, 3, path="after")
    second = step(service, model, 2)
    time.sleep(0.1)
    assert not service.future(saved["request_id"], KEY).done()
    first = step(service, model, 1)
    assert result(service, saved)["path"] == f"tinker://{model}/weights/after"
    assert all(service.future(each["request_id"], KEY).done() for each in (first, second))
    state = service.store.tensors(service.store.find(f"tinker://{model}/weights/after"), optimizer=True)[1]
    assert float(state["step"]) == 2


def test_a_request_that_is_sent_again_runs_once(service):
    model = model_of(service, session_of(service))
    assert step(service, model, 1) == step(service, model, 1)
    with pytest.raises(RefusedError, match="was another request"):
        step(service, model, 1, rate=0.2)
    result(service, step(service, model, 1))
    with pytest.raises(RefusedError, match="out of order: 2 is next"):
        step(service, model, 10**6)


def test_a_refused_request_uses_up_its_place(service):
    model = model_of(service, session_of(service))
    body = b'{"model_id": "%s", "seq_id": 1, "momentum": 1}' % model.encode()
    promise = service.refuse_in_turn(RefusedError(422, "momentum: not served"), body, KEY, b"")
    with pytest.raises(FailedError, match="momentum: not served"):
        result(service, promise)
    result(service, step(service, model, 2))
    with pytest.raises(RefusedError, match="momentum"):
        service.refuse_in_turn(RefusedError(422, "momentum: not served"), b"[]", KEY, b"")


def test_a_failure_is_its_requests_own(service):
    session = session_of(service)
    model = model_of(service, session)
    result(service, save(service, model, 1, path="a"))
    with pytest.raises(FailedError, match="a name that is free") as failed:
        result(service, save(service, model, 2, path="a"))
    assert failed.value.category == "user"
    with pytest.raises(FailedError, match="plain name"):
        result(service, save(service, model, 3, path="../a"))
    result(service, step(service, model, 4))
    result(service, step(service, model_of(service, session, 1), 1))


def test_another_key_sees_nothing(service):
    session = session_of(service)
    model = model_of(service, session)
    path = result(service, save(service, model, 1, path="a"))["path"]
    other = session_of(service, "tml-b")
    for ask in (
        lambda: step(service, model, 2, key="tml-b"),
        lambda: service.future(f"{model}:1", "tml-b"),
        lambda: service.heartbeat(wire.OfSession(session_id=session), "tml-b"),
        lambda: service.finish(session, "tml-b"),
        lambda: service.checkpoint(path, "tml-b"),
        lambda: service.load(
            wire.LoadWeights(path=path, optimizer=True, session_id=other, model_seq_id=0), "tml-b", b""
        ),
    ):
        with pytest.raises(RefusedError, match="another key") as refused:
            ask()
        assert refused.value.status == 403
    assert service.sessions("tml-b") == [service.session(other, "tml-b")]


def test_what_is_unknown_is_refused_in_words(service):
    session = session_of(service)
    for status, ask in (
        (410, lambda: service.heartbeat(wire.OfSession(session_id="s-1"), KEY)),
        (410, lambda: step(service, "s-1:train:0", 1)),
        (404, lambda: step(service, f"{session}:train:7", 1)),
        (404, lambda: service.future(f"{session}:train:0:1", KEY)),
        (404, lambda: service.sampler(f"{session}:sample:1", KEY)),
        (404, lambda: service.checkpoint("tinker://a/weights/b", KEY)),
        (400, lambda: service.create_sampler(
            wire.CreateSamplingSession(session_id=session, sampling_session_seq_id=0, base_model="other"), KEY)),
    ):  # fmt: skip
        with pytest.raises(RefusedError) as refused:
            ask()
        assert refused.value.status == status


def test_a_silent_session_is_dropped_and_its_requests_fail(service):
    session = session_of(service)
    model = model_of(service, session)
    waits = service.future(step(service, model, 2)["request_id"], KEY)  # 1 never comes
    service.session(session, KEY).seen -= 10
    session_of(service, "tml-b")  # a new one drops it
    with pytest.raises(FailedError, match="no heartbeat"):
        waits.result(timeout=60)
    with pytest.raises(RefusedError, match="is gone"):
        service.heartbeat(wire.OfSession(session_id=session), KEY)


def test_a_finished_session_keeps_its_checkpoints(service):
    session = session_of(service)
    path = result(service, save(service, model_of(service, session), 1, path="a"))["path"]
    service.finish(session, KEY)
    assert service.sessions(KEY) == []
    loaded = wire.LoadWeights(path=path, optimizer=True, session_id=session_of(service), model_seq_id=0)
    answer = result(service, service.load(loaded, KEY, b""))
    assert service.model(answer["model_id"], KEY).adapter.shape.rank == 2


def test_sessions_take_turns(service, monkeypatch):
    first, second = (model_of(service, session_of(service)) for _ in range(2))
    order, run = [], service._run
    go = threading.Event()
    monkeypatch.setattr(service, "_run", lambda job: (go.wait(60), order.append(job.id), run(job)))
    promises = [step(service, first, n) for n in (1, 2, 3)] + [step(service, second, n) for n in (1, 2, 3)]
    go.set()
    for promise in promises:
        result(service, promise)
    owners = [request.rpartition(":")[0] for request in order]
    assert owners in ([first, second] * 3, [second, first] * 3)


def test_too_many_requests_that_wait_are_refused(service, monkeypatch):
    monkeypatch.setattr(module, "PENDING", 4)
    model = model_of(service, session_of(service))  # its answer was not retrieved
    for seq_id in (2, 3, 4):
        step(service, model, seq_id)
    with pytest.raises(RefusedError, match="wait already") as refused:
        step(service, model, 1)
    assert refused.value.status == 429
    service.retrieved(f"{model}:0", KEY)
    for seq_id in (1, 2, 3, 4):
        result(service, step(service, model, seq_id))


def test_retrieved_answers_are_kept_for_a_while(service, monkeypatch):
    monkeypatch.setattr(module, "RETRIEVED", 1)
    model = model_of(service, session_of(service))
    promises = [step(service, model, seq_id) for seq_id in (1, 2)]
    for promise in promises:
        result(service, promise)
        service.retrieved(promise["request_id"], KEY)
    with pytest.raises(RefusedError, match="retrieved long ago"):
        service.future(promises[0]["request_id"], KEY)
    result(service, promises[1])


def test_weights_of_old_unnamed_samplers_are_dropped(service, monkeypatch):
    monkeypatch.setattr(module, "SNAPSHOTS", 1)
    model = model_of(service, session_of(service))
    ids = []
    for seq_id in (1, 2):
        request = wire.SaveWeights(model_id=model, seq_id=seq_id, sampling_session_seq_id=seq_id)
        promise = service.save("sampler_weights", request, KEY, b"")
        ids.append(result(service, promise)["sampling_session_id"])
    asked = {"prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"max_tokens": 2}, "seq_id": 0}
    with pytest.raises(RefusedError, match="were dropped") as refused:
        service.sample(wire.Sample(sampling_session_id=ids[0], **asked), KEY, b"")
    assert refused.value.status == 410


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompt": {"chunks": []}}, "0 prompt tokens"),
        ({"prompt": {"chunks": [{"tokens": [99]}]}}, "0 to 10 are needed"),
        ({"sampling_params": {"max_tokens": 256}}, "256 positions"),
        ({"sampling_params": {"stop": []}}, "EOS"),
        ({"sampling_params": {"stop": [99]}}, "0 to 10 are needed"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 1}, "less than the prompt"),
    ],
)
def test_a_sample_that_cannot_be_had_is_refused_in_words(service, changed, said):
    session = session_of(service)
    request = wire.CreateSamplingSession(session_id=session, sampling_session_seq_id=0, base_model="m")
    sampler = service.create_sampler(request, KEY)["sampling_session_id"]
    asked = {"prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"max_tokens": 2}, "seq_id": 0}
    with pytest.raises(RefusedError, match=said):
        service.sample(wire.Sample(sampling_session_id=sampler, **{**asked, **changed}), KEY, b"")


def test_a_json_body_is_refused_field_by_field():
    with pytest.raises(RefusedError, match="topk_prompt_logprobs: not served with 5") as refused:
        wire.parsed(
            wire.Sample,
            b'{"prompt": {"chunks": []}, "sampling_params": {}, "sampling_session_id": "", "seq_id": 0,'
            b' "topk_prompt_logprobs": 5, "new_field": 1}',
        )
    assert "new_field: not served" in str(refused.value)
    with pytest.raises(RefusedError, match="body"):
        wire.parsed(wire.OptimStep, b"\xff")
