"""Each rule of a recipe refuses an example that breaks it and nothing else; the example without that is valid."""

import re

import pytest

from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError
from logitless.train.assembly.algorithm import algorithm_of
from logitless.train.assembly.checks import arrangement_of
from logitless.train.recipe import config, rule
from logitless.train.recipe.algorithm import COMPOSED_RULES
from logitless.train.recipe.config import MACHINE_RULES, PROCESS_RULES, RULES
from logitless.train.recipe.loading import load_recipe
from logitless.train.recipe.rule import Machine, Processes, Setting, check, unmet

MINIMAL = """
name: small
model: {source: some/model, device: cpu, trained_dtype: float32}
data: {train: {name: file, path: train.jsonl}}
rollout: {sampling: {max_new_tokens: 8}}
rewards: [{name: length, cap: 3}]
"""
LORA = ("model.lora={rank: 2}",)
BFLOAT16 = ("model.trained_dtype=bfloat16",)
FOUR_BITS = (*LORA, "model.quantize=nf4")
SETS = ("evaluation.sets={hard: {data: {name: file, path: hard.jsonl}}}",)
TOOLS = ("rollout.environment={name: tools, tools: [{name: calculator}]}", "rollout.limits={max_tokens: 8}")
WARM = ("warm_start={data: {name: file, path: warm.jsonl}}",)
HOST = ("train.optimizer.moments=host", *BFLOAT16)
SERVER = ("rollout.engine={name: vllm_server, urls: [http://127.0.0.1:1]}",)
ADAPTER = (*SERVER, *LORA, "rollout.engine.weights={name: adapter}")
FLIGHT = (*SERVER, "rollout.engine.in_flight=true", "rollout.staleness=1")
IN_FLIGHT = ("rollout.in_flight=keep", "rollout.staleness=1")
PARITY = ("rollout.parity={warn: {mean: 0.02}}",)
ACCEPTED = "algorithm.correction={max: 2.0, filtered_sampling: accept}"
COLUMN = "rollout.engine={name: recorded, column: answer}"
TEACHER = ("teacher={source: x/y, divergence: reverse_kl}",)
ON_SERVER = "teacher={source: http://127.0.0.1:1, advantage: true}"
TOP = (ON_SERVER, "teacher.temperature=1", "teacher.divergence=reverse_kl", "teacher.top_k=5")
SEVERAL = ("teacher={source: {x: start, y: self}, column: kind, template: '{{ hint }}{{ prompt }}', advantage: 1}",)
CENTRED = ("algorithm.surrogate={name: reinforce}", "algorithm.score_centering=device")
OVERLONG = "{name: overlong, max_length: %d, buffer: 2}"
BASE = ("teacher={source: base, advantage: true}", *LORA)


def engine(name):
    return f"rollout.engine={{name: {name}}}"


def layers(name):
    return f"model.layers={name}"


