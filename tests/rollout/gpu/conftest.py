"""What tests with graphs need of memory."""

import pytest
import torch


@pytest.fixture
def ordinary_memory():
    """Poison is written by a kernel of its own before every launch, which a captured graph would repeat."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.cuda.empty_cache()
