"""``logitless export``, ``sample`` and ``show``: what a run left is used without the trainer, bit for bit."""

import json
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import RepoUrl
from huggingface_hub.errors import LocalTokenNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from logitless.cli.main import main
from logitless.models.loading import load_model
from logitless.rollout.recorded import read_completions
from logitless.rollout.transformers import TransformersEngine
from logitless.train import push
from logitless.train.export import _shown_recipe
from logitless.train.record.run_folder import RunFolder, open_run_folder
from logitless.train.saved_policy import load_policy
from logitless.train.store.checkpoint import checkpoints, read_checkpoint
from logitless.types import Completion, Group, Prompt, Verdict
from tests.train.tiny import give_chat_template, start, tiny_recipe

SHORT = {"train__blocks": 2, "train__epochs_per_block": 1}
ALL_OF_LORA = {
    "model__lora": {"rank": 2, "use_rslora": True, "dropout": 0.2, "modules_to_save": ["lm_head", "norm"]},
    "model__trained_dtype": "float32",
    "train__optimizer__learning_rate": 0.1,
}
LORA = {"model__lora": {"rank": 2, "alpha": 4.0}, "train__optimizer__learning_rate": 0.1}


def finished(folder, **changes) -> RunFolder:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("logitless.train.run.write_report", lambda path: None)
        return start(tiny_recipe(folder, **(SHORT | changes)))[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def rounded_run(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("rounded"), model__trained_dtype="bfloat16", model__dtype="bfloat16")


def on_a_base(folder, **changes):
    """On a base that has a folder, as one from the hub would."""
    source = tiny_recipe(folder).model.source
    load_model(source, random_weights=True, seed=5).save_pretrained(str(folder / "base"))
    return finished(folder, model__source=str(folder / "base"), model__random_weights=False, **changes)


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    return on_a_base(tmp_path_factory.mktemp("lora"), **LORA)


@pytest.fixture(scope="module")
def whole_modules_run(tmp_path_factory):
    """rsLoRA with dropout, and modules that are trained whole."""
    return on_a_base(tmp_path_factory.mktemp("whole"), **ALL_OF_LORA)


def parameters(run, which=-1):
    tensors = read_checkpoint(checkpoints(run.checkpoints)[which]).tensors
    return {name.partition("/")[2]: tensors[name] for name in tensors if name.startswith("parameter/")}


def exported(run, tmp_path, *arguments):
    target = tmp_path / "exported"
    assert main(["export", str(run.path), "--out", str(target), *arguments]) == 0
    return target


def loaded_export(*arguments):
    return AutoModelForCausalLM.from_pretrained(exported(*arguments, "--dtype", "float32"))


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[3, 4, 5, 6]])).logits


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "x", "prompt": "ab"}\n{"id": "y", "prompt": "ba"}\n')
    return path


@pytest.fixture
def refused(capsys):
    """Runs a command that must end with a status, and say why."""

    def refused(said, *command, status=2):
        assert main([str(word) for word in command]) == status
        assert said in capsys.readouterr().err

    return refused


# --- export ---------------------------------------------------------------------------------------------------------


def test_an_export_in_float32_has_the_bits_of_the_checkpoint(run, tmp_path, capsys):
    model = loaded_export(run, tmp_path)
    loaded, trained = dict(model.named_parameters()), parameters(run)
    assert loaded.keys() == trained.keys()
    assert all(loaded[name].dtype == torch.float32 and loaded[name].equal(trained[name]) for name in trained)
    assert "after 2 blocks" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_of_a_run_in_bfloat16_is_of_its_masters_rounded_once(rounded_run, tmp_path, dtype):
    folder = exported(rounded_run, tmp_path, "--dtype", dtype)
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())
    masters = parameters(rounded_run)
    assert any(not master.bfloat16().float().equal(master) for master in masters.values())
    assert all(loaded[name].equal(masters[name].to(getattr(torch, dtype))) for name in masters)


def test_an_earlier_checkpoint_can_be_exported(run, tmp_path):
    loaded = dict(loaded_export(run, tmp_path, "--checkpoint", "1").named_parameters())
    names = [path.name for path in checkpoints(run.checkpoints)]
    of_block = max(number for number, name in enumerate(names) if name.startswith("block-000001-"))
    assert all(loaded[name].equal(tensor) for name, tensor in parameters(run, of_block).items())
    assert any(not loaded[name].equal(tensor) for name, tensor in parameters(run).items())


