"""The report as Chromium shows it: no complaint, legible wide, narrow, dark and printed, quick when it is long."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from logitless.train.record.run_folder import RunFolder
from logitless.train.report.compare import write_comparison
from logitless.train.report.page import write_report
from tests.browser.chromium import PROGRAM, Chromium, chromium
from tests.train.fake_run import fake_run

pytestmark = [pytest.mark.browser, pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")]

SMALLEST_LETTERS = """
Math.min(...[...document.querySelectorAll('figure img')].map(image => {
  const svg = atob(image.src.split(',')[1]);
  const sizes = [...svg.matchAll(/font(?:-size)?: ([0-9.]+)px/g)].map(found => Number(found[1]));
  const width = Number(svg.match(/viewBox="0 0 ([0-9.]+)/)[1]);
  return Math.min(...sizes) * image.clientWidth / width;
}))
"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = fake_run(tmp_path_factory.mktemp("runs"), num_blocks=30)
    write_report(folder.path)
    return folder


@pytest.mark.parametrize("width", [1300, 400])
def test_a_report_has_no_complaint_no_overflow_and_legible_plots(
    browser: Chromium, run: RunFolder, width: int, tmp_path: Path
) -> None:
    browser.size(width)
    browser.media()
    browser.open(run.report.as_uri())
    assert browser.complaints() == []
    assert browser.value("document.images.length") > 10
    assert browser.value("[...document.images].every(image => image.naturalWidth > 0)")
    assert browser.value(OVERFLOW) <= 0
    assert browser.value(SMALLEST_LETTERS) >= 8
    browser.picture(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 20_000


def test_print_is_light_and_has_the_plots(browser: Chromium, run: RunFolder) -> None:
    browser.size(800)
    browser.media("print", "dark")
    browser.open(run.report.as_uri())
    assert browser.value(BACKGROUND) == "rgb(255, 255, 255)"
    assert browser.value("getComputedStyle(document.querySelector('figure img')).filter") == "none"
    assert browser.value(SMALLEST_LETTERS) >= 8


def test_a_dark_screen_has_a_dark_page_and_plots_that_are_turned_round(browser: Chromium, run: RunFolder) -> None:
    browser.size(1300)
    browser.media("", "dark")
    browser.open(run.report.as_uri())
    assert browser.value(BACKGROUND) == "rgb(15, 23, 42)"
    assert "invert" in browser.value("getComputedStyle(document.querySelector('figure img')).filter")
    browser.media()
    assert browser.value(BACKGROUND) == "rgb(248, 250, 252)"


def test_a_group_is_a_page_that_its_link_opens(browser: Chromium, run: RunFolder) -> None:
    browser.size(1300)
    browser.open(run.report.as_uri())
    shown = "[...document.querySelectorAll('.page')].filter(page => page.offsetHeight > 0).map(page => page.id).join()"
    assert browser.value(shown) == ""
    browser.value("document.querySelector('a[href=\"#block-30-group-2\"]').click()")
    assert browser.value(shown) == "block-30-group-2"
    tops = "[...document.querySelectorAll('.page:target article')].map(each => each.getBoundingClientRect().top)"
    assert browser.value(f"new Set(({tops}).slice(0, 3)).size") == 1  # side by side


def test_the_values_of_a_plot_unfold(browser: Chromium, run: RunFolder) -> None:
    browser.open(run.report.as_uri())
    details = "document.querySelector('details.values')"
    assert browser.value(f"{details}.open") is False
    browser.value(f"{details}.querySelector('summary').click()")
    assert browser.value(f"{details}.open") is True
    assert browser.value(f"{details}.querySelector('table').offsetHeight") > 100


def test_a_comparison_of_runs_has_no_complaint(browser: Chromium, tmp_path: Path) -> None:
    folders = [fake_run(tmp_path, num_blocks=20, seed=seed).path for seed in range(3)]
    browser.size(1300)
    browser.open(write_comparison(folders, tmp_path / "comparison.html").as_uri())
    assert browser.complaints() == []
    assert browser.value(OVERFLOW) <= 0
    assert browser.value("document.images.length") >= 5


def test_a_report_of_twenty_thousand_steps_opens_and_holds_no_more_than_one_of_five_hundred(
    browser: Chromium, tmp_path: Path
) -> None:
    sizes = []
    browser.size(1300)
    for steps in (500, 20_000):
        folder = fake_run(tmp_path / str(steps), num_blocks=20, steps_per_block=steps // 20)
        assert folder.read_metrics()[-1]["step"] == steps
        write_report(folder.path)
        seconds = min(browser.open(folder.report.as_uri()) for _ in range(3))
        sizes.append((folder.report.stat().st_size, browser.value("document.querySelectorAll('*').length")))
    assert all(large <= 1.1 * small for small, large in zip(*sizes, strict=True))
    assert seconds < 20  # one, on a machine that has nothing else to do
