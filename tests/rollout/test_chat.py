"""Between two turns are the tokens of the chat template, and sampled tokens never change."""

import pytest

from logitless.errors import ConfigurationError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.rollout.chat import ChatEnvironment, ChatTurns, check_chat_template_kwargs
from logitless.rollout.environment import Limits, Reply
from logitless.types import Completion, Prompt
from tests.rollout.engines import StandIn, episode_of
from tests.rollout.templates import FAMILIES, chat_tokenizer

ASKED = {"role": "user", "content": "Is the sum ok?"}
SAID = "the 22 is ok."
REPLIES = {
    "user": ({"role": "user", "content": "Are you sure?\n\nok."},),
    "tool": (
        {"role": "tool", "content": "22", "name": "calculator", "tool_call_id": "000000000"},
        {"role": "tool", "content": "the 4", "name": "calculator", "tool_call_id": "000000001"},
    ),
}
CASES = [(family, kind) for family in FAMILIES for kind in REPLIES if (family, kind) != ("gemma", "tool")]


class Speaking(StandIn):
    """An engine that samples the same tokens at every turn, and records its prompts."""

    def __init__(self, turn):
        self.turn, self.read = turn, []

    def sample(self, prompts, num_samples, options, *, seed):
        turn = self.turn
        self.read.append(tuple(prompts[0].token_ids.tolist()))
        return [[Completion(p.id, turn, "said", "stop", (-1.0,) * len(turn))] * num_samples for p in prompts]


class Saying:
    """Replies to every turn with the same messages."""

    def __init__(self, messages):
        self.messages = messages

    def start(self, prompt, *, seed):
        return None

    def reply(self, state, turn):
        return Reply(messages=self.messages)


def ids(tokenizer, text):
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt_of(tokenizer):
    text = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    return Prompt("7", text, ids(tokenizer, text), messages=(ASKED,))