OF_RECIPES = [  # what goes together, and what breaks one rule of it
    (SETS, "evaluation.sets={train: {data: {name: file, path: x}}}"),
    ((), "rewards=[{name: length}, {name: format, sources: [sums]}]"),
    (SETS, "rewards=[{name: length, sources: [train]}]"),
    (SETS, "rewards=[{name: length, sources: [train]}, {name: format, gate: true}]"),
    ((*TOOLS, "rollout.environment.call_reward=0.1", "rewards=[]"), "rollout.environment.call_reward=0"),
    (("rewards=[{name: length}]",), "rewards=[]"),
    (("rewards.0.label=a-b",), "rewards.0.label=a/b"),
    (("writers=[wandb, tensorboard]",), "writers=[wandb, {name: wandb}]"),
    ((*SETS, "evaluation.stop={patience: 1, metric: held_out/hard/accuracy}"), "evaluation.sets={}"),
    ((*SETS, "checkpoint.keep_best={metric: held_out/hard/accuracy}"), "checkpoint.keep_best={}"),
    (TOOLS, "rollout.limits.max_tokens=7"),
    (TOOLS, "evaluation.sampling={max_new_tokens: 9}"),
    (TOOLS, "rollout.environment=null"),
    ((), "rollout.sampling.temperature=0"),
    ((f"rewards=[{OVERLONG % 8}]",), f"rewards=[{{name: length}}, {OVERLONG % 9}]"),
    (("rollout.completions_per_prompt=1",), "rollout.zero_signal=drop"),
    (("rollout.zero_signal=refill",), "rollout.completions_per_prompt=1"),
    (PARITY, "rollout.sampling.top_k=2"),
    (PARITY, "rollout.sampling.presence_penalty=0.5"),
    (PARITY, "rollout.staleness=1"),
    (("train.tokens_per_micro_batch=519",), "train.tokens_per_micro_batch=518"),  # the last token is never read
    (("train.activation_memory=1000",), "model.gradient_checkpointing=true"),
    (("train.activation_memory=1000",), "model.compile=true"),
    (("train.optimizer.moments=8bit",), "train.optimizer.implementation=fused"),
    (HOST, "model.trained_dtype=float32"),
    (HOST, "parallel.deterministic=true"),
    ((*LORA, "model.dtype=bfloat16"), "model.lora=null"),
    (BFLOAT16, "model.autocast=bfloat16"),
    (("model.lora={modules_to_save: [lm_head]}", "model.dtype=bfloat16", *BFLOAT16), "model.trained_dtype=float32"),
    (("model.lora={dropout: 0.1}",), layers("row_invariant")),
    (("model.lora={dropout: 0.1}",), engine("gpu")),
    (FOUR_BITS, "model.lora=null"),
    (FOUR_BITS, *WARM),
    (FOUR_BITS, layers("row_invariant")),
    ((*FOUR_BITS, *ADAPTER), "rollout.engine.weights={name: folder}"),
    ((layers("row_invariant"),), "model.attention=sdpa"),
    ((layers("row_invariant"),), "model.autocast=bfloat16"),
    ((layers("row_invariant"),), "model.compile=true"),
    ((layers("row_invariant"),), "model.lora={modules_to_save: [norm]}"),
    (("parallel.sampling=1",), *SERVER),
    (("parallel.sampling_shards=2",), engine("transformers")),
    ((engine("gpu"), "parallel.sampling_shards=2", "rollout.staleness=1"), "rollout.in_flight=keep"),
    ((engine("gpu"), "parallel.sampling_shards=2", "model.lora={}"), "model.quantize=nf4"),
    ((engine("gpu"),), layers("transformers")),
    ((engine("gpu"),), "train.scoring_backend=chunked"),
    ((engine("gpu"),), "train.training_backend=reference"),
    (SERVER, "evaluation.sampling={max_new_tokens: 6, min_p: 0.1, top_p: 0.5}"),
    ((*SERVER, "rollout.engine.api_key_file=a"), "rollout.engine.api_key_variable=B"),
    ((*SERVER, "rollout.engine.model=served", "model.source={model_type: llama}"), "rollout.engine.model=null"),
    (FLIGHT, "rollout.staleness=0"),
    (IN_FLIGHT, "rollout.staleness=0"),
    (IN_FLIGHT, *SERVER),
    ((*FLIGHT, *LORA), "rollout.engine.weights={name: adapter}"),
    (ADAPTER, "model.lora=null"),
    (ADAPTER, *WARM),
    (ADAPTER, "model.lora={modules_to_save: [lm_head]}"),
    (("parallel.deterministic=true",), "parallel.shard=2"),
    (("parallel.deterministic=true",), "parallel.sequence=2"),
    (("algorithm.correction={max: 2.0}",), "rollout.sampling.top_k=3"),
    ((ACCEPTED, "rollout.sampling.top_p=0.9"), "algorithm.correction={max: 2.0}"),
    (CENTRED, "rollout.sampling.top_p=0.9"),
    (CENTRED, *SERVER),
    ((*CENTRED, "rollout.in_flight=recompute", "rollout.staleness=1"), "rollout.in_flight=keep"),
    ((*CENTRED, *LORA), "model.lora={dropout: 0.1}"),
    ((*TEACHER, "rewards=[]"), "rollout.zero_signal=drop"),
    ((*TEACHER, "rollout.zero_signal=drop"), "teacher.alone=true"),
    (TEACHER, "teacher.divergence=null"),
    ((*TEACHER, "teacher.advantage=0.5", "teacher.weight=2"), "teacher.divergence=null"),
    ((*TEACHER, "teacher.divergence=jensen_shannon", "teacher.beta=0.1"), "teacher.divergence=forward_kl"),
    (BASE, "model.lora=null"),
    (BASE, "teacher.place=host"),
    (BASE, "teacher.layers=transformers"),
    (SEVERAL, LORA[0]),
    (SEVERAL, "teacher.template=null"),
    (SEVERAL, "teacher.source=a/b"),
    ((ON_SERVER, "teacher.temperature=1"), "teacher.dtype=float32"),
    ((ON_SERVER, "teacher.temperature=1"), "teacher.divergence=forward_kl"),
    ((ON_SERVER, "teacher.temperature=1"), "teacher.temperature=0.5"),
    (TOP, "teacher.divergence=null"),
    (TOP, "train.training_backend=fused"),
    (TEACHER, "teacher.top_k=5"),
    ((*SEVERAL, "teacher.gamma=1", "teacher.divergence=reverse_kl"), "teacher.advantage=0"),
    (("algorithm.preset=nll", "rewards=[]"), "algorithm.preset=grpo"),
    (("rollout.engine={name: recorded, path: a.jsonl}",), "rollout.engine.path=null"),
    ((COLUMN, "rollout.completions_per_prompt=1"), "rollout.engine.path=a.jsonl"),
    ((COLUMN, "rollout.completions_per_prompt=1"), "rollout.completions_per_prompt=2"),
]


