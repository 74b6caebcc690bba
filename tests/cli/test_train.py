"""``logitless train``: the committed recipes plan within their memory, and the exit status says whose fault it was."""

import gc
import json
import re
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from logitless.cli.main import main
from logitless.cli.output import program
from logitless.cli.train import _check_name, _command
from logitless.errors import ConfigurationError
from logitless.train.plan.run_plan import plan_of
from logitless.train.recipe.loading import load_recipe, parse_recipe
from tests.train.interrupting import at_step, stop_at
from tests.train.tiny import tiny_raw

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


@pytest.fixture(autouse=True)
def repository_root(monkeypatch):
    """The paths inside recipes start there."""
    monkeypatch.chdir(ROOT)


def dry_run_command(recipe):
    """The arguments of the dry run that a recipe's first comment gives."""
    comment = [line.removeprefix("#").strip() for line in recipe.read_text(encoding="utf-8").splitlines()]
    first = next(number for number, line in enumerate(comment) if line.endswith("--dry-run \\"))
    last = next(number for number in range(first, len(comment)) if not comment[number].endswith("\\"))
    return shlex.split(" ".join(line.removesuffix("\\") for line in comment[first : last + 1]))[1:]


def plan(recipe, *more):
    overrides = [word for word in dry_run_command(recipe) if "=" in word]
    return plan_of(load_recipe(recipe, [*overrides, *more]))


# --- before the start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ([], "auto"),
        (["--set", "model.device=cuda:1"], "cuda:1"),
        (["--set", "model.device=cpu"], "cpu"),
        (["--set", "model=7"], "cpu"),
        (["--set", "model.device=auto", "--dry-run"], "cpu"),
    ],
)
def test_the_context_of_the_recipes_device_is_created_for_a_run_and_its_imports_are_never_collected(
    monkeypatch, tmp_path, arguments, device
):
    devices, seen = list[str](), list[tuple[bool, bool]]()
    recipe = parse_recipe(tiny_raw(tmp_path))

    def context(name):
        devices.append(name)
        return nullcontext()

    def begin(*_, **__):
        seen.append((gc.isenabled(), gc.get_freeze_count() > 100_000))
        raise ConfigurationError(needed="a test", given="this", remedy="None.")

    (tmp_path / "recipe.yaml").write_text("model: {source: x/y}\n")
    monkeypatch.setattr("logitless.cli.train.cuda_context", context)
    monkeypatch.setattr("logitless.train.recipe.loading.check_recipe", lambda *_: recipe)
    monkeypatch.setattr("logitless.train.recipe.loading.load_recipe", lambda *_: recipe)
    monkeypatch.setattr("logitless.train.entry.train", begin)
    monkeypatch.setattr("logitless.cli.train._planned", begin)
    assert main(["train", str(tmp_path / "recipe.yaml"), *arguments]) == 2
    assert devices == [device]
    assert seen == [(True, True)]
    assert gc.get_freeze_count() == 0