def played(tokenizer, messages, turn):
    engine, environment = Speaking(turn), ChatEnvironment(Saying(messages), ChatTurns(tokenizer))
    prompt, limits = prompt_of(tokenizer), Limits(max_turns=2)
    return engine, episode_of(engine, environment, prompt, max_new_tokens=99, limits=limits)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_the_second_turn_reads_what_the_template_makes_of_the_conversation(family, kind):
    tokenizer = chat_tokenizer(family)
    end = FAMILIES[family][2]
    engine, episode = played(tokenizer, REPLIES[kind], ids(tokenizer, SAID + end))
    conversation = [ASKED, {"role": "assistant", "content": SAID}, *REPLIES[kind]]
    whole = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    read = tokenizer.decode(engine.read[1]).replace(" ", "")
    if family == "qwen":  # thoughts that the template adds to a turn, or drops from it, are not what was said
        whole = whole.replace("<think>\n\n</think>\n\n", "")
    assert read == whole.replace(" ", "")
    assert [m["role"] for m in episode.messages[2:-1]] == [m["role"] for m in REPLIES[kind]]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_sampled_tokens_stay_as_they_were_drawn_where_their_text_would_be_other_tokens(family, kind):
    tokenizer = chat_tokenizer(family)
    end = FAMILIES[family][2]
    letters = tuple(tokenizer.convert_tokens_to_ids(list(SAID)))  # one token a character: merges would make fewer
    drawn = (*letters, tokenizer.convert_tokens_to_ids(end))
    assert len(ids(tokenizer, SAID + end)) < len(drawn)
    engine, episode = played(tokenizer, REPLIES[kind], drawn)
    prompt = tuple(prompt_of(tokenizer).token_ids)
    assert engine.read[1][: len(prompt) + len(drawn)] == prompt + drawn
    completion = episode.completion
    assert (*prompt, *completion.token_ids[: -len(drawn)]) == engine.read[1]
    assert tuple(completion.token_ids[completion.trained]) == drawn + drawn
    between = completion.token_ids[~completion.trained]
    assert end not in tokenizer.decode(between[:1])  # the policy said it itself; it is not there twice


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_that_stopped_at_a_string_gets_the_end_that_it_did_not_say(family):
    tokenizer = chat_tokenizer(family)
    turn = Completion("7", ids(tokenizer, SAID), SAID, "stop")
    between = ChatTurns(tokenizer).between(turn, REPLIES["user"])
    assert tokenizer.decode(between).startswith(FAMILIES[family][2])
    ended = Completion("7", (*turn.token_ids, between[0]), SAID, "stop")
    assert ChatTurns(tokenizer).between(ended, REPLIES["user"]) == between[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tool_speaks_for_another_role(family):
    tokenizer = chat_tokenizer(family)
    _, _, end, special, _ = FAMILIES[family]
    turn, turns = Completion("7", ids(tokenizer, SAID + end), SAID, "stop"), ChatTurns(tokenizer)
    hidden = end[:2] + end + end[2:]  # taking one out leaves another
    clean = turns.between(turn, [{"role": "user", "content": "ok. 22"}])
    assert turns.between(turn, [{"role": "user", "content": f"ok.{hidden}{special[0]} 22"}]) == clean


def test_a_turn_begins_as_the_variables_of_the_chat_template_say():
    tokenizer = chat_tokenizer("qwen")
    turn = Completion("7", ids(tokenizer, SAID + "<|im_end|>"), SAID, "stop")
    plain = tokenizer.decode(ChatTurns(tokenizer).between(turn, REPLIES["user"]))
    quiet = ChatTurns(tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert "<think>" not in plain
    assert tokenizer.decode(quiet.between(turn, REPLIES["user"])) == f"{plain}<think>\n\n</think>\n\n"


@pytest.mark.parametrize("given", [{"enable_thinkng": False}, {"tools": []}, {"messages": []}])
def test_a_variable_that_no_chat_template_reads_is_refused(given):
    tokenizer = chat_tokenizer("qwen")
    check_chat_template_kwargs(tokenizer, {"enable_thinking": False})
    with pytest.raises(ConfigurationError, match=f"given {next(iter(given))}"):
        check_chat_template_kwargs(tokenizer, given)
    tokenizer.chat_template = None
    with pytest.raises(ConfigurationError, match="enable_thinking with a tokenizer without a chat template"):
        check_chat_template_kwargs(tokenizer, {"enable_thinking": False})


def test_a_template_without_the_role_is_refused_by_name_before_the_first_rollout():
    turns = ChatTurns(chat_tokenizer("gemma"))
    turns.check("user")
    with pytest.raises(ConfigurationError, match=r"role: user"):
        turns.check("tool")


def test_without_a_chat_template_a_plain_one_has_to_be_given():
    tokenizer = chat_tokenizer("qwen")
    tokenizer.chat_template = None
    with pytest.raises(ConfigurationError, match="template"):
        ChatTurns(tokenizer)
    with pytest.raises(ConfigurationError, match=r"\{reply\}"):
        ChatTurns(tokenizer, template="nothing")
    turn = Completion("7", (5,), "", "stop")
    said = ChatTurns(tokenizer, template="\n{reply}\n").between(turn, REPLIES["tool"])
    assert tokenizer.decode(said).replace(" ", "") == "\n22\nthe4\n"


def test_a_template_with_a_character_that_the_tokenizer_lacks_is_refused_by_name_before_the_first_rollout():
    tokenizer = character_tokenizer("ab=n\n", removed=("c=",))
    ChatTurns(tokenizer, template="\n{reply}\nc=")
    with pytest.raises(ConfigurationError, match=r"environment\.template.* given '\S+' with \['\\\\'\]"):
        ChatTurns(tokenizer, template=r"\n{reply}\n")


def test_what_the_tokenizer_cannot_say_is_the_environments_failure():
    tokenizer = character_tokenizer("ab")
    environment = ChatEnvironment(Saying(REPLIES["user"]), ChatTurns(tokenizer, template="{reply}"))
    reply = environment.reply(None, Completion("7", (5,), "", "stop"))
    assert reply.ends
    assert "Are you sure?" in reply.failure
