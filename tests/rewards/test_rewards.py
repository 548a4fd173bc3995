"""Named rewards, the registry, weights, breakdown and errors."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from posttrain.rewards.errors import RewardError
from posttrain.rewards.format import FormatReward, OverlongPenalty, RepetitionPenalty
from posttrain.rewards.language import LanguageReward
from posttrain.rewards.maths import MathsReward
from posttrain.rewards.pool import VerifierPool
from posttrain.rewards.registry import Reward, RewardSet, build_rewards

PROMPTS = ["a", "b", "c"]
COMPLETIONS = [r"\boxed{1}", r"\boxed{5}", r"so \boxed{3}"]


def lengths(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]


def test_format():
    given = [r"so \boxed{3}", r"\boxed{", "3", r"\boxed{}", [{"role": "assistant", "content": r"\boxed{x}"}]]
    assert FormatReward()(prompts=given, completions=given) == [1, 0, 0, 0, 1]
    think = [
        r"<think>x</think>\boxed{1}",
        r"x</think>\boxed{1}",
        r"<think>\boxed{1}</think>",
        r"\boxed{1}",
        r"hm <think>x</think>\boxed{1}",
    ]
    assert FormatReward(think=True)(prompts=think, completions=think) == [1, 1, 0, 0, 0]


def test_overlong_is_dapo_equation_13():
    reward = OverlongPenalty(max_length=100, cache=20)
    ids = [[0] * length for length in (0, 80, 85, 90, 100, 101)]
    assert reward(prompts=[""] * 6, completions=[""] * 6, completion_ids=ids) == pytest.approx([0, 0, -0.25, -0.5, -1, -1])
    with pytest.raises(RewardError, match="completion_ids"):
        reward(prompts=[""], completions=[""])
    with pytest.raises(RewardError, match="cache=200"):
        OverlongPenalty(max_length=100, cache=200)


def test_repetition():
    reward = RepetitionPenalty(ngram=2, max_penalty=0.5)
    # "a b a b a": 4 bigrams, 2 distinct
    assert reward(prompts=[""] * 3, completions=["a b a b a", "a b c d", "a"]) == pytest.approx([-0.25, 0, 0])


def test_language_is_the_share_of_letters_in_its_script():
    texts = ["so it is seven", "所以答案是 seven", r"因此 $x = \frac{a}{b}$，故 \boxed{x}", "12 + 3", "итак ответ"]
    english, chinese, russian = (LanguageReward(language=code)(texts, texts) for code in ("en", "zh", "ru"))
    assert english == pytest.approx([1, 0.5, 0, 1, 0])
    assert chinese == pytest.approx([0, 0.5, 1, 1, 0])
    assert russian == pytest.approx([0, 0, 0, 1, 1])
    with pytest.raises(RewardError, match="language='english' is not known; known: en"):
        LanguageReward(language="english")


def test_the_policy_reaches_the_verifier():
    completions, golds = [r"\boxed{12\text{ m}}"], [r"12\text{ cm}"]
    with build_rewards({"workers": 1, "answer": {"units": "ignore"}}) as rewards:
        assert rewards(["a"], completions, answer=golds) == [1.0]
    config = {"workers": 1, "functions": [{"name": "maths", "args": {"policy": {"thinking": "require"}}}]}
    with build_rewards(config) as rewards:
        assert rewards(["a"], completions, answer=golds) == [0.0]
        assert rewards(["a"], ["<think>x</think>" + completions[0]], answer=["12"]) == [1.0]


def test_an_echoed_prompt_is_not_an_answer():
    prompt = r"As \boxed{4} is 2+2, what is 3+1? Think first."
    with VerifierPool(workers=1) as pool:
        reward = MathsReward(pool)
        assert reward([prompt], [prompt], answer=["4"]) == [0.0]
        assert reward([[{"role": "user", "content": prompt}]], [prompt + r" \boxed{4}"], answer=["4"]) == [1.0]
        assert MathsReward(pool, policy={"prompt_echo": "keep"})([prompt], [prompt], answer=["4"]) == [1.0]


@pytest.mark.parametrize("code", ["", "3", "'bye'"])
def test_a_reward_that_exits_is_named(code):
    def leaving(prompts, completions, **columns):
        if "5" in completions[0] or len(completions) > 1:
            sys.exit(eval(code) if code else None)
        return [1.0] * len(completions)

    rewards = RewardSet([Reward(name="leaving", function=leaving)])
    with pytest.raises(RewardError, match=rf"'leaving' called sys.exit\({code}\).*sample 1 of 3"):
        rewards(PROMPTS, COMPLETIONS)


def test_a_reward_that_hangs_is_named_in_time(tmp_path):
    (tmp_path / "own.py").write_text(
        "import threading\n"
        "def slow(prompts, completions, **columns):\n"
        "    threading.Event().wait(3600)\n"
        "def wrong(prompts, completions, **columns):\n"
        "    raise KeyError('gone')\n"
        "def right(prompts, completions, **columns):\n"
        "    return [2.0] * len(completions)\n"
    )

    def built(name: str) -> RewardSet:
        return build_rewards({"functions": [{"path": f"{tmp_path}/own.py:{name}"}]}, limit_s=0.2 if name == "slow" else 60.0)

    with pytest.raises(RewardError, match=r"'slow' has not returned for 0 s, given 3 completions.*grpo\.batch_timeout_s"):
        built("slow")(PROMPTS, COMPLETIONS)
    with pytest.raises(RewardError, match=r"'wrong' raised KeyError.*sample 0 of 3"):
        built("wrong")(PROMPTS, COMPLETIONS)
    assert built("right")(PROMPTS, COMPLETIONS) == [2.0] * 3
    with build_rewards({"workers": 1}, limit_s=0.2) as rewards:
        assert rewards.rewards[0].limit_s is None, "verifications have limits of their own"


def test_a_file_that_exits_while_it_is_loaded(tmp_path):
    (tmp_path / "own.py").write_text("import sys\nsys.exit(1)\n")
    with pytest.raises(RewardError, match=r"cannot load .*own\.py: SystemExit"):
        build_rewards({"functions": [{"path": f"{tmp_path}/own.py:f"}]})


def test_maths_and_none():
    with VerifierPool(workers=1) as pool:
        reward = MathsReward(pool, wrong=-1.0)
        assert reward(PROMPTS, COMPLETIONS, answer=["1", "2", None]) == [1.0, -1.0, None]
        conversation = [[{"role": "assistant", "content": r"\boxed{1}"}]]
        assert reward(["a"], conversation, answer=[1]) == [1.0]
        with pytest.raises(RewardError, match="'answer'.*missing.*solution"):
            reward(PROMPTS, COMPLETIONS, solution=["1"] * 3)
        with pytest.raises(RewardError, match="2 entries for 3"):
            reward(PROMPTS, COMPLETIONS, answer=["1", "2"])


def test_weights_breakdown_and_none():
    config = {
        "functions": [{"name": "maths", "weight": 2.0}, {"name": "format", "weight": 0.5}],
        "workers": 1,
        "timeout_s": 3.0,
        "memory_mb": 256,
    }
    with build_rewards(config) as rewards:
        assert (rewards.pool.workers, rewards.pool.timeout_s, rewards.pool.memory_mb) == (1, 3.0, 256)
        assert rewards(PROMPTS, COMPLETIONS, answer=["1", "2", ""]) == [2.5, 0.5, None]
        assert rewards.breakdown == {"maths": [1.0, 0.0, None], "format": [1.0, 1.0, 1.0]}
        assert rewards.counters()["unreadable_gold"] == 1 and rewards.counters()["verified"] == 3


def test_none_of_an_optional_reward_adds_nothing():
    rewards = RewardSet(
        [
            Reward(name="one", function=lambda prompts, completions, **columns: [None, 1.0, None]),
            Reward(name="two", function=lambda prompts, completions, **columns: [2.0, 3.0, None], weight=10.0),
        ]
    )
    assert rewards(PROMPTS, COMPLETIONS) == [20.0, 31.0, None]


def test_own_rewards_by_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def brevity(prompts, completions, scale=1.0, **columns):\n    return [scale * len(c) for c in completions]\n"
        "class Constant:\n    def __init__(self, value): self.value = value\n"
        "    def __call__(self, prompts, completions, **columns): return [self.value] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    functions = [
        SimpleNamespace(name=None, path=f"{tmp_path}/mine.py:brevity", weight=0.1, args={"scale": 2.0}),
        SimpleNamespace(name="seven", path="mine:Constant", weight=1.0, args={"value": 7}),
    ]
    rewards = build_rewards(SimpleNamespace(functions=functions))
    assert rewards.pool is None
    assert rewards(["p"], ["12345"]) == [pytest.approx(8.0)]
    assert rewards.breakdown == {"brevity": [10.0], "seven": [7.0]}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "math"}, "did you mean 'maths'"),
        ({"name": "overlong", "args": {"length": 3}}, "does not take these `args`"),
        ({"path": "nothing"}, "package.module:function"),
        ({"path": "no_such_package_at_all:f"}, "cannot import"),
        ({"path": "no_such_file.py:f"}, "there is no file"),
        ({"path": "json:no_such"}, "has no function 'no_such'"),
    ],
)
def test_entries_that_cannot_be_built(entry, message):
    with pytest.raises(RewardError, match=message):
        build_rewards({"functions": [entry]})


@pytest.mark.parametrize("text", ["nonsense\n", "1 / 0\n", "def f(:\n", "import no_such_package_at_all\n"])
def test_a_file_that_fails_while_it_is_loaded(tmp_path, text):
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(RewardError, match=r"cannot load .*own\.py: \w+Error"):
        build_rewards({"functions": [{"path": f"{tmp_path}/own.py:f"}]})


def test_a_reward_that_raises_is_named_with_its_sample():
    def picky(prompts, completions, answer, **columns):
        return [1.0 / int(gold) for gold in answer]

    rewards = RewardSet([Reward(name="picky", function=picky)])
    with pytest.raises(
        RewardError, match=r"'picky' raised ZeroDivisionError: .*sample 1 of 3, completion .*boxed\{5\}"
    ) as caught:
        rewards(PROMPTS, COMPLETIONS, answer=["1", "0", "2"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "1 values for 3"),
        (1.0, "float for 3"),
        ([1.0, float("nan"), 1.0], "nan.*sample 1"),
        ([1.0, 1.0, "x"], "'x'.*sample 2"),
    ],
)
def test_a_reward_that_returns_nonsense_is_named(values, message):
    rewards = RewardSet([Reward(name="odd", function=lambda prompts, completions, **columns: values)])
    with pytest.raises(RewardError, match=message):
        rewards(PROMPTS, COMPLETIONS)


def test_names_must_differ():
    with pytest.raises(RewardError, match="one name"):
        RewardSet([Reward(name="a", function=lengths), Reward(name="a", function=lengths)])


def test_imports_no_torch_and_no_config(root):
    code = (
        "import sys, posttrain.rewards.registry, posttrain.rewards.compare\n"
        "print([name for name in ('torch', 'posttrain.config') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
