"""Order, keys, sessions and failures, without HTTP and without the SDK."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from logitless.errors import RefusedError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.tinker import schedule, wire
from logitless.tinker import service as module
from logitless.tinker.adapter import Shape
from logitless.tinker.service import FailedError, Service
from logitless.tinker.store import Store
from logitless.tinker.trainer import Trainer
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


def sampler_of(service, session, number=0, **options):
    options = options or {"base_model": "m"}
    request = wire.CreateSamplingSession(session_id=session, sampling_session_seq_id=number, **options)
    return service.create_sampler(request, KEY)["sampling_session_id"]


def sample(service, sampler, seq_id=0, tokens=(3,)):
    prompt = {"chunks": [{"tokens": list(tokens)}]}
    asked = wire.Sample(prompt=prompt, sampling_params={"max_tokens": 2}, sampling_session_id=sampler, seq_id=seq_id)
    return service.sample(asked, KEY, b"")


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
    with pytest.raises(RefusedError, match="was another request's"):
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
    for seq_id in (5, 6):  # the SDK overwrites no checkpoint of a sampler
        asked = wire.SaveWeights(model_id=model, seq_id=seq_id, path="a")
        saved = service.save("sampler_weights", asked, KEY, b"")
        if seq_id == 5:
            result(service, saved)
    with pytest.raises(FailedError, match="Choose another"):
        result(service, saved)
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


def test_a_session_outlives_a_clock_that_is_set(service, monkeypatch):
    session, real = session_of(service), time.time
    monkeypatch.setattr(time, "time", lambda: real() + 1e6)
    session_of(service)
    service.heartbeat(wire.OfSession(session_id=session), KEY)


def test_a_silent_session_is_dropped_also_while_others_keep_the_service_busy(service, monkeypatch):
    silent, model = session_of(service), model_of(service, session_of(service))
    there, run, since = [], service._together, service.session(silent, KEY).seen - 10

    def serve(jobs):
        there.append(silent in service._sessions)
        if there[-1]:
            service.session(silent, KEY).seen = since
        run(jobs)

    monkeypatch.setattr(service, "_together", serve)
    with held_up(service):
        promises = [step(service, model, seq_id) for seq_id in (1, 2)]
    for promise in promises:
        result(service, promise)
    assert there == [True, False]


def test_sessions_that_begin_while_the_service_ends_disturb_nothing(service, monkeypatch):
    first = [session_of(service), session_of(service)]
    real, began = service._fail_all, []

    def failing(*given):  # meanwhile clients are still answered
        began.append(thread.submit(session_of, service))
        wait(began, timeout=0.1)
        real(*given)

    monkeypatch.setattr(service, "_fail_all", failing)
    with ThreadPoolExecutor(1) as thread:
        service.close()
    assert first + [each.result() for each in began] == list(service._sessions)


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
    order, run = [], service._together
    go = threading.Event()
    monkeypatch.setattr(service, "_together", lambda jobs: (go.wait(60), order.append(jobs[0].id), run(jobs)))
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


def test_an_answered_request_is_not_held(service, monkeypatch):
    monkeypatch.setattr(module.wire, "sample_output", lambda *_: b"1234")
    session = session_of(service)
    result(service, step(service, model_of(service, session), 1))
    assert result(service, sample(service, sampler_of(service, session))) == b"1234"
    jobs = service.session(session, KEY).jobs.values()
    assert [(job.run, getattr(job, "request", None), job.num_bytes) for job in jobs] == [
        (None, None, size) for size in (0, 0, 4)
    ]


def test_bytes_that_wait_or_were_not_retrieved_are_limited(service, monkeypatch):
    monkeypatch.setattr(module, "HELD_BYTES", 100)
    monkeypatch.setattr(module.wire, "sample_output", lambda *_: bytes(90))
    sampler = sampler_of(service, session_of(service))
    with pytest.raises(RefusedError, match="100 bytes"):
        sample(service, sampler, tokens=(3, 4, 5))
    first = sample(service, sampler)
    result(service, first)
    with pytest.raises(RefusedError, match="100 bytes"):
        sample(service, sampler, 1)
    service.retrieved(first["request_id"], KEY)
    result(service, sample(service, sampler, 1))  # the retrieved answer made room


def test_cancelled_requests_are_forgotten_like_retrieved_ones(service, monkeypatch):
    monkeypatch.setattr(schedule, "GATHER_SECONDS", 60.0)
    monkeypatch.setattr(module, "RETRIEVED", 1)
    session = session_of(service)
    sampler = sampler_of(service, session)
    for seq_id in range(3):
        service.cancel(sample(service, sampler, seq_id)["request_id"], KEY)
    assert list(service.session(session, KEY).jobs) == [f"{sampler}:2"]


def test_a_key_has_so_many_sessions_and_models(service, monkeypatch):
    session = session_of(service)
    model_of(service, session)
    for name in ("SESSIONS", "MODELS"):
        monkeypatch.setattr(module, name, 1)
    model_of(service, session)  # sent again
    for ask in (lambda: session_of(service), lambda: model_of(service, session, 1)):
        with pytest.raises(RefusedError, match="close some"):
            ask()
    model_of(service, session_of(service, "tml-b"), key="tml-b")


def test_what_waits_for_a_request_that_never_came_fails_and_the_model_goes_on(service, monkeypatch):
    model = model_of(service, session_of(service))
    monkeypatch.setattr(schedule, "MISSING_SECONDS", 0.0)
    with pytest.raises(FailedError, match=r"seq_id 1 of .* never came"):
        result(service, step(service, model, 2))
    with pytest.raises(FailedError, match="the whole gradient"):
        result(service, step(service, model, 3))
    result(service, step(service, model, 4))


def test_a_steady_stream_of_samples_does_not_delay_the_first_for_ever(service, monkeypatch):
    monkeypatch.setattr(schedule, "GATHER_SECONDS", 60.0)
    session = session_of(service)
    sampler = sampler_of(service, session)
    with service._state:
        promises = [sample(service, sampler, seq_id) for seq_id in range(2)]
        jobs = service.session(session, KEY).samples
        assert service._schedule.next() == []
        jobs[0].arrived -= 60.0 * schedule.GATHER_MOST + 1
        found = service._schedule.next()
    assert [job.id for job in found] == [promise["request_id"] for promise in promises]


def test_fewer_samples_than_usual_wait_longer_for_the_rest(service, monkeypatch):
    monkeypatch.setattr(schedule, "GATHER_SECONDS", 60.0)
    session = session_of(service)
    sampler = sampler_of(service, session)

    def found(seq_ids, seconds):
        for seq_id in seq_ids:
            sample(service, sampler, seq_id)
        for job in service.session(session, KEY).samples:
            job.arrived -= seconds
        return len(service._schedule.next())

    with service._state:
        assert found(range(4), 61) == 4
        assert found(range(4, 7), 61) == 0
        assert found(range(7, 8), 61) == 4  # all are there
        assert found(range(8, 10), 301) == 2
        assert found(range(10, 12), 61) == 2  # that is usual now


def test_a_failure_that_nobody_expected_does_not_end_the_service(service, monkeypatch):
    session = session_of(service)
    model, sampler = model_of(service, session), sampler_of(service, session)
    monkeypatch.setattr(module.wire, "sample_output", lambda *_: 1 / 0)
    with pytest.raises(FailedError, match="ZeroDivisionError"):
        result(service, sample(service, sampler))
    with monkeypatch.context() as patch:
        patch.setattr(service, "_together", lambda _: 1 / 0)
        with pytest.raises(FailedError, match="ZeroDivisionError"):
            result(service, step(service, model, 1))
    result(service, step(service, model, 2))
    assert service.is_serving


def test_a_checkpoint_is_looked_up_when_its_turn_has_come(service):
    model = model_of(service, session_of(service))
    path = f"tinker://{model}/weights/a"
    loaded = service.load(wire.LoadWeights(path=path, optimizer=True, model_id=model, seq_id=2), KEY, b"")
    result(service, save(service, model, 1, path="a"))
    assert result(service, loaded)["path"] == path


def test_an_adapter_of_another_base_model_is_refused(service):
    session = session_of(service)
    model = model_of(service, session)
    path = result(service, save(service, model, 1, path="a"))["path"]
    service.names = ("other",)
    new = wire.LoadWeights(path=path, optimizer=True, session_id=session, model_seq_id=1)
    for ask in (lambda: sampler_of(service, session, model_path=path), lambda: service.load(new, KEY, b"")):
        with pytest.raises(RefusedError, match="an adapter of 'm': this service has other"):
            ask()
    into = wire.LoadWeights(path=path, optimizer=True, model_id=model, seq_id=2)
    with pytest.raises(FailedError, match="an adapter of 'm'"):
        result(service, service.load(into, KEY, b""))


def test_a_sampler_of_a_checkpoint_that_was_overwritten_says_so(service):
    session = session_of(service)
    model = model_of(service, session)
    path = result(service, save(service, model, 1, path="a"))["path"]
    sampler = sampler_of(service, session, model_path=path)
    assert sampler_of(service, session, model_path=path) == sampler
    with pytest.raises(RefusedError, match="another sampling session"):
        sampler_of(service, session)
    result(service, save(service, model, 2, path="a", overwrite=True))
    with pytest.raises(FailedError, match="was overwritten"):
        result(service, sample(service, sampler))


def test_sessions_sample_differently_and_a_repeated_run_alike(service):
    def name(session):
        sampler = service.sampler(sampler_of(service, session), KEY)
        asked = {"prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"max_tokens": 2}}
        with held_up(service):
            service.sample(wire.Sample(sampling_session_id=sampler.id, seq_id=0, **asked), KEY, b"")
            [job] = service.session(session, KEY).samples
            return job.request.id

    assert [name(session_of(service)) for _ in range(2)] == ["0:sample:0:0", "1:sample:0:0"]


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


def test_an_unnamed_sampler_that_is_asked_for_again_under_another_number_is_the_first_one(service):
    model = model_of(service, session_of(service))
    requests = [wire.SaveWeights(model_id=model, seq_id=1, sampling_session_seq_id=number) for number in (1, 2)]
    first, again = (service.save("sampler_weights", each, KEY, repr(each).encode()) for each in requests)
    assert result(service, again) == result(service, first)
    assert result(service, first)["sampling_session_id"].endswith(":1")
    with pytest.raises(RefusedError, match="was another request's"):
        save(service, model, 1, path="a")


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
    with pytest.raises(RefusedError, match="were dropped"):  # of one that waited meanwhile
        service._weights(service.sampler(ids[0], KEY))


def test_a_json_body_is_refused_field_by_field():
    with pytest.raises(RefusedError, match="prompt_alt_tokens_k: not served with 5") as refused:
        wire.parsed(
            wire.Sample,
            b'{"prompt": {"chunks": []}, "sampling_params": {}, "sampling_session_id": "", "seq_id": 0,'
            b' "prompt_alt_tokens_k": 5, "new_field": 1}',
        )
    assert "new_field: not served" in str(refused.value)
    with pytest.raises(RefusedError, match="body"):
        wire.parsed(wire.OptimStep, b"\xff")
    with pytest.raises(RefusedError, match="at most 65536"):
        wire.parsed(wire.OptimStep, bytes(1 << 17))


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (wire.SetTtl, '{"ttl_seconds": true}'),
        (wire.SetTtl, '{"ttl_seconds": 1000000000000}'),
        (wire.SetTtl, "seconds"),
        (wire.AdamParams, '{"eps": 0}'),
        (wire.TextChunk, '{"tokens": [9223372036854775808]}'),
        (wire.SamplingParams, '{"stop": [9223372036854775808]}'),
    ],
)
def test_numbers_that_nothing_can_be_done_with_are_refused(kind, given):
    with pytest.raises(RefusedError) as refused:
        wire.parsed(kind, given.encode())
    assert refused.value.status == 422


@pytest.fixture
def mixing(service, monkeypatch):
    """What each call of the trainer got, which lets adapters share calls as it does with row-invariant layers."""
    calls = []
    for name in ("together", "passes_together"):
        monkeypatch.setattr(type(service.trainer), name, 2)

    def forward_backward(pairs):
        calls.append([adapter for adapter, _ in pairs])
        return [([{"logprobs": np.zeros(1, np.float32)}], {}) for _ in pairs]

    def sample(wanted):
        calls.append([request.id for _, request in wanted])
        return [([], None) for _ in wanted]

    monkeypatch.setattr(service.trainer, "forward_backward_together", forward_backward)
    monkeypatch.setattr(service.trainer, "sample", sample)
    monkeypatch.setattr(wire, "forward_backward_output", lambda *_: b"")
    monkeypatch.setattr(wire, "sample_output", lambda *_: b"")
    monkeypatch.setattr(wire, "forward_backward", lambda message, **_: message)
    monkeypatch.setattr(wire, "forward_backward_request", lambda body: body)
    monkeypatch.setattr(wire, "num_tokens", lambda message: message.num_tokens)
    return calls


class Passed:
    """Stands in for the SDK's message."""

    def __init__(self, model, seq_id=1, num_tokens=5, forward_only=False):
        self.model_id, self.seq_id, self.num_tokens, self.forward_only = model, seq_id, num_tokens, forward_only

    def __len__(self):
        return 0


