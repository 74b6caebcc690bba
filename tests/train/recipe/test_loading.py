"""A recipe: what YAML means, what --set replaces, and errors that name the key and the repair."""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_args, get_origin

import pytest
import yaml

from logitless.errors import ConfigurationError
from logitless.objective.presets import PRESETS
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import PATHS, dump_recipe, load_recipe, parse_recipe
from logitless.train.recipe.problems import ELSEWHERE, _alternatives, _fields
from tests.train.tiny import tiny_raw

ROOT = Path(__file__).parents[3]

MINIMAL = """
name: small
model: {source: some/model}
data:
  train: {name: file, path: train.jsonl}
rollout:
  sampling: {max_new_tokens: 8}
rewards:
  - {name: length, cap: 3}
"""


def loaded(tmp_path, text="", *overrides):
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL + text, encoding="utf-8")
    return load_recipe(path, overrides)


def refused(tmp_path, text="", *overrides):
    with pytest.raises(ConfigurationError) as error:
        loaded(tmp_path, text, *overrides)
    return str(error.value)


# --- YAML -----------------------------------------------------------------------------------------------------------


def test_a_number_with_an_exponent_is_a_number_in_the_file_and_in_set_and_text_like_one_stays_text(tmp_path):
    for written, value in (("1e-5", 1e-5), ("1E-5", 1e-5), ("2.5e-7", 2.5e-7), ("3.e-2", 0.03), ("+1e+0", 1.0)):
        in_file = loaded(tmp_path, f"train:\n  optimizer: {{learning_rate: {written}}}\n")
        in_set = loaded(tmp_path, "", f"train.optimizer.learning_rate={written}")
        assert in_file.train.optimizer.learning_rate == in_set.train.optimizer.learning_rate == value
    assert loaded(tmp_path, "", "name=1e-5-run").name == "1e-5-run"


def test_a_key_given_twice_is_an_error_with_its_line(tmp_path):
    message = refused(tmp_path, "seed: 1\nseed: 2\n")
    assert "'seed' is given twice" in message
    assert re.search(r"recipe\.yaml.*line \d+", message, re.DOTALL)
    assert "'blocks' is given twice" in refused(tmp_path, "train: {blocks: 1, blocks: 2}\n")


def test_a_file_without_sections_or_without_a_file_is_an_error(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigurationError, match="mapping of sections"):
        load_recipe(tmp_path / "list.yaml")
    with pytest.raises(ConfigurationError, match=r"absent\.yaml"):
        load_recipe(tmp_path / "absent.yaml")


def test_the_path_of_a_recipe_may_be_text(tmp_path):
    recipe = loaded(tmp_path)
    assert load_recipe(str(tmp_path / "recipe.yaml")) == recipe


# --- keys and values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "old", "new"),
    [
        ("train.leave_out_dead=false", "train.leave_out_dead", "train.skip_zero_advantage"),
        ("rewards.0={name: math, spoiled_score: 1}", "rewards.0.spoiled_score", "rewards.0.ungradable_score"),
        (
            "rollout.engine={name: gpu, recount_every: 5}",
            "rollout.engine.recount_every",
            "rollout.engine.rescore_every",
        ),
    ],
)
def test_a_renamed_key_is_refused_with_its_name_of_today(tmp_path, override, old, new):
    assert f"'{old}' is called '{new}' now" in refused(tmp_path, "", override)


@pytest.mark.parametrize(
    ("override", "gone"),
    [
        ("rollout.engine={name: vllm, sleep: true}", "rollout.engine: not 'vllm': .*take {name: vllm_server}"),
        (
            "rollout.engine={name: vllm_server, urls: [http://a], weights: {name: nccl, port: 1}}",
            "rollout.engine.weights: not 'nccl': .*take {name: folder}",
        ),
        ("model.layers=liger", "model.layers: not 'liger': .*take auto"),
    ],
)
def test_a_removed_choice_is_refused_with_what_to_take_instead(tmp_path, override, gone):
    assert re.search(gone, refused(tmp_path, "", override))


