"""``logitless bench`` reaches its benchmarks."""

import pytest

from logitless.cli.main import main


@pytest.mark.parametrize(
    ("benchmark", "option"), [("head", "--contenders"), ("step", "--probe-seconds"), ("scale", "--layouts")]
)
def test_a_benchmark_says_what_it_measures(benchmark, option, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", benchmark, "--help"])
    assert ended.value.code == 0
    assert option in capsys.readouterr().out


def test_bench_without_a_benchmark_is_bad_input(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code == 2
