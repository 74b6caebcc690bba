"""Rewards: text in, Verdict out; bounded, killable, typed failure."""