@pytest.mark.parametrize(
    ("override", "wrong", "nearest"),
    [
        ("trian.blocks=3", "trian", "train"),
        ("train.optimizer.learningrate=1e-3", "train.optimizer.learningrate", "train.optimizer.learning_rate"),
        ("rewards.0.capp=9", "rewards.0.capp", "rewards.0.cap"),
        ("rewards=[{name: function, path: 'a:b', deadline: 1}]", "rewards.0.deadline", "rewards.0.deadline_seconds"),
        ("kl={placement: loss, contrl: 1, control: {name: fixed, beta: 0}}", "kl.contrl", "kl.control"),
        ("kl={placement: reward, control: {name: fixed, bta: 0}}", "kl.control.bta", "kl.control.beta"),
        ("train.lerning_rate=1e-3", "train.lerning_rate", "train.optimizer.learning_rate"),
        ("max_new_tokens=9", "max_new_tokens", "rollout.sampling.max_new_tokens"),
        ("rollout.tokens_per_step=9", "rollout.tokens_per_step", "train.tokens_per_step"),
        ("rollout.parity.stop.meen=1", "rollout.parity.stop.meen", "rollout.parity.stop.mean"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(tmp_path, override, wrong, nearest):
    assert f"unknown key '{wrong}' (nearest: '{nearest}')" in refused(tmp_path, "", override)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.optimizer.betas=[1.5, 2]", "train.optimizer.betas.0: needs to be less than 1, not 1.5"),
        ("train.optimizer.learning_rate=.inf", "train.optimizer.learning_rate: needs to be a finite number, not inf"),
        ("evaluation.success_at=.nan", "evaluation.success_at: needs to be a finite number, not nan"),
        ("seed=9223372036854775808", "seed: needs to be less than"),
        ("schema_number=2", "schema_number: needs to be 1, not 2"),
        ("train.blocks=many", "train.blocks: needs to be a whole number, not 'many'"),
        (
            "train.optimizer.schedule=cosin",
            "train.optimizer.schedule: not 'cosin' (nearest: 'cosine'): needs to be 'constant', 'linear' or 'cosine'",
        ),
        ("rollout=3", "rollout: needs to be a section with keys of engine, parity"),
        ("rollout.parity.stop=3", "rollout.parity.stop: needs to be a section with keys of mean, p95, max, sequence"),
        (
            "rewards=[{name: function, path: 'a:b', options: {}}]",
            "'rewards.0.options' (a function has no options; a class does, see the end of docs/own_reward.md)",
        ),
        (
            "rollout.engine={name: gpuu}",
            "not 'gpuu' (nearest: 'gpu'): needs 'name' to be one of auto, transformers, re",
        ),
        (
            "rollout.environment={name: tools, tools: [{name: calculater}]}",
            "rollout.environment.tools.0: not 'calculater' (nearest: 'calculator'): needs 'name' to be one of c",
        ),
        ("rewards=[{name: lenght}]", "rewards.0: not 'lenght' (nearest: 'length'): needs 'name' to be one of code, e"),
        ("rewards=[{name: zzzz}]", "reward_model, not 'zzzz'."),
        ("rollout.engine=gpu", "needs to be a section with a name, as {name: gpu} (auto, "),
        ("rollout.engine={memory: 3}", "rollout.engine: needs 'name', one of auto, transformers"),
        (
            "kl={placement: los, control: {name: fixed, beta: 0}}",
            "kl: not 'los' (nearest: 'loss'): needs 'placement' to be one of",
        ),
        ("algorithm.surrogate={name: clpi}", "algorithm.surrogate: not 'clpi' (nearest: 'clip'): needs 'name'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_words_of_the_recipe(tmp_path, override, said):
    message = refused(tmp_path, "", override)
    assert said in message
    assert not re.search(r"Input|dictionary|valid |tag |discriminator|\.\.", message.removeprefix("needed a valid"))


@pytest.mark.parametrize("key", ELSEWHERE)
def test_a_name_of_other_libraries_is_answered_with_the_key_that_does_what_it_does(tmp_path, key):
    assert f"'train.{key}' (what others call {key} is '{ELSEWHERE[key]}' here)" in refused(
        tmp_path, "", f"train.{key}=1"
    )
    *section, name = ELSEWHERE[key].split(".")
    if section == ["algorithm", "parameters"]:
        assert any(name in inspect.signature(preset).parameters for preset in PRESETS.values())
    else:
        assert has_key(Recipe, [*section, name])


def test_the_page_for_users_of_trl_names_the_keys_that_the_errors_name():
    page = (Path(__file__).parents[3] / "docs" / "trl.md").read_text(encoding="utf-8")
    named = re.findall(r"^    (\w+) +([a-z_.]+)\b", page.partition("## On to a whole run")[2], re.MULTILINE)
    assert len(named) == 5
    assert dict(named).items() <= ELSEWHERE.items()


def test_a_key_like_no_other_of_the_algorithm_is_answered_with_the_place_of_a_presets_parameters(tmp_path):
    said = "'algorithm.epsilom' (a parameter of the preset is set under 'algorithm.parameters')"
    assert said in refused(tmp_path, "", "algorithm.epsilom=0.3")


def has_key(kind, path):
    inner = [_fields(each)[path[0]] for each in _alternatives(kind) if path[0] in _fields(each)]
    return bool(inner) and (len(path) == 1 or any(has_key(each, path[1:]) for each in inner))


def test_a_recipe_that_is_not_utf_8_or_holds_half_a_character_is_an_error(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes(MINIMAL.encode() + "output: caf\u00e9\n".encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"UTF-8 at .*latin\.yaml"):
        load_recipe(path)
    assert "whole characters" in refused(tmp_path, 'output: "\\ud800"\n')


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL.lstrip(), encoding="utf-8-sig")
    assert load_recipe(path).name == "small"


@pytest.mark.parametrize(
    "text",
    [
        "output: !!python/object/apply:os.getcwd []\n",
        "output: 2024-13-45\n",
        "output: {[1]: 2}\n",
        "output: &a [*a]\n",
        "output: " + "[" * 3000,
        "output: !!int many\n",
        "seed: 1" + "0" * 5000 + "\n",
        "1: 2\n",
        "output: {1: 2}\n",
    ],
)
def test_yaml_that_cannot_be_a_recipe_or_would_build_an_object_is_an_error_in_words(tmp_path, text):
    message = refused(tmp_path, text)
    assert message
    assert "python" not in text or "well-formed YAML" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n b: {c: 2}\n", "given mapping values are not allowed here, in line 11, column 3: b: {c: 2}. Repair"),
        ("a: {b: 1\nc: 2\n", "while parsing a flow mapping that begins in line 10, in line 11, column 2: c: 2. Repair"),
        ("a: [1\n", "while parsing a flow sequence that begins in line 10, in line 11, column 1. Repair"),
    ],
)
def test_broken_yaml_is_told_with_its_line(tmp_path, text, said):
    assert said in refused(tmp_path, text)  # behind nine lines of a recipe


def test_every_problem_is_listed_at_once(tmp_path):
    message = refused(tmp_path, "", "sead=1", "train.blocks=many", "model.device=3")
    assert all(each in message for each in ("'sead'", "train.blocks", "'many'", "model.device"))


def test_a_missing_key_is_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: small\n")
    with pytest.raises(
        ConfigurationError, match=r"model: is needed.*rollout: is needed.*rewards: is .*, or \[\] where an"
    ):
        load_recipe(path)


def test_a_knob_of_one_variant_cannot_be_set_on_another(tmp_path):
    assert "tau_positive" in refused(tmp_path, "algorithm: {surrogate: {name: clip, tau_positive: 1.0}}\n")
    assert "cap" in refused(tmp_path, "", "rewards=[{name: exact, cap: 3}]")
    assert "target" in refused(tmp_path, "kl: {placement: loss, control: {name: fixed, beta: 0.1, target: 0.05}}\n")
    assert "penalty" in refused(
        tmp_path, "kl: {placement: reward, penalty: {estimator: k2}, control: {name: fixed, beta: 0.1}}\n"
    )


def test_an_error_of_a_part_itself_keeps_its_remedy(tmp_path):
    message = refused(tmp_path, "kl: {placement: loss, penalty: {estimator: k1}, control: {name: fixed, beta: 0.1}}\n")
    assert message.startswith("needed in kl.penalty: ")
    assert "expected gradient is 0" in message
    assert "ratio_corrected" in message
    assert refused(tmp_path, "", "rollout.sampling.temperature=0").startswith("needed for rollout.sampling: a positive")


# --- --set ----------------------------------------------------------------------------------------------------------


def test_set_replaces_scalars_sections_lists_and_items(tmp_path):
    recipe = loaded(
        tmp_path,
        "",
        "seed=7",
        "data.held_out={name: file, path: held.jsonl}",
        "rewards.0.cap=5",
        "writers=[]",
        "train.optimizer.betas=[0.8, 0.9]",
    )
    assert recipe.seed == 7
    assert recipe.data.held_out.path == Path("held.jsonl").absolute()
    assert recipe.rewards[0].cap == 5
    assert recipe.writers == ()
    assert recipe.train.optimizer.betas == (0.8, 0.9)


# --- round trip -----------------------------------------------------------------------------------------------------


def test_a_later_set_wins_null_switches_a_section_off_and_all_after_the_first_equals_sign_is_the_value(tmp_path):
    assert loaded(tmp_path, "", "seed=1", "seed=9223372036854775807").seed == 2**63 - 1
    assert loaded(tmp_path, "", "data.held_out={name: file, path: x}", "data.held_out=null").data.held_out is None
    assert loaded(tmp_path, "", "model.source=a=b").model.source == "a=b"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        *((override, "--set") for override in ("seed", "=3", "rewards.1.cap=5", "rewards.first.cap=5", "name.x.y=1")),
        ("model.source={a: ", "well-formed YAML in --set model.source"),
        ("name=../elsewhere", "name"),  # it cannot leave the output folder
        (
            "rollout.engine={name: recorded, path: x, urls: [y]}",
            "(another kind of rollout.engine has it",
        ),
        *((f"{key}=1", "unknown key") for key in ("zzz", "train.zzz", "foo.bar")),  # like no other, without a proposal
    ],
)
def test_a_set_that_points_nowhere_or_cannot_be_is_an_error_that_shows_how(tmp_path, override, said):
    message = refused(tmp_path, "", override)
    assert said in message
    assert "nearest" not in message


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_committed_recipe_is_valid_and_survives_writing_and_reading(path, tmp_path):
    recipe = load_recipe(path)
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "config.yaml") == recipe