def held_up(service):
    """Keeps the service's thread out while requests arrive."""
    return service._state


def test_passes_of_several_sessions_share_one_if_they_fit_and_are_alike(service, mixing):
    models = [model_of(service, session_of(service)) for _ in range(5)]
    adapters = [service.model(model, KEY).adapter for model in models]
    of = service.trainer.tokens_per_row
    wanted = [(5, False), (of, False), (of - 5, False), (5, True), (5, False)]
    with held_up(service):
        promises = [
            service.forward_backward(Passed(model, 1, *each), KEY, b"")
            for model, each in zip(models, wanted, strict=True)
        ]
    for promise in promises:
        result(service, promise)
    assert mixing == [[adapters[0], adapters[2]], [adapters[1]], [adapters[3]], [adapters[4]]]


def test_keys_take_turns_however_many_sessions_one_has(service, mixing, monkeypatch):
    for name in ("together", "passes_together"):
        monkeypatch.setattr(type(service.trainer), name, 1)
    keys = ["tml-a"] * 4 + ["tml-b"]
    models = [model_of(service, session_of(service, key), key=key) for key in keys]
    adapters = [service.model(model, key).adapter for model, key in zip(models, keys, strict=True)]
    with held_up(service):
        promises = [
            (service.forward_backward(Passed(model), key, b""), key) for model, key in zip(models, keys, strict=True)
        ]
    for promise, key in promises:
        result(service, promise, key)
    assert [adapters.index(adapter) for call in mixing for adapter in call].index(4) <= 1


