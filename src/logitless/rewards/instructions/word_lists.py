"""Fixed lists of words that checks compare with."""


def listed(words: str) -> tuple[str, ...]:
    """The words of a text.

    Example:
        >>> listed("a b")
        ('a', 'b')
    """
    return tuple(words.split())


LANGUAGES = listed("en es pt ar hi fr ru de ja it bn uk th ur ta te bg ko pl he fa vi ne sw kn mr gu pa ml fi ")
"""ISO 639-1 codes that IFEval asks for."""

ABBREVIATIONS = listed(
    "mr mrs ms dr prof sr jr st inc ltd co corp bros gen col maj lt sgt capt adm gov sen rep rev vs u.s u.k u.s.a "
    "d.c a.m p.m i.e e.g ph.d jan feb aug sept oct nov dec "
)
"""Words whose full stop ends no sentence, in lower case and without that full stop."""

STOP_WORDS = listed(
    "i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers "
    "herself it its itself they them their theirs themselves what which who whom this that these those am is are "
    "was were be been being have has had having do does did doing a an the and but if or because as until while "
    "of at by for with about against between into through during before after above below to from up down in out "
    "on off over under again further then once here there when where why how all any both each few more most "
    "other some such no nor not only own same so than too very s t can will just don should now d ll m o re ve y "
    "ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn "
)
"""The English stop words of IFBench's ratio:stop_words."""

PRONOUNS = listed(
    "i me we us you he him she her it they them my mine our ours your yours his hers its their theirs myself "
    "ourselves yourself yourselves himself herself itself themselves this that these those who whom whose which "
    "what whoever whomever whatever whichever anybody anyone anything everybody everyone everything nobody "
    "nothing somebody someone something each either neither both all some any none "
)
"""The words that IFBench's count:pronouns counts."""

CONJUNCTIONS = listed("and but for nor or so yet ")

PERSON_NAMES = listed(
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin "
    "Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan "
    "Victoria Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph "
    "Claire Ryan Stella Jonathan "
)
"""The names that the prompts of IFBench's count:person_names list."""

CAPITALS = listed(
    "Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam "
    "Warsaw London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana "
    "Zagreb "
)
"""European capitals north of 45 degrees, from north to south, as IFBench orders them."""
