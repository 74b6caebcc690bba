"""Sampling on servers: what is asked, what is believed, what happens when one fails. These servers are fakes."""

import signal
import threading
import time
from functools import partial
from queue import SimpleQueue

import pytest
import torch
from transformers import AutoModelForCausalLM

from logitless.errors import EngineError, InputError
from logitless.http_client import HttpClient, Patience
from logitless.models.loading import load_model
from logitless.models.lora import LoraOptions, add_lora, merge_adapters
from logitless.rollout.engine import PushingEngine, Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.transformers import TransformersEngine
from logitless.rollout.vllm.api import VllmServer
from logitless.rollout.vllm.probe import Probe, probe_prompt, scored_tokens
from logitless.rollout.vllm.server import VllmServerEngine
from logitless.rollout.vllm.weight_sync import AdapterSync, FolderSync
from logitless.seeds import derived_seed
from logitless.types import Prompt
from tests.models.mixtures import MIXTURES
from tests.rollout.fake_vllm import Served, answered, changed, choice, failing, gone, serving, slow
from tests.rollout.policy import TOKENIZER, tiny_policy

PROMPTS = [Prompt(str(i), "", ids) for i, ids in enumerate([(3, 4), (5,), (6, 7, 8)])]
OPTIONS = SamplingOptions(max_new_tokens=6)
GENERATE = "/inference/v1/generate"
QUICK = Patience(give_up_seconds=300.0, first_wait_seconds=0.01, longest_wait_seconds=0.02)
IMPATIENT = Patience(give_up_seconds=0.05, first_wait_seconds=0.01)


def _served(**options):
    return Served(partial(tiny_policy, 9), TOKENIZER, **options)  # started with other weights than the policy's


def _engine(*urls, sync=None, patience=QUICK, seconds=300.0, key=None):
    servers = [VllmServer(HttpClient(url, seconds=seconds, api_key=key)) for url in urls]
    probe = Probe(probe_prompt(TOKENIZER, 12), max_difference=1e-4, new_tokens=4)
    sync = FolderSync("policy", patience) if sync is None else sync
    return VllmServerEngine(servers, sync, TOKENIZER, probe=probe, patience=patience)


def _loaded(*urls, model=None, version=0, **options):
    """An engine whose servers have a policy's weights."""
    engine = _engine(*urls, **options)
    engine.load(Weights.of(tiny_policy() if model is None else model), version)
    return engine


@pytest.fixture
def served():
    return _served()


@pytest.fixture
def url(served):
    with serving(served) as url:
        yield url


def _expected(model, prompts=PROMPTS, num_samples=3):
    """What the model itself samples, each prompt with the seed that its request has."""
    engine = TransformersEngine(model, TOKENIZER)
    asked = [([Prompt("p", "", p.token_ids)], derived_seed(7, p.id)) for p in prompts]
    return _tokens([engine.sample(prompt, num_samples, OPTIONS, seed=seed)[0] for prompt, seed in asked])


def _tokens(groups):
    return [[completion.token_ids.tolist() for completion in group] for group in groups]


def _sample(engine, prompts=PROMPTS, options=OPTIONS):
    return engine.sample(prompts, 3, options, seed=7)


def test_completions_are_those_of_the_pushed_weights_with_their_log_probs_and_version(url):
    model, engine = tiny_policy(), _engine(url)
    engine.load(Weights.of(model), 4)
    groups = _sample(engine)
    assert _tokens(groups) == _expected(model)
    here = TransformersEngine(model, TOKENIZER).sample([Prompt("p", "", (3, 4))], 3, OPTIONS, seed=derived_seed(7, "0"))
    for mine, theirs in zip(here[0], groups[0], strict=True):
        assert theirs.logp_sampler == pytest.approx(mine.logp_sampler, abs=1e-5)
        assert (theirs.text, theirs.finish_reason, theirs.weights_version) == (mine.text, mine.finish_reason, 4)
    assert isinstance(engine, PushingEngine)
    assert engine.transfer_numbers["weights/probe_difference_max"] < 1e-4