def test_a_run_with_row_invariant_layers_is_exported_and_sampled_from_without_a_gpu(tmp_path, monkeypatch, capsys):
    run = finished(tmp_path)
    config = yaml.safe_load(run.config.read_text())
    config["model"]["layers"] = "row_invariant"
    run.config.write_text(yaml.safe_dump(config))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = loaded_export(run, tmp_path)
    assert all(p.equal(parameters(run)[name]) for name, p in model.named_parameters())
    assert sampled(capsys, run, "--prompt", "ah", "--temperature", "0", "--device", "cpu")


@pytest.mark.parametrize("which", ["lora_run", "whole_modules_run"])
def test_merged_and_adapter_alone_are_the_same_policy(which, tmp_path, request):
    from peft import PeftModel

    lora_run = request.getfixturevalue(which)
    policy = load_policy(lora_run, exact=True).policy.model
    merged = loaded_export(lora_run, tmp_path)
    (tmp_path / "adapter").mkdir()
    folder = exported(lora_run, tmp_path / "adapter", "--form", "adapter", "--dtype", "float32")
    base = AutoModelForCausalLM.from_pretrained(lora_run.path.parents[1] / "base")
    without = logits(base)
    adapted = PeftModel.from_pretrained(base, str(folder))
    if which == "lora_run":  # transformers leaves modules that are trained whole as they are in the base model
        assert logits(adapted).equal(logits(AutoModelForCausalLM.from_pretrained(folder)))
    torch.testing.assert_close(logits(merged), logits(adapted))
    torch.testing.assert_close(logits(policy), logits(adapted))
    assert (logits(merged) - without).abs().max() > 1e-3
    assert not (folder / "model.safetensors").exists()


def test_the_export_brings_tokenizer_generation_settings_and_a_card(run, tmp_path):
    folder = exported(run, tmp_path)
    assert AutoTokenizer.from_pretrained(folder).decode([3, 4]) == "ab"
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.max_new_tokens, generation.eos_token_id, generation.top_k) == (6, 2, 0)
    card = (folder / "README.md").read_text(encoding="utf-8")
    for name in ("reward", "held_out_accuracy"):
        assert f"]({name}.svg)" in card
        assert (folder / f"{name}.svg").read_text(encoding="utf-8").startswith("<svg")
    front = yaml.safe_load(card.split("---")[1])
    assert front["tags"] == ["logitless"]
    provenance = json.loads(run.provenance.read_text())
    commit = provenance["starts"][-1]["commit"]  # None where there is no git, or its repository is another user's
    assert (commit or "started outside of a repository") in card
    assert "2 blocks" in card
    recipe = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert recipe["train"]["optimizer"]["learning_rate"] == 1e-2
    assert recipe["data"]["train"]["path"] == "train.jsonl"
    assert str(run.path.parents[1]) not in card, "no folder of this machine"
    records = run.read_metrics()
    reward = [record["reward/mean"] for record in records if "reward/mean" in record][-1]
    accuracy = [record["evaluation/accuracy"] for record in records if "evaluation/accuracy" in record][-1]
    assert f"| {records[-1]['step']} | {reward:.4g} | {accuracy:.4g} |" in card


def test_the_recipe_of_a_card_names_code_of_ones_own_without_this_machines_folder(tmp_path):
    own = [{"name": "function", "path": f"{tmp_path}/rewards.py:mine"}]
    assert "path: rewards.py:mine\n" in _shown_recipe(tiny_recipe(tmp_path, rewards=own))


def test_a_run_whose_checkpoints_are_gone_is_exported_from_its_model(tmp_path):
    run = finished(tmp_path, **LORA)
    before = loaded_export(run, tmp_path)
    for path in [*run.checkpoints.rglob("*")][::-1]:
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "later").mkdir()
    after = loaded_export(run, tmp_path / "later")
    assert all(a.equal(b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--form", "adapter"], "full fine-tuning"),
        (["--checkpoint", "77"], "block-000002-"),
        (["--out", "{run}"], "Remove it"),
    ],
)
def test_what_cannot_be_exported_exits_2_and_writes_nothing(run, refused, arguments, said):
    before = set(run.path.rglob("*"))
    refused(said, "export", run.path, *(word.format(run=run.path) for word in arguments))
    assert set(run.path.rglob("*")) == before


