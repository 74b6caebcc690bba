"""Seeds of different purposes."""

from logitless.seeds import derived_seed


def test_seeds_of_different_purposes_differ():
    seeds = {derived_seed(seed, name, n) for seed in range(3) for name in ("a", "b") for n in range(5)}
    assert len(seeds) == 30
    assert all(0 <= seed < 2**63 for seed in seeds)