def test_a_pass_that_fails_among_others_runs_alone_and_breaks_its_own_gradient(service, mixing, monkeypatch):
    models = [model_of(service, session_of(service)) for _ in range(2)]
    adapters = [service.model(model, KEY).adapter for model in models]
    working = service.trainer.forward_backward_together

    def fails(pairs):
        if any(adapter is adapters[0] for adapter, _ in pairs):
            raise ValueError("no memory")
        return working(pairs)

    monkeypatch.setattr(service.trainer, "forward_backward_together", fails)
    with held_up(service):
        promises = [service.forward_backward(Passed(model), KEY, b"") for model in models]
    with pytest.raises(FailedError, match="no memory"):
        result(service, promises[0])
    assert result(service, promises[1]) == b""
    assert [adapter.broken for adapter in adapters] == ["request 1: ValueError: no memory", ""]


def test_samples_of_several_sessions_share_a_call_in_turn_up_to_its_completions(service, mixing, monkeypatch):
    monkeypatch.setattr(schedule, "COMPLETIONS", 4)
    monkeypatch.setattr(service, "_weights", lambda _: None)
    sessions = [session_of(service) for _ in range(3)]
    samplers = [sampler_of(service, each) for each in sessions]
    for number, session in enumerate(sessions):
        service.sampler(samplers[number], KEY).version = -number
        assert service.session(session, KEY)
    busy, quiet, third = samplers
    asked = [(busy, seq) for seq in range(5)] + [(quiet, 0), (third, 0)]
    with held_up(service):
        promises = [sample(service, sampler, seq, tokens=(3 + seq,)) for sampler, seq in asked]
    for promise in promises:
        result(service, promise)
    numbers = [[name.rsplit(":", 1)[0][0] + name[-1] for name in call] for call in mixing]
    # Two adapters share a call, so that the third waits; a quiet session is in the first call, however busy another is.
    assert numbers == [["00", "10", "01", "02"], ["20", "03", "04"]]


