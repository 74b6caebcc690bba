"""Which backend runs."""

import logging
import sys

import pytest
import torch
from torch.distributed import ProcessGroup

from logitless.errors import UnavailableError
from logitless.head import api, contract
from logitless.head.api import token_scores
from logitless.types import LMHead
from tests.head.cases import Case, problem, run


class Sharded(torch.Tensor):
    """As little of a DTensor as the contract looks at."""

    placements = ()


ARGUMENTS = (torch.ones(2, 16), torch.ones(4, 16), torch.tensor([0, 3]))


@pytest.fixture
def without_fused(monkeypatch):
    contract._log_once.cache_clear()
    monkeypatch.setattr(api, "why_not", lambda name, *_: "no such machine" if name == "fused" else None)


@pytest.mark.usefixtures("without_fused")
def test_auto_takes_chunked_where_fused_cannot_run_and_says_so_once(caplog):
    with caplog.at_level(logging.INFO, logger="logitless"):
        scores = [token_scores(*ARGUMENTS), token_scores(*ARGUMENTS)]
    assert [record.getMessage() for record in caplog.records] == [
        "head backend: chunked (fused cannot run: no such machine)"
    ]
    assert torch.equal(scores[0].logp, token_scores(*ARGUMENTS, backend="chunked").logp)


@pytest.mark.usefixtures("without_fused")
def test_a_named_backend_that_cannot_run_raises_with_its_reason():
    with pytest.raises(UnavailableError, match=r"no such machine.*backend='chunked'"):
        token_scores(*ARGUMENTS, backend="fused")


def test_kernels_that_cannot_be_imported_are_a_reason_not_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "logitless.head.fused", None)
    monkeypatch.delattr("logitless.head.fused", raising=False)
    reason = api.why_not("fused", *ARGUMENTS[:2])
    assert reason is not None
    assert "cannot be imported" in reason


def test_a_group_or_a_sharded_weight_is_no_reason_against_the_kernels(monkeypatch):
    monkeypatch.setattr("logitless.head.fused.why_not", lambda hidden: None)
    sharded = Sharded(torch.ones(4, 16))
    for head, group in ((ARGUMENTS[1], ProcessGroup(0, 2)), (LMHead(sharded), None)):
        assert api.why_not("fused", ARGUMENTS[0], head, group) is None
        assert api.why_not("reference", ARGUMENTS[0], head, group) is not None


def test_a_weight_alone_is_a_head():
    given = problem(Case())
    alone = token_scores(given.hidden, given.head.weight, given.target, backend="chunked")
    assert torch.equal(alone.logp.detach(), run(given, "chunked")["logp"])