def test_an_adapter_whose_base_nobody_else_has_is_refused(tmp_path, refused):
    refused("random weights", "export", finished(tmp_path, **LORA).path, "--form", "adapter")


class Hub:
    """Stands in for the hub's client: repositories by name, whether each is private, and what was uploaded."""

    def __init__(self, login=True, private=()):
        self.login, self.private, self.uploaded = login, dict(private), []

    def whoami(self):
        if not self.login:
            raise LocalTokenNotFoundError("Token is required")
        return {"name": "me"}

    def repo_exists(self, repo):
        return repo in self.private

    def repo_info(self, repo):
        return SimpleNamespace(private=self.private[repo])

    def create_repo(self, repo, *, private, exist_ok):
        assert exist_ok
        self.private.setdefault(f"me/{repo}", private)
        return RepoUrl(f"https://huggingface.co/me/{repo}")

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.uploaded.append((repo_id, sorted(path.name for path in folder_path.iterdir()), commit_message))


@pytest.fixture
def hub(monkeypatch):
    """The hub answers, and is a stand-in."""

    def take(stand_in, *, answers=True):
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: stand_in)
        monkeypatch.setattr(push, "use_cache_if_unreachable", lambda: not answers)
        return stand_in

    return take


@pytest.mark.parametrize("public", [False, True])
def test_an_export_is_pushed_where_that_is_asked_for_and_private_unless_public_is(run, tmp_path, capsys, hub, public):
    stand_in = hub(Hub())
    exported(run, tmp_path)
    assert stand_in.uploaded == []
    (tmp_path / "pushed").mkdir()
    flags = ["--public"] if public else []
    folder = exported(run, tmp_path / "pushed", "--push-to-hub", "toy", *flags)
    [(repo, files, message)] = stand_in.uploaded
    assert (repo, message) == ("me/toy", "tiny after 2 blocks and 4 steps")
    assert files == sorted(path.name for path in folder.iterdir())
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= set(files)
    assert stand_in.private == {"me/toy": not public}
    assert capsys.readouterr().out.endswith("https://huggingface.co/me/toy\n")


@pytest.mark.parametrize(
    ("stand_in", "answers", "arguments", "status", "said"),
    [
        (Hub(private={"me/toy": False}), True, ["--push-to-hub", "toy"], 2, "me/toy, which is public"),
        (Hub(login=False), True, ["--push-to-hub", "toy"], 1, "hf auth login"),
        (Hub(), False, ["--push-to-hub", "toy"], 1, "a hub that answers"),
        (Hub(), True, ["--push-to-hub", "a/b/c"], 2, "OWNER/NAME"),
        (Hub(), True, ["--public"], 2, "--push-to-hub beside --public"),
    ],
)
def test_a_push_that_cannot_be_or_would_publish_is_refused_before_anything_is_written(
    run, tmp_path, refused, hub, stand_in, answers, arguments, status, said
):
    hub(stand_in, answers=answers)
    refused(said, "export", run.path, "--out", tmp_path / "exported", *arguments, status=status)
    assert not list(tmp_path.iterdir())
    assert stand_in.uploaded == []


def test_a_push_that_breaks_leaves_the_folder_and_says_how_to_push_it(run, tmp_path, refused, hub):
    stand_in = hub(Hub())

    def gone(**options):
        raise httpx.ConnectError("gone")

    stand_in.upload_folder = gone
    target, said = tmp_path / "exported", f"hf upload toy {tmp_path / 'exported'} --private"
    refused(said, "export", run.path, "--out", target, "--push-to-hub", "toy", status=1)
    assert (target / "model.safetensors").is_file()


# --- sample ---------------------------------------------------------------------------------------------------------


def sampled(capsys, run, *arguments):
    assert main(["sample", str(run.path), *arguments]) == 0
    return capsys.readouterr().out


def test_a_prompt_is_completed_the_same_way_again_and_another_way_with_another_seed(run, capsys):
    first = sampled(capsys, run, "--prompt", "ah", "--samples", "8")
    assert first == sampled(capsys, run, "--prompt", "ah", "--samples", "8")
    assert first != sampled(capsys, run, "--prompt", "ah", "--samples", "8", "--seed", "1")
    assert len(first.splitlines()) == 16