def test_a_group_is_one_request_with_one_settings_object(served, url):
    engine = _loaded(url)
    served.asked.clear()
    _sample(engine, options=SamplingOptions(max_new_tokens=6, temperature=0.7, stop=("a",), stop_token_ids=(5,)))
    asked = [body for path, body in served.asked if path == GENERATE]
    assert sorted(body["token_ids"] for body in asked) == [[3, 4], [5], [6, 7, 8]]
    settings = [body["sampling_params"] for body in asked]
    for each in settings:
        assert (each["n"], each["temperature"], each["stop"], each["stop_token_ids"]) == (3, 0.7, ["a"], [2, 5])
    assert len({each["seed"] for each in settings}) == 3


def test_at_temperature_0_a_token_has_log_prob_0(url):
    engine = _loaded(url)
    [group] = engine.sample(PROMPTS[:1], 1, OPTIONS.greedy(), seed=0)
    assert set(group[0].logp_sampler) == {0.0}


def test_prompts_take_turns_on_several_servers_that_all_get_the_weights(served, url):
    other, model = _served(), tiny_policy()
    with serving(other) as second:
        engine = _loaded(url, second)
        assert _tokens(_sample(engine)) == _expected(model)
    of = [[body["token_ids"] for path, body in each.asked if path == GENERATE][1:] for each in (served, other)]
    assert [sorted(prompts) for prompts in of] == [[[3, 4], [6, 7, 8]], [[5]]]  # after a probe of each


def test_new_weights_are_paused_for_pushed_and_the_prefix_cache_is_reset(served, url):
    engine = _loaded(url)
    served.asked.clear()
    engine.load(Weights.of(tiny_policy(1)), 1)
    told = [path for path, _ in served.asked if path not in ("/weight_info", "/v1/models", GENERATE)]
    named = "/update_weight_version"
    assert told == ["/pause?mode=wait", named, "/collective_rpc", "/reset_prefix_cache", named, "/resume"]
    assert _tokens(_sample(engine)) == _expected(tiny_policy(1))


def test_weights_that_did_not_arrive_stop_the_run_with_both_numbers(served, url):
    served.loads = False
    with pytest.raises(EngineError, match=r"within 0.0001 nats .* version 3 .*-[\d.]+ there and -[\d.]+ here"):
        _engine(url).load(Weights.of(tiny_policy()), 3)


def test_an_adapter_alone_is_pushed_under_a_name_of_its_version(served, url):
    policy = add_lora(tiny_policy(9), LoraOptions(rank=2, targets=("q_proj", "down_proj")), seed=0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    engine = _engine(url, sync=AdapterSync(QUICK))
    engine.load(Weights.of(policy), 1)
    [first] = served.adapters
    engine.load(Weights.of(policy), 2)
    [second] = served.adapters  # the one before is served no longer
    assert first != second
    assert _tokens(_sample(engine)) == _expected(policy)
    assert engine.transfer_numbers["weights/pushed_bytes"] < sum(p.nbytes for p in policy.parameters()) / 4
    assert not [path for path, _ in served.asked if path == "/collective_rpc"]
    served.restart()  # and then it knows neither
    assert _tokens(_sample(engine)) == _expected(policy)


def _refused_until_an_adapter_is_there(served, refused=None):
    """A request that an unknown adapter is refused to, which its client learns when another one has pushed it."""

    def overtaken(body):
        refusal = answered(served, GENERATE, body)
        if refused:
            refused.set()
        while not served.adapters:
            time.sleep(0.005)
        return refusal

    return overtaken


def test_a_request_that_missed_an_adapter_which_another_one_brought_back_is_made_again(served, url):
    policy = add_lora(tiny_policy(9), LoraOptions(rank=2), seed=0)
    engine = _loaded(url, model=policy, sync=AdapterSync(QUICK))
    served.restart()

    served.faults[GENERATE] = [_refused_until_an_adapter_is_there(served)]
    assert _tokens(_sample(engine)) == _expected(policy)


def test_a_request_that_began_amid_the_push_that_brings_an_adapter_back_is_made_again(served, url, monkeypatch):
    policy = add_lora(tiny_policy(9), LoraOptions(rank=2), seed=0)
    engine = _loaded(url, model=policy, sync=AdapterSync(QUICK))
    served.restart()
    again, refused, found = AdapterSync.again, threading.Event(), []

    def amid(sync, server):
        served.faults[GENERATE] = [_refused_until_an_adapter_is_there(served, refused)]
        asking.start()
        assert refused.wait(300)
        again(sync, server)

    monkeypatch.setattr(AdapterSync, "again", amid)
    asking = threading.Thread(target=lambda: found.extend(_sample(engine, PROMPTS[1:2])))
    assert _tokens(_sample(engine, PROMPTS[:1])) == _expected(policy, PROMPTS[:1])
    asking.join()
    assert _tokens(found) == _expected(policy, PROMPTS[1:2])


def test_an_adapter_on_another_base_model_is_found_by_the_probe(url):
    policy = add_lora(tiny_policy(1), LoraOptions(rank=2), seed=0)
    with pytest.raises(EngineError, match="nats of the trainer's"):
        _engine(url, sync=AdapterSync(QUICK)).load(Weights.of(policy), 0)


def test_a_base_model_that_somebody_else_gave_weights_to_between_two_pushes_stops_the_run(served, url):
    policy = add_lora(tiny_policy(9), LoraOptions(rank=2), seed=0)
    engine = _loaded(url, model=policy, sync=AdapterSync(QUICK))
    served.name = "theirs"  # the same weights, so that no probe would see it
    with pytest.raises(EngineError, match="somebody else pushed, called 'theirs'"):
        engine.load(Weights.of(policy), 1)


class _OfCheckpoints(Served):
    """A server that takes weights by the names of checkpoint files alone, as vLLM does, and every one of them."""

    def _load(self, folder):
        read, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with self.lock:
            self.policy = read.eval()


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_mixture_is_pushed_by_the_names_of_checkpoint_files_with_its_correction_bias(dtype):
    config = MIXTURES["glm4_moe"] | {"vocab_size": 11, "num_hidden_layers": 2}

    def policy(seed=9):
        model = load_model(config, random_weights=True, seed=seed).eval()
        model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.4, -0.3, 0.1, -0.2]))
        return model

    trained = add_lora(policy(1), LoraOptions(rank=2))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    with serving(_OfCheckpoints(policy, TOKENIZER)) as url:
        engine = _engine(url, sync=FolderSync("policy", QUICK, dtype=dtype))
        engine.load(Weights.of(trained), 1)
        assert _tokens(_sample(engine)) == _expected(merge_adapters(trained))


