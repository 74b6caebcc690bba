"""A failure on one rank ends the work on all ranks, with an error that says what failed on which rank.

A rank that fails outside a collective tells the others. One that fails inside leaves, which breaks its connections;
``ranks_of_environment`` then tells the others which rank left and why.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from logitless import errors
from logitless.distributed.exit_reasons import in_one_line
from logitless.distributed.ranks import Ranks
from logitless.errors import EngineError, LogitlessError, LostRankError, TrainingError


class SharedWork:
    """Work that several ranks do at the same time.

    Attributes:
        can_report: whether this rank can tell the others of a failure; False inside a collective.
    """

    def __init__(self) -> None:
        self.can_report = True

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Inside, ranks exchange data: a rank that fails here cannot tell the others."""
        self.can_report = False
        yield
        self.can_report = True  # not where it failed


@contextmanager
def failing_together(ranks: Ranks, work: str) -> Iterator[SharedWork]:
    """An exception on one rank, Ctrl-C included, ends the block on every rank; a collective at its end.

    The first rank that failed raises its own error. The others raise a ``LogitlessError`` of the same class, or a
    ``TrainingError``.

    Args:
        ranks: all of them enter the block; inside it they wait for each other only in ``SharedWork.collective``.
        work: what must succeed, as a noun phrase; ``needed`` of the others' error.

    Raises:
        LogitlessError: another rank failed; ``given`` says which, and why.

    Example:
        >>> with failing_together(Ranks.alone(), "completions"):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        OSError: [Errno 28] No space left on device
    """
    shared, failure = SharedWork(), None
    try:
        yield shared
    except BaseException as error:
        if ranks.world == 1 or isinstance(error, LostRankError):
            raise
        if not shared.can_report:
            if isinstance(error, EngineError):  # saving a checkpoint for it would wait for the other ranks
                raise TrainingError(needed=error.needed, given=error.given, remedy=error.remedy) from error
            raise
        failure = error
    try:
        failures = ranks.all_gather_object(None if failure is None else described(failure))
    except LostRankError:
        if failure is not None:
            raise failure from None
        raise
    first = next((rank for rank, each in enumerate(failures) if each is not None), None)
    if first is None:
        return
    if failure is not None and (first == ranks.rank or not isinstance(failure, Exception)):
        raise failure
    raise error_of(failures[first], work, first) from failure


def described(error: BaseException) -> list[str]:
    """[class, needed, given, remedy] of one of our errors; [text] of any other: for ``error_of`` on another rank."""
    if isinstance(error, LogitlessError):
        kind = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        return [kind.__name__, error.needed, error.given, error.remedy]
    return [in_one_line(error)]


def error_of(described: list[str], work: str, rank: int) -> LogitlessError:
    """The error that the other ranks raise."""
    match described:
        case [kind, needed, given, remedy]:
            error: LogitlessError = getattr(errors, kind)(
                needed=needed, given=f"{given} (on rank {rank})", remedy=remedy
            )
            return error
    return TrainingError(
        needed=f"{work} on every rank",
        given=f"{described[0]} (on rank {rank})",
        remedy="Look for that rank's traceback; --resume goes on from the last checkpoint.",
    )
