"""Whether answers equal golds, in this process: no hanging input here."""

import pytest

pytest.importorskip("math_verify")

from mpmath.libmp import NoConvergence

from posttrain.rewards import compare
from posttrain.rewards.compare import matches, read_gold
from posttrain.rewards.normalise import clean


def same(gold, answer, kind="boxed"):
    read = read_gold(gold)
    assert read is not None
    return matches(read, answer, kind)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{3}{4}", "0.75"),
        (r"\frac{3}{4}", "6/8"),
        ("1500", "1,500"),
        ("1500", r"\$1{,}500"),
        ("12", r"12\text{ apples}"),
        ("0.25", r"\frac14"),
        (r"0.\overline{27}", r"\frac{3}{11}"),
        (r"2\frac{3}{5}", r"\frac{13}{5}"),
        ("2 3/5", "2.6"),
        ("x=4", "4"),
        ("(1, 2)", r"\left(1, 2\right)"),
        (r"\{3, 1\}", r"\{1, 3\}"),
        ("[0, 4)", "[0,4)"),
        (r"(-\infty, 5)", "x<5"),
        ("2<x<7", "7>x>2"),
        ("3-4i", "-4i+3"),
        ("2-5i", "-i(5+2i)"),
        (r"\sqrt{12}", r"2\sqrt{3}"),
        (r"\sqrt{3/n}", r"\frac{\sqrt{3}}{\sqrt{n}}"),
        (r"1\pm\sqrt{2}", r"1-\sqrt2, 1+\sqrt2"),
        (r"\text{Friday}", "Friday"),
        ("D", r"\text{(D)}"),
        ("D", r"\textbf{(D)}\ 19"),
        ("3e8", r"3\times 10^8"),
        ("x^2+1", "x²+1"),
        (r"\frac{h}{\lambda T}", r"\frac{h}{\lambda T} "),
        ("120", "120°"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ],
)
def test_equal(gold, answer):
    assert same(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("7", "8"),
        ("7", ""),
        ("7", "7, 8"),
        ("2", "1, 2"),
        (r"\frac{3}{4}", r"\frac{4}{3}"),
        ("0.00000004", "0.00000003"),
        (r"3\times10^{-9}", r"3\times10^{-8}"),
        ("123_5", "123_7"),
        ("7:15 a.m.", "7:15 p.m."),
        (r"2, 4, \ldots, 2n", r"2, 5, \ldots, 2n"),
        ("D", "B"),
        ("[0, 4)", "[0, 4]"),
        ("x>3", "x<3"),
        ("|x|", "x"),
        (r"\sqrt{x^2}", "x"),
        ("x+1", "y+1"),
        (r"\text{Friday}", "Monday"),
        ("4", '__import__("os").getpid() or 4'),
        ("4", 'eval("2+2")'),
    ],
)
def test_different(gold, answer):
    assert not same(gold, answer)


def test_answers_within_words():
    assert same("100", "100 dollars", "marked")
    assert same("34", "the largest n is 34", "marked")
    assert same("9", "which leaves her with $9$ eggs.", "tail")
    assert not same("9", "of the 9 eggs 4 are left", "tail")
    assert same("B", "it is not A, so B.", "tail")


@pytest.mark.parametrize("gold", ["", "  ", "$$", r"\frac{1}{", r"\left("])
def test_unreadable_gold(gold):
    assert read_gold(gold) is None


def test_clean_is_stable():
    for text in (r"3\frac{1}{7}", r"\$5", r"0.\overline{3}", "x²", "3>x>1", "4.5e33", r"\underline{7}"):
        assert clean(clean(text)) == clean(text)


def test_only_what_sympy_cannot_compute_is_unequal(monkeypatch):
    def failing(error):
        def raise_it(*_):
            raise error

        monkeypatch.setattr(compare, "_equal_values", raise_it)
        return same("x+1", "1+x\\cdot 1")

    assert not failing(NotImplementedError("cannot solve"))
    assert not failing(NoConvergence("zeta"))
    for error in (MemoryError(), RecursionError(), OSError("a bug of ours")):
        with pytest.raises(type(error)):
            failing(error)
