"""A plot is SVG that parses, the same for the same numbers, and does not grow with the length of a run."""

import math
from xml.etree import ElementTree

import pytest

from logitless.train.report.plots import Line, _short, _stretches, heat_map, line_plot, smoothed, thinned


def test_a_plot_is_an_svg_document_that_is_the_same_every_time():
    def draw():
        return line_plot([Line("a", (1, 2, 3), (0.5, None, 2)), Line("b", (1,), (1.0,))], x_label="x", y_label="y")

    assert draw() == draw()
    assert ElementTree.fromstring(draw()).tag.endswith("svg")


@pytest.mark.parametrize("label", ["a$b$c", "$", "<b>&", "under_score^2"])
def test_a_label_is_text_and_not_markup(label):
    drawn = line_plot([Line(label, (1, 2), (1, 2)), Line("other", (1, 2), (1, 2))], x_label="x", y_label="y")
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.tag.endswith("text")]
    assert label in texts


def test_a_short_line_keeps_its_points_and_its_gaps():
    x, y = thinned(Line("a", (1, 2, 3), (0.5, None, math.inf)))
    assert x == [1.0, 2.0, 3.0]
    assert y[0] == 0.5
    assert math.isnan(y[1])


def test_a_long_line_is_drawn_as_means_over_equal_stretches():
    x, y = thinned(Line("a", tuple(range(1200)), tuple(float(n % 3) if n % 3 else None for n in range(1200))))
    assert len(x) == len(y) == 400
    assert x[:2] == [1.0, 4.0]  # of 0, 1, 2 and of 3, 4, 5
    assert y[:2] == [1.5, 1.5]  # of 1 and 2, the gap left out


@pytest.mark.parametrize("length", [1, 399, 400, 401, 1001])
def test_stretches_cover_everything_once(length):
    assert [n for stretch in _stretches(length) for n in range(length)[stretch]] == list(range(length))


def test_a_run_ten_times_as_long_is_no_larger():
    def size(length):
        values = tuple(math.sin(n / length * 7) for n in range(length))
        return len(line_plot([Line("a", tuple(range(length)), values)], x_label="x", y_label="y"))

    assert size(20_000) < 1.2 * size(2_000)


def test_a_heat_map_may_have_blanks_one_column_and_many_columns():
    for columns in (1, 900):
        rows = [[None if n % 5 == 0 else 0.5 for n in range(columns)] for _ in range(3)]
        drawn = heat_map(rows, x=range(1, columns + 1), y_label="", y_names=["a", "b$", "c"], value_label="rate")
        assert ElementTree.fromstring(drawn).tag.endswith("svg")


@pytest.mark.parametrize(
    ("value", "text"), [(4467.4, "4,467"), (123.44, "123"), (0.01234, "0.0123"), (1e6, "1,000,000")]
)
def test_a_bar_is_labelled_with_all_digits_before_the_point(value: float, text: str) -> None:
    assert _short(value) == text


def test_a_smoothed_line_is_the_running_mean_of_what_is_there():
    assert smoothed([1.0, 1.0, 1.0]) == pytest.approx([1.0, 1.0, 1.0])
    # Three points keep 1 - 1/3 of the weight: (2/3 * 0 + 3) / (2/3 + 1) = 1.8; (2/3 * 3 + 3) / (4/9 + 2/3 + 1) = 45/19
    assert smoothed([0.0, 3.0, 3.0]) == pytest.approx([0.0, 1.8, 45 / 19])


def test_a_noisy_line_is_drawn_faint_below_its_mean_and_an_exact_one_alone():
    line = Line("noise", tuple(range(100)), tuple(n % 7 for n in range(100)))
    both, alone = (line_plot([line], x_label="x", y_label="y", smooth=smooth) for smooth in (True, False))
    assert both.count("stroke-opacity: 0.3") == 1
    assert "stroke-opacity: 0.3" not in alone