# --- paths ----------------------------------------------------------------------------------------------------------


def test_a_path_in_a_recipe_starts_at_its_file_and_one_in_set_at_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = "warm_start: {data: {name: file, path: ../warm.jsonl}}\nvalue_head: {source: head.safetensors}\n"
    recipe = loaded(tmp_path, text, "data.held_out={name: file, path: held_out.jsonl}", "value_head.source=~/head")
    assert recipe.data.train.path == tmp_path / "train.jsonl"
    assert recipe.warm_start.data.path == tmp_path / "../warm.jsonl"
    assert recipe.data.held_out.path == tmp_path / "elsewhere" / "held_out.jsonl"
    assert recipe.value_head.source == str(Path.home() / "head")
    section = loaded(tmp_path, "", "data={train: {name: file, path: other.jsonl}}").data
    assert section.train.path == tmp_path / "elsewhere" / "other.jsonl"


def test_code_in_a_file_starts_at_the_recipe_and_in_set_at_the_current_folder_and_a_module_stays_one(
    tmp_path, monkeypatch
):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    raw, paths = tiny_raw(tmp_path), ("./rewards.py:brief", "rewards.py:other", "my_package.rewards:third")
    raw["rewards"] = [{"name": "function", "path": path} for path in paths]
    raw["rollout"]["environment"] = {"name": "own", "factory": "./riddles.py:Riddle"}
    raw["rollout"]["limits"] = {"max_tokens": 6}
    (there / "recipe.yaml").write_text(yaml.safe_dump(raw))
    recipe = load_recipe(there / "recipe.yaml", ["rewards.1.path=./rewards.py:other"])
    found = [reward.path for reward in recipe.rewards]
    assert found == [f"{there}/rewards.py:brief", f"{here}/rewards.py:other", "my_package.rewards:third"]
    assert recipe.rollout.environment.factory == f"{there}/riddles.py:Riddle"
    assert raw["rewards"][0]["path"] == "./rewards.py:brief"
    assert parse_recipe(raw).rewards[0].path == f"{here}/rewards.py:brief"


