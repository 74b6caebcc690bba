"""The public SDK against the service: its operations, its log-probs, and what goes wrong. `make test-tinker`."""

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

tinker = pytest.importorskip("tinker", reason="the Tinker SDK is not installed: make test-tinker")
pytest.importorskip("starlette", reason="starlette is not installed: make test-tinker")

import httpx  # noqa: E402
import zstandard  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from tinker.proto import tinker_public_pb2 as pb  # noqa: E402

from logitless.tinker.app import ROUTES  # noqa: E402
from logitless.tinker.wire import MAX_BODY_BYTES, AdamParams  # noqa: E402
from tests.tinker import operations  # noqa: E402
from tests.tinker.operations import made  # noqa: E402
from tests.tinker.served import served  # noqa: E402
from tests.tinker.tiny import write_model  # noqa: E402
from tinker import types  # noqa: E402

# The SDK's threads and connections are its own: they end with the process.
pytestmark = [pytest.mark.tinker, pytest.mark.filterwarnings("default")]

TEXT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module", autouse=True)
def key():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-a")
        yield
    gc.collect()  # connections of clients that are gone: here their warnings are no errors


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def url(model, folder):
    with served(model, folder, "--name", "tiny", "--name", str(model)) as (_, found):
        yield found


@pytest.fixture(scope="module")
def service(url):
    return tinker.ServiceClient(base_url=url)


def trained(service, rank=4, seed=0, num_steps=3):
    trainer = made(service.create_lora_training_client(base_model="tiny", rank=rank, seed=seed))
    for _ in range(num_steps):
        trainer.forward_backward([operations.datum(TEXT, weights=1.0)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.02)).result()
    return trainer


def test_every_operation_of_the_sdk_is_served_or_refused_as_the_page_says(url, model):
    written = json.loads(operations.RESULTS.read_text())
    found = operations.results(url, model)
    if tinker.__version__ == written["sdk"]:
        assert found == written["operations"]
    known = {name: result for name, result in found.items() if name in written["operations"]}
    assert len(known) > 60
    assert {n: w == "served" for n, w in known.items()} == {n: written["operations"][n] == "served" for n in known}


def test_every_path_in_the_sdks_source_has_a_route():
    known = {re.sub(r"\{\w+\}", "{}", name.split()[1]) for name in ROUTES}
    known |= {path.replace("{}/{}", "{}", 1) for path in known if "{}/{}" in path}  # the SDK's id of a checkpoint
    named = set()
    for file in Path(tinker.__file__).parent.rglob("*.py"):
        if file.stem.endswith("_test"):
            continue
        named |= set(re.findall(r'f?"/api/v1(/[^"?`\s]*)"', file.read_text()))
    named = {re.sub(r"\{[\w.]+\}", "{}", path) for path in named}
    assert len(named) > 30
    paths = known | {path.replace("/checkpoints/{}/", "/checkpoints/{}/{}/") for path in known}
    assert {path for path in named if path not in paths} == set()


def test_log_probs_of_sample_forward_and_compute_logprobs_are_the_same_bits(service):
    trainer = trained(service)
    sampler = made(trainer.save_weights_and_get_sampling_client())
    asked = types.SamplingParams(max_tokens=12)
    response = sampler.sample(types.ModelInput.from_ints(TEXT), 4, asked).result()
    for sequence in response.sequences:
        whole = TEXT + sequence.tokens
        out = trainer.forward([operations.datum(whole, weights=1.0)], "cross_entropy").result()
        assert out.loss_fn_outputs[0]["logprobs"].tolist()[len(TEXT) - 1 :] == sequence.logprobs
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
        assert scored[len(TEXT) :] == sequence.logprobs
    assert len({sequence.sequence_id for sequence in response.sequences}) == 4


