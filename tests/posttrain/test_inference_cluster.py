"""The queue that engines take prompts from: who took what, and messages that come late."""

from posttrain.inference import Prompt
from posttrain.inference.cluster import PromptQueue


def prompts(*names: str) -> list[Prompt]:
    return [Prompt(id=name, messages=()) for name in names]


def taken(queue: PromptQueue, engine: int, call: int) -> str | None:
    prompt = queue.take(engine, call)
    return None if prompt is None else prompt.id


def test_in_order_and_what_was_lost_goes_first():
    queue = PromptQueue()
    queue.put(prompts("a", "b", "c", "d"), 1)
    assert [taken(queue, 0, 1), taken(queue, 1, 1), taken(queue, 0, 1)] == ["a", "b", "c"]
    assert queue.give_back(0) == ["a", "c"]
    queue.put(prompts("a", "c"), 1)
    assert [taken(queue, 1, 1) for _ in range(4)] == ["a", "c", "d", None]


def test_a_dead_engine_gets_nothing_more():
    """Its last message may arrive after it was declared dead: a prompt that it took then would be waited for in vain."""
    queue = PromptQueue()
    queue.put(prompts("a"), 1)
    assert queue.give_back(0) == []
    assert taken(queue, 0, 1) is None
    assert queue.waiting() == 1


def test_a_call_that_has_ended_gets_nothing_of_the_next():
    """The engine that gave the last sample still asks whether there is more: by then the next suite's prompts may be here."""
    queue = PromptQueue()
    queue.put(prompts("a"), 1)
    assert taken(queue, 0, 1) == "a"
    queue.put(prompts("b"), 2)
    assert taken(queue, 0, 1) is None
    assert taken(queue, 0, 2) == "b"
    assert queue.give_back(0) == ["b"], "what it took in the call before is no debt"