def test_a_name_that_is_taken_is_refused_before_transformers_is_imported(tmp_path):
    (tmp_path / "length-toy").mkdir()
    (tmp_path / "length-toy" / "notes.txt").write_text("ours")
    command = f"""
import sys
from logitless.cli.main import main
status = main(["train", "recipes/length-toy.yaml", "--set", "output={tmp_path}"])
print(status, "transformers.models" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert ran.stdout == "2 False\n"
    assert f"given the existing {tmp_path}/length-toy" in ran.stderr


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_of_several_processes_leaves_a_folder_in_the_way_to_the_one_that_writes(tmp_path, monkeypatch, world_size):
    recipe = parse_recipe({**tiny_raw(tmp_path), "name": "other"})
    (Path(recipe.output) / "other").mkdir(parents=True)
    (Path(recipe.output) / "other" / "notes.txt").write_text("of this node")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(ConfigurationError, match="existing") if world_size == 1 else nullcontext():
        _check_name(recipe, forks=False)


# --- dry runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("qwen2.5-0.5b-gsm8k", 23),
        ("qwen3-1.7b-gsm8k-24gb", 23),
        ("llama3.1-8b-ifeval-24gb", 23),
        ("llama3.1-8b-ifeval-16gb", 15),
        ("qwen3-30b-a3b-gsm8k", 131),
    ],
)
def test_the_documented_dry_run_of_a_recipe_passes_and_its_memory_leaves_a_gib_of_its_card(name, gib, capsys):
    assert main(dry_run_command(RECIPES / f"{name}.yaml")) == 0
    printed = capsys.readouterr().out
    assert f"recipe {name}: checked" in printed
    assert "8 prompts of 8 rows" in printed
    assert 4 < float(re.search(r"total\s+([\d.]+) GiB", printed)[1]) < gib


def test_moments_on_the_host_take_twelve_bytes_a_weight_off_the_gpu():
    found = plan(RECIPES / "qwen3-1.7b-gsm8k-24gb.yaml")
    assert found.memory_bytes["gradients"] == 2 * found.memory_bytes["trained weights"]
    on_the_gpu = plan(RECIPES / "qwen3-1.7b-gsm8k-24gb.yaml", "train.optimizer.moments=float32")
    assert on_the_gpu.total_bytes - found.total_bytes == 3 * found.memory_bytes["gradients"] > 19 * 2**30


def test_eight_billion_weights_fit_16_gib_in_four_bits_with_a_gib_to_spare():
    found = plan(RECIPES / "llama3.1-8b-ifeval-16gb.yaml")
    d, f, kv, v = 4096, 14336, 1024, 128256
    linears = 32 * (2 * d * d + 2 * d * kv + 3 * d * f)  # 4 bits, 8 for 64 of them, 32 for 256 of those
    rest = 2 * v * d + 32 * 2 * d + d
    assert found.memory_bytes["frozen weights"] == linears * (4 + 8 / 64 + 32 / (64 * 256)) / 8 + 2 * rest
    assert found.total_bytes < 15 * 2**30


def test_the_ifeval_recipe_falls_back_to_the_format_reward_as_it_says():
    data = "data.train={name: file, path: recipes/dry-run/gsm8k.jsonl, columns: {prompt: question}, system: Use tags.}"
    found = plan(RECIPES / "llama3.1-8b-ifeval-24gb.yaml", "rewards=[{name: format}]", data)
    assert "Use tags." in found.first_prompt.text


def test_the_quickstart_passes_its_dry_run(capsys):
    fewer = [f"--set={source}.size=200" for source in ("data.train", "data.held_out", "warm_start.data")]
    assert main(["train", "recipes/quickstart.yaml", "--dry-run", *fewer]) == 0
    printed = capsys.readouterr().out
    assert "recipe quickstart: checked" in printed
    # The tokenizer removes the task's instructions and the commas between the letters.
    assert re.search(r"first prompt +'Your task is, .+' \(\d tokens: its tokenizer reads '[a-z]+\\n'\)\n", printed)


def test_a_dry_run_makes_no_folder_and_minds_none(tmp_path, capsys):
    (tmp_path / "length-toy").mkdir()
    assert main(["train", "recipes/length-toy.yaml", "--dry-run", "--set", f"output={tmp_path}"]) == 0
    assert list((tmp_path / "length-toy").iterdir()) == []
    capsys.readouterr()


# --- exit status ----------------------------------------------------------------------------------------------------


def sets(*overrides):
    return [word for each in overrides for word in ("--set", str(each))]


def status(capsys, *arguments):
    returned = main(["train", *arguments])
    return returned, capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.blcoks=3", "unknown key 'train.blcoks' (nearest: 'train.blocks')"),
        ("data.train={name: file, path: no/such/file.jsonl}", "no/such/file.jsonl"),
        ("rollout.completions_per_prompt=1", "algorithm.advantage"),
    ],
)
def test_bad_input_exits_2_and_says_what_and_how(override, said, capsys):
    returned, message = status(capsys, "recipes/length-toy.yaml", "--dry-run", "--set", override)
    assert returned == 2
    assert said in message
    assert "Traceback" not in message


def test_modes_that_exclude_each_other_exit_2(capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(["train", "recipes/length-toy.yaml", "--numbered", "--resume"])
    assert exit_status.value.code == 2
    capsys.readouterr()


def following_command(output):
    """The arguments of the command that a run's last line says."""
    return shlex.split(output.splitlines()[-1].removeprefix(f"next: {program()} "), comments=True)


SMALL = [
    "recipes/length-toy.yaml",
    *sets("rollout.prompts_per_block=2", "rollout.completions_per_prompt=2", "rollout.sampling.max_new_tokens=4"),
    *sets("train.blocks=1", "writers=[]"),
]