@pytest.fixture
def loaded(tmp_path):
    (tmp_path / "recipe.yaml").write_text(MINIMAL, encoding="utf-8")
    return lambda *overrides: load_recipe(tmp_path / "recipe.yaml", overrides)


@pytest.fixture
def unchecked(loaded, monkeypatch):
    """The recipe that would be refused."""

    def load(*overrides):
        with monkeypatch.context() as patch:
            patch.setattr(config, "RULES", ())
            return loaded(*overrides)

    return load


def broken(rules, subject):
    return [each for each in rules if each.is_broken(subject)]


@pytest.mark.parametrize(("beside", "wrong"), OF_RECIPES, ids=str)
def test_a_recipe_is_refused_for_the_one_rule_that_it_breaks_and_valid_without_that(loaded, unchecked, beside, wrong):
    loaded(*beside)
    recipe = unchecked(*beside, wrong)
    (rule,) = broken(RULES, recipe)
    with pytest.raises(ConfigurationError) as error:
        loaded(*beside, wrong)
    assert str(rule.error(recipe)) in str(error.value)


def test_what_a_rule_of_another_setting_refuses_is_valid_without_that(loaded):
    free = ("model.gradient_checkpointing=true", "model.attention=sdpa", "parallel.shard=2")
    free += ("train.optimizer.implementation=fused", "train.scoring_backend=chunked")
    loaded(layers("transformers"), *free, "rollout.sampling={max_new_tokens: 8, min_p: 0.1, top_k: 3}")


OF_PROCESSES = [
    (("parallel.deterministic=true",), 4, 3),
    (("train.optimizer.moments=8bit",), 1, 2),
    (HOST, 1, 2),
    ((*HOST, "parallel.replicate=2"), None, 2),
    ((engine("gpu"),), 1, 2),
    ((layers("row_invariant"),), 1, 2),
    (FOUR_BITS, 1, 2),
    ((*SERVER, "rollout.staleness=1"), 1, 2),
    (IN_FLIGHT, 1, 2),
    (("parallel.sampling=1",), 2, 1),
    (("parallel.sampling_shards=2",), 4, 3),
    ((engine("gpu"), "parallel.sampling_shards=2", "parallel.sampling=3"), None, 4),
    (("parallel.sampling_shards=2", "parallel.replicate=2"), 4, 2),
    (("parallel.sampling=1", "parallel.replicate=2", "parallel.shard=2"), None, 5),
    ((*TEACHER, "parallel.sequence=2"), None, 2),
    (CENTRED, 1, 2),
    ((*TEACHER, "teacher.place=cuda:1"), 1, 2),
    (("parallel.sequence=2", "model.attention=sdpa"), None, 2),
    (("parallel.vocabulary=all_rows", "parallel.replicate=2"), None, 4),
]


@pytest.mark.parametrize(("overrides", "fits", "wrong"), OF_PROCESSES, ids=str)
def test_a_number_of_processes_is_refused_for_the_one_rule_that_it_breaks(loaded, overrides, fits, wrong):
    recipe = loaded(*overrides)
    if fits is not None:
        arrangement_of(recipe, fits)
    (rule,) = broken(PROCESS_RULES, _processes(recipe, wrong))
    with pytest.raises(rule.kind) as error:
        arrangement_of(recipe, wrong)
    assert str(error.value) == str(rule.error(_processes(recipe, wrong)))


@pytest.mark.parametrize("overrides", [(engine("gpu"),), (layers("row_invariant"),), ("train.optimizer.moments=8bit",)])
def test_copies_of_whole_weights_on_several_processes_break_no_rule(loaded, overrides):
    assert arrangement_of(loaded(*overrides, "parallel.replicate=2"), 2) == Arrangement(replicate=2)


def _processes(recipe, world):
    parallel = recipe.parallel
    whole = {"replicate": parallel.replicate, "sequence": parallel.sequence, "whole": parallel.deterministic}
    training = world - parallel.num_sampling
    return Processes(recipe, training, Arrangement.of(max(1, training), **whole))


HARNESS = ("rollout.environment={name: harness, command: [a]}", "rollout.limits={max_tokens: 8}")

