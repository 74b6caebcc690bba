"""The view shows what the records say, on a terminal and off it, and its time to go is that of the blocks so far."""

import io
import itertools
import logging
import math
import re
import sys

import pytest
from rich.console import Console

from logitless.train.record import live_view
from logitless.train.record.live_view import LiveView, duration, sparkline


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_silent_view_shows_nothing(capsys):
    with LiveView(10, title="toy", silent=True) as view:
        view.phase("rollout")
        view.update({"step": 1, "block": 1, "reward/mean": 0.25}, sample=None)
        view.message("saved")
    assert capsys.readouterr() == ("", "")


def view_of(blocks, width=80, title="toy"):
    """A view off a terminal, and what it has written."""
    out = io.StringIO()
    return LiveView(blocks, title=title, console=Console(file=out, width=width)), out


def test_off_a_terminal_each_step_with_something_to_show_is_one_plain_line():
    view, out = view_of(2, width=40)
    with view:
        view.update({"step": 0, "block": 1, "memory/peak_bytes": 9}, sample=None)
        view.update({"step": 1, "block": 1, "reward/mean": 0.123456, "kl_ref/k3_mean": None}, ("a", "b", 0.0))
        view.message("[bold]not markup[/bold] " + "x" * 60)
    assert out.getvalue().splitlines() == [
        "toy: 2 blocks",
        "block 1/2  step 1  reward 0.1235",
        "[bold]not markup[/bold] " + "x" * 60,
    ]


def test_the_evaluation_before_training_is_of_no_block():
    view, out = view_of(2)
    with view:
        view.update({"step": 0, "block": 1, "evaluation/accuracy": 0.25}, sample=None)
        view.update({"step": 0, "block": 1, "reward/mean": 0.5}, sample=None)  # a block without a step
    assert out.getvalue().splitlines()[1:] == [
        "before training  held-out accuracy 0.25",
        "block 1/2  step 0  reward 0.5",
    ]


def test_a_reward_that_failed_in_a_block_is_named_with_its_share_in_the_first_line_of_the_block() -> None:
    view, out = view_of(3)
    with view:
        view.update({"step": 1, "block": 1, "reward/mean": 0.25, "verdict/mine/failed_fraction": 0.4}, sample=None)
        view.update({"step": 2, "block": 1, "entropy/mean": 1.0}, sample=None)
        assert "mine failed at 40%" in shown(view)
        view.update({"step": 3, "block": 2, "reward/mean": 0.25, "verdict/mine/failed_fraction": 0.0}, sample=None)
        assert "mine" not in shown(view)
    assert out.getvalue().splitlines()[1:] == [
        "block 1/3  step 1  reward 0.25  mine failed at 40%",
        "block 1/3  step 2  entropy 1",
        "block 2/3  step 3  reward 0.25",
    ]


def test_an_accuracy_of_which_some_completions_have_no_score_says_how_many():
    view, out = view_of(3)
    with view:
        for step, (accuracy, unscored) in enumerate([(0.25, 0.5), (0.5, 0.0), (math.nan, 1.0)]):
            numbers = {"evaluation/accuracy": accuracy, "evaluation/unscored_fraction": unscored}
            view.update({"step": step, "block": 1, **numbers}, sample=None)
    assert [line.partition("held-out ")[2] for line in out.getvalue().splitlines()[1:]] == [
        "accuracy 0.25 (50% not scored)",
        "accuracy 0.5",
        "accuracy not scored",
    ]


def test_the_accuracy_of_each_further_held_out_set_is_shown_under_its_name():
    view, out = view_of(3, width=200)
    with view:
        numbers = {"held_out/hard/accuracy": 0.25, "held_out/hard/accuracy/low": 0.1}
        view.update({"step": 0, "block": 1, **numbers, "held_out/hard/unscored_fraction": 0.5}, sample=None)
        view.update(
            {"step": 1, "block": 1, "held_out/hard/accuracy": 0.5, "held_out/new/accuracy": math.nan}, sample=None
        )
        assert re.search(r"hard accuracy +0\.5 +▁█", shown(view))
    assert out.getvalue().splitlines()[1:] == [
        "before training  hard accuracy 0.25 (50% not scored)",
        "block 1/3  step 1  hard accuracy 0.5  new accuracy not scored",
    ]


