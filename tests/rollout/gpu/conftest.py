"""Memory settings for tests with graphs."""

import pytest
import torch


@pytest.fixture
def ordinary_memory():
    """Turn the filling of uninitialised memory off: it is a kernel, which a captured graph would repeat."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.cuda.empty_cache()
