"""Samples that the server refuses: one problem's own fault, or the recipe's, which only the other samples tell."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from posttrain.inference import BackendError, Text

logger = logging.getLogger(__name__)

# Problems that a server may refuse before it has answered anything: by then it is the request that it dislikes, not the problems.
MOST = 16


def settled(texts: Iterable[Text], *, answered: bool) -> Iterator[Text]:
    """The texts, refused ones held back until the server has answered something: only then are they these problems' own fault.

    Args:
        answered: whether it has answered before, in an earlier part of this run.

    Raises:
        BackendError: it has refused everything so far: `MOST` problems, or all that there are. Nothing of it is handed out, so
            that these problems are asked again once the recipe is mended.
    """
    held: list[Text] = []
    for text in texts:
        refused = text.finish_reason == "refused"
        if refused:
            logger.warning("the server refuses sample %d of %s (%s)", text.sample, text.prompt_id, text.text)
        answered = answered or not refused
        held.append(text)
        if answered:
            yield from held
            held.clear()
        elif len({one.prompt_id for one in held}) >= MOST:
            break
    if held:
        problems = len({text.prompt_id for text in held})
        raise BackendError(
            f"the server refuses every request, {len(held)} samples of {problems} problems so far, at last one of "
            f"{held[-1].prompt_id} ({held[-1].text}); is max_tokens within its context, and does it "
            "know each field of distill.teacher.extra_body?"
        )
