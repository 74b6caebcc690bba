"""vLLM in this process, with a stand-in for its ``LLM`` around a model of its own; ``tests/vllm`` has the real one."""

import sys
import types
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from logitless.errors import EngineError, UnavailableError
from logitless.rollout.engine import PushingEngine, Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.transformers import TransformersEngine
from logitless.rollout.vllm.in_process import VllmEngine
from logitless.rollout.vllm.probe import Probe, probe_prompt
from logitless.rollout.vllm.weight_folder import read_weights
from logitless.seeds import derived_seed
from logitless.types import Prompt
from tests.rollout.policy import TOKENIZER, tiny_policy

PROMPTS = [Prompt(str(i), "", ids) for i, ids in enumerate([(3, 4), (5,)])]
OPTIONS = SamplingOptions(max_new_tokens=6)


@dataclass
class Output:
    token_ids: list[int]
    logprobs: list[dict] | None
    finish_reason: str


class StandIn:
    """``vllm.LLM`` as far as it is used."""

    last = None

    def __init__(self, model, **options):
        self.model = AutoModelForCausalLM.from_pretrained(model)
        self.options, self.said = options, []
        self.resets = True
        StandIn.last = self

    def collective_rpc(self, method, kwargs):
        assert method == "load_weight_folder"
        with torch.no_grad():
            for name, tensor in read_weights(kwargs["folder"]):
                self.model.get_parameter(name).copy_(tensor)

    def reset_prefix_cache(self):
        return self.resets

    def wake_up(self):
        self.said.append("wake")

    def sleep(self, level):
        self.said.append("sleep")

    def generate(self, prompts, settings, use_tqdm):
        engine = TransformersEngine(self.model, TOKENIZER)
        outputs = []
        for prompt, s in zip(prompts, settings, strict=True):
            options = SamplingOptions(max_new_tokens=s.max_tokens, temperature=s.temperature)
            [group] = engine.sample([Prompt("p", "", tuple(prompt["prompt_token_ids"]))], s.n, options, seed=s.seed)
            outputs.append(types.SimpleNamespace(outputs=[self.as_output(c) for c in group]))
        return outputs

    def as_output(self, c):
        logprobs = [{t: types.SimpleNamespace(logprob=x)} for t, x in zip(c.token_ids, c.logp_sampler, strict=True)]
        return Output(list(c.token_ids), logprobs, c.finish_reason)


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    module = types.SimpleNamespace(LLM=StandIn, SamplingParams=types.SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", module)


def _engine(**changes):
    options = {"dtype": "float32", "context": 64, "memory_fraction": 0.4, "sleep": False, "eager": True, "max_rows": 8}
    probe = Probe(probe_prompt(TOKENIZER, 12), max_difference=1e-4, new_tokens=4)
    return VllmEngine(TOKENIZER, probe=probe, **(options | changes))


def _loaded(**changes):
    engine = _engine(**changes)
    engine.load(Weights.of(tiny_policy()), 0)
    return engine


def test_completions_are_of_the_weights_loaded_last_with_their_version():
    engine = _engine()
    for version, seed in enumerate((0, 1)):
        model = tiny_policy(seed)
        engine.load(Weights.of(model), version)
        groups = engine.sample(PROMPTS, 3, OPTIONS, seed=7)
        for prompt, group in zip(PROMPTS, groups, strict=True):
            [expected] = TransformersEngine(model, TOKENIZER).sample(
                [Prompt("p", "", prompt.token_ids)], 3, OPTIONS, seed=derived_seed(7, prompt.id)
            )
            assert [c.token_ids.tolist() for c in group] == [c.token_ids.tolist() for c in expected]
            assert {c.weights_version for c in group} == {version}
    assert isinstance(engine, PushingEngine)
    assert engine.transfer_numbers["weights/probe_difference_max"] < 1e-4
    assert StandIn.last.options["logprobs_mode"] == "processed_logprobs"
    engine._llm = None
    root = engine._folders.root
    engine.close()
    assert not root.exists()


def test_it_sleeps_between_rounds_where_it_is_told_to():
    engine = _loaded(sleep=True)
    engine.sample(PROMPTS, 1, OPTIONS, seed=0)
    engine.load(Weights.of(tiny_policy(1)), 1)
    assert StandIn.last.said == ["wake", "sleep"] * (1 + 1 + 1 + 1)  # probe, round, weights, probe
    assert StandIn.last.options["enable_sleep_mode"] is True


def test_a_prefix_cache_that_is_not_reset_stops_the_run():
    engine = _loaded()
    StandIn.last.resets = False
    with pytest.raises(EngineError, match="did not reset"):
        engine.load(Weights.of(tiny_policy(1)), 1)


def test_weights_that_did_not_arrive_stop_the_run(monkeypatch):
    engine = _loaded()
    monkeypatch.setattr(StandIn, "collective_rpc", lambda *arguments, **options: None)
    with pytest.raises(EngineError, match=r"vLLM in this process within 0\.0001 nats"):
        engine.load(Weights.of(tiny_policy(1)), 1)


def test_a_completion_without_log_probs_stops_the_run(monkeypatch):
    engine = _loaded()
    output = types.SimpleNamespace(outputs=[Output([3], None, "length")])
    monkeypatch.setattr(StandIn, "generate", lambda *arguments, **options: [output])
    with pytest.raises(EngineError, match="a finished completion with log-probs"):
        engine.sample(PROMPTS[:1], 1, OPTIONS, seed=0)


def test_nothing_is_sampled_before_there_are_weights_and_nothing_without_vllm(monkeypatch):
    engine = _engine()
    with pytest.raises(EngineError, match="none yet"):
        engine.sample(PROMPTS, 1, OPTIONS, seed=0)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UnavailableError, match=r"logitless\[vllm\]"):
        engine.load(Weights.of(tiny_policy()), 0)
    engine.close()
