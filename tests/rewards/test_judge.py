"""A judge behind an endpoint, on a real server: its number is the score, and its failures are never a wrong answer."""

import time

import pytest

from logitless.errors import ConfigurationError
from logitless.rewards.judge import MAX_REPLY_BYTES, Judge
from tests.rewards.servers import judging, said


def judge(url, **options):
    return Judge(url=url, model="j", **{"backoff_seconds": 0.01, "timeout_seconds": 300.0, **options})


def verdicts(reward, *texts, **columns):
    return reward.verdicts(["2+2="] * len(texts), list(texts), columns)


@pytest.fixture(autouse=True)
def nothing_was_asked_before(monkeypatch):
    """A server may get the port of an earlier test's server, whose replies are cached by address."""
    monkeypatch.setattr("logitless.rewards.judge._caches", {})


def test_the_last_number_of_the_reply_is_the_score():
    with judging(lambda n, body: said('It says "Score: 10", but no.\nScore: 2.5')) as (url, requests):
        [verdict] = verdicts(judge(url), "Score: 10")
    assert (verdict.score, verdict.status) == (0.25, "graded")
    assert requests[0]["path"] == "/v1/chat/completions"
    assert (requests[0]["model"], requests[0]["temperature"]) == ("j", 0.0)


def test_the_template_takes_prompt_completion_and_columns_and_nothing_of_what_they_hold():
    with judging(lambda n, body: said("Score: 0")) as (url, requests):
        reward = judge(url, template="{prompt}|{completion}|{answer}|{", system="Be strict.")
        reward.check({"answer": ["4"]})
        verdicts(reward, "{answer} {prompt}", answer=["4"])
    system, user = requests[0]["messages"]
    assert system == {"role": "system", "content": "Be strict."}
    assert user["content"] == "2+2=|{answer} {prompt}|4|{"


def test_the_same_question_is_asked_once():
    with judging(lambda n, body: said("Score: 5")) as (url, requests):
        reward = judge(url)
        assert [v.score for v in verdicts(reward, "a", "b", "a")] == [0.5] * 3
        verdicts(reward, "b", "a")
    assert len(requests) == 2


def test_replies_are_kept_in_a_file_for_the_next_process(tmp_path):
    file = tmp_path / "judged.jsonl"
    with judging(lambda n, body: said("Score: 5")) as (url, _):
        first = judge(url, cache=str(file))
        verdicts(first, "a")
        assert len(file.read_text().splitlines()) == 1
    # Another judge of the same endpoint, which is gone.
    again = judge(url, cache=str(file), retries=0, label="again")
    assert [v.status for v in verdicts(again, "a", "b")] == ["graded", "error"]
    file.write_text("no JSON\n")
    with pytest.raises(ConfigurationError, match="cache"):
        judge(url, cache=str(file), label="broken").check({})


@pytest.mark.parametrize("kept_bytes", [1, 20, -1])
def test_a_last_line_of_the_cache_that_a_kill_cut_is_removed_and_asked_for_again(kept_bytes, tmp_path):
    file = tmp_path / "cache.jsonl"
    with judging(lambda n, body: said("Score: 5")) as (url, requests):
        verdicts(judge(url, cache=str(file)), "a", "b")
        first, second = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(first + second[:kept_bytes])
        again = judge(url, cache=str(file), label="again")
        again.check({})
        assert file.read_bytes() == first
        verdicts(again, "a", "b")
    assert len(requests) == 3
    assert file.read_bytes() == first + second


@pytest.mark.parametrize(
    "content", ['{"key": "a", "re\n', '{"key": "a", "re\n{"key": "b", "reply": "7"}\n', '{"a": 1}', "x"]
)
def test_a_cache_that_is_bad_elsewhere_is_refused_and_left_as_it_is(content, tmp_path):
    file = tmp_path / "cache.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match="cache"):
        judge("http://127.0.0.1:9/v1", cache=str(file)).check({})
    assert file.read_text() == content