def weights(trainer, url, folder):
    """Saved in the external format, and downloaded."""
    path = trainer.save_weights_external("w").result().path
    urls = tinker.ServiceClient(base_url=url).create_rest_client().get_external_weights_urls(path).result().urls
    with urllib.request.urlopen(urls["adapter_model.safetensors"]) as said:
        (folder / "w.safetensors").write_bytes(said.read())
    return load_file(folder / "w.safetensors")


def test_a_checkpoint_is_downloaded_by_the_cookbook_and_the_sdks_command_and_read_by_peft(
    service, model, url, tmp_path
):
    if tinker.__version__.startswith("0.36"):
        pytest.skip("the cookbook needs version 0.38")
    download = pytest.importorskip("tinker_cookbook.weights").download
    trainer = trained(service)
    state, whole = trainer.save_state("a").result().path, trainer.save_weights_external("b").result().path
    folders = [download(tinker_path=path, output_dir=f"{tmp_path}/{path[-1]}", base_url=url) for path in (state, whole)]
    command = [sys.executable, "-m", "tinker.cli", "checkpoint", "download", state, "--output", f"{tmp_path}/cli"]
    subprocess.run(command, env={**os.environ, "TINKER_BASE_URL": url}, check=True, capture_output=True)
    folders += (tmp_path / "cli").iterdir()
    found = [load_file(Path(folder) / "adapter_model.safetensors") for folder in folders]
    assert len(found) == 3
    assert all(each.keys() == found[0].keys() for each in found)
    assert all((each[name] == found[0][name]).all() for each in found for name in each)
    scored = trainer.forward([operations.datum(TEXT, weights=1.0)], "cross_entropy").result()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folders[0])
    with torch.no_grad():
        logp = adapted(torch.tensor([TEXT[:-1]])).logits[0].log_softmax(-1)
    read = logp.gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0]
    # sums of at most 272 numbers, of log-probs below 10
    assert (read - torch.tensor(scored.loss_fn_outputs[0]["logprobs"].tolist())).abs().max() < 272 * 10 * 2**-24


SPARSE = {
    "data": [5, TEXT[2], TEXT[4]],
    "dtype": "int64",
    "shape": [4, 2],
    "sparse_crow_indices": [0, 0, 2, 2, 3],
    "sparse_col_indices": [0, 1, 0],
}


def test_likeliest_and_named_tokens_of_prompt_and_sample_come_in_the_sdks_layouts(service):
    sampler, length, k = made(trained(service).save_weights_and_get_sampling_client()), len(TEXT), 3
    ids = torch.full((length - 1, 2), -1)
    ids[1], ids[3, 0] = torch.tensor([5, TEXT[2]]), TEXT[4]  # row i scores the prompt's token i + 1
    assert types.TensorData(**SPARSE).to_torch(pad_value=-1).equal(ids)
    found = [
        sampler.sample(
            types.ModelInput.from_ints(TEXT), 1, types.SamplingParams(max_tokens=4, temperature=0),
            include_prompt_logprobs=True, topk_prompt_logprobs=k, topk_sample_logprobs=k,
            target_prompt_logprobs=target, prompt_logprobs_last_n=last,
        ).result()
        for target, last in (
            (types.TensorData.from_torch(ids), None), (types.TensorData(**SPARSE), 2)
        )
    ]  # fmt: skip
    for response, last in zip(found, (length - 1, 2), strict=True):
        assert [each is None for each in response.topk_prompt_logprobs] == [True] * (length - last) + [False] * last
        assert {len(each) for each in response.topk_prompt_logprobs if each is not None} == {k}
        assert [row[0][0] for row in response.sequences[0].topk_logprobs] == response.sequences[0].tokens
        named = response.target_prompt_logprobs.to_torch()
        assert (named != 0).tolist() == (ids != -1).tolist()
        for value, position in ((named[1, 1], 2), (named[3, 0], 4)):  # sums of at most 272 numbers, in another order
            assert abs(value.item() - found[0].prompt_logprobs[position]) < 272 * 10 * 2**-24
    layouts = [each.target_prompt_logprobs.sparse_crow_indices for each in found]
    assert layouts == [None, SPARSE["sparse_crow_indices"]]
    for wrong in (ids[:2], torch.full_like(ids, -1), torch.full_like(ids, 999)):
        asked = {"target_prompt_logprobs": types.TensorData.from_torch(wrong)}
        with pytest.raises(tinker.BadRequestError, match="target_prompt_logprobs"):
            sampler.sample(types.ModelInput.from_ints(TEXT), 1, types.SamplingParams(max_tokens=1), **asked).result()


