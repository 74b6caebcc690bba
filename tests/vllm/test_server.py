"""A real server in float32 with a tied LM head: samples are what the model says; pushes arrive or are noticed."""

import threading
import time
from contextlib import ExitStack, closing

import pytest
import torch

from logitless.data.packing import pack
from logitless.errors import EngineError, InputError
from logitless.http_client import HttpClient
from logitless.rollout.engine import Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.transformers import TransformersEngine
from logitless.rollout.vllm.api import VllmServer, request_settings
from logitless.rollout.vllm.probe import scored_tokens
from logitless.rollout.vllm.weight_folder import WeightFolders
from logitless.train.learn.policy import Policy
from logitless.train.learn.teacher_server import ServedTeacher
from logitless.types import Prompt
from tests.rollout.plain_forward import check_logp
from tests.vllm.conftest import KEY, PATIENCE, PROMPT, TOKENIZER, engine_at, server_at, tiny_model, tiny_server

PROMPTS = [Prompt(str(n), "", tuple(PROMPT[n : n + n + 1])) for n in range(6)]
OPTIONS = SamplingOptions(max_new_tokens=24)
SEED = 5


def _tokens(groups):
    return [[completion.token_ids.tolist() for completion in group] for group in groups]


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    with tiny_server(tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture(scope="module")
def model():
    return tiny_model(1)


@pytest.fixture(scope="module")
def loaded(process, model):
    """An engine with the weights of seed 1."""
    engine = engine_at(process.url)
    engine.load(Weights.of(model), 7)
    yield engine
    engine.close()


@pytest.fixture
def fresh_at(process):
    """Makes further engines, which are closed after the test."""
    with ExitStack() as made:
        yield lambda **options: made.enter_context(closing(engine_at(process.url, **options)))


@pytest.fixture
def engine(loaded, model):
    """The same, whatever a test did to the server."""
    yield loaded
    loaded._sync.again(loaded._watched[0].server)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.4, "top_k": 5},
        {"top_p": 0.7},
        {"temperature": 0.8, "min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
    ],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_log_probs_are_of_the_distribution_that_the_settings_define(engine, model, changes):
    options = SamplingOptions(max_new_tokens=24, **changes)
    groups = engine.sample(PROMPTS, 4, options, seed=SEED)
    # Two implementations in float32: about 60 roundings of sums of 64 to 128 terms, at logits of about 5.
    check_logp(model, PROMPTS, groups, options, rtol=0, atol=1e-4)
    assert sum(completion.length for group in groups for completion in group) > 300


def test_in_float32_the_two_engines_agree_to_1e_5(engine, model):
    groups = engine.sample(PROMPTS, 8, OPTIONS, seed=SEED)
    differences = [
        abs(a - b)
        for prompt, group in zip(PROMPTS, groups, strict=True)
        for c in group
        for a, b in zip(c.logp_sampler, scored_tokens(model, prompt.token_ids, c.token_ids, 1.0), strict=True)
    ]
    assert sum(differences) / len(differences) < 1e-5


