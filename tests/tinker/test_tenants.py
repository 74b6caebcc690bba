"""Tenants of one service, in shared passes and calls of the engine: each gets the answers of running alone."""

import numpy as np
import pytest

pytest.importorskip("tinker")
pytest.importorskip("triton")

from tinker.proto import tinker_public_pb2 as pb

from logitless.head import fused
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.rollout.gpu import steps
from logitless.tinker import wire
from logitless.tinker.service import Service
from logitless.tinker.store import Store
from logitless.tinker.trainer import Trainer
from tests.tinker.test_service import KEY, result, session_of, step
from tests.tinker.test_trainer import CONFIG

# The interpreter divides by 0 in rows that are masked; numpy's settings for that are of the thread that set them.
pytestmark = [pytest.mark.tinker, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

RANKS = (2, 5, 3)


def datum(tokens, logprobs):
    def tensor(values, dtype, name):
        return pb.Tensor(dense=np.array(values, dtype).tobytes(), dtype=name, shape=[len(values)])

    targets, behind = tokens[1:], [0.0] * (len(tokens) - 1 - len(logprobs))
    made = pb.Datum()
    made.model_input.add().encoded_text.tokens = np.array(tokens[:-1], np.int32).tobytes()
    made.loss_fn_inputs["target_tokens"].CopyFrom(tensor(targets, np.int64, pb.DTYPE_INT64))
    made.loss_fn_inputs["logprobs"].CopyFrom(tensor(behind + logprobs, np.float32, pb.DTYPE_FLOAT32))
    made.loss_fn_inputs["advantages"].CopyFrom(tensor(behind + [1.0] * len(logprobs), np.float32, pb.DTYPE_FLOAT32))
    return made


def cycles(folder, numbers):
    """The answers of these tenants, each a list of bytes, and how many shared a call."""
    model = load_model(CONFIG, random_weights=True, seed=1)
    trainer = Trainer(model, character_tokenizer("abcdefgh"), row_invariant=True)
    service = Service(trainer, Store(folder), names=["m"], tokenizer_name="m")
    try:
        answers, sessions, models = {number: [] for number in numbers}, {}, {}
        for number in numbers:
            sessions[number] = session_of(service)
            lora = wire.LoraConfig(rank=RANKS[number], seed=number)
            create = wire.CreateModel(
                session_id=sessions[number], model_seq_id=0, base_model="m", lora_config=lora
            )  # fmt: skip
            models[number] = result(service, service.create_model(create, KEY, b""))["model_id"]

        def together(ask):
            with service._state:  # all arrive before one is served
                promises = {number: ask(number) for number in numbers}
            for number, promise in promises.items():
                answers[number].append(result(service, promise))

        for cycle in range(2):
            first = 4 * cycle + 1
            together(
                lambda n, first=first, cycle=cycle: service.save(
                    "sampler_weights",
                    wire.SaveWeights(model_id=models[n], seq_id=first, sampling_session_seq_id=cycle),
                    KEY,
                    b"",
                )
            )
            samplers = {n: answers[n].pop()["sampling_session_id"] for n in numbers}

            def asked(n, samplers=samplers, cycle=cycle):
                params = {"max_tokens": 4, "seed": cycle}
                prompt = {"chunks": [{"tokens": [3, 4, 5 + n]}]}
                request = wire.Sample(
                    prompt=prompt, sampling_params=params, num_samples=2, sampling_session_id=samplers[n], seq_id=0
                )
                return service.sample(request, KEY, b"")

            together(asked)

            def passed(n, first=first):
                sampled = pb.SampleResponse.FromString(answers[n][-1])
                message = pb.ForwardBackwardRequest(model_id=models[n], seq_id=first + 1, loss_fn="importance_sampling")
                for each in sampled.sequences:
                    tokens = [3, 4, 5 + n, *np.frombuffer(each.tokens, np.int32).tolist()]
                    message.data.append(datum(tokens, np.frombuffer(each.logprobs, np.float32).tolist()))
                return service.forward_backward(message.SerializeToString(), KEY, b"")

            together(passed)
            together(lambda n, first=first: step(service, models[n], first + 2, rate=0.05))
            together(
                lambda n, first=first: service.save(
                    "weights", wire.SaveWeights(model_id=models[n], seq_id=first + 3, path=f"c{first}"), KEY, b""
                )
            )
            for n in numbers:
                path = answers[n].pop()["path"].removeprefix("tinker://")
                files = (folder / path / f"{name}.safetensors" for name in ("adapter_model", "optimizer"))
                answers[n] += [file.read_bytes() for file in files]
        return answers, dict(service.held(KEY)["most_adapters_in_a_call"])
    finally:
        service.close()


def test_tenants_get_the_answers_of_running_alone_in_every_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "STEPS", 3)
    monkeypatch.setattr(fused, "why_not", fused._unsupported)
    mixed, most = cycles(tmp_path / "mixed", [0, 1, 2])
    assert most == {"pass": 3, "sample": 3}
    for number in range(3):
        alone, most = cycles(tmp_path / str(number), [number])
        assert most == {"pass": 1, "sample": 1}
        assert alone[number] == mixed[number]
        assert len({str(answer) for answer in alone[number]}) > 8
