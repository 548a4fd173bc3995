"""Refusals in the form in which OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An answer with an error: {"error": {"message", "type", "param", "code"}}.

    Args:
        status: of the HTTP answer.
        message: what was given, what is allowed, what to do.
        param: field of the request that is to blame, if one is.
        code: OpenAI's word for it, for clients that tell errors apart by it.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        # A message may repeat what was sent, half a surrogate pair included, and has to be UTF-8 all the same.
        self.message = message.encode(errors="backslashreplace").decode()
        self.param = None if param is None else param.encode(errors="backslashreplace").decode()
        self.status, self.code, self.headers = status, code, headers

    def content(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)
