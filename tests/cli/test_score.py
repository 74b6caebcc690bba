"""``logitless score`` prints rates with intervals, writes what it is asked for, and says what is missing."""

import json

import pytest

from logitless.cli.main import main

IDS = ["punctuation:no_comma", "startend:quotation"]


@pytest.fixture
def files(tmp_path):
    prompts = [
        {"key": key, "prompt": f"Say {key}.", "instruction_id_list": IDS, "kwargs": [{}, {}], "answer": '"1"'}
        for key in (1, 2, 3)
    ]
    said = {1: '"1"', 2: 'Sure, here:\n"2"', 9: "9"}
    responses = [{"prompt": f"Say {key}.", "response": text} for key, text in said.items()]
    for name, rows in (("prompts", prompts), ("responses", responses)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return ["--prompts", str(tmp_path / "prompts.jsonl"), "--responses", str(tmp_path / "responses.jsonl")]


def followed(path):
    return [json.loads(line)["follow_instruction_list"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_suite_is_scored_and_missing_and_skipped_rows_are_no_failure(files, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    arguments = ["score", "--suite", "ifeval", *files, "--json", str(out), "--workers", "1"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "1 responses without a prompt skipped" in printed
    for part in ("50.0%", "prompt-level strict", "instruction-level loose", "2 scored", "1 missing: no response"):
        assert part in printed
    assert followed(out) == [[True, True], [False, False]]


def test_loose_rows_on_request(files, tmp_path):
    out = tmp_path / "out.jsonl"
    assert main(["score", "--suite", "ifeval", *files, "--json", str(out), "--loose", "--workers", "1"]) == 0
    assert followed(out) == [[True, True], [True, True]]


def test_a_file_that_is_there_is_not_overwritten(files, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    assert main(["score", "--suite", "ifeval", *files, "--json", str(out)]) == 2
    assert f"needed nothing at {out}, for --json" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_a_reward_of_the_library_is_scored(files, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert main(["score", "--reward", "logitless.rewards.text.exact:Exact", *files, "--json", str(out)]) == 0
    assert "0.5" in capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert rows == [{"prompt": "Say 1.", "score": 1.0}, {"prompt": "Say 2.", "score": 0.0}]


OWN = """
LIMIT = 3
class Scorer:
    def __call__(self, completions): return [1.0]
def brevity(completions): return 1.0
def exact(completions, solution): return [1.0]
def fails(completions):
    return [1 / 0]
"""


@pytest.mark.parametrize(
    ("path", "complaints"),
    [
        ("own.py:brvity", ["no 'brvity' in", "own.py, which has Scorer, brevity, exact, fails", "Correct the path"]),
        ("own.py:LIMIT", ["a value of type int, which cannot be called"]),
        ("own.py:Scorer", ["whose arguments Python can name", "TypeError: a class"]),
        ("own.py:exact", ["a column of the data (answer,", "given solution", "Rename them"]),
        ("own.py:brevity", ["own.py:brevity: a list of 1 scores (numbers or None) expected, float returned", "[0.5]"]),
        ("broken.py:brevity", ["NameError: name 'nothing' is not defined in", "broken.py, line 2"]),
        ("absent.py:brevity", ["there is no file"]),
    ],
)
def test_what_is_wrong_with_an_own_function_is_said_with_what_would_be_right(files, tmp_path, capsys, path, complaints):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("\nnothing\n")
    assert main(["score", "--reward", f"{tmp_path}/{path}", *files]) == 2
    error = capsys.readouterr().err
    for complaint in complaints:
        assert complaint in error


def test_a_function_that_fails_is_shown_with_its_first_traceback(files, tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    assert main(["score", "--reward", f"{tmp_path}/own.py:fails", *files]) == 0
    line = OWN[: OWN.index("[1 / 0]")].count(chr(10)) + 1
    assert f"line {line}, in fails" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--suite", "ifbench"], "line 1, key 1"),
        (["--reward", "logitless.rewards.text.exact:Exact", "--loose"], "--suite with --loose"),
        *((["--suite", "ifeval", "--deadline", seconds], "--deadline") for seconds in ("inf", "0")),
        (["--suite", "ifeval", "--workers", "0"], "--workers"),
        (["--suite", "ifeval", "--json", "no/such/folder/out.jsonl"], "existing folder for --json"),
    ],
)
def test_bad_input_exits_with_2_and_says_why(files, capsys, arguments, complaint):
    assert main(["score", *arguments, *files]) == 2
    assert complaint in capsys.readouterr().err