def test_a_teacher_on_the_server_gives_the_log_probs_of_its_model(engine, model, process):
    text = "abc, de."
    prompt = Prompt("1", text, tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"]))
    pairs = [(prompt, completion) for completion in engine.sample([prompt], 3, OPTIONS, seed=SEED)[0]]
    batch, options = pack(pairs), {"temperature": 1.0, "backend": "reference"}
    teacher = ServedTeacher(server_at(process.url), patience=PATIENCE)
    teacher.check(prompt)
    with torch.no_grad():
        expected = Policy(model).scores(batch, **options).logp
    torch.testing.assert_close(teacher.scores(batch, **options).logp, expected, rtol=0, atol=1e-4)
    ids, logp = teacher.top(batch, 20)  # the most without --max-logprobs
    of_all = torch.cat([_log_probs_of_all(model, prompt, completion) for _, completion in pairs])
    torch.testing.assert_close(logp, of_all.topk(20, 1).values, rtol=0, atol=1e-4)
    torch.testing.assert_close(logp, of_all.gather(1, ids), rtol=0, atol=1e-4)
    with pytest.raises(EngineError, match=r"21.*20"):
        teacher.top(batch, 21)


def _log_probs_of_all(model, prompt, completion):
    """[tokens, V] in the place of each token of a completion."""
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
    with torch.no_grad():
        return model(input_ids=ids).logits[0, len(prompt.token_ids) - 1 : -1].log_softmax(-1)


def test_greedy_decoding_gives_the_same_text_as_transformers(engine, model):
    options = OPTIONS.greedy()
    there = engine.sample(PROMPTS, 1, options, seed=0)
    here = TransformersEngine(model, TOKENIZER).sample(PROMPTS, 1, options, seed=0)
    assert _tokens(there) == _tokens(here)
    assert [group[0].text for group in there] == [group[0].text for group in here]
    assert set(there[0][0].logp_sampler) == {0.0}


def test_samples_of_a_prompt_differ_and_a_seed_repeats_them(engine):
    once, again, other = (engine.sample(PROMPTS, 8, OPTIONS, seed=seed) for seed in (SEED, SEED, SEED + 1))
    assert _tokens(once) == _tokens(again)
    assert once[0] != other[0]
    assert len({c.token_ids.tobytes() for c in once[0]}) == 8
    assert {c.weights_version for group in once for c in group} == {7}


def test_a_stop_string_ends_a_completion_also_where_tokens_split_it(engine):
    plain = engine.sample(PROMPTS, 4, OPTIONS, seed=SEED)
    text = plain[2][1].text
    stop = text[5:8]  # three characters, each a token of its own
    stopped = engine.sample(PROMPTS, 4, SamplingOptions(max_new_tokens=24, stop=(stop,)), seed=SEED)
    cut = stopped[2][1]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
    assert cut.token_ids.tolist() == plain[2][1].token_ids[: cut.length].tolist()
    assert TOKENIZER.decode(list(cut.token_ids)).endswith(stop)
    assert len(cut.logp_sampler) == cut.length


def test_stop_tokens_and_eos_end_completions_and_limits_cut_them(engine):
    stop = engine.sample(PROMPTS, 4, OPTIONS, seed=SEED)[1][0].token_ids[3].item()
    groups = engine.sample(PROMPTS, 16, SamplingOptions(max_new_tokens=24, stop_token_ids=(stop,)), seed=SEED)
    for completion in (c for group in groups for c in group):
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in (TOKENIZER.eos_token_id, stop))
        assert not {TOKENIZER.eos_token_id, stop} & set(completion.token_ids[:-1])
        assert completion.finish_reason == "stop" or completion.length == 24


def test_a_push_replaces_the_weights_and_the_version(engine, fresh_at):
    other = tiny_model(2)
    fresh = fresh_at()
    fresh.load(Weights.of(other), 8)
    assert fresh.transfer_numbers["weights/probe_difference_max"] < 1e-4
    [group] = fresh.sample(PROMPTS[:1], 1, OPTIONS, seed=SEED)
    expected = scored_tokens(other, PROMPTS[0].token_ids, group[0].token_ids, 1.0)
    assert group[0].logp_sampler == pytest.approx(expected, abs=1e-4)
    assert group[0].weights_version == 8


def test_differences_arrive_as_whole_weights_do(engine, fresh_at):
    moving = tiny_model(3)
    fresh = fresh_at(differences_in_a_row=8)
    fresh.load(Weights.of(moving), 0)
    whole = fresh.transfer_numbers["weights/pushed_bytes"]
    for version in range(1, 4):
        with torch.no_grad():
            for name, parameter in moving.named_parameters():
                if "layers.1" in name and parameter.ndim == 2:
                    parameter[version] += 0.3
        fresh.load(Weights.of(moving), version)
        assert fresh.transfer_numbers["weights/probe_difference_max"] < 1e-4
        assert fresh.transfer_numbers["weights/pushed_bytes"] < whole / 10
        assert fresh.transfer_numbers["weights/changed_fraction"] < 0.05