def test_calls_are_counted_with_the_seconds_that_they_took(service, monkeypatch):
    monkeypatch.setattr(module.wire, "sample_output", lambda *_: b"")
    session = session_of(service)
    model, sampler = model_of(service, session), sampler_of(service, session)
    result(service, step(service, model, 1))
    result(service, sample(service, sampler))
    service.close()  # a call is counted behind its answers
    calls = service.held(KEY)["calls"]
    assert {kind: call["count"] for kind, call in calls.items()} == {"pass": 0, "sample": 1, "other": 2}
    assert all(call["seconds"] > 0 for kind, call in calls.items() if kind != "pass")


def test_an_adapter_beyond_the_memory_is_refused_and_what_is_held_is_listed(service, monkeypatch):
    session, shape = session_of(service), Shape(2, True, True, True)
    each = service.trainer.bytes_of(shape)
    assert each == 16 * 2 * sum(sum(m.weight.shape) for _, m in service.trainer._modules(shape))
    monkeypatch.setattr(service.trainer, "budget", 2 * (2 * each + 1))
    models = [model_of(service, session, number) for number in range(2)]
    with pytest.raises(RefusedError, match=rf"rank 2 takes {each} bytes .* {2 * each} of the .*{models[0]} {each}"):
        model_of(service, session, 2)
    held = service.held(KEY)
    assert held["held_bytes"] == 2 * each
    assert held["models"][models[1]] == {"device_bytes": each, "snapshot_bytes": 0}
    assert service.held("tml-b")["models"] == {}
    service.finish(session, KEY)
    assert service.held(KEY)["held_bytes"] == 0
    model_of(service, session_of(service))


