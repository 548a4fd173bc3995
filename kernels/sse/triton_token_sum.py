"""Where the rows of a token add up.

A token has one shared row and R routed rows. With one route, the routed launch adds its output to the shared one's; with more,
every row has its own fp32 place and the rows of a token are summed in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.kernels.sse.triton_common import sum_terms


class TokenSum:
    """A sum over the rows of a token, [T, H, V] like `like`: launches leave rows where `target` says, `finish` gives the sum."""

    def __init__(self, like: Tensor, *, routes: int, has_shared: bool) -> None:
        self.routes = routes
        self.total = torch.empty_like(like)
        self.part = torch.empty_like(like, dtype=torch.float32) if has_shared else None
        tokens, *rest = like.shape
        self.rows = like.new_empty(tokens * routes, *rest, dtype=torch.float32) if routes > 1 else None

    def target(self, *, is_shared: bool) -> tuple[Tensor, bool, bool]:
        """-> the fp32 tensor of partial sums; whether a launch adds to what is in it; whether its result is the last, which goes
        to `total`."""
        if is_shared:
            assert self.part is not None
            return self.part, False, False
        if self.rows is not None:
            return self.rows, False, False
        return self.total if self.part is None else self.part, self.part is not None, True

    def finish(self) -> Tensor:
        if self.rows is None:
            return self.total
        tokens, inner = self.total.shape[0], self.total.shape[1:].numel()
        return sum_terms(self.rows, tokens, self.routes, inner, self.total.dtype, self.part).view(self.total.shape)