def test_trap_vllms_own_reload_leaves_a_tied_lm_head_stale_on_cpus_and_the_probe_says_so(engine, fresh_at):
    fresh = fresh_at(loader="reload")
    with pytest.raises(EngineError, match=r"nats of the trainer's.*given -[\d.]+ there and -[\d.]+ here"):
        fresh.load(Weights.of(tiny_model(4)), 0)


def _loaded_without_reset(server, folder, model):
    written = WeightFolders(folder).write(Weights.of(model).tensors(), 0, model.config.save_pretrained)
    server.call_workers("load_weight_folder", {"folder": str(written.folder)}, seconds=60.0)


def _asked(server, count=1, tokens=8, **changes):
    settings = request_settings(SamplingOptions(max_new_tokens=tokens), ()) | changes
    return server.sample("policy", PROMPT, count, settings, seed=1)


def _distance(model, sampled):
    scored = torch.tensor(scored_tokens(model, PROMPT, sampled.token_ids, 1.0))
    return (scored - torch.tensor(sampled.logp)).abs()


def test_trap_a_push_without_resetting_the_prefix_cache_leaves_cached_prompts_on_old_weights(engine, process, tmp_path):
    server, other = server_at(process.url), tiny_model(5)
    _asked(server)  # the prompt is cached under the weights of before
    _loaded_without_reset(server, tmp_path, other)
    assert _distance(other, _asked(server)[0]).max() > 0.05
    server.forget_prefixes()
    assert _distance(other, _asked(server)[0]).max() < 1e-4


def test_trap_the_probes_prompt_is_cached_so_that_a_cache_that_was_not_reset_is_noticed(engine, fresh_at, monkeypatch):
    fresh = fresh_at()
    fresh.load(Weights.of(tiny_model(6)), 0)
    monkeypatch.setattr(VllmServer, "forget_prefixes", lambda self: None)
    monkeypatch.setattr(
        VllmServer, "pause", lambda self, mode: self.client.post(f"/pause?mode={mode}&clear_cache=false")
    )
    with pytest.raises(EngineError, match="nats of the trainer's"):
        fresh.load(Weights.of(tiny_model(5)), 1)