def test_a_checkpoint_of_a_larger_rank_than_memory_has_is_refused_and_the_model_stays(service, monkeypatch):
    session = session_of(service)
    model = model_of(service, session)
    path = result(service, save(service, model, 1, path="a"))["path"]
    monkeypatch.setattr(service.trainer, "budget", 10)
    with pytest.raises(RefusedError, match="more --memory"):
        service.load(wire.LoadWeights(path=path, optimizer=True, session_id=session, model_seq_id=1), KEY, b"")
    assert list(service.session(session, KEY).models) == [model]


def test_bytes_of_all_keys_together_are_bounded(service, monkeypatch):
    monkeypatch.setattr(module, "ALL_HELD_BYTES", 3 * module.TOKEN_BYTES)
    with held_up(service):
        for key in ("tml-a", "tml-b"):
            session = service.create_session(wire.CreateSession(), key)["session_id"]
            request = wire.CreateSamplingSession(session_id=session, sampling_session_seq_id=0, base_model="m")
            sampler = service.create_sampler(request, key)["sampling_session_id"]
            asked = wire.Sample(
                prompt={"chunks": [{"tokens": [3, 4]}]}, sampling_params={"max_tokens": 2},
                sampling_session_id=sampler, seq_id=0,
            )  # fmt: skip
            if key == "tml-a":
                service.sample(asked, key, b"")
                continue
            with pytest.raises(RefusedError, match="of all keys"):
                service.sample(asked, key, b"")