def test_an_adapter_of_experts_is_not_pushed_alone(url):
    config = MIXTURES["qwen3_moe"] | {"vocab_size": 11}
    trained = add_lora(load_model(config, random_weights=True), LoraOptions(rank=2))
    with pytest.raises(EngineError, match=r"experts.*Set rollout.engine.weights: {name: folder}"):
        _engine(url, sync=AdapterSync(QUICK)).load(Weights.of(trained), 0)


def test_a_policy_without_an_adapter_cannot_push_one(url):
    with pytest.raises(EngineError, match="a policy without one"):
        _engine(url, sync=AdapterSync(QUICK)).load(Weights.of(tiny_policy()), 0)


# --- faults


@pytest.mark.parametrize(
    "fault",
    [failing(503), gone, lambda body: (200, b'{"choices": [{"index": 0, "tok'), lambda body: (200, b"")],
    ids=["503", "gone", "truncated JSON", "empty"],
)
def test_a_passing_fault_is_asked_through_and_changes_nothing(served, url, fault):
    model = tiny_policy()
    engine = _loaded(url)
    served.faults[GENERATE] = [fault, failing(500)]
    assert _tokens(_sample(engine)) == _expected(model)


def _without(field):
    return lambda found: found["choices"][1].pop(field)


def _with_token(**change):
    return lambda found: found["choices"][0]["logprobs"]["content"][0].update(change)


UNUSABLE = {
    "without log-probs": (_without("logprobs"), "sample 1 of"),
    "without token ids": (_without("token_ids"), "sample 1 without token ids"),
    "fewer samples": (lambda found: found["choices"].pop(), "2 samples where 3 were asked for"),
    "NaN": (_with_token(logprob=float("nan")), "sample 0 with the log-prob nan"),
    "log-probs of other tokens": (_with_token(token_id=1), "sample 0 of [0-9]+ tokens with log-probs"),
    "without names of weights": (_without("weight_versions"), "sample 1 of [0-9]+ tokens with the weights' names"),
    "aborted": (lambda found: found["choices"][0].update(finish_reason="abort"), "ended because of 'abort'"),
}


