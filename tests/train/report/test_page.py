"""The page loads nothing, runs nothing, shows what was recorded, and is written for a run in any state."""

import json
import re
from html.parser import HTMLParser

import pytest

from logitless.errors import ConfigurationError, DataError
from logitless.train.record.rollout_data import turns
from logitless.train.record.run_folder import create_run_folder
from logitless.train.report import cards
from logitless.train.report import page as report
from logitless.train.report.page import write_report
from logitless.types import Completion, Group, Prompt, Verdict
from tests.train.fake_run import fake_run

TITLES = {
    "Reward",
    "Held-out accuracy",
    "KL to the reference",
    "KL coefficient",
    "Entropy",
    "Completion length",
    "Truncated and without signal",
    "Clipped tokens",
    "Ratio to the old policy",
    "Gradient norm",
    "Learning rate",
    "Rewards over time",
    "Scores of exact over time",
    "Scores of style over time",
    "Constraints over time",
    "Throughput",
    "Time by phase",
}


class Page(HTMLParser):
    """Tags, sources, headings of plots and cells of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.addresses, self.titles, self.cells, self.text = [], [], set(), [], ""
        self.open = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.open = tag
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "data")]
        assert not [name for name, _ in attributes if name.startswith("on")]
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data):
        self.text += data
        if self.open == "h3":
            self.titles.add(data)
        if self.open == "div" and self.cells:
            self.cells[-1] += data

    def handle_endtag(self, tag):
        self.open = ""


@pytest.fixture
def drawn(monkeypatch):
    """Plots are recorded and not drawn."""
    calls = {"lines": [], "maps": [], "bars": []}
    for kind, module, name in (
        ("lines", cards, "line_plot"),
        ("maps", report, "heat_map"),
        ("bars", report, "bar_plot"),
    ):
        monkeypatch.setattr(
            module, name, lambda first, *_, kind=kind, **options: calls[kind].append((first, options)) or "<svg/>"
        )
    return calls


def page_of(folder) -> Page:
    return Page(write_report(folder.path).read_text())


def test_the_page_of_a_whole_run_holds_every_plot_and_loads_and_runs_nothing(tmp_path):
    folder = fake_run(tmp_path, num_blocks=4)
    page = page_of(folder)
    assert page.titles == TITLES
    assert page.addresses
    assert all(address.startswith(("data:image/svg+xml;base64,", "#")) for address in page.addresses)
    assert not {"script", "link", "iframe", "object", "form"} & set(page.tags)
    content = folder.report.read_bytes()
    assert b"default-src 'none'" in content
    assert len(content) < 1_000_000


def test_texts_of_a_run_are_shown_and_not_obeyed(tmp_path, drawn):
    page = page_of(fake_run(tmp_path))
    assert any("</td><script>alert(" in cell for cell in page.cells)
    assert any(cell == "Write <b>word 0</b> & nothing else:" for cell in page.cells)


def test_the_summary_stands_on_top(tmp_path, drawn):
    text = page_of(fake_run(tmp_path)).text
    for part in ("0.31 → 0.9", "0.234 → 1.41", "24optimizer steps", "1 min 36 s", "0.37 GiB", "finished"):
        assert part in text


def test_kl_is_drawn_with_mean_p95_and_the_target_of_the_recipe(tmp_path, drawn):
    folder = fake_run(tmp_path)
    page_of(folder)
    lines, options = next(call for call in drawn["lines"] if call[0][0].label == "mean" and call[1]["level"])
    assert [line.label for line in lines] == ["mean", "95th percentile"]
    assert options["level"] == ("target", 0.05)
    records = folder.read_metrics()
    assert lines[1].x == tuple(range(1, 25))
    assert lines[1].y == tuple(record["kl_ref/k3_p95"] for record in records[1:])


def empty_run(folder, config="name: toy"):
    """A run before its first step."""
    made = create_run_folder(folder, "toy")
    made.write_config(config)
    return made


@pytest.mark.parametrize(
    ("ended_by", "said"), [("early_stopping", "finished by early stopping"), ("signal", "stopped by a signal")]
)
def test_how_a_run_ended_is_said_and_the_evaluation_marked_whose_weights_it_exported(tmp_path, drawn, ended_by, said):
    folder = fake_run(tmp_path)
    summary = json.loads(folder.summary.read_text())
    exported = {"which": "best", "block": 8, "step": 16, "metric": "evaluation/accuracy", "value": 0.6}
    folder.write_summary(summary | {"ended_by": ended_by, "exported": exported})
    text = page_of(folder).text
    assert said in text
    assert ("finished" in text) == ("finished" in said)
    assert "model/ has the weights of the best evaluation/accuracy, 0.6, after block 8 (step 16)" in text
    (options,) = (options for lines, options in drawn["lines"] if lines[0].label == "accuracy")
    assert options["moment"] == ("best, exported", 16)
    assert all(options.get("moment") is None for lines, options in drawn["lines"] if lines[0].label != "accuracy")


def test_a_value_head_has_plots_of_its_own(tmp_path, drawn):
    assert "Value head" not in page_of(fake_run(tmp_path)).titles
    folder = fake_run(tmp_path)
    numbers = {"loss/value": 0.5, "value/mean": 0.1, "value/return_mean": 0.2, "value/explained_variance": -0.5}
    folder.append_metrics({"step": 99, **numbers})
    assert {"Value head", "Value loss"} < set(page_of(folder).titles)
    lines = {line.label: line.y for lines, _ in drawn["lines"] for line in lines}
    names = ("value loss", "value", "return", "explained variance")
    assert [lines[name] for name in names] == [(number,) for number in numbers.values()]


def test_what_a_teacher_teaches_has_plots_of_its_own(tmp_path, drawn):
    folder = fake_run(tmp_path)
    numbers = {"teacher/divergence": 0.5, "teacher/log_ratio": -0.4, "teacher/tail": 0.1, "teacher/tail_of_policy": 0.2}
    folder.append_metrics({"step": 99, **numbers})
    titles = page_of(folder).titles
    assert {"Divergence from the teacher", "Log ratio to the teacher", "Beyond a server's likeliest tokens"} < set(
        titles
    )
    found = {line.y for lines, _ in drawn["lines"] for line in lines}
    assert {(number,) for number in numbers.values()} < found


@pytest.mark.parametrize(
    ("algorithm", "is_shown"),
    [
        ("{preset: nll}", True),
        ("{preset: nll, surrogate: null}", True),
        ("{surrogate: {name: nll}}", True),
        ("{preset: nll, surrogate: {name: clip}}", False),
        ("{preset: grpo}", False),
    ],
)
def test_the_loss_is_drawn_of_a_supervised_stage_alone(tmp_path, drawn, algorithm, is_shown):
    folder = fake_run(tmp_path)
    folder.write_config(f"name: toy\nalgorithm: {algorithm}")
    folder.append_metrics({"step": 99, "loss/total": 2.5})
    assert ("Loss" in page_of(folder).titles) == is_shown
    assert ((2.5,) in {line.y for lines, _ in drawn["lines"] for line in lines}) == is_shown


def test_a_histogram_is_the_share_of_each_bin_in_its_block(drawn):
    # 12 bins from 0 to 3: 0.25 each. Block 1: 0, 0, 3, 3; block 2: 1.5 (bin 6) alone; block 3: nothing scored.
    report._histograms({1: [0.0, 0.0, 3.0, 3.0], 2: [1.5], 3: []})
    ((rows, options),) = drawn["maps"]
    assert options["x"] == [1, 2, 3]
    assert options["y_edges"] == [0.25 * edge for edge in range(13)]
    assert (rows[0], rows[6], rows[11]) == ([0.5, 0.0, None], [0.0, 1.0, None], [0.5, 0.0, None])


def test_constraints_have_their_pass_rate_in_each_block(tmp_path, drawn):
    folder = fake_run(tmp_path, num_blocks=3)
    page_of(folder)
    rates, options = next(call for call in drawn["maps"] if call[1].get("y_names"))
    assert options["y_names"] == ["startend:quotation", "punctuation:no_comma", "punctuation:dots"]
    for index, (_, rows) in enumerate(folder.read_rollouts()):
        details = [json.loads(row["verdicts"])["style"]["detail"] for row in rows]
        said = [satisfied for detail in details for name, satisfied in detail if name == "punctuation:dots"]
        assert rates[2][index] == sum(said) / len(said)


def test_verdicts_that_are_no_grades_are_counted(tmp_path, drawn):
    folder = fake_run(tmp_path)
    timeouts = sum(record.get("verdict/style/timeout", 0) for record in folder.read_metrics())
    cells = page_of(folder).cells
    start = cells.index("style")
    counts = [str(12 * 32 - timeouts), "0", "0", str(timeouts), "0"]
    assert cells[start : start + 7] == ["style", *counts, "over 2 s"]


def test_a_crashed_run_with_half_a_last_line_and_no_summary_has_a_page(tmp_path, drawn):
    folder = fake_run(tmp_path, num_blocks=4)
    folder.summary.unlink()
    content = folder.metrics.read_text()
    folder.metrics.write_text(content[: len(content) - 40])
    text = page_of(folder).text
    assert "stopped after step 7" in text
    assert "7optimizer steps" in text


def test_rewards_are_drawn_in_total_and_by_function_and_accuracy_from_before_the_first_step(tmp_path, drawn):
    page_of(fake_run(tmp_path))
    assert [line.label for line in drawn["lines"][0][0]] == ["total", "exact", "style"]
    (line,) = next(lines for lines, _ in drawn["lines"] if lines[0].label == "accuracy")
    assert (line.x, line.y) == ((0, 8, 16, 24), (0.31, 0.9 * 8 / 24, 0.9 * 16 / 24, 0.9))


def test_missing_metrics_have_no_plot_and_no_place(tmp_path, drawn):
    folder = empty_run(tmp_path, "[not, a, mapping")
    folder.append_metrics({"step": 1, "block": 1, "entropy/mean": 1.0, "kl_ref/k3_mean": float("nan")})
    assert page_of(folder).titles == {"Entropy"}


def test_a_config_and_a_summary_that_are_no_text_still_have_a_report(tmp_path):
    folder = fake_run(tmp_path, num_blocks=1)
    for path in (folder.config, folder.summary):
        path.write_bytes(bytes([0x84, 0xFF, 0x00]))
    assert "Entropy" in page_of(folder).titles


def test_a_folder_without_a_run_and_a_damaged_file_are_errors(tmp_path):
    with pytest.raises(ConfigurationError):
        write_report(tmp_path / "none")
    folder = fake_run(tmp_path, num_blocks=1)
    folder.metrics.write_text("garbage\n" + folder.metrics.read_text())
    with pytest.raises(DataError, match="line 1"):
        write_report(folder.path)


@pytest.mark.parametrize(
    ("config", "target"),
    [({"kl": None}, None), ({"kl": {"target": 0.1}, "train": {"target": 7}}, 0.1)],
)
def test_the_target_is_that_of_the_kl_section(config, target):
    assert report._target(config) == target


def test_a_long_text_keeps_its_beginning_and_its_end_and_says_what_is_left_out():
    assert report._shortened("aaabbbbbcccccc", 9) == "aaa […5 characters…] cccccc"
    assert report._shortened("aaacccccc", 9) == "aaacccccc"
    assert report._shortened("", 9) == "(empty)"


def test_a_group_has_a_page_of_its_own_with_every_completion_the_best_first(tmp_path, drawn):
    folder = fake_run(tmp_path, num_blocks=3)
    page_of(folder)
    text = folder.report.read_text()
    places = [text.index(f'<section class=page id="block-{block}-group-2">') for block in (1, 2, 3)]
    assert places == sorted(places)
    assert all(f'href="#block-{block}-group-2"' in text for block in (1, 2, 3))
    own = text[places[1] :].partition("</section>")[0]
    rows = [row for row in folder.read_block(2) if row["group"] == 2]
    assert own.count("<article>") == len(rows) == 8
    rewards = [float(part.partition(",")[0]) for part in own.split("<p class=facts>reward ")[1:]]
    assert rewards == sorted(rewards, reverse=True)


def test_prompts_are_whole_in_the_samples_and_on_the_page_of_a_group(tmp_path, drawn):
    folder = empty_run(tmp_path)
    prompt = Prompt("7", "question " * 2000 + "the end", (4,))
    completion = Completion("7", (4, 2), "said", "stop")
    folder.write_rollouts(1, [Group(prompt, (completion,), ({"a": Verdict.graded(1.0)},), (1.0,))])
    assert prompt.text in page_of(folder).cells
    assert folder.report.read_text().count(f"<pre class=prompt>{prompt.text}</pre>") == 1


SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2=?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}]},
    {"role": "tool", "name": "add", "content": "<4>"},
    {"role": "assistant", "content": "It is 4."},
]


@pytest.mark.parametrize("prompt_shows_it", [True, False])
def test_several_turns_are_a_conversation_with_roles_calls_and_what_tools_answered(tmp_path, drawn, prompt_shows_it):
    folder = empty_run(tmp_path)
    prompt = Prompt("7", "<s>Be brief. 2+2=?" if prompt_shows_it else "row 7", (4,))
    completions = (Completion("7", (4, 9, 2), "It is 4.", "stop", trained=(True, False, True), turn=(0, 0, 1)),)
    verdicts = ({"a": Verdict.graded(1.0)},)
    folder.write_rollouts(1, [Group(prompt, completions, verdicts, (1.0,), conversations=(tuple(SAID),))])
    page = page_of(folder)
    before = "" if prompt_shows_it else "system: Be brief.\n\nuser: 2+2=?\n\n"
    assert f'{before}assistant: add({{"a": 2}})\n\ntool add: <4>\n\nassistant: It is 4.' in page.cells
    own = folder.report.read_text().partition('id="block-1-group-1"')[2]
    said = re.findall(r'<div class="turn (\w+)"><b>([^<]*)</b><pre>([^<]*)</pre></div>', own)
    of_prompt = [] if prompt_shows_it else [("other", "system", "Be brief."), ("other", "user", "2+2=?")]
    call, answer = ("policy", "assistant", "add({&quot;a&quot;: 2})"), ("other", "tool add", "&lt;4&gt;")
    assert said == [*of_prompt, call, answer, ("policy", "assistant", "It is 4.")]


def test_a_message_without_a_role_in_a_run_of_before_is_shown_all_the_same():
    said = [{"role": "assistant", "content": "go on"}, {"content": "no"}]
    row = {"prompt": "a", "completion": "go on", "conversation": json.dumps(said)}
    assert turns(row) == [("assistant", "go on"), ("", "no")]


def test_a_completion_that_nobody_could_score_is_the_last_of_its_group():
    common = {"prompt": "p", "advantage": None, "num_tokens": 1, "finish_reason": "stop", "verdicts": "{}"}
    rewards = (0.5, None, 0.25, 1.0)
    page = report._group_page("a", [{**common, "completion": "c", "reward": reward} for reward in rewards])
    assert [part.partition(",")[0] for part in page.split("<p class=facts>reward ")[1:]] == ["1", "0.5", "0.25", "–"]


def test_every_plot_over_steps_has_its_values_below_it(tmp_path, drawn):
    page = page_of(fake_run(tmp_path, num_blocks=40))
    assert page.tags.count("details") == len(drawn["lines"]) + 1  # the recipe's
    assert len(cards._values([cards.Line("a", tuple(range(1000)), tuple(range(1000)))]).split("<tr>")) == 27
