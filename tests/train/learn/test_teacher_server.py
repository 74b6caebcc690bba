"""A teacher on a server says what the same model says in this process, or is refused."""

import pytest
import torch

from logitless.data.packing import pack
from logitless.errors import ConfigurationError, EngineError
from logitless.http_client import HttpClient, Patience
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.rollout.vllm.api import VllmServer
from logitless.train.learn.policy import Policy
from logitless.train.learn.teacher_server import ServedTeacher
from logitless.types import Completion, Prompt
from tests.rollout.fake_vllm import Served, serving
from tests.train.test_distillation import ALONE, LONGER
from tests.train.tiny import ALPHABET, TINY_LLAMA, finished_run, steps_of

PROMPT = Prompt("1", "ab", (3, 4))
PAIRS = [
    (PROMPT, Completion("1", (5, 6, 2), "", "stop")),
    (Prompt("2", "c", (5,)), Completion("2", (), "", "stop")),
    (Prompt("3", "abc", (3, 4, 5)), Completion("3", (6, 7, 8, 9), "", "stop", trained=[True, False, True, False])),
]


def _model():
    return load_model(TINY_LLAMA | {"initializer_range": 0.5}, random_weights=True, seed=5)


def _served(alphabet=ALPHABET, **faults):
    return Served(_model, character_tokenizer(alphabet), faults=faults)


def _teacher(url):
    patience = Patience(give_up_seconds=5.0, first_wait_seconds=0.0)
    return ServedTeacher(VllmServer(HttpClient(url)), patience=patience)


def test_its_log_probs_are_those_of_the_model_of_scored_tokens_alone():
    batch, options = pack(PAIRS), {"temperature": 1.0, "backend": "reference"}
    with serving(_served(**{"/v1/completions": [lambda _: (200, b'{"choices": []}')]})) as url:
        teacher = _teacher(url)
        teacher.check(PROMPT)
        found = teacher.scores(batch, **options)
    with torch.no_grad():
        expected = Policy(_model()).scores(batch.take([0, 2]), **options)
    torch.testing.assert_close(found.logp, expected.logp, rtol=0, atol=1e-5)
    assert found.entropy.isnan().all()


def test_a_server_with_another_tokenizer_or_several_models_is_refused():
    with (
        serving(_served(alphabet="bacdefgh")) as url,
        pytest.raises(ConfigurationError, match="reads prompt '1'"),
    ):
        _teacher(url).check(PROMPT)
    served = _served()
    served.adapters["other"] = served.policy
    with serving(served) as url, pytest.raises(EngineError, match="given 'policy', 'other'"):
        _teacher(url).check(PROMPT)


@pytest.mark.parametrize("content", [b"{}", b'{"choices": [{"prompt_logprobs": [null]}]}'])
def test_an_answer_without_the_log_probs_is_an_error_after_some_attempts(content):
    with serving(_served(**{"/v1/completions": [lambda _: (200, content)] * 9})) as url:
        teacher = _teacher(url)
        teacher.check(PROMPT)
        with pytest.raises(EngineError, match="no log-probs of 5 tokens"):
            teacher.scores(pack(PAIRS[:1]), temperature=1.0, backend="auto")


def test_a_run_learns_from_a_server_as_from_the_same_model_in_this_process(tmp_path):
    model = _model()
    model.save_pretrained(tmp_path / "teacher")
    character_tokenizer(ALPHABET).save_pretrained(tmp_path / "teacher")
    changes = {**LONGER, **ALONE, "train__blocks": 2}
    with serving(_served()) as url:
        runs = [
            finished_run(tmp_path, **changes, teacher={"source": source, "advantage": 1}, name=f"run-{i}")
            for i, source in enumerate([str(tmp_path / "teacher"), url])
        ]
    local, served = (
        [step["teacher/log_ratio"] for step in steps_of(run) if "teacher/log_ratio" in step] for run in runs
    )
    assert len(local) == 2
    assert served == pytest.approx(local, abs=1e-4)