def test_paths_of_named_sources_and_sets_start_where_others_do(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = "evaluation: {sets: {hard: {data: {name: file, path: hard.jsonl}}}}\n"
    sources = "{a: {data: {name: file, path: a.jsonl}}, b: {data: {name: hub, dataset: ./b, split: train}}}"
    recipe = loaded(tmp_path, text, f"data.train={{name: mixture, sources: {sources}}}")
    assert recipe.evaluation.sets["hard"].data.path == tmp_path / "hard.jsonl"
    assert recipe.data.train.sources["a"].data.path == tmp_path / "elsewhere" / "a.jsonl"
    assert recipe.data.train.sources["b"].data.dataset == str(tmp_path / "elsewhere" / "b")
    moved = loaded(tmp_path, text, "evaluation.sets.hard.data.path=other.jsonl")
    assert moved.evaluation.sets["hard"].data.path == tmp_path / "elsewhere" / "other.jsonl"
    assert parse_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


def test_each_of_several_teachers_starts_at_the_recipes_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = "teacher: {source: {math: ./math, chat: start}, divergence: reverse_kl}\n"
    assert loaded(tmp_path, text).teacher.sources == {"math": str(tmp_path / "math"), "chat": "start"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("evaluation.sets={hard: {data: {name: file, paht: x}}}", "evaluation.sets.hard.data.paht"),
        ("data.train={name: mixture, sources: {a: {data: {name: file, path: a}}}}", "two or more sources"),
        ("evaluation.sets={a/b: {data: {name: file, path: x}}}", "evaluation.sets.a/b"),
    ],
)
def test_names_of_data_are_of_one_thing_each(tmp_path, override, said):
    assert said in refused(tmp_path, "", override)


