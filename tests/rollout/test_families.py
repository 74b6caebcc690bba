"""Every architecture that trains is sampled from too, and what was sampled is what training scores."""

from collections.abc import Iterator

import pytest
import torch

from logitless.data.packing import pack
from logitless.models.char_tokenizer import character_tokenizer
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.transformers import TransformersEngine
from logitless.types import Prompt
from tests.models.families import TRAINED, one_of_each_kind
from tests.models.in_float64 import in_float64
from tests.models.test_families import loaded, logits
from tests.rounding import of_roundings

LENGTHS = (4, 1, 9, 4, 2)
SAMPLED = [family for family in TRAINED if family.attention == "packed"]  # the cache of sparse attention is refused
families = pytest.mark.parametrize("family", one_of_each_kind(SAMPLED))


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with in_float64():
        yield


@families
def test_the_log_probability_of_a_sampled_token_is_that_of_the_packed_row(family):
    """Prompts of several lengths, read in several parts; rows that end leave the batch."""
    generator = torch.Generator().manual_seed(5)
    prompts = [
        Prompt(str(i), "", torch.randint(3, 40, (length,), generator=generator).numpy())
        for i, length in enumerate(LENGTHS)
    ]
    model, tokenizer = loaded(family), character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+-")
    engine = TransformersEngine(model, tokenizer, max_rows=7, prefill_tokens=9)
    options = SamplingOptions(max_new_tokens=6, stop_token_ids=tuple(range(3, 9)))
    groups = engine.sample(prompts, 2, options, seed=1)
    pairs = [(prompt, each) for prompt, group in zip(prompts, groups, strict=True) for each in group]
    lengths = {each.length for _, each in pairs}
    assert len(lengths) > 1, "rows end at different steps"
    batch = pack(pairs)
    with torch.no_grad():
        logp = logits(model, batch.inputs).log_softmax(-1).gather(1, batch.target[:, None])[:, 0]
    # both in float64; a completion's numbers are kept in float32
    torch.testing.assert_close(batch.logp_sampler.double(), logp, rtol=of_roundings(torch.float32, 3), atol=1e-9)