def test_a_run_ends_with_0_and_a_taken_name_with_2_untouched(tmp_path, capsys):
    arguments = [*SMALL, *sets(f"output={tmp_path}")]
    assert main(["train", *arguments]) == 0
    assert "report.html" in capsys.readouterr().out
    summary = tmp_path / "length-toy" / "summary.json"
    assert json.loads(summary.read_text())["reward_last_block"] <= 4
    written = summary.stat().st_mtime_ns
    returned, message = status(capsys, *arguments)
    assert returned == 2
    assert "--resume" in message
    assert summary.stat().st_mtime_ns == written
    assert main(["train", *arguments, "--numbered"]) == 0
    assert (tmp_path / "length-toy-2" / "summary.json").exists()
    capsys.readouterr()


OTHER_SIGNALS = [(signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.mark.parametrize(
    ("number", "wanted"),
    [(signal.SIGINT, 130), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHER_SIGNALS)],
    ids=lambda n: str(n),
)
def test_a_run_that_a_signal_stopped_ends_with_the_status_that_shells_expect_and_its_resume_with_0(
    tmp_path, capsys, monkeypatch, number, wanted
):
    arguments = ["train", *SMALL, "--set", f"output={tmp_path}"]
    with monkeypatch.context() as patched:
        stop_at(0, patched, number)
        assert main(arguments) == wanted
    output = capsys.readouterr().out
    assert f"stopped by {signal.Signals(number).name} and saved" in output
    assert not (tmp_path / "length-toy" / "model").exists()
    assert main(following_command(output)) == 0
    assert "finished" in capsys.readouterr().out


def test_a_second_ctrl_c_names_the_checkpoint_that_is_left_and_the_command_that_resumes_from_it(
    tmp_path, capsys, monkeypatch
):
    def pressed_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    arguments = ["train", *SMALL, *sets(f"output={tmp_path}", "train.blocks=3", "checkpoint.every_blocks=1")]
    with monkeypatch.context() as patched:
        at_step(1, patched, pressed_twice)
        assert main(arguments) == 130
    *_, stopped, checkpoint, following = capsys.readouterr().err.splitlines()
    assert stopped == "logitless train: stopped by Ctrl-C"
    folder = tmp_path / "length-toy" / "checkpoints"
    assert checkpoint == f"  last checkpoint    {max(folder.iterdir())}"
    assert following.endswith("--resume")
    assert main(following_command(following)) == 0
    assert "finished" in capsys.readouterr().out


def test_under_torchrun_the_next_command_starts_as_many_processes(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert _command() == "torchrun --nproc-per-node 2 -m logitless train"


def test_a_replay_of_no_run_names_the_runs_that_are_there(tmp_path, capsys):
    assert main(["train", "--replay", str(tmp_path / "nope")]) == 2
    assert "needed the folder of a run at" in capsys.readouterr().err


def test_a_signal_in_the_last_step_of_a_run_leaves_it_complete(tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patched:
        stop_at(1, patched, signal.SIGTERM)
        assert main(["train", *SMALL, "--set", f"output={tmp_path}"]) == 0
    assert (tmp_path / "length-toy" / "model").exists()
    capsys.readouterr()


def test_one_command_starts_a_run_goes_on_with_it_and_forks_it(tmp_path, capsys, monkeypatch):
    arguments = ["train", *SMALL, "--set", f"output={tmp_path}", "--set", "train.blocks=2"]
    with monkeypatch.context() as patched:
        stop_at(1, patched)
        assert main([*arguments, "--resume-or-start"]) == 130
    assert main([*arguments, "--resume-or-start"]) == 0
    run = tmp_path / "length-toy"
    fork = [*arguments, *sets("name=fork", "train.blocks=3", "train.optimizer.learning_rate=0.01")]
    assert main([*fork, "--fork", f"{run}:2", "--dry-run"]) == 0
    assert not (tmp_path / "fork").exists()
    assert main([*fork, "--fork", f"{run}:2"]) == 0
    printed = capsys.readouterr().out
    begins = f"fork of {run}: begins after 2 blocks"
    assert begins in printed
    assert main(following_command(printed)) == 0
    assert "block 3" in capsys.readouterr().out
    assert status(capsys, *fork[1:], "--set", "model.lora={}", "--fork", str(run), "--dry-run")[0] == 2


def test_a_run_of_which_nothing_was_scored_has_failed_and_says_so_everywhere(tmp_path, capsys):
    reward = "rewards=[{name: function, path: tests.train.faulty_rewards:raising}]"
    goes_on = "train.max_unscored_fraction=1"
    assert main(["train", *SMALL, *sets(f"output={tmp_path}", reward, held_out_in(tmp_path), goes_on)]) == 1
    *_, shown = capsys.readouterr().out.rpartition("\n\n")
    folder = tmp_path / "length-toy"
    lines = shown.splitlines()
    assert lines[0] == f"failed, for no completion was scored: {folder}"
    assert "  held-out accuracy  not scored" in lines
    assert "  mean reward        not scored" in lines
    assert "  failed reward      raising: 4 of 4 completions (100%), the first by RuntimeError: broken" in lines
    command = following_command(shown)
    assert json.loads((folder / "summary.json").read_text())["ended_by"] == "unscored"
    assert json.loads(folder.joinpath("metrics.jsonl").read_text().splitlines()[0])["evaluation/accuracy"] is None
    report, why = (folder / "report.html").read_text(), "RuntimeError: broken"
    for part in ("failed, for no completion was scored", "not scored</div><div>held-out accuracy", why):
        assert part in report
    for audit, of in (
        (["doctor", str(folder / "config.yaml"), "--no-measure"], "run length-toy"),
        (command, "measured batch"),
    ):
        assert main(audit) == 0
        said = f"4 of 4 completions of the {of}, the first by {why} [failed scoring]"
        assert said in capsys.readouterr().out


def held_out_in(folder):
    (folder / "held_out.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    return f"data.held_out={{name: file, path: {folder / 'held_out.jsonl'}}}"


def test_graded_rewards_show_the_held_out_reward_beside_the_accuracy(tmp_path, capsys):
    assert main(["train", *SMALL, *sets(f"output={tmp_path}", held_out_in(tmp_path))]) == 0
    shown = capsys.readouterr().out
    summary = json.loads((tmp_path / "length-toy" / "summary.json").read_text())
    before, after = (summary[f"held_out_reward_{when}"] for when in ("before", "after"))
    assert f"  held-out reward    {before:.3f} -> {after:.3f}\n" in shown
    assert "logitless show" in shown.splitlines()[-1]


def test_a_run_whose_held_out_completions_all_earn_nothing_names_the_command_that_shows_completions(tmp_path, capsys):
    settings = sets(f"output={tmp_path}", held_out_in(tmp_path), "rewards=[{name: exact, column: answer}]")
    (tmp_path / "train.jsonl").write_text('{"prompt": "b", "answer": "?"}\n{"prompt": "c", "answer": "?"}\n')
    data = f"data.train={{name: file, path: {tmp_path / 'train.jsonl'}}}"
    assert main(["train", *SMALL, *settings, *sets(data)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("no held-out completion earned a reward: read some")


def test_a_run_whose_rewards_gave_no_advantage_is_finished_and_says_so_as_does_doctor_of_it_and_of_a_batch(
    tmp_path, capsys
):
    settings = sets(f"output={tmp_path}", "rewards=[{name: regex, pattern: never}]")
    assert main(["train", *SMALL, *settings]) == 0
    shown = capsys.readouterr().out
    assert "  no signal          rewards gave no completion an advantage: nothing was learned from them\n" in shown
    assert shown.splitlines()[-1].endswith("no completion had an advantage: read some")
    run = str(tmp_path / "length-toy" / "config.yaml")
    for audit, of in (
        (["doctor", run, "--no-measure"], "run length-toy"),
        (["doctor", *SMALL, *settings], "measured batch"),
    ):
        assert main(audit) == 0
        assert f"rewards: no completion of the {of} has an advantage [no signal]" in capsys.readouterr().out


def test_a_run_that_cannot_go_on_exits_1(tmp_path, capsys):
    never = ["rewards=[{name: regex, pattern: never}]", "rollout.zero_signal=drop"]  # every group without signal
    overrides = [f"output={tmp_path}", *never, "train.max_blocks_without_signal=1"]
    returned, message = status(capsys, *SMALL, *sets(*overrides))
    assert returned == 1
    assert "signal" in message