@pytest.mark.parametrize(("change", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_answer_that_lacks_something_is_asked_for_again_and_then_stops_the_run(served, url, change, message):
    model = tiny_policy()
    engine = _loaded(url)
    served.faults[GENERATE] = [changed(served, change)]
    assert _tokens(_sample(engine)) == _expected(model)
    served.faults[GENERATE] = [changed(served, change)] * 3
    with pytest.raises(EngineError, match=message):
        _sample(engine, PROMPTS[:1])


def test_a_server_that_is_gone_for_good_stops_the_run_at_the_deadline():
    served = _served()
    with serving(served) as url:
        engine = _loaded(url, patience=IMPATIENT)
    with pytest.raises(EngineError, match=r"3 samples of a prompt from http://127.0.0.1:\d+; given ConnectionRefused"):
        _sample(engine)


def test_a_server_that_is_too_slow_is_asked_again(served, url):
    model = tiny_policy()
    engine = _loaded(url, seconds=1.5)
    served.faults[GENERATE] = [slow(served, 3.0)]
    assert _tokens(_sample(engine, PROMPTS[:1])) == _expected(model, PROMPTS[:1])


def test_a_server_that_came_back_with_old_weights_gets_them_again_and_what_it_said_without_them_is_not_used(
    served, url
):
    model = tiny_policy()
    engine = _loaded(url)

    def restart(body):
        served.restart()

    served.faults[GENERATE] = [restart]
    assert _tokens(_sample(engine)) == _expected(model)
    served.restart()  # between two rounds: no request fails, and what is said without the weights is thrown away
    served.asked.clear()
    assert _tokens(_sample(engine)) == _expected(model)
    samples = [body["sampling_params"]["n"] for path, body in served.asked if path == GENERATE]
    assert samples.count(3) > 3


@pytest.mark.parametrize("when", ["between rounds", "during a round", "before a push"])
def test_weights_that_somebody_else_pushed_stop_the_run(served, url, when):
    engine = _loaded(url)

    def intrude(body=None):
        served.name = "theirs"
        return 500, b""

    if when == "during a round":
        served.faults[GENERATE] = [intrude]
    else:
        intrude()
    with pytest.raises(EngineError, match="somebody else pushed, called 'theirs'"):
        engine.load(Weights.of(tiny_policy()), 1) if when == "before a push" else _sample(engine)


def test_a_prompt_longer_than_the_servers_context_is_refused_before_it_is_asked(served, url):
    served.context = 8
    engine = _loaded(url)
    with pytest.raises(InputError, match="prompt '2' of 3 tokens and 6 new"):
        _sample(engine)


def test_what_a_server_refuses_stops_the_run_with_its_words(served, url):
    engine = _loaded(url)
    served.faults[GENERATE] = [failing(400, "the prompt is too long")] * 3
    with pytest.raises(EngineError, match="a refusal, HTTP 400: the prompt is too long"):
        _sample(engine)


def test_a_prefix_cache_that_is_not_reset_is_tried_again_and_then_stops_the_run(served, url):
    def kept(body):
        return 200, b'{"success": false}'

    served.faults["/reset_prefix_cache"] = [kept]
    _engine(url).load(Weights.of(tiny_policy()), 0)
    served.faults["/reset_prefix_cache"] = [kept] * 50
    with pytest.raises(EngineError, match="a prefix cache that was not reset"):
        _engine(url, patience=IMPATIENT).load(Weights.of(tiny_policy()), 0)


def test_a_server_of_another_model_is_named(url):
    engine = _engine(url, sync=FolderSync("another", QUICK))
    with pytest.raises(EngineError, match=r"a server of the model 'another' .* given one of 'policy'"):
        engine.load(Weights.of(tiny_policy()), 0)


def test_a_completion_that_ends_where_the_policys_tokenizer_does_not_is_refused(served, url):
    engine = _loaded(url)

    def end_early(found):
        [name] = {span["version"] for span in found["choices"][0]["weight_versions"]}
        found["choices"][0] = choice(0, [3], [-1.0], "stop", [name])

    served.faults[GENERATE] = [changed(served, end_early)] * 3
    with pytest.raises(EngineError, match=r"finish reason 'stop' .* because of 'length'"):
        _sample(engine)


def test_the_key_is_sent_and_a_wrong_one_is_named():
    with serving(_served(key="secret")) as url:
        engine = _loaded(url, key="secret")
        _sample(engine)
        with pytest.raises(EngineError, match=r"HTTP 401: .*Unauthorized.* api_key_file"):
            _engine(url).load(Weights.of(tiny_policy()), 0)


def test_ctrl_c_ends_the_requests_under_way(served, url, monkeypatch):
    engine = _loaded(url)
    asked, waiting = threading.Semaphore(0), threading.Event()

    class Noting(SimpleQueue):
        def get(self, **options):
            waiting.set()
            return super().get(**options)

    def unanswered(body):
        asked.release()
        return slow(served, 240.0)(body)

    def interrupt():
        for _ in PROMPTS:
            asked.acquire()
        waiting.wait()  # all threads are started; amid a start the standard library may forget one
        _interrupt_main()

    monkeypatch.setattr("logitless.rollout.vllm.server.SimpleQueue", Noting)
    served.faults[GENERATE] = [unanswered] * len(PROMPTS)
    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _sample(engine)
    assert time.monotonic() - began < 200.0  # and not the server's 240 seconds
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("logitless-requests")]


def test_a_request_that_has_not_begun_at_ctrl_c_is_not_made(served, url, monkeypatch):
    engine = _loaded(url)
    served.asked.clear()
    given_up, answer = threading.Event(), VllmServerEngine._answer

    class Interrupted(SimpleQueue):
        def get(self, **options):
            _interrupt_main()
            time.sleep(300)

    def later(*arguments):
        given_up.wait(300)
        return answer(*arguments)

    monkeypatch.setattr(VllmServerEngine, "_answer", later)
    monkeypatch.setattr(HttpClient, "give_up", lambda client: given_up.set())
    monkeypatch.setattr("logitless.rollout.vllm.server.SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        _sample(engine)
    assert not served.asked


def _interrupt_main():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_nothing_is_sampled_before_there_are_weights():
    with pytest.raises(EngineError, match="none yet"):
        _sample(_engine("http://127.0.0.1:1"))


# --- weights that change while a completion is under way


def _in_flight(url, **options):
    return _engine(url, sync=FolderSync("policy", QUICK, in_flight=True), **options)


def _pushed_in_the_middle(served, url):
    """Completions that wait after their third token until the weights change; and all weights by version."""
    models = {version: tiny_policy(version) for version in (0, 1)}
    engine = _in_flight(url)
    engine.load(Weights.of(models[0]), 0)
    first, found = served.name, []
    served.token_seconds, served.hold = 0.001, lambda name: name == first
    options = SamplingOptions(max_new_tokens=40)
    asking = threading.Thread(target=lambda: found.extend(engine.sample(PROMPTS, 2, options, seed=7)))
    asking.start()
    assert served.begun.wait(300)
    engine.load(Weights.of(models[1]), 1)
    asking.join()
    engine.close()
    return models, [c for group in found for c in group]


def test_weights_that_arrive_in_the_middle_of_a_completion_are_those_of_its_later_tokens(served, url):
    models, completions = _pushed_in_the_middle(served, url)
    mixed = [c for c in completions if c.token_versions is not None]
    assert mixed
    for completion in mixed:
        assert set(completion.token_versions) == {0, 1}
        assert list(completion.token_versions) == sorted(completion.token_versions)
        assert completion.weights_version == 0
        prompt = next(p for p in PROMPTS if p.id == completion.prompt_id)
        under = {v: scored_tokens(m, prompt.token_ids, completion.token_ids, 1.0) for v, m in models.items()}
        by_version = [under[version][t] for t, version in enumerate(completion.token_versions)]
        assert completion.logp_sampler == pytest.approx(by_version, abs=1e-5)
        assert completion.logp_sampler != pytest.approx(under[0], abs=1e-2)


def test_completions_that_no_push_met_have_one_version(served, url):
    engine = _in_flight(url)
    engine.load(Weights.of(tiny_policy()), 3)
    for completion in (c for group in _sample(engine) for c in group):
        assert (completion.weights_version, completion.token_versions) == (3, None)
    assert "/pause?mode=keep" in [path for path, _ in served.asked]


def test_a_server_that_restarts_while_the_policy_is_trained_is_probed_with_what_the_trainer_said_before(served, url):
    model = tiny_policy()
    engine = _loaded(url)
    expected = _expected(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)  # training goes on, in place
    served.restart()
    assert _tokens(_sample(engine)) == expected
