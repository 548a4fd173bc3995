"""Filters, balance, journal and problems of the teacher's traces, against cases worked out by hand."""

import json

import pytest

from posttrain.config import BalanceConfig, TraceFilters
from posttrain.distill.balance import BEYOND, EASY, FULL, choose, fill
from posttrain.distill.filters import reason_against, repeated_share, script_shares, well_formed_thinking
from posttrain.distill.grade import close_thinking
from posttrain.distill.journal import Journal, Trace
from posttrain.distill.problems import screen
from posttrain.errors import RunFolderError
from posttrain.rewards.pool import VerifierPool


def trace(problem="a", sample=0, text="So \\boxed{2}.", **fields) -> Trace:
    defaults = {"finish_reason": "stop", "seed": 7, "reward": 1.0, "parts": {"maths": 1.0}}
    return Trace(problem=problem, sample=sample, text=text, **{**defaults, **fields})


@pytest.mark.parametrize(
    ("fields", "filters", "reason"),
    [
        ({}, {}, None),
        ({"finish_reason": "length", "reward": None}, {}, "truncated"),
        ({"finish_reason": "abort", "reward": None}, {}, "aborted"),
        ({"text": "  \n", "reward": None}, {}, "empty"),
        ({"text": "<think>so 2</think>\n", "reward": None}, {}, "nothing after the thinking block"),
        ({"reward": None}, {}, "not gradable"),
        ({"reward": 0.0, "parts": {"maths": 0.0}}, {}, "wrong answer"),
        ({"reward": 0.9, "parts": {"maths": 1.0, "overlong": -0.1}}, {}, "reward below 1"),
        ({"reward": 0.9, "parts": {"maths": 1.0, "overlong": -0.1}}, {"min_reward": 0.5}, None),
        ({"special": True}, {}, "a special token in the text"),
        ({"student_tokens": 3}, {"min_tokens": 4}, "below 4 tokens"),
        ({"student_tokens": 4}, {"min_tokens": 4, "max_tokens": 4}, None),
        ({"student_tokens": 5}, {"max_tokens": 4}, "above 4 tokens"),
        ({}, {"thinking": "required"}, "no well-formed thinking block"),
        ({"text": "<think>1 and 1</think> \\boxed{2}"}, {"thinking": "required"}, None),
        ({"text": "<think>1 and 1</think> \\boxed{2}"}, {"thinking": "forbidden"}, "a thinking block"),
        ({"text": "答案是二,所以选择这个数字 \\boxed{2}"}, {"language": "latin"}, "not latin enough"),
        ({"text": "答案是二,所以 $x$ 等于 \\boxed{2}"}, {"language": "han"}, None),
        ({"text": "again and again " * 30 + "\\boxed{2}"}, {}, "repeats itself"),
        ({"text": "again and again " * 30 + "\\boxed{2}"}, {"max_repetition": 1.0}, None),
        ({"repetition": 0.3}, {}, "repeats itself"),
        ({"scripts": {"latin": 0.9, "han": 0.1, "cyrillic": 0.0}}, {"language": "latin"}, "not latin enough"),
    ],
)
def test_one_reason_a_trace(fields, filters, reason):
    assert reason_against(trace(**fields), TraceFilters(**filters)) == reason


def test_script_shares_count_letters_without_notation():
    # Latin: "The", "is" = 5 letters; Cyrillic: 5 letters; x, \alpha and the Greek letter do not count.
    assert script_shares("The x is ответ \\alpha β") == {"latin": 0.5, "han": 0.0, "cyrillic": 0.5}
    assert script_shares("12 + 3 = 15") == {"latin": 1.0, "han": 1.0, "cyrillic": 1.0}


def test_repeated_share_is_of_twenty_words():
    words = [f"w{i}" for i in range(20)]
    # 40 words: 21 sequences of 20, of which the last equals the first.
    assert repeated_share(" ".join(words * 2)) == pytest.approx(1 / 21)
    assert repeated_share(" ".join(words)) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b", True),
        ("\n<think>a</think>b", True),
        ("a</think>b", False),
        ("<think>a</think>", False),
        ("<think></think>b", False),
        ("x<think>a</think>b", False),
        ("<think>a</think>b</think>c", False),
        ("</think>b<think>a", False),
    ],
)
def test_thinking_block(text, expected):
    assert well_formed_thinking(text) is expected


def test_opening_tag_that_the_template_wrote_is_put_back():
    assert close_thinking("\nso 2</think>\n2") == "<think>\nso 2</think>\n2"
    assert close_thinking("<think>so</think>2") == "<think>so</think>2"
    assert close_thinking("plain") == "plain"
    assert close_thinking("half \ud800 pair") == "half ? pair"


@pytest.mark.parametrize(
    ("available", "rows", "shares", "expected"),
    [
        ([10, 10, 10, 10], 8, [1, 1, 1, 1], [2, 2, 2, 2]),
        ([1, 10, 10, 10], 16, [1, 1, 1, 1], [1, 5, 5, 5]),
        ([0, 2, 3, 50], 20, [1, 1, 1, 1], [0, 2, 3, 15]),
        ([10, 10], 9, [2, 1], [6, 3]),
        ([10, 10], 5, [1, 1], [3, 2]),
        ([2, 2], 9, [1, 1], [2, 2]),
        ([3, 10], 5, [0, 1], [0, 5]),
        ([3, 2], 5, [0, 1], [3, 2]),
        ([0, 0], 5, [1, 1], [0, 0]),
    ],
)
def test_rows_are_shared_out_among_difficulties(available, rows, shares, expected):
    assert fill(available, rows, shares) == expected


