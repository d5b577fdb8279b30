"""The page of a run in progress in the browser: a server on this machine, and server-sent events."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import InstrumentError
from ..pip_extras import pip_command
from ..report import check_packages
from ..report.make_report import render
from ..report.numbers import as_json
from .live_run import LiveRun
from .page_data import LivePage

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")  # any port: it differs behind a tunnel of ssh
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",  # the address contains the token
    "X-Content-Type-Options": "nosniff",
}
KEEP_ALIVE_SECONDS = 15.0
CHECK_SECONDS = 0.25  # between two checks whether the server is stopping


class LiveServer:
    """Serves the page of a run. Only programs that know the token in its address can read it.

    Args:
        live: The run.
        pause: Returns the seconds to wait after a refresh, given its duration in seconds.
        opening_seconds: The time to read earlier rows before the page is shown, in seconds.
        reading_seconds: The time to read earlier rows in each later refresh, in seconds.

    Attributes:
        token: The token.

    Raises:
        InstrumentError: A package is missing.
    """

    def __init__(
        self, live: LiveRun, pause: Callable[[float], float], *, opening_seconds: float, reading_seconds: float
    ) -> None:
        check_web_packages()
        self.token = secrets.token_urlsafe(16)
        self._live = live
        self._page = LivePage(live)
        self._pause = pause
        self._reading_seconds = reading_seconds
        self._lock = threading.Lock()  # the run is read and shown in different threads
        self._server: uvicorn.Server | None = None
        live.refresh(opening_seconds)

    def serve(self, port: int, on_start: Callable[[str], None]) -> None:
        """Serve the page until `stop` is called.

        Args:
            port: The port; 0 for a free one.
            on_start: Called with the address of the page.

        Raises:
            OSError: The port is not available.
            KeyboardInterrupt: The process was interrupted.
        """
        import uvicorn

        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((ADDRESS, port))
            listener.listen()  # a browser that is opened at once waits for the server
            config = uvicorn.Config(self.application(), log_level="error", access_log=False, server_header=False)
            self._server = uvicorn.Server(config)
            on_start(f"http://{ADDRESS}:{listener.getsockname()[1]}/?token={self.token}")
            self._server.run(sockets=[listener])

    def stop(self) -> None:
        """Stop serving. Can be called from any thread."""
        if self._server is not None:
            self._server.should_exit = True

    def application(self) -> Starlette:
        """Return the application: `/` is the page, `/changes` its updates."""
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.routing import Route

        # The header Host is checked, so that no other web site can reach the server under its own name.
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False)
        routes = [Route("/", self._show_page), Route("/changes", self._send_changes)]
        return Starlette(routes=routes, middleware=[hosts], lifespan=self._refreshing)

    @asynccontextmanager
    async def _refreshing(self, application: Starlette) -> AsyncIterator[None]:  # noqa: ARG002
        """Refresh the run while the server runs."""
        task = asyncio.create_task(self._refresh_forever())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _refresh_forever(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.to_thread(self._refresh)
            if self._live.is_running or self._live.fraction_read == 1:
                await asyncio.sleep(self._pause(time.monotonic() - began))

    def _refresh(self) -> None:
        with self._lock:
            self._live.refresh(self._reading_seconds)

    async def _show_page(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse

        return self._refusal(request) or HTMLResponse(await asyncio.to_thread(self.html), headers=HEADERS)

    def html(self) -> str:
        """Return the page in its current state."""
        with self._lock:
            numbers = self._page.numbers()
            return render("run.html", self._page.words(numbers), numbers, self._live.folder, live=True)

    async def _send_changes(self, request: Request) -> Response:
        from starlette.responses import PlainTextResponse, StreamingResponse

        try:  # the browser sends the header when it connects again
            since = int(request.headers.get("last-event-id") or request.query_params["since"])
        except (KeyError, ValueError):
            return PlainTextResponse("the parameter since must be a number", 400, headers=HEADERS)
        return self._refusal(request) or StreamingResponse(
            self._changes(since), media_type="text/event-stream", headers=HEADERS
        )

    async def _changes(self, since: int) -> AsyncIterator[str]:
        """Yield the changes after a version as server-sent events."""
        sent = time.monotonic()
        yield "retry: 1000\n\n"
        while self._server is None or not self._server.should_exit:
            if self._live.version != since:
                message = await asyncio.to_thread(self._message, since)
                since = message["version"]
                sent = time.monotonic()
                yield f"id: {since}\ndata: {await asyncio.to_thread(as_json, message)}\n\n"
            elif time.monotonic() - sent > KEEP_ALIVE_SECONDS:
                sent = time.monotonic()
                yield ":\n\n"  # finds out whether the browser is still there
            await asyncio.sleep(CHECK_SECONDS)

    def _message(self, since: int) -> dict[str, Any]:
        with self._lock:
            return self._page.changes(since)

    def _refusal(self, request: Request) -> Response | None:
        """Return the response to a request without the token or from the page of another web site; otherwise None."""
        from starlette.responses import PlainTextResponse

        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers["host"]:
            return PlainTextResponse("requests from other web sites are refused", 403, headers=HEADERS)
        if not secrets.compare_digest(request.query_params.get("token", "").encode(), self.token.encode()):
            return PlainTextResponse(
                "the token is missing or invalid: use the address that the command printed", 403, headers=HEADERS
            )
        return None


def check_web_packages() -> None:
    """Check that the packages of the page are installed.

    Raises:
        InstrumentError: A package is missing.
    """
    try:
        import_module("starlette")
        import_module("uvicorn")
    except ImportError:
        raise InstrumentError(f"--web requires Starlette and Uvicorn: {pip_command('live')}") from None
    check_packages()
