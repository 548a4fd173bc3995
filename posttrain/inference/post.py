"""POST requests from any thread, each with a limit on its whole time.

httpx limits the silence between two reads only: a server (or a proxy in front of it) that sends a byte now and then keeps a
request open for ever. Here an event loop on a thread of its own cancels a request when its time is over, whatever it is doing:
waiting for a connection, sending, or reading headers or body; the connection is closed with it.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import httpx

CONNECT_S = 30.0


class Poster:
    """A pool of connections.

    Args:
        headers: of every request.
        timeout_s: longest time of a request, from its start to the last byte of the answer.
        connections: open at once at most.
    """

    def __init__(self, *, headers: dict[str, str], timeout_s: float, connections: int) -> None:
        self.timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=min(CONNECT_S, timeout_s)),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="requests", daemon=True).start()
        self._finalizer = weakref.finalize(self, _shut_down, self._loop, self._client)

    def post(self, url: str, content: Any) -> httpx.Response:
        """Send `content` as JSON and return the whole answer.

        Raises:
            httpx.RequestError: the connection failed or was lost, or the body cannot be unpacked.
            TimeoutError: `timeout_s` have passed.
            RuntimeError: the pool is closed.
        """
        if not self._finalizer.alive:
            raise RuntimeError("the connections to the server are closed; open the backend anew")
        answer: Future[httpx.Response] = asyncio.run_coroutine_threadsafe(self._post(url, content), self._loop)
        return answer.result()

    async def _post(self, url: str, content: Any) -> httpx.Response:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._client.post(url, json=content)
        except TimeoutError:
            raise TimeoutError(f"no whole answer within {self.timeout_s:g} s (timeout_s)") from None

    def close(self) -> None:
        """End the requests that are open and the thread; may be called twice."""
        self._finalizer()


def _shut_down(loop: asyncio.AbstractEventLoop, client: httpx.AsyncClient) -> None:
    async def end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await client.aclose()
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
