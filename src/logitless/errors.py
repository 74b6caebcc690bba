"""The errors that logitless raises.

Each says what was needed, what was given, and what to do. Each is also a ``ValueError`` (the caller's input was wrong)
or a ``RuntimeError`` (something else was: the machine, a file, a run).
"""

from functools import partial


class LogitlessError(Exception):
    """Root of all logitless errors.

    Args:
        needed: what the code required, as a noun phrase.
        given: what it got instead.
        remedy: what the caller can do, as an imperative sentence.

    Example:
        >>> str(InputError(needed="at least one token", given="none", remedy="Drop empty batches."))
        'needed at least one token; given none. Drop empty batches.'
    """

    def __init__(self, *, needed: str, given: str, remedy: str) -> None:
        super().__init__(f"needed {needed}; given {given}. {remedy}")
        self.needed, self.given, self.remedy = needed, given, remedy

    def __reduce__(self) -> tuple[object, ...]:
        # the default passes arguments by position
        return partial(type(self), needed=self.needed, given=self.given, remedy=self.remedy), ()


class InputError(LogitlessError, ValueError):
    """A function was called with arguments that do not fit together (shapes, dtypes, ranges, missing tensors)."""


class ConfigurationError(LogitlessError, ValueError):
    """A recipe, a preset or a command line asks for something impossible or contradictory."""


class DataError(LogitlessError, ValueError):
    """A file or a row of a data set is malformed; the message names the row."""


class UnavailableError(LogitlessError, RuntimeError):
    """A named backend, engine or optional package cannot run on this machine."""


class CheckpointError(LogitlessError, RuntimeError):
    """A checkpoint could not be written or read back."""


class TrainingError(LogitlessError, RuntimeError):
    """A run cannot go on, for example after repeated non-finite gradients or half an update."""


class EngineError(LogitlessError, RuntimeError):
    """An engine outside of this process is gone, gives wrong answers, or does not take weights."""


class LostRankError(TrainingError):
    """Another process of the run is gone or does not answer; the message names it if it is known."""


class RefusedError(Exception):
    """A request over HTTP that a server here answers with a status other than 200.

    Args:
        status: of HTTP.
        message: in words, for the client.
        code: OpenAI's name of the kind of error.
    """

    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code
