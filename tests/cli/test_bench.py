"""``logitless bench`` reaches its benchmarks."""

import pytest

from logitless.cli.main import main


def test_bench_head_says_what_it_measures(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "head", "--help"])
    assert ended.value.code == 0
    assert "--contenders" in capsys.readouterr().out


def test_bench_without_a_benchmark_is_bad_input(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code == 2