def test_an_encrypted_checkpoint_is_refused_where_it_would_have_to_be_read(service):
    pyrage = pytest.importorskip("pyrage")
    trainer, owner = trained(service, num_steps=0), pyrage.x25519.Identity.generate()
    save = trainer.save_weights_external
    path = save("secret", age_encryption_recipients=[str(owner.to_public())]).result().path
    with pytest.raises(tinker.RequestFailedError, match="which is encrypted"):
        made(service.create_sampling_client(model_path=path)).sample(
            types.ModelInput.from_ints(TEXT), 1, types.SamplingParams(max_tokens=2)
        ).result()
    with pytest.raises(tinker.RequestFailedError, match="age recipients"):
        save("lost", age_encryption_recipients=["somebody"]).result()


def test_two_clients_get_the_bits_of_running_alone(url, model, tmp_path):
    clients = [tinker.ServiceClient(base_url=url) for _ in range(2)]
    trainers = [made(c.create_lora_training_client("tiny", rank=2 + n, seed=n)) for n, c in enumerate(clients)]
    for _ in range(3):
        for trainer in trainers:
            trainer.forward_backward([operations.datum(TEXT, weights=1.0)], "cross_entropy")
        for trainer in trainers:
            trainer.optim_step(types.AdamParams(learning_rate=0.02)).result()
    together = [weights(trainer, url, tmp_path) for trainer in trainers]
    with served(model, tmp_path / "alone", "--name", "tiny") as (_, other):
        alone = weights(trained(tinker.ServiceClient(base_url=other), rank=3, seed=1), other, tmp_path)
    assert together[1].keys() == alone.keys()
    assert all(together[1][name].tobytes() == alone[name].tobytes() for name in alone)


def test_a_custom_loss_in_two_passes_has_the_gradient_of_the_built_in_one(service):
    outs = []
    for custom in (False, True):
        trainer, data = trained(service, seed=3, num_steps=0), [operations.datum(TEXT, weights=1.0)]
        if custom:
            trainer.forward_backward_custom(data, operations.minus_sum)
        else:
            trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
        outs.append(trainer.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist())
    assert outs[0] == outs[1]


def test_what_was_saved_is_there_after_the_server_was_killed_and_sessions_are_gone(model, tmp_path):
    with served(model, tmp_path / "saved", "--name", "tiny") as (process, url):
        trainer = trained(tinker.ServiceClient(base_url=url))
        path = trainer.save_state("kept").result().path
        before = trainer.forward([operations.datum(TEXT, weights=1.0)], "cross_entropy").result()
        process.send_signal(signal.SIGKILL)
        process.wait()
    with served(model, tmp_path / "saved", "--name", "tiny") as (_, url):
        session = path.removeprefix("tinker://").partition(":")[0]
        reply = post(url, "session_heartbeat", {"session_id": session})
        assert reply.status_code == 410
        assert "restarted" in reply.json()["error"]
        again = made(tinker.ServiceClient(base_url=url).create_training_client_from_state_with_optimizer(path))
        after = again.forward([operations.datum(TEXT, weights=1.0)], "cross_entropy").result()
    assert after.loss_fn_outputs[0]["logprobs"].tolist() == before.loss_fn_outputs[0]["logprobs"].tolist()