def test_a_hub_name_stays_one_unless_a_folder_has_it_or_it_begins_like_a_path(tmp_path):
    assert loaded(tmp_path).model.source == "some/model"
    assert loaded(tmp_path, "", "model.tokenizer=./absent").model.tokenizer == str(Path.cwd() / "absent")
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert loaded(tmp_path).model.source == str(tmp_path / "some" / "model")
    text = MINIMAL.replace("some/model", "some/model, tokenizer: ./tokenizer")
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.yaml").model.tokenizer == str(tmp_path / "tokenizer")
    hub = "data.train={name: hub, dataset: openai/gsm8k, split: train}"
    assert loaded(tmp_path, "", hub).data.train.dataset == "openai/gsm8k"


def test_a_recipe_in_python_starts_its_paths_at_the_current_folder_and_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = yaml.safe_load(MINIMAL)
    assert parse_recipe(raw).data.train.path == tmp_path / "train.jsonl"
    assert raw == yaml.safe_load(MINIMAL)


def test_every_key_that_is_a_path_by_its_type_is_known_as_one():
    """A section's further path would otherwise start at the current folder in silence."""
    found = {".".join(path) for path in path_keys(Recipe)}
    assert found == {key for key in PATHS if key.endswith("path")}


def path_keys(kind, above=()):
    for alternative in _alternatives(kind):
        for name, inner in _fields(alternative).items():
            if Path in (inner, *get_args(inner)) or name in ("path", "file", "folder"):
                yield (*above, name)
            yield from path_keys(inner, (*above, name))
            if get_origin(inner) in (dict, Mapping):
                yield from path_keys(get_args(inner)[1], (*above, name, "*"))


def test_recipes_of_the_page_on_data_are_valid(tmp_path):
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    one, several, held_out = (yaml.safe_load(text) for text in blocks)
    minimal = yaml.safe_load(MINIMAL)
    minimal["model"] |= one.pop("model")
    assert list(parse_recipe({**minimal, **several, **held_out}).training_sources) == ["sums", "words"]
    assert parse_recipe({**minimal, **one, **held_out}).evaluation.sets["hard"].samples_per_prompt == 16


# --- rewards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [
        {"name": "own", "factory": "./riddles.py:Riddle"},
        {"name": "guessing"},
        {"name": "harness", "command": ["true"]},
        {"name": "tools", "tools": [{"name": "calculator"}], "call_reward": 0.1},
    ],
)
def test_no_reward_is_needed_beside_an_environment_that_pays(tmp_path, environment):
    raw = tiny_raw(tmp_path) | {"rewards": []}
    raw["rollout"] |= {"environment": environment, "limits": {"max_tokens": 6}}
    assert parse_recipe(raw).rewards == ()
