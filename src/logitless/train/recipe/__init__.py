"""The recipe of a run: its keys, how a file becomes one, and what may change when a run goes on."""