def test_a_program_that_goes_on_with_a_restarted_server_is_told_at_once(model, tmp_path):
    with served(model, tmp_path, "--name", "tiny") as (_, url):
        trainer = trained(tinker.ServiceClient(base_url=url), num_steps=1)
        sampler = made(trainer.save_weights_and_get_sampling_client())
    with served(model, tmp_path, "--name", "tiny", "--port", url.rpartition(":")[2]):
        for ask in (
            lambda: trainer.forward_backward([operations.datum(TEXT, weights=1.0)], "cross_entropy"),
            lambda: sampler.sample(types.ModelInput.from_ints(TEXT), 1, types.SamplingParams(max_tokens=2)),
        ):
            with pytest.raises(tinker.APIStatusError, match="restarted") as told:
                ask().result(60)
            assert told.value.status_code == 410


HELD = """
import sys
from pathlib import Path

import torch

from logitless.cli.main import main
from logitless.tinker.trainer import Trainer

begun, going_on, sample = Path(sys.argv.pop(1)), Path(sys.argv.pop(1)), Trainer.sample

def held(*arguments):
    begun.touch()
    while not going_on.exists():
        torch.ones(300, 300) @ torch.ones(300, 300)  # C++, as in a call that goes on
    return sample(*arguments)

Trainer.sample = held
sys.exit(main())
"""
"""Runs the command line; calls for samples say by a file that they have begun, and go on when there is another."""


@contextlib.contextmanager
def asked_for_samples(model, folder):
    """A service with a call under way, the file that lets it go on, and the future of the answer."""
    begun, going_on = folder / "begun", folder / "going on"
    program = ("-c", HELD, str(begun), str(going_on))
    saved = served(model, folder / "saved", "--name", "tiny", program=program, stderr=subprocess.PIPE)
    # The thread ends after the server, whose end ends a request.
    with ThreadPoolExecutor(1) as thread, saved as (process, url):
        session = post(url, "create_session", {}).json()["session_id"]
        base = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = post(url, "create_sampling_session", base).json()["sampling_session_id"]
        wanted = {"prompt": {"chunks": [{"tokens": TEXT}]}, "sampling_params": {"max_tokens": 3, "stop": []}}
        promise = post(url, "asample", {**wanted, "num_samples": 4, "sampling_session_id": sampler, "seq_id": 0})
        asked = thread.submit(post, url, "retrieve_future", promise_of(promise.json()))
        while not begun.exists():
            assert process.poll() is None
            time.sleep(0.01)
        yield process, going_on, asked


def says_that_it_ends(process):
    for line in process.stderr:
        if "ends when the call under way is answered; Ctrl-C again ends it at once" in line:
            return True
    return False


def test_a_service_that_is_stopped_says_that_it_answers_the_call_under_way_and_does(model, tmp_path):
    with asked_for_samples(model, tmp_path) as (process, going_on, asked):
        process.send_signal(signal.SIGTERM)
        assert says_that_it_ends(process)
        process.send_signal(signal.SIGTERM)  # as schedulers do
        assert not asked.done()
        going_on.touch()
        assert len(pb.SampleResponse.FromString(asked.result().content).sequences) == 4
        assert process.wait(60) == 128 + signal.SIGTERM