@pytest.mark.parametrize("which", ["run", "rounded_run", "lora_run", "whole_modules_run"])
def test_the_policy_that_is_sampled_from_is_that_of_the_end_of_the_run(which, request):
    run = request.getfixturevalue(which)
    latest, model = load_policy(run), load_policy(run, "model")
    assert (latest.block, latest.step) == (model.block, model.step)
    assert logits(latest.policy.model).equal(logits(model.policy.model))
    first = load_policy(run, checkpoints(run.checkpoints)[0].name)
    assert first.step < latest.step
    assert not logits(first.policy.model).equal(logits(latest.policy.model))


@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_what_a_warm_start_taught_is_in_the_policy_and_its_adapter_is_not_exported_alone(tmp_path, refused, changes):
    warm_start = {"data": {"name": "file", "path": str(tmp_path / "train.jsonl")}, "steps": 3, "learning_rate": 0.1}
    run = finished(tmp_path, warm_start=warm_start, **changes)
    latest, model = load_policy(run), load_policy(run, "model")
    assert logits(latest.policy.model).equal(logits(model.policy.model))
    torch.testing.assert_close(logits(loaded_export(run, tmp_path)), logits(latest.policy.model))
    if changes:
        refused("warm start", "export", run.path, "--form", "adapter")


def test_a_file_of_prompts_becomes_completions_that_an_engine_can_replay(run, prompts_file, tmp_path, capsys, refused):
    prompts_file.write_text(prompts_file.read_text().replace("prompt", "question"))
    out = tmp_path / "out.jsonl"
    arguments = ["--file", str(prompts_file), "--column", "question", "--out", str(out)]
    sampled(capsys, run, *arguments, "--samples", "2", "--temperature", "0", "--max-new-tokens", "3")
    completions = read_completions(out)
    assert [completion.prompt_id for completion in completions] == ["x", "x", "y", "y"]
    assert completions[0].token_ids.tolist() == completions[1].token_ids.tolist()
    assert all(completion.length <= 3 for completion in completions)
    written = out.read_bytes()
    refused(f"needed nothing at {out}", "sample", run.path, *arguments)
    assert out.read_bytes() == written


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_what_was_sampled_can_be_scored(run, prompts_file, tmp_path, capsys, form):
    out, rows = tmp_path / f"out.{form}", tmp_path / "rows.jsonl"
    sampled(capsys, run, "--file", str(prompts_file), "--samples", "2", "--out", str(out))
    (tmp_path / "own.py").write_text("def size(completions, **_):\n    return [len(each) for each in completions]\n")
    files = ["--prompts", str(prompts_file), "--responses", str(out), "--json", str(rows)]
    assert main(["score", "--reward", f"{tmp_path}/own.py:size", *files]) == 0
    assert "4 scored" in capsys.readouterr().out
    scored = [json.loads(line) for line in rows.read_text().splitlines()]
    assert scored == [
        {"prompt": each.prompt_id.translate({120: "ab", 121: "ba"}), "score": float(len(each.text))}
        for each in read_completions(out)
    ]


def test_prompts_are_rendered_with_the_runs_variables_of_the_chat_template(prompts_file, tmp_path, capsys):
    give_chat_template(tmp_path)
    run = finished(tmp_path, model__chat_template_kwargs={"mood": "good"})
    printed = sampled(capsys, run, "--file", str(prompts_file))
    assert "=== x: abgd\n" in printed
    assert "=== y: bagd\n" in printed


def test_a_policy_with_a_value_head_can_be_sampled_from(tmp_path, capsys):
    run = finished(tmp_path, algorithm={"preset": "ppo"})
    assert sampled(capsys, run, "--prompt", "ah", "--temperature", "0")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "ah", "--samples", "0"], "--samples"),
        (["--prompt", "ah", "--seed", "-1"], "--seed"),
        (["--prompt", "ah", "--out", "completions.txt"], ".jsonl"),
        (["--prompt", "ah", "--checkpoint", "latset"], "block-000002-"),
        (["--prompt", "ah", "--temperature", "-1"], "temperature"),
        (["--prompt", "z"], "'z'"),
        (["--prompt", "a" * 30], "at most 8 tokens"),
        (["--file", "no/such.jsonl"], "no/such.jsonl"),
    ],
)
def test_bad_input_to_sample_exits_2_and_says_why(run, refused, arguments, said):
    refused(said, "sample", run.path, *arguments)


