"""``logitless bench`` reaches its benchmarks."""

from pathlib import Path

import pytest

from logitless.cli.main import main

ROOT = Path(__file__).parents[2]


def test_a_benchmark_says_what_it_measures(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "optimizer", "--help"])
    assert ended.value.code == 0
    assert "--quick" in capsys.readouterr().out


def test_bench_without_a_benchmark_is_bad_input(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code == 2


@pytest.mark.parametrize("benchmark", ["bits", "head", "rollout", "scale", "step"])
def test_a_figure_of_this_library_is_refused_with_the_script_that_makes_it(benchmark, capsys):
    assert main(["bench", benchmark, "--table", "README.md"]) == 2
    assert f"python benchmarks/{benchmark}.py" in capsys.readouterr().err
    assert (ROOT / "benchmarks" / f"{benchmark}.py").is_file()
