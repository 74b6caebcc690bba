from logitless.rewards.text.gate import MinimumLength, Relevance


def test_a_text_passes_from_the_minimum_on():
    assert MinimumLength(minimum=3)(["p"] * 3, ["a b", "a b c", "a b c d"]) == [0, 1, 1]
    assert MinimumLength(minimum=3, unit="tokens")(["p"] * 2, ["a"] * 2, [[1] * 2, [1] * 3]) == [0, 1]


def test_a_text_is_relevant_that_takes_up_enough_long_words_of_the_prompt():
    prompt = "Describe the rivers of France and Spain."  # long words: describe, rivers, france, spain
    texts = ["Nothing.", "FRANCE has some.", "Rivers of France", "riversoffrance"]
    assert Relevance(share=0.25)([prompt] * 4, texts) == [0, 1, 1, 0]
    assert Relevance(share=0.5)([prompt] * 4, texts) == [0, 0, 1, 0]


def test_a_prompt_without_long_words_asks_for_nothing():
    assert Relevance(share=1.0)(["2+2="], [""]) == [1]


def test_both_are_gates():
    assert MinimumLength().gate
    assert Relevance().gate