def _generated(server):
    """Tokens that the server has sampled since its start."""
    lines = server.client.get("/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def _pushed_while_sampling(server, mode, folder, model):
    """A long completion during which the weights change, with the given way to pause."""
    found = []
    asking = threading.Thread(
        target=lambda: found.extend(_asked(server, tokens=280, ignore_eos=True, stop_token_ids=[]))
    )
    begun = _generated(server)
    asking.start()
    while _generated(server) < begun + 20 and asking.is_alive():  # in the middle of the completion
        time.sleep(0.005)
    server.client.post(f"/pause?mode={mode}&clear_cache=false")
    _loaded_without_reset(server, folder, model)
    server.resume()
    asking.join()
    return found[0]


def test_trap_pause_keep_mixes_two_policies_in_one_completion_and_wait_does_not(engine, model, process, tmp_path):
    server, other = server_at(process.url), tiny_model(5)
    waited = _pushed_while_sampling(server, "wait", tmp_path / "wait", other)
    assert _distance(model, waited).max() < 1e-3
    for attempt in range(8):  # on a busy machine the completion may have ended before the pause came
        engine._sync.again(server)
        mixed = _pushed_while_sampling(server, "keep", tmp_path / f"keep-{attempt}", other)
        before, after = _distance(model, mixed), _distance(other, mixed)
        if before[-1] > 1e-3:
            break
    assert before[0] < 1e-3  # begun with the old weights
    assert before[-1] > 1e-3  # ended with others
    assert after.max() > 0.05  # and of no single policy


def test_a_push_in_flight_gives_each_token_the_version_and_the_log_prob_of_the_weights_that_drew_it(
    engine, process, fresh_at
):
    models = {11: tiny_model(5), 12: tiny_model(6)}
    fresh, server = fresh_at(in_flight=True), server_at(process.url)
    settings = SamplingOptions(max_new_tokens=280, stop_token_ids=())
    for _ in range(8):  # on a busy machine completions may have ended before the push came
        fresh.load(Weights.of(models[11]), 11)
        found, begun = [], _generated(server)
        asking = threading.Thread(target=lambda: found.extend(fresh.sample(PROMPTS, 4, settings, seed=SEED)))  # noqa: B023
        asking.start()
        while _generated(server) < begun + 20 * 24 and asking.is_alive():
            time.sleep(0.005)
        fresh.load(Weights.of(models[12]), 12)
        asking.join()
        mixed = [c for group in found for c in group if c.token_versions is not None]
        if mixed:
            break
    assert mixed
    for completion in mixed[:6]:
        prompt = PROMPTS[int(completion.prompt_id)].token_ids
        under = {v: scored_tokens(m, prompt, completion.token_ids, 1.0) for v, m in models.items()}
        assert list(completion.token_versions) == sorted(completion.token_versions)
        assert completion.weights_version == 11
        expected = [under[version][t] for t, version in enumerate(completion.token_versions)]
        assert completion.logp_sampler == pytest.approx(expected, abs=1e-3)  # keys were made anew by the new weights
        assert max(abs(a - b) for a, b in zip(completion.logp_sampler, under[11], strict=True)) > 0.05


def test_a_prompt_longer_than_the_context_is_refused_here_and_by_the_server(engine, process):
    long = Prompt("long", "", PROMPT * 3)
    with pytest.raises(InputError, match="prompt 'long' of 600 tokens"):
        engine.sample([long], 1, OPTIONS, seed=SEED)
    engine._context = 10_000
    with pytest.raises(EngineError, match=r"a refusal, HTTP 400: .*512"):
        engine.sample([long], 1, OPTIONS, seed=SEED)
    engine._context = 512


def test_a_request_without_the_key_is_refused(process):
    with pytest.raises(EngineError, match="401"):
        PATIENCE.until_done(lambda: server_at(process.url, key=None).models(), what="models", where="there")
    assert "policy" in VllmServer(HttpClient(process.url, api_key=KEY)).models()


def test_many_prompts_at_once_keep_their_order(engine, model):
    many = [Prompt(f"m{n}", "", (PROMPT[n], PROMPT[n + 1])) for n in range(100)]
    groups = engine.sample(many, 2, SamplingOptions(max_new_tokens=4), seed=SEED)
    for prompt, group in zip(many[::10], groups[::10], strict=True):
        expected = scored_tokens(model, prompt.token_ids, group[1].token_ids, 1.0)
        assert group[1].prompt_id == prompt.id
        assert group[1].logp_sampler == pytest.approx(expected, abs=1e-4)


def test_kill_9_in_the_middle_of_a_round_continues_on_a_restarted_server_with_the_right_weights(
    engine, process, monkeypatch
):
    expected = engine.sample(PROMPTS, 8, OPTIONS, seed=SEED)
    many = [*PROMPTS, *(Prompt(f"k{n}", "", PROMPT[n : n + 50]) for n in range(30))]
    plain, lock, asked = VllmServer.sample, threading.Lock(), []

    def killing(self, *arguments, **options):
        with lock:
            asked.append(arguments)
            if len(asked) == 10:  # nine are under way
                process.kill()
                process.start()
        return plain(self, *arguments, **options)

    monkeypatch.setattr(VllmServer, "sample", killing)
    groups = engine.sample(many, 8, OPTIONS, seed=SEED)
    assert engine._watched[0].restarts > 0
    assert _tokens(groups[: len(PROMPTS)]) == _tokens(expected)
