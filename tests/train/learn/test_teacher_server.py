"""A teacher on a server says what the same model says in this process, or is refused."""

import json

import pytest
import torch

from logitless.data.packing import pack
from logitless.errors import ConfigurationError, EngineError
from logitless.http_client import HttpClient, Patience
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.rollout.vllm.api import VllmServer
from logitless.train.learn.policy import Policy
from logitless.train.learn.step import on_host, step_numbers
from logitless.train.learn.teacher import Teacher
from logitless.train.learn.teacher_server import ServedTeacher
from logitless.train.plan.run_plan import dry_run
from logitless.train.recipe.teacher import TeacherSection
from logitless.train.run import run_recipe
from logitless.types import Completion, Prompt
from tests.head.two_streams import defined
from tests.rollout.fake_vllm import Served, serving
from tests.rounding import of_roundings
from tests.train.learn.test_step import (
    CUTS,
    GPT2,
    TEMPERATURE,
    WHOLE,
    _assert_same,
    _block,
    _each,
    _oracle,
    _policy,
    whole_gradient,
)
from tests.train.learn.test_teacher import WEIGHT, _gradient
from tests.train.test_distillation import ALONE, LONGER
from tests.train.tiny import ALPHABET, TINY_LLAMA, finished_run, steps_of, tiny_recipe

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


def test_its_likeliest_tokens_are_those_of_the_model():
    batch = pack(PAIRS)
    with serving(_served()) as url:
        teacher = _teacher(url)
        teacher.check(PROMPT)
        ids, logp = teacher.top(batch, 3)
    with torch.no_grad():
        hidden, head = Policy(_model()).hidden_and_head(batch.take([0, 2]))
        expected = (hidden @ head.weight.T).log_softmax(-1).topk(3, 1)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(logp, expected.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", None), ("reverse_kl", None), ("jensen_shannon", 0.3)])
def test_the_gradient_is_that_of_full_logits_over_the_likeliest_tokens_and_the_rest_for_any_cut(kind, beta):
    model = load_model(GPT2 | {"n_layer": 1}, random_weights=True, seed=9).eval()
    policy, section = _policy(), TeacherSection(source="http://x", divergence=kind, beta=beta, weight=WEIGHT, top_k=4)
    block = _block(policy)
    with serving(Served(lambda: model, character_tokenizer(ALPHABET))) as url:
        server = _teacher(url)
        server._model = "policy"  # this test has no texts
        teacher = Teacher([server], section)
        whole = _gradient(policy, block, WHOLE, teacher)
        for name in ("uneven rows", "another order"):
            _assert_same(_gradient(policy, block, CUTS[name], teacher), whole, 1e-12)
    oracle = _oracle()
    loss, every, tails = torch.zeros((), dtype=torch.float64), [], []
    for _, ids, target, _ in _each(block):
        p = (oracle(ids[None]).logits[0, -len(target) :] / TEMPERATURE).softmax(-1)
        with torch.no_grad():
            full = torch.cat([ids, target[-1:]])[None]  # as it is asked
            q = model(input_ids=full).logits[0, -len(target) - 1 : -1].log_softmax(-1).double().exp()
        named = q.topk(4, 1).indices
        events = [
            torch.cat([each.gather(1, named), 1 - each.gather(1, named).sum(1, keepdim=True)], 1) for each in (p, q)
        ]
        divergence = defined(*(each.log() for each in events), kind, beta)
        every.append(divergence.detach())
        tails.append(torch.stack([each[:, -1].detach() for each in events], 1))
        loss = loss + WEIGHT * divergence.mean() / 8
    loss.backward()
    of_term = whole_gradient(oracle)
    difference = whole[1] - _gradient(policy, block, WHOLE, None)[1] - of_term
    # The teacher's log-probs are float32, of a few nats.
    assert difference.abs().max() <= of_roundings(torch.float32, 20) * of_term.abs().max()
    numbers = on_host(step_numbers(whole[2]))
    assert numbers["teacher/divergence"] == pytest.approx(float(torch.cat(every).mean()), rel=1e-5)
    found = [numbers["teacher/tail_of_policy"], numbers["teacher/tail"]]
    assert found == pytest.approx(torch.cat(tails).mean(0).tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"4": -1.0, "9": -0.1}, "2 log-probs of a token where 3"),
        ({"4": 2.0, "9": 1.5, "8": -3.0}, "sum to 11.9 .*raw_logprobs"),
        ({"4": float("-inf"), "9": -0.5, "8": -1.0}, "not finite"),
    ],
    ids=str,
)
def test_likeliest_tokens_that_are_no_log_probs_are_an_error(entries, words):
    place = {token: {"logprob": logp} for token, logp in entries.items()}
    answer = json.dumps({"choices": [{"prompt_logprobs": [None, place]}]}).encode()
    with serving(_served(**{"/v1/completions": [lambda _: (200, answer)] * 9})) as url:
        teacher = _teacher(url)
        teacher.check(PROMPT)
        one = [(Prompt("1", "a", (3,)), Completion("1", (4,), "", "length"))]
        with pytest.raises(EngineError, match=words):
            teacher.top(pack(one), 3)


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


def test_a_server_that_is_down_ends_a_run_and_a_dry_run_at_once_with_its_address(tmp_path):
    with serving(_served()) as url:
        pass
    recipe = tiny_recipe(tmp_path, **ALONE, teacher={"source": url, "advantage": 1})
    for start in (run_recipe, dry_run):
        with pytest.raises(EngineError, match=rf"server at {url} .*Refused.*1 attempt in 0 s.* begin once it answers"):
            start(recipe)
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_refuses_a_server_with_another_tokenizer(tmp_path):
    with serving(_served(alphabet="bacdefgh")) as url:
        recipe = tiny_recipe(tmp_path, **ALONE, teacher={"source": url, "advantage": 1})
        with pytest.raises(ConfigurationError, match=f"policy's tokenizer.*another one at {url}"):
            dry_run(recipe)


def test_a_run_learns_from_a_server_as_from_the_same_model_in_this_process(tmp_path):
    model = _model()
    model.save_pretrained(tmp_path / "teacher")
    character_tokenizer(ALPHABET).save_pretrained(tmp_path / "teacher")
    changes = {**LONGER, **ALONE, "train__blocks": 2}
    both = {"advantage": 1, "divergence": "reverse_kl"}
    with serving(_served()) as url:
        # All but one of the tokens by themselves: nothing is truncated.
        teachers = [{"source": str(tmp_path / "teacher")}, {"source": url, "top_k": TINY_LLAMA["vocab_size"] - 1}]
        runs = [
            finished_run(tmp_path, **changes, teacher=each | both, name=f"run-{i}") for i, each in enumerate(teachers)
        ]
    for name in ("teacher/log_ratio", "teacher/divergence"):
        local, served = ([step[name] for step in steps_of(run) if name in step] for run in runs)
        assert len(local) >= 2
        assert served == pytest.approx(local, abs=1e-4)
    assert all(0 < step["teacher/tail"] < 0.1 for step in steps_of(runs[1]))
    assert all("teacher/tail" not in step for step in steps_of(runs[0]))
