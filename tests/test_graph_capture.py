"""Captures of CUDA graphs, and when a GPU may be waited for."""

import threading

import pytest
import torch

from logitless.graph_capture import between_captures, captured, refuse_unwritten


class Graph:
    """What is asked of a graph, in order."""

    def __init__(self):
        self.asked = list[object]()

    def capture_begin(self, memory: object, *, capture_error_mode: str) -> None:
        self.asked.append((memory, capture_error_mode))

    def capture_end(self) -> None:
        self.asked.append("end")


@pytest.fixture(autouse=True)
def nobody_elses_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def answer() -> bool:
    with between_captures() as may_wait:
        return may_wait


def of_another_thread() -> bool:
    found = list[bool]()
    thread = threading.Thread(target=lambda: found.append(answer()))
    thread.start()
    thread.join()
    return found[0]


def test_a_capture_shares_memory_and_lets_other_threads_launch():
    graph = Graph()
    with captured(graph, "of another"):
        assert graph.asked == [("of another", "thread_local")]
    assert graph.asked[1:] == ["end"]


def test_no_thread_may_wait_amid_a_capture():
    assert (answer(), of_another_thread()) == (True, True)
    with captured(Graph()):
        assert (answer(), of_another_thread()) == (False, False)
    assert (answer(), of_another_thread()) == (True, True)


def test_a_thread_that_captures_for_somebody_else_may_not_wait(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not answer()


def test_a_capture_that_fails_is_over():
    graph = Graph()
    with pytest.raises(ValueError, match="in it"), captured(graph):
        raise ValueError("in it")
    assert graph.asked[-1] == "end"
    assert answer()


def test_where_cuda_does_not_answer_captures_go_on(monkeypatch):
    def refuse() -> bool:
        raise RuntimeError("forked")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", refuse)
    with pytest.raises(RuntimeError, match="forked"):
        answer()
    with captured(graph := Graph()):
        assert len(graph.asked) == 1


def test_a_capture_begins_when_nobody_waits_any_more():
    graph, begun = Graph(), threading.Event()

    def capture() -> None:
        begun.set()
        with captured(graph):
            pass

    thread = threading.Thread(target=capture)
    with between_captures() as may_wait:
        assert may_wait
        thread.start()
        begun.wait()
        assert graph.asked == []
    thread.join()
    assert len(graph.asked) == 2


def test_what_fails_amid_a_capture_is_raised_and_not_that_the_capture_was_invalid():
    class Invalid(Graph):
        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(ValueError, match="no such kernel"), captured(Invalid()):
        raise ValueError("no such kernel")
    assert answer()


def test_what_would_be_kept_without_being_written_is_refused_amid_a_capture(monkeypatch):
    refuse_unwritten("a table", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    refuse_unwritten("a table", torch.device("cpu"))
    with pytest.raises(RuntimeError, match="a table must be made before"):
        refuse_unwritten("a table", torch.device("cuda"))
