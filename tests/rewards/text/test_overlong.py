from logitless.rewards.text.overlong import Overlong


def test_the_penalty_of_the_paper_at_its_corners_and_half_way():
    # DAPO: max_length 20480, of which the last 4096 are the buffer: 0 up to 16384, then -(length - 16384) / 4096.
    reward = Overlong(max_length=20480, buffer=4096)
    ids = [[0] * length for length in (1, 16384, 17408, 18432, 20480, 30000)]
    assert reward(["p"] * 6, ["text"] * 6, ids) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