def test_choice_is_balanced_and_accounted_for():
    accepted = {("easy", 0): 9, ("easy", 1): 5, ("hard", 3): 7, ("mid", 0): 1, ("mid", 2): 2, ("always", 0): 1}
    rates = {"easy": 0.9, "hard": 0.1, "mid": 0.5, "always": 1.0}
    config = BalanceConfig(rows=3, per_problem=1, prefer="shortest", max_pass_rate=0.95)
    chosen = choose(accepted, rates, config, seed=1)
    assert chosen.keys == {("easy", 1), ("hard", 3), ("mid", 0)}
    assert chosen.dropped == {EASY: 1, BEYOND: 2}
    assert [(row["up_to"], row["rows"]) for row in chosen.bins] == [(0.25, 1), (0.5, 1), (0.75, 0), (1.0, 1)]
    fewer = choose(accepted, rates, BalanceConfig(rows=2, per_problem=2), seed=1)
    assert len(fewer.keys) == 2
    assert fewer.dropped == {FULL: 4}
    assert choose(dict(reversed(accepted.items())), rates, BalanceConfig(rows=2, per_problem=2), seed=1).keys == fewer.keys


def test_a_second_trace_comes_after_every_first():
    accepted = {(f"p{i}", sample): 1 for i in range(5) for sample in range(4)}
    chosen = choose(accepted, dict.fromkeys([f"p{i}" for i in range(5)], 1.0), BalanceConfig(rows=7, per_problem=4), seed=0)
    counts = [sum(problem == f"p{i}" for problem, _ in chosen.keys) for i in range(5)]
    assert sorted(counts) == [1, 1, 1, 2, 2]


def test_journal_cuts_a_torn_line_and_keeps_the_rest(tmp_path):
    with Journal.open(tmp_path, {"teacher": "t"}) as journal:
        journal.append([trace(sample=0), trace(sample=1, text="ünïcode \u2028 line")])
    whole = (tmp_path / "traces.jsonl").read_bytes()
    (tmp_path / "traces.jsonl").write_bytes(whole + b'{"problem": "a", "sam')
    assert [t.sample for t in Journal(tmp_path).read()] == [0, 1]
    with Journal.open(tmp_path, {"teacher": "t"}) as journal:
        assert (tmp_path / "traces.jsonl").read_bytes() == whole
        journal.append([trace(sample=2)])
        assert [t.sample for t in journal.read()] == [0, 1, 2]
        assert list(journal.read())[1].text == "ünïcode \u2028 line"


def test_a_first_line_that_is_torn_leaves_an_empty_journal(tmp_path):
    (tmp_path / "traces.jsonl").write_bytes(b'{"problem":' + b"x" * 200_000)
    with Journal.open(tmp_path, {}) as journal:
        assert list(journal.read()) == []
    assert (tmp_path / "traces.jsonl").stat().st_size == 0


@pytest.mark.parametrize("text", ["{", "[1]", "null"])
def test_damaged_settings_of_a_journal_are_named(tmp_path, text):
    with Journal.open(tmp_path, {"teacher": "t"}) as journal:
        journal.append([trace()])
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"settings\.json is damaged .*which teacher wrote traces\.jsonl: restore it"):
        Journal(tmp_path).settings()
    with pytest.raises(RunFolderError, match=r"settings\.json is damaged"):
        Journal.open(tmp_path, {"teacher": "t"})


def test_journal_refuses_other_settings_a_second_writer_and_damage(tmp_path):
    with Journal.open(tmp_path, {"teacher": "t", "seed": 1}) as journal:
        journal.append([trace()])
        with pytest.raises(RunFolderError, match="written by another process"):
            Journal.open(tmp_path, {"teacher": "t", "seed": 1}, patience_s=0)
    with pytest.raises(RunFolderError, match=r"(?s)teacher: 't' there, 'u' now"):
        Journal.open(tmp_path, {"teacher": "u", "seed": 1})
    with open(tmp_path / "traces.jsonl", "a") as file:
        file.write("{not json\n" + json.dumps({"problem": "b"}) + "\n")
    with pytest.raises(RunFolderError, match=r"traces.jsonl:2 is damaged"):
        list(Journal(tmp_path).read())


def test_problems_are_screened_before_the_teacher_is_asked():
    rows = [
        {"id": "1", "problem": "What is 1+1?", "answer": "2"},
        {"id": "2", "problem": "What  is 1+1?", "answer": "2"},
        {"id": "3", "problem": "What is 1-1?", "answer": "0"},
        {"id": "4", "problem": "What is 5+5?", "answer": "10"},
        {"id": "5", "problem": "What is it?", "answer": "\\frac{"},
        {"id": "6", "problem": "?!", "answer": "1"},
    ]
    with VerifierPool(workers=1) as pool:
        kept, dropped, listed = screen(rows, {"suite": ["what is 5 + 5 ?"]}, pool)
    assert [row["id"] for row in kept] == ["1", "3"]
    assert listed == ["5"]
    assert dropped == {
        "the same problem again": 1,
        "repeats suite": 1,
        "a gold answer that cannot be read": 1,
        "a problem without words or numbers": 1,
    }
