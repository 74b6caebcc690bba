"""Pages of keys and values: how many fit into a budget, and which are free."""

from collections.abc import Sequence
from dataclasses import dataclass

from logitless.errors import ConfigurationError
from logitless.models.row_invariant.paged_attention import PAGE


def pages_for(positions: int) -> int:
    """The number of pages that hold so many positions.

    Example:
        >>> pages_for(0), pages_for(64), pages_for(65)
        (0, 1, 2)
    """
    return -(-positions // PAGE)


@dataclass(frozen=True)
class PromptPages:
    """Numbers of pages of a prompt and of each of its samples.

    A prompt is stored without its last token, which is the first input of every sample's decoding. The pages that it
    fills are shared; the page in which it ends is copied for each sample, which appends to it.

    Args:
        shared: full pages of the prompt, read by all samples.
        ends_within: 1 if the prompt ends inside a page, else 0.
        own: pages of a sample alone, up to its last position.

    Example:
        >>> PromptPages.of(prompt=131, max_new_tokens=64)
        PromptPages(shared=2, ends_within=1, own=2)
    """

    shared: int
    ends_within: int
    own: int

    @classmethod
    def of(cls, prompt: int, max_new_tokens: int) -> "PromptPages":
        stored = prompt - 1
        shared = stored // PAGE
        positions = prompt + max_new_tokens - 1  # the last new token is not an input
        return cls(shared, int(stored % PAGE > 0), pages_for(positions) - shared)

    @property
    def to_begin(self) -> int:
        """Pages that the prompt and its first sample need."""
        return self.shared + self.ends_within + self.own


class Pool:
    """The free pages; the lowest are taken first.

    Args:
        num_pages: in total.

    Example:
        >>> pool = Pool(4)
        >>> taken = pool.take(3)
        >>> pool.take(2), pool.free
        (None, 1)
        >>> pool.give_back(taken)
        >>> pool.free
        4
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))[::-1]
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take so many pages; None if fewer are free."""
        if count > len(self._free):
            return None
        pages = tuple(self._free.pop() for _ in range(count))
        self._taken.update(pages)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Free these pages; raises ValueError if one is free already."""
        if not self._taken.issuperset(pages) or len(set(pages)) < len(pages):
            raise ValueError(f"pages {pages} are not taken")
        self._taken.difference_update(pages)
        self._free += sorted(pages, reverse=True)


def pages_within(
    budget: int, page_bytes: int, prompts: Sequence[PromptPages], lengths: Sequence[int], max_new_tokens: int,
    num_samples: int, max_rows: int,
) -> int:  # fmt: skip
    """Pages to allocate: enough for all prompts, each with a first sample, and ``max_rows`` more samples; at most the
    budget.

    Args:
        budget: bytes.
        page_bytes: of a page, all layers together.
        prompts: pages of each prompt.
        lengths: of the prompts in tokens, for the error.
        max_new_tokens: of a sample.
        num_samples: of each prompt.
        max_rows: samples decoded at once.

    Raises:
        ConfigurationError: one sample of the longest prompt does not fit; names the largest ``max_new_tokens`` that
            does.

    Example:
        >>> prompts = [PromptPages.of(65, 64)]
        >>> pages_within(10**6, 1000, prompts, [65], 64, num_samples=8, max_rows=4)
        6
    """
    most = budget // page_bytes
    longest = max(range(len(prompts)), key=lambda i: prompts[i].to_begin)
    if prompts[longest].to_begin > most:
        needed = prompts[longest].to_begin
        fit = (most - prompts[longest].ends_within) * PAGE - lengths[longest] + 1
        raise ConfigurationError(
            needed=f"{needed * page_bytes:,} bytes for keys and values, those of one completion of the longest prompt"
            f" ({lengths[longest]} tokens and {max_new_tokens} new)",
            given=f"a budget of {budget:,}",
            remedy=f"Raise rollout.engine.memory to {needed * page_bytes}"
            + (f", or lower max_new_tokens to at most {fit}." if fit > 0 else ", or drop prompts of this length."),
        )
    together = min(max_rows, len(prompts) * num_samples) * max(each.own for each in prompts)
    return min(most, sum(each.shared + each.ends_within + each.own for each in prompts) + together)