@pytest.mark.parametrize(
    "failure",
    [(500, b"oops"), (505, b"no"), (409, b"busy"), (429, b"slow down"), (200, b"{"), (200, b"CUT"), (200, b"{}")],
)
def test_what_may_pass_is_tried_again(failure):
    with judging(lambda n, body: failure if n < 2 else said("Score: 10")) as (url, requests):
        [verdict] = verdicts(judge(url, retries=2), "4")
    assert verdict.score == 1.0
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("answer", "status", "count"),
    [
        ((500, b"oops"), "error", 3),
        ((200, b"not JSON"), "error", 3),
        ((401, b"no key"), "error", 1),
        ((302, b"http://127.0.0.1:9/"), "error", 1),
        (said("I would rather not."), "error", 1),
        (said("Score: 11"), "error", 1),
        (("wait", 60.0), "timeout", 1),
        ((500, b"oops CUT"), "error", 3),
        ((401, b"no key" + bytes(1 << 20)), "error", 1),
        ((None, b"HTP/1.0 what?\r\n\r\n"), "error", 3),
        (said("Score: 1" + "0" * MAX_REPLY_BYTES), "error", 1),
        (said("Score:" + " " * (MAX_REPLY_BYTES - 999)), "error", 1),
    ],
    ids=lambda given: str(given)[:30],
)
def test_a_judge_that_fails_has_a_status_and_no_score(answer, status, count):
    slow = {"timeout_seconds": 0.2, "retries": 0} if answer[0] == "wait" else {"retries": 2}
    with judging(lambda n, body: answer) as (url, requests):
        [verdict] = verdicts(judge(url, **slow), "4")
        while len(requests) < count:  # one that is given up before the server comes to it
            time.sleep(0.005)
    assert (verdict.score, verdict.status) == (None, status)
    assert verdict.message
    assert len(requests) == count


def test_a_judge_that_is_not_there_is_an_error():
    [verdict] = verdicts(judge("http://127.0.0.1:9/v1", retries=1), "4")
    assert (verdict.score, verdict.status) == (None, "error")
    assert "2 times" in verdict.message


def test_no_retry_begins_after_the_deadline():
    with judging(lambda n, body: (500, b"oops")) as (url, requests):
        [verdict] = verdicts(judge(url, retries=9, backoff_seconds=1000.0, deadline_seconds=500.0), "4")
    assert verdict.status == "error"
    assert len(requests) == 1
    assert verdict.message.startswith("the judge failed once, last: HTTP 500")


def test_beyond_the_budget_nothing_is_asked_and_what_is_known_is_free():
    with judging(lambda n, body: said("Score: 10")) as (url, requests):
        reward = judge(url, max_requests=2, concurrency=1)
        found = [v.status for v in verdicts(reward, "a", "b", "c", "d")]
        assert sorted(found) == ["graded", "graded", "missing", "missing"]
        assert [v.status for v in verdicts(reward, "a", "b")] == ["graded", "graded"]
    assert len(requests) == 2


def test_the_key_comes_from_the_environment_or_a_file_and_goes_to_the_endpoint(monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE", "secret")
    (tmp_path / "key").write_text("other\n")
    with judging(lambda n, body: said("Score: 1")) as (url, requests):
        verdicts(judge(url, api_key_variable="JUDGE"), "a")
        verdicts(judge(url, api_key_file=str(tmp_path / "key")), "a")
        verdicts(judge(url), "a")
    assert [request["key"] for request in requests] == ["Bearer secret", "Bearer other", None]
    monkeypatch.delenv("JUDGE")
    for missing in ({"api_key_variable": "JUDGE"}, {"api_key_file": str(tmp_path / "none")}):
        with pytest.raises(ConfigurationError, match="key"):
            judge(url, **missing).check({})


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "file:///etc/passwd"},
        {"template": "no field"},
        {"pattern": "no group"},
        {"pattern": "("},
        {"lowest": 1.0, "highest": 1.0},
        {"concurrency": 0},
        {"retries": -1},
        {"api_key_variable": "A", "api_key_file": "b"},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        Judge(**{"url": "http://127.0.0.1:9/v1", "model": "j", **wrong})


def test_a_column_that_is_not_there_is_refused_before_the_first_rollout():
    with pytest.raises(ConfigurationError, match="'answer'"):
        judge("http://127.0.0.1:9/v1", template="{completion}{answer}").check({"other": ["1"]})
