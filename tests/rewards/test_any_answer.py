"""The rules on texts take whatever a policy may write: a model that has learnt nothing boxes `=`."""

import random

from posttrain.rewards import claims, texts
from posttrain.rewards.extract import find_answer
from posttrain.rewards.policy import AnswerPolicy

GOLDS = [
    "16",
    r"\frac{1}{2}",
    "(1,2)",
    r"\{1,2\}",
    "x=3",
    "C",
    "[0,1)",
    r"50\%",
    "1:2:3",
    r"\text{red}",
    "2+3i",
    "12_{5}",
    "f'(x)",
]
PIECES = [
    *"=()[]{} $%,./^_:-<>|!~&@#'\"\n\t°½±√²千", "\u2028", "1", "42", "x", "i", "A", "(B)", "or", "and", "not", "is", "am", "cm",
    r"\to", r"\frac", r"\boxed{", r"\text{", r"\pm", r"\sqrt", r"\{", r"\}", r"\cup", r"\infty", r"\le", r"\pi", r"\\", r"\mod",
    r"\begin{pmatrix}", r"\end{pmatrix}", r"\ldots", r"\,", "1,000", "10^{3}",
]  # fmt: skip


def test_a_lone_sign_of_equality():
    assert claims.chain("=") == []
    assert texts.by_rule("16", "=", AnswerPolicy()) in (None, False)
    assert texts.by_rule("f'(x)", "=", AnswerPolicy()) is False


def test_random_pieces():
    draw, policy = random.Random(0), AnswerPolicy()
    for _ in range(20_000):
        answer, gold = "".join(draw.choices(PIECES, k=draw.randrange(8))), draw.choice(GOLDS)
        assert texts.by_rule(gold, answer, policy) in (True, False, None)
        assert texts.by_rule(answer, gold, policy) in (True, False, None)
        for text in (answer, rf"so \boxed{{{answer}}}"):
            found = find_answer(text)
            assert found is None or isinstance(found.text, str)
