"""Weights over NCCL without a GPU: what is sent again and when, by a transfer that only takes notes."""

import pytest
import torch
from torch import nn

from logitless.errors import EngineError, LostRankError
from logitless.http_client import HttpClient, Patience
from logitless.rollout.engine import Weights
from logitless.rollout.vllm.api import VllmServer
from logitless.rollout.vllm.nccl_transfer import NcclSync
from tests.rollout.fake_vllm import Served, serving
from tests.rollout.policy import TOKENIZER, tiny_policy


class Noting(NcclSync):
    """Opens no communicator; notes for each send which communicator sent and what the first weight was."""

    def __init__(self, **options):
        super().__init__("policy", Patience(give_up_seconds=1.0), address="127.0.0.1", port=29600, **options)
        self.opened, self.sent = 0, []

    def _opened(self, server):
        self.opened += 1
        number, sync = self.opened, self

        class Communicator:
            def send_weights(self):
                [(_, tensor)] = sync._weights.tensors()
                sync.sent.append((number, float(tensor.detach())))

            def shutdown(self):
                pass

        return Communicator()


@pytest.fixture
def served():
    return Served(tiny_policy, TOKENIZER)


@pytest.fixture
def server(served):
    with serving(served) as url:
        yield VllmServer(HttpClient(url))


def _policy(value):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def _weights(model):
    return Weights(model, lambda: iter(model.named_parameters()))


def test_pushes_share_a_communicator_and_name_the_weights(served, server):
    sync = Noting()
    for version in range(2):
        sync.push([server], _weights(_policy(version)), version)
        assert sync.held(server) == "current"
    assert sync.sent == [(1, 0.0), (1, 1.0)]


def test_a_server_that_was_restarted_between_two_pushes_gets_a_communicator_of_its_own(served, server):
    sync = Noting()
    sync.push([server], _weights(_policy(0)), 0)
    served.restart()
    sync.push([server], _weights(_policy(1)), 1)
    assert sync.sent == [(1, 0.0), (2, 1.0)]  # the first one would wait for a partner that is gone


def test_a_server_that_was_restarted_while_the_policy_waits_gets_the_same_weights_again(served, server):
    sync = Noting()
    sync.push([server], _weights(_policy(3)), 0)
    served.restart()
    sync.again(server)
    assert sync.sent == [(1, 3.0), (2, 3.0)]
    assert sync.held(server) == "current"


@pytest.mark.parametrize("options", [{"trains_meanwhile": True}, {"in_flight": True}])
def test_a_server_that_was_restarted_while_the_policy_is_trained_stops_the_run(served, server, options):
    model, sync = _policy(3), Noting(**options)
    sync.push([server], _weights(model), 0)
    with torch.no_grad():
        model.weight.add_(1.0)  # training goes on
    served.restart()
    with pytest.raises(EngineError, match="which was restarted; given a policy that is trained while servers sample"):
        sync.again(server)
    assert sync.sent == [(1, 3.0)]


@pytest.mark.parametrize(
    ("met", "kind", "words"),
    [
        (
            LostRankError(needed="all 2 ranks", given="no rank 1", remedy="Look at it."),
            LostRankError,
            "given no rank 1",
        ),
        (RuntimeError("NCCL"), EngineError, "weights sent to .* over NCCL; given RuntimeError: NCCL"),
    ],
)
def test_a_rank_that_leaves_while_weights_are_made_whole_is_not_called_a_fault_of_the_server(met, kind, words, server):
    def tensors():
        raise met

    with pytest.raises(kind, match=words):
        Noting().push([server], Weights(_policy(0), tensors), 0)