# --- show -----------------------------------------------------------------------------------------------------------


def test_show_prints_the_group_with_every_completion_and_its_verdicts(run, capsys):
    assert main(["show", str(run.path), "--block", "1", "--group", "3"]) == 0
    printed = capsys.readouterr().out
    rows = open_run_folder(run.path).read_block(1)[8:12]
    assert f"block 1, group 3 of 4, prompt {rows[0]['prompt_id']}" in printed
    for number, row in enumerate(rows, start=1):
        assert f"{number} of 4, reward {row['reward']:.4g}, advantage {row['advantage']:.4g}" in printed
        assert row["completion"] in printed
    assert printed.count("length: graded") == 4


def test_show_prints_every_turn_of_a_conversation_below_its_role(tmp_path, capsys):
    said = (
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
        {"role": "tool", "name": "add", "content": "4\x1b"},
        {"role": "assistant", "content": "It is 4."},
    )
    completion = Completion("7", (4, 9, 2), "It is 4.", "stop", trained=(True, False, True), turn=(0, 0, 1))
    prompt = Prompt("7", "a long prompt: " * 100 + "2+2=", (4,))
    printed = shown(tmp_path, capsys, prompt, completion, Verdict.graded(1.0), conversations=(said,))
    assert prompt.text in printed
    assert "\nassistant:\nadd({})\ntool add:\n4�\nassistant:\nIt is 4.\n" in printed


def shown(path, capsys, prompt, completion, verdict, **more):
    """What is printed of a run of one completion."""
    folder = RunFolder(path)
    folder.rollouts.mkdir()
    folder.write_config("name: own")
    folder.write_rollouts(1, [Group(prompt, (completion,), ({"length": verdict},), (1.0,), **more)])
    assert main(["show", str(path)]) == 0
    return capsys.readouterr().out


def test_show_says_how_a_completion_ended_however_narrow_the_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    printed = shown(
        tmp_path, capsys, Prompt("7", "2+2=", (4,)), Completion("7", (4,), "4", "length"), Verdict.graded(1.0)
    )
    assert "\n1 of 1, reward 1, advantage none, 1 tokens, ended by the length limit\n" in printed


def test_show_without_numbers_prints_the_first_group_of_the_last_block(run, capsys):
    assert main(["show", str(run.path)]) == 0
    assert "block 2, group 1 of 4" in capsys.readouterr().out


def test_what_a_model_wrote_cannot_steer_the_terminal(tmp_path, capsys):
    verdict = Verdict(1.0, "graded", message="said \x1b[2J")
    completion = Completion("7", (4, 2), "\x1b]0;owned\x07[bold]plain[/bold]", "stop")
    printed = shown(tmp_path, capsys, Prompt("7", "2+2=", (4,)), completion, verdict)
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert "[bold]plain[/bold]" in printed


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--block", "9"], "1 to 2"), (["--group", "5"], "1 to 4"), (["--group", "0"], "1 to 4")]
)
def test_a_group_that_is_not_there_exits_2_with_those_that_are(run, refused, arguments, said):
    refused(said, "show", run.path, *arguments)


def test_prompts_of_the_command_line_are_rendered_with_the_recipes_variables_of_the_chat_template(
    tmp_path, monkeypatch
):
    give_chat_template(tmp_path)
    run = finished(tmp_path, model__chat_template_kwargs={"mood": "good"}, train__blocks=1)
    asked, sample = [], TransformersEngine.sample

    def noting(engine, prompts, *more, **options):
        asked.extend(prompts)
        return sample(engine, prompts, *more, **options)

    monkeypatch.setattr(TransformersEngine, "sample", noting)
    assert main(["sample", str(run.path), "--prompt", "ca"]) == 0
    assert [prompt.text for prompt in asked] == ["cagd"]


@pytest.mark.parametrize("command", [["export"], ["sample", "--prompt", "x"], ["show"]])
def test_a_folder_that_is_no_run_exits_2(tmp_path, refused, command):
    refused("config.yaml", command[0], tmp_path, *command[1:])