def test_a_second_ctrl_c_ends_a_service_at_once_and_quietly(model, tmp_path):
    with asked_for_samples(model, tmp_path) as (process, _, asked):
        process.send_signal(signal.SIGINT)
        assert says_that_it_ends(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
        assert process.stderr.read() == ""
        with pytest.raises(httpx.TransportError):
            asked.result(60)


def test_a_second_service_of_a_folder_is_refused_before_it_loads_its_model(url, folder):
    with served("no model", folder, "--name", "tiny", stderr=subprocess.PIPE) as (process, said):
        assert process.wait(300) == 2
        assert said == ""
        assert re.search(
            r"folder of checkpoints .* given process \d+ on .* name another --folder", process.stderr.read()
        )
    assert httpx.get(f"{url}/api/v1/healthz", headers=KEY).status_code == 200


def test_a_prompt_that_takes_all_positions_of_the_model_is_scored(service):
    trainer = trained(service)
    sampler = made(trainer.save_weights_and_get_sampling_client())
    whole = (TEXT * 1000)[:4096]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
    out = trainer.forward([operations.datum(whole, weights=1.0)], "cross_entropy").result()
    assert len(scored) == 4096
    assert scored[1:] == out.loss_fn_outputs[0]["logprobs"].tolist()
    for length, said in ((4096, "shorten the prompt"), (4000, "lower max_tokens, or shorten the prompt")):
        with pytest.raises(tinker.BadRequestError, match=f"max_tokens 200: the model has 4096 positions; {said}"):
            sampler.sample(types.ModelInput.from_ints(whole[:length]), 1, types.SamplingParams(max_tokens=200)).result()


def test_every_save_that_was_acknowledged_is_whole_after_a_kill_amid_others(model, tmp_path):
    acknowledged, begun = [], threading.Event()

    def save(url):  # without the SDK, which waits for minutes for a server that is gone
        about = {"model_id": request_of(url).model_id}
        answer(url, post(url, "optim_step", {**about, "seq_id": 1}))
        with contextlib.suppress(httpx.TransportError):
            for number in range(2, 10**6):
                promise = post(url, "save_weights", {**about, "seq_id": number, "path": str(number)})
                acknowledged.append(answer(url, promise)["path"])
                if len(acknowledged) > 8:
                    begun.set()

    with served(model, tmp_path / "saved", "--name", "tiny") as (process, url), ThreadPoolExecutor(2) as threads:
        saves = [threads.submit(save, url) for _ in range(2)]
        assert begun.wait(300)
        process.kill()
        assert [each.result() for each in saves] == [None, None]
    with served(model, tmp_path / "saved", "--name", "tiny") as (_, url):
        listed = httpx.get(f"{url}/api/v1/checkpoints?limit=1000000", headers=KEY).json()["checkpoints"]
        assert {*acknowledged} <= {each["tinker_path"] for each in listed}
    for path in acknowledged:
        folder = tmp_path / "saved" / path.removeprefix("tinker://")
        assert all(load_file(folder / f"{name}.safetensors") for name in ("adapter_model", "optimizer"))


def test_a_client_that_leaves_amid_a_future_disturbs_nobody(url, service):
    session = post(url, "create_session", {}).json()["session_id"]
    about = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = post(url, "create_sampling_session", about).json()["sampling_session_id"]
    asked = {"prompt": {"chunks": [{"tokens": TEXT}]}, "sampling_params": {"max_tokens": 200}, "num_samples": 64}
    promise = post(url, "asample", {**asked, "sampling_session_id": sampler, "seq_id": 0}).json()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/api/v1/retrieve_future", json=promise_of(promise), headers=KEY, timeout=0.05)
    assert post(url, f"sessions/{session}/finish", {}).status_code == 200
    assert trained(service, num_steps=1)


KEY = {"x-api-key": "tml-a"}


def promise_of(promise):
    return {"request_id": promise["request_id"]}


EMPTY_DATUM = pb.ForwardBackwardRequest(data=[{}]).SerializeToString()


def post(url, path, body, headers=(), **options):
    content = {"json": body} if isinstance(body, dict) else {"content": body}
    return httpx.post(
        f"{url}/api/v1/{path}", **content, headers={**KEY, **dict(headers)}, timeout=60, verify=False, **options
    )


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "said"),
    [
        ("forward_backward", b"\xff\xff", {}, 400, "no ForwardBackwardRequest"),
        ("forward_backward", b"abc", {"content-encoding": "zstd"}, 400, "not zstd"),
        ("forward_backward", b"abc", {"content-encoding": "br"}, 415, "zstd and plain"),
        ("forward_backward", lambda: b"\0" * (MAX_BODY_BYTES + 1), {}, 413, "more than"),
        (
            "forward_backward",
            lambda: zstandard.ZstdCompressor().compress(b"\0" * (MAX_BODY_BYTES + 1)),
            {"content-encoding": "zstd"},
            413,
            "more than",
        ),
        ("forward_backward", lambda: b"".join([EMPTY_DATUM] * 10**7), {}, 413, "fields"),
        ("asample", lambda: b'{"prompt":{"chunks":[' + b'{"tokens":[]},' * 10**6, {}, 422, "objects and lists"),
        ("create_session", {}, {"host": "evil.example:80"}, 403, "loopback"),
        ("create_session", {}, {"x-api-key": ""}, 401, "TINKER_API_KEY"),
        ("create_session", b"[]", {}, 422, "body"),
        ("create_model", {"session_id": "s-1", "model_seq_id": 0, "base_model": "other"}, {}, 400, "has tiny"),
        ("create_model", {"session_id": "s-1", "model_seq_id": 0, "base_model": "tiny"}, {}, 410, "gone"),
        ("retrieve_future", {"request_id": "../../etc"}, {}, 200, "gone"),
        ("weights_info", {"tinker_path": "tinker://../weights/x"}, {}, 404, "plain name"),
        ("from_the_future", {}, {}, 404, "no operation"),
    ],
)
def test_what_is_hostile_or_too_large_is_answered_in_words(url, path, body, headers, status, said):
    reply = post(url, path, body() if callable(body) else body, headers)
    assert (reply.status_code, said in reply.json()["error"]) == (status, True), reply.text