OF_MACHINES = [  # overrides, device, an absent package, and what does without
    ((layers("row_invariant"),), "cpu", None, "model.layers=transformers"),
    ((layers("row_invariant"),), "cuda", "triton", "model.layers=transformers"),
    (("model.attention=flex_attention",), "cpu", None, "model.attention=packed"),
    (FOUR_BITS, "cuda", "bitsandbytes", "model.quantize=null"),
    (LORA, "cuda", "peft", None),
    (HARNESS, "cpu", "starlette", None),
    ((engine("gpu"),), "cpu", None, "rollout.engine={name: transformers}"),
    ((engine("gpu"),), "cuda", "triton", "rollout.engine={name: transformers}"),
    (("train.optimizer.moments=8bit",), "cpu", "torchao", "train.optimizer.moments=float32"),
    (HOST, "cpu", None, "train.optimizer.moments=float32"),
    (("train.training_backend=fused",), "cpu", None, "train.training_backend=auto"),
    (("train.scoring_backend=fused",), "cpu", None, "train.scoring_backend=auto"),
    (("writers=[tensorboard, wandb, {name: trackio, group: a}]",), "cpu", "trackio", "writers=[tensorboard, wandb]"),
    (("writers=[wandb, {name: trackio, group: a}]",), "cpu", "wandb", "writers=[{group: a, name: trackio}]"),
]


def _found(loaded, monkeypatch, overrides, device, absent):
    machine = Machine(loaded(*overrides), device)
    monkeypatch.setattr(rule.importlib.util, "find_spec", lambda name: None if name == absent else name)
    monkeypatch.setattr(rule, "without_triton", lambda: "Triton is absent" if absent == "triton" else "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return machine, broken(MACHINE_RULES, machine)


@pytest.mark.parametrize(("overrides", "device", "absent", "instead"), OF_MACHINES, ids=str)
def test_what_a_machine_lacks_breaks_one_rule_and_the_setting_instead_breaks_none(
    loaded, monkeypatch, overrides, device, absent, instead
):
    machine, found = _found(loaded, monkeypatch, overrides, device, absent)
    (rule,) = found
    assert rule.instead(machine) == (() if instead is None else (instead,))
    assert absent is None or absent.split("_")[0] in str(rule.error(machine)).lower()
    if instead is not None:
        assert broken(MACHINE_RULES, Machine(loaded(*overrides, instead), device)) == []


def test_an_algorithm_is_refused_for_the_one_rule_that_it_breaks(loaded):
    unpaid = ("rewards=[]", "rollout.environment={name: guessing}", "rollout.limits={max_tokens: 8}")
    gdpo = "algorithm.advantage={name: gdpo}"
    remax = ("algorithm.preset=remax",)
    of_its_own = "algorithm.surrogate={name: own, factory: 'logitless.objective.surrogate:A2po'}"
    cases = [
        (("value_head={}",), gdpo),
        (unpaid, gdpo),
        ((), "algorithm.preset=echo"),
        (("rollout.zero_signal=drop",), "algorithm.advantage={name: rae}"),
        (("kl=null",), of_its_own),
        (remax, "rollout.engine={name: recorded, path: x.jsonl}"),
    ]
    for of, (overrides, breaks) in zip(COMPOSED_RULES, cases, strict=True):
        algorithm_of(loaded("algorithm.preset=ppo", *overrides))
        with pytest.raises(ConfigurationError, match=rf"needed for {re.escape(of.setting.words)}: {of.needed};"):
            algorithm_of(loaded(*overrides, breaks))


def test_a_setting_that_a_subject_does_not_have_needs_nothing_until_auto_asks():
    rules = [Setting[int]("even", lambda n: n % 2 == 0).needs(
        "a small one", holds=lambda n: n < 5, given=str, remedy="Lower it."
    )]  # fmt: skip
    check(rules, 7)
    assert [str(each) for each in unmet(rules, 7)] == ["needed for even: a small one; given 7. Lower it."]
    assert unmet(rules, 3) == []
    with pytest.raises(ConfigurationError, match="given 6"):
        check(rules, 6)
    with pytest.raises(ConfigurationError, match="given 6"):
        check([each.on(len) for each in rules], "xxxxxx")


FAMILIES = {"recipes": RULES, "processes": PROCESS_RULES, "machines": MACHINE_RULES}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rule_has_an_example(family, loaded, unchecked, monkeypatch):
    if family == "recipes":
        shown = [broken(RULES, unchecked(*beside, wrong)) for beside, wrong in OF_RECIPES]
    elif family == "processes":
        shown = [broken(PROCESS_RULES, _processes(loaded(*overrides), wrong)) for overrides, _, wrong in OF_PROCESSES]
    else:
        shown = [_found(loaded, monkeypatch, *case)[1] for *case, _ in OF_MACHINES]
    assert [rule for rule in FAMILIES[family] if rule not in [first for first, *_ in shown]] == []