def test_the_loss_is_shown_where_it_says_how_far_a_run_is_and_what_a_teacher_teaches_everywhere():
    numbers = {"step": 1, "block": 1, "loss/total": 2.5, "teacher/divergence": 0.25, "teacher/log_ratio": -0.5}
    for shows_loss, first in ((True, "loss 2.5  divergence"), (False, "step 1  divergence")):
        out = io.StringIO()
        with LiveView(3, shows_loss=shows_loss, console=Console(file=out), clock=Clock()) as view:
            view.update(numbers, sample=None)
        assert f"{first} from the teacher 0.25  log ratio to the teacher -0.5" in out.getvalue()


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=90, height=30, color_system=None)


def test_on_a_terminal_log_lines_are_shown_above_the_view_and_nowhere_else(caplog):
    logger, console = logging.getLogger("logitless"), terminal()
    with LiveView(3, console=console):
        logger.warning("waiting for a %s", "reward")
    assert "waiting for a reward" in console.file.getvalue()
    assert not caplog.records
    logger.warning("after it")
    assert [record.message for record in caplog.records] == ["after it"]
    assert "after it" not in console.file.getvalue()


def shown(view: LiveView) -> str:
    console = Console(file=io.StringIO(), width=90, color_system=None)
    console.print(view._render())
    return console.file.getvalue()


def test_a_sparkline_of_nothing_finite_is_blank():
    assert sparkline([math.nan, math.inf]) == "  "
    assert sparkline([]) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 00 s"), (3599, "59 min 59 s"), (7260, "2 h 01 min")]
)
def test_a_duration_is_rounded_to_what_can_be_read(seconds, text):
    assert duration(seconds) == text


def test_the_time_to_go_is_that_of_the_blocks_after_the_first():
    clock = Clock()
    view = LiveView(10, console=terminal(), clock=clock)
    for step, block, now in [(0, 1, 50.0), (1, 1, 100.0), (2, 2, 105.0), (3, 2, 110.0), (4, 3, 120.0), (5, 4, 124.0)]:
        clock.now = now
        view.update({"step": step, "block": block}, None)
        assert (view.seconds_left() is None) == (step < 4)
    # Blocks 1, 2, 3 ended at 100, 110, 120: 10 s a block. 7 are left from 120 on, until 190; now it is 124.
    assert view.seconds_left() == pytest.approx(66.0)
    clock.now = 500.0
    assert view.seconds_left() == 0.0


def test_a_resumed_view_starts_where_the_run_stopped():
    view = LiveView(10, first_block=6, console=terminal(), clock=Clock())
    assert "block 6/10" in shown(view)


def test_a_terminal_shows_progress_curves_phase_and_a_sample():
    with LiveView(10, title="toy", console=terminal(), clock=Clock()) as view:
        view.phase("rollout")
        for step, reward in [(1, 0.1), (2, 0.1), (3, 0.3)]:
            view.update({"step": step, "block": step, "reward/mean": reward, "kl_ref/k3_mean": 0.01}, None)
        view.update({"step": 4, "block": 3, "entropy/mean": 1.5}, ("2+2=", "four", 1.0))
        view.update({"step": 5, "block": 3}, None)
        text = shown(view)
    for part in ("toy", "block 3/10", "reward", "▁▁█", "0.3", "KL", "1.5", "2+2=four", "rollout"):
        assert part in text


def test_it_is_drawn_by_another_thread_whatever_the_run_says_meanwhile():
    view, steps = LiveView(10**6, console=terminal(), clock=Clock()), itertools.count(1)

    def between_lines(frame, event, argument):
        if frame.f_code.co_filename == live_view.__file__:  # here the run may get its turn
            step = next(steps)
            view.update({"step": step, "block": step, "reward/mean": 0.1 * (step % 7)}, ("2+2=", f"{step}", 1.0))
        return between_lines

    before = sys.gettrace()
    sys.settrace(between_lines)
    try:
        for _ in range(3):  # with no number there, with few, with all that are kept
            view._render()
    finally:
        sys.settrace(before)
    assert next(steps) > 100
    assert "2+2=" in shown(view)


def test_hostile_text_is_shown_and_not_obeyed():
    with LiveView(2, title="[red]toy", console=terminal(), clock=Clock()) as view:
        view.update({"step": 1, "block": 1}, ("[blink]", "\x1b[2J\r\x07" + "a" * 1000, -1.0))
        text = shown(view)
    assert "[red]toy" in text
    assert "[blink]" in text
    assert "\x1b[2J" not in text
    assert text.count("a") < 500


def test_a_view_says_that_a_run_stopped_and_lets_the_error_through():
    console = terminal()
    with pytest.raises(RuntimeError), LiveView(2, console=console, clock=Clock()):
        raise RuntimeError
    assert "stopped" in console.file.getvalue()
