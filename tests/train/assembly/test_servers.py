"""A server that a recipe names and that is down, or serves something else, refuses a run and a dry run."""

import pytest

from logitless.errors import EngineError
from logitless.train.assembly.model import tokenizer_of
from logitless.train.plan.run_plan import dry_run
from logitless.train.run import run_recipe
from tests.rewards.servers import judging, said
from tests.rollout.fake_vllm import Served, serving
from tests.train.tiny import tiny_model, tiny_recipe


def _engine(url, **more):
    return {"name": "vllm_server", "urls": [url], "model": "policy", **more}


def _judge(url):
    return [{"name": "judge", "url": url, "model": "j", "backoff_seconds": 0.0, "retries": 0}]


@pytest.fixture
def policy_served(tmp_path):
    recipe = tiny_recipe(tmp_path)
    with serving(Served(lambda: tiny_model(recipe), tokenizer_of(recipe.model))) as url:
        yield url


@pytest.mark.parametrize("begin", [run_recipe, dry_run])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout__engine": _engine("http://127.0.0.1:1")}, r"rollout\.engine\.urls.*Refused.*begin once it answers"),
        ({"rewards": _judge("http://127.0.0.1:1/v1")}, "judge 'j' at http://127.0.0.1:1/v1.*Refused"),
    ],
    ids=["engine", "judge"],
)
def test_a_server_that_is_down_is_named(begin, changes, words, tmp_path):
    with pytest.raises(EngineError, match=words):
        begin(tiny_recipe(tmp_path, **changes))
    assert not (tmp_path / "runs").exists()


def test_an_engine_of_another_model_is_refused_unless_an_adapter_is_sent(policy_served, tmp_path):
    other = _engine(policy_served, model="another")
    with pytest.raises(EngineError, match=r"the model 'another' .* given one of 'policy'"):
        dry_run(tiny_recipe(tmp_path, rollout__engine=other))
    lora = {"rank": 2, "alpha": 4.0, "targets": ["q_proj"]}
    dry_run(tiny_recipe(tmp_path, rollout__engine=other | {"weights": {"name": "adapter"}}, model__lora=lora))


def test_a_judge_that_refuses_the_model_is_refused_and_another_is_asked_once(tmp_path):
    with (
        judging(lambda n, body: (404, b"no such model")) as (url, _),
        pytest.raises(EngineError, match="no such model"),
    ):
        dry_run(tiny_recipe(tmp_path, rewards=_judge(url)))
    with judging(lambda n, body: said("ok")) as (url, requests):
        dry_run(tiny_recipe(tmp_path, rewards=_judge(url)))
    assert [request["model"] for request in requests] == ["j"]