@pytest.mark.parametrize("body", [b"seconds", b'{"ttl_seconds": true}', b'{"ttl_seconds": 1000000000000}'])
def test_a_time_to_live_is_a_number_of_seconds(url, service, body):
    path = trained(service, num_steps=0).save_state("kept").result().path.removeprefix("tinker://")
    run, kind, name = path.split("/")
    place = f"{url}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/ttl"
    assert httpx.put(place, content=body, headers=KEY, timeout=60).status_code == 422
    place = f"{url}/files/{path}/adapter_model.safetensors?until=99999999999&signature=%C3%A9"
    assert httpx.get(place, timeout=60).status_code == 403


def sparse(*shape):
    rows = np.zeros(shape[0] + 1, np.int64).tobytes()
    return pb.Tensor(sparse_csr=pb.SparseCsr(crow_indices=rows), dtype=pb.DTYPE_INT64, shape=shape)


def dense(values, dtype):
    name = pb.DTYPE_INT64 if dtype == np.int64 else pb.DTYPE_FLOAT32
    return pb.Tensor(dense=np.array(values, dtype).tobytes(), dtype=name, shape=np.shape(values))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.model_input.add().image.SetInParent(), "encoded_text alone"),
        (lambda d: d.ClearField("model_input"), "0 tokens"),
        (lambda d: d.loss_fn_inputs["target_tokens"].CopyFrom(dense([1], np.int64)), "one row a token"),
        (lambda d: d.loss_fn_inputs["target_tokens"].CopyFrom(sparse(1, 67_000_000)), "one row a token"),
        (lambda d: d.loss_fn_inputs["target_tokens"].CopyFrom(sparse(4, 65)), "at most 64 targets"),
        (lambda d: d.loss_fn_inputs["target_tokens"].CopyFrom(dense([1, 2, 3, 999], np.int64)), "0 to 271"),
        (
            lambda d: d.loss_fn_inputs["target_tokens"].CopyFrom(dense([1, 2, 3, -100], np.int64)),
            "0 leaves a token",
        ),
        (lambda d: d.loss_fn_inputs["target_tokens"].CopyFrom(dense([1.0] * 4, np.float32)), "no integers"),
        (lambda d: d.loss_fn_inputs["weights"].CopyFrom(dense([np.nan] * 4, np.float32)), "not finite"),
        (lambda d: d.loss_fn_inputs["weights"].CopyFrom(dense([1.0], np.float32)), "shape"),
        (lambda d: d.loss_fn_inputs["mask"].CopyFrom(dense([1.0] * 4, np.float32)), "are read"),
        (lambda d: d.loss_fn_inputs["weights"].shape.append(-1), "for shape"),
        (lambda d: setattr(d.loss_fn_inputs["weights"], "dense", b"abc"), "bytes"),
        (lambda d: setattr(d.loss_fn_inputs["weights"], "dtype", pb.DTYPE_BFLOAT16), "BFLOAT16"),
        (lambda d: d.loss_fn_inputs["weights"].sparse_csr.SetInParent(), "a sparse tensor"),
    ],
)
def test_data_that_do_not_fit_together_fail_in_words_and_the_next_step_is_refused(url, change, said):
    message = request_of(url)
    model, datum = message.model_id, message.data[0]
    change(datum)
    failed = answer(url, post(url, "forward_backward", message.SerializeToString()))
    assert said in failed["error"]
    assert failed["category"] == "user"
    step = answer(url, post(url, "optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}))
    assert "the whole gradient" in step["error"]
    step = answer(url, post(url, "optim_step", {"model_id": model, "seq_id": 3, "adam_params": {"beta1": 2.0}}))
    assert "beta1" in step["error"]
    assert "metrics" in answer(url, post(url, "optim_step", {"model_id": model, "seq_id": 4}))


def request_of(url):
    """A request of ``forward_backward`` for a new model."""
    session = post(url, "create_session", {}).json()["session_id"]
    create = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    answer(url, post(url, "create_model", create))
    message = pb.ForwardBackwardRequest(model_id=f"{session}:train:0", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(TEXT[:-1], np.int32).tobytes()
    datum.loss_fn_inputs["target_tokens"].CopyFrom(dense(TEXT[1:], np.int64))
    datum.loss_fn_inputs["weights"].CopyFrom(dense([1.0] * 4, np.float32))
    return message


def answer(url, promise):
    return post(url, "retrieve_future", promise_of(promise.json())).json()


def test_a_compressed_body_is_read_and_another_keys_model_is_refused(url):
    message = request_of(url).SerializeToString()
    assert post(url, "forward_backward", message, {"x-api-key": "tml-b"}).status_code == 403
    body = zstandard.ZstdCompressor().compress(message)
    promise = post(url, "forward_backward", body, {"content-encoding": "zstd"})
    result = post(url, "retrieve_future", promise_of(promise.json()))
    assert result.headers["content-type"] == "application/x-protobuf"
    assert len(pb.ForwardBackwardOutput.FromString(result.content).loss_fn_outputs) == 1


def test_data_with_changed_bytes_are_served_or_refused_and_fail_in_no_other_way(url):
    rng, found, message = np.random.default_rng(0), set(), request_of(url)
    datum, tag = message.data[0].SerializeToString(), message.DESCRIPTOR.fields_by_name["data"].number << 3 | 2
    for message.seq_id in range(1, 100):
        changed = bytearray(datum)
        for place in rng.integers(len(datum), size=rng.integers(1, 4)):
            changed[place] = rng.integers(256)
        del message.data[:]
        length = bytes([len(datum) & 127 | 128, len(datum) >> 7])
        reply = post(url, "forward_backward", message.SerializeToString() + bytes([tag]) + length + changed)
        if reply.status_code == 400:  # no such message, so that its place is free
            message.data.add().ParseFromString(datum)
            reply = post(url, "forward_backward", message.SerializeToString())
        said = post(url, "retrieve_future", promise_of(reply.json()))
        found.add(said.json()["category"] if said.headers["content-type"] == "application/json" else "served")
    assert found == {"served", "user"}


def test_adams_defaults_are_the_sdks():
    theirs = types.AdamParams().model_dump()
    assert {name: value for name, value in AdamParams().model_dump().items() if name != "type"} == theirs
