"""The pages of a run or a sweep in progress in the browser: complete, and what changed since a version, from a server on this machine."""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ..config.spec_file import YAML_ERRORS
from ..errors import InstrumentError
from ..storage.control_folder import MAX_BYTES, request_changes
from ..training.sweep_jobs import SweepJob
from . import check_packages
from .charts import changed_charts, charts, lanes
from .live_run import LiveRun
from .live_sweep import LiveSweep, last_metrics
from .make_report import as_json, render, render_blocks, with_vocabulary
from .run_page import values
from .sweep_page import PageRow, page

RUN_BLOCKS = ("summary", "findings", "lanes", "coverage", "events", "model")
SWEEP_BLOCKS = ("summary", "runs")
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
CHANGE_SECONDS = 60.0  # until a change that the run has not made is withdrawn
STOP_SECONDS = 2  # for browsers that do not close their connection
NO_SUCH_RUN = "there is no such run"
T = TypeVar("T")


class _ChangingPage:
    """A page of which the blocks of the template that changed after a version are rendered again."""

    def __init__(self, template: str, names: Sequence[str]) -> None:
        self._template = template
        self._names = names
        self._blocks: dict[str, tuple[str, int]] = {}  # by name: the HTML, and the version of its last change

    def _changed_blocks(self, since: int, version: int, words: Mapping[str, Any]) -> dict[str, str]:
        for name, html in render_blocks(self._template, words, self._names).items():
            if name not in self._blocks or self._blocks[name][0] != html:
                self._blocks[name] = html, version
        return {name: html for name, (html, changed) in self._blocks.items() if changed > since or since > version}


class LivePage(_ChangingPage):
    """The page of a run in progress, with the address of the page of its sweep, if any. Call its methods from one thread at a time."""

    def __init__(self, live: LiveRun, *, sweep: str | None = None, takes_changes: bool = False) -> None:
        super().__init__("run.html", RUN_BLOCKS)
        self.source = live
        self._options: dict[str, Any] = {"sweep": sweep, "takes_changes": takes_changes}

    def html(self) -> str:
        """Return the complete page."""
        numbers = charts(self.source)
        return render("run.html", self._words(numbers), numbers, self.source.folder, live=True)

    def _words(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        return values(self.source, numbers, self.source.findings(), self.source.problems) | self._options

    def changes(self, since: int) -> dict[str, Any]:
        """Return what changed after the version that the browser has.

        These are `version`; `html`, the changed parts of the page by name; and either `whole`, the data of all charts, or `parts`, the
        changed groups of steps, and `lanes`.
        """
        live, shown = self.source, lanes(self.source)
        blocks = self._changed_blocks(since, live.version, self._words(shown))
        changes: dict[str, Any] = {"version": live.version, "html": blocks}
        if since > live.version or since < live.rebuilt:
            return {**changes, "whole": with_vocabulary(charts(live))}
        return {**changes, "parts": changed_charts(live, since), "lanes": shown}


class LiveSweepPage(_ChangingPage):
    """The page of a sweep in progress. `link` returns the address of the page of a job. Call its methods from one thread at a time."""

    def __init__(self, folder: str, link: Callable[[str], str]) -> None:
        super().__init__("sweep.html", SWEEP_BLOCKS)
        self.source = LiveSweep(folder)
        self._link = link
        self._structure: tuple[object, int] = None, 0  # what the charts contain, and the version of its last change

    def folder_of(self, name: str) -> Path | None:
        """Return the folder of a job that has started; None if there is no such job."""
        return {job.name: job.folder for job in self.source.jobs if job.folder in self.source.runs}.get(name)

    def html(self) -> str:
        """Return the complete page."""
        return render("sweep.html", *self._content(), self.source.folder, live=True)

    def changes(self, since: int) -> dict[str, Any]:
        """Return what changed after the version that the browser has, as for a run; `runs` and `curves` are those of changed jobs."""
        sweep = self.source
        words, numbers = self._content()
        metrics = {name for run in numbers["runs"] for name in run["metrics"]}
        curves = {(phase, *one["statistics"]) for run in numbers["curves"] for phase, one in run.items()}
        structure = [job.name for job in sweep.jobs], numbers["overrides"], metrics, curves
        if structure != self._structure[0]:
            self._structure = structure, sweep.version
        changes = {"version": sweep.version, "html": self._changed_blocks(since, sweep.version, words)}
        if since > sweep.version or since < self._structure[1]:
            return {**changes, "whole": with_vocabulary(numbers)}
        new = {i: numbers["curves"][i] for i, job in enumerate(sweep.jobs) if sweep.changed.get(job.folder, -1) > since}
        return {**changes, "runs": numbers["runs"], "curves": new}

    def _content(self) -> tuple[dict[str, Any], dict[str, Any]]:
        sweep = self.source
        keys = list(dict.fromkeys(key for job in sweep.jobs for key in sweep.source.differing(job)))
        names = [str(live.info.get("name")) for live in sweep.runs.values()]
        words, numbers = page([self._row(job) for job in sweep.jobs], keys, sweep.folder, names)
        return words, {"version": sweep.version, **numbers}

    def _row(self, job: SweepJob) -> PageRow:
        overrides = {key: _value(text) for key, text in self.source.source.differing(job).items()}
        live = self.source.runs.get(job.folder)
        if live is None:
            return PageRow(job.name, job.status, overrides, note=job.error or "")
        return PageRow(
            job.name,
            job.status,
            {"seed": live.info["seed"], **overrides},
            metrics=live.info["metrics"],
            shown=last_metrics(live),
            curves=self.source.curves[job.folder],
            note=job.error or "",
            page=self._link(job.name),
            step=live.progress,
        )


def _value(text: str) -> Any:
    """Return the value of an override; the text itself if it cannot be read."""
    try:
        return yaml.safe_load(text)
    except (*YAML_ERRORS, OverflowError):
        return text


class LiveServer:
    """Serves the page of a run, or the pages of a sweep and its jobs. Only programs that know the token can read them.

    `sweep`: the folder of a sweep, as a path or an address, to be shown instead of a run. Raise a ConfigError if it contains no sweep, and
    an InstrumentError if Plotly or Jinja2 is not installed.
    """

    def __init__(
        self,
        folder: Path,
        pause: Callable[[float], float],
        *,
        opening_seconds: float,
        reading_seconds: float,
        sweep: str | None = None,
        takes_changes: bool = False,
    ) -> None:
        check_packages()
        self.token = secrets.token_urlsafe(16)
        self.page: LivePage | LiveSweepPage
        if sweep is None:
            self.page = LivePage(LiveRun(folder), takes_changes=takes_changes)
        else:
            self.page = LiveSweepPage(sweep, self._address)
        self._pause = pause  # returns the seconds to wait after a refresh, given its processor time in seconds
        # The time to read earlier rows before a page is shown, and in each later refresh.
        self._opening_seconds, self._reading_seconds = opening_seconds, reading_seconds
        self._takes_changes = takes_changes  # whether the page of a run has a form that changes the run
        self._jobs: dict[str, LivePage] = {}  # the pages of jobs that a browser shows, by name
        self._browsers: Counter[str] = Counter()  # by job
        self._lock = threading.Lock()  # pages are read and shown in different threads
        self._server: uvicorn.Server | None = None
        self._failure: Exception | None = None
        self.page.source.refresh(opening_seconds)

    def _address(self, job: str = "") -> str:
        """Return the address of the page of a job, or of the sweep, relative to the server."""
        return f"/?token={self.token}" + (f"&run={quote(job)}" if job else "")

    def serve(self, port: int, on_start: Callable[[str], None]) -> None:
        """Serve the page until `stop` is called. `port`: 0 for a free one. `on_start` is called with the address of the page.

        Raise an OSError if the port is not available, and an InstrumentError if the pages cannot be updated any more.
        """
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((ADDRESS, port))
            listener.listen()  # a browser that is opened at once waits for the server
            options: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False, "ws": "none"}
            config = uvicorn.Config(self.application(), timeout_graceful_shutdown=STOP_SECONDS, **options)
            self._server = uvicorn.Server(config)
            on_start(f"http://{ADDRESS}:{listener.getsockname()[1]}{self._address()}")
            self._server.run(sockets=[listener])
        if isinstance(self._failure, OSError):
            raise InstrumentError(f"the page cannot be updated any more: {self._failure}") from self._failure
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop serving. Can be called from any thread."""
        if self._server is not None:
            self._server.should_exit = True

    def application(self) -> Starlette:
        """Return the application: `/` is a page, `/changes` its updates, and `/control` changes a run."""
        # The header Host is checked, so that no other web site can reach the server under its own name.
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False)
        routes = [Route("/", self._guarded(self._show_page)), Route("/changes", self._guarded(self._send_changes))]
        if self._takes_changes:
            routes.append(Route("/control", self._guarded(self._control), methods=["POST"]))
        return Starlette(routes=routes, middleware=[hosts], lifespan=self._refreshing)

    @asynccontextmanager
    async def _refreshing(self, application: Starlette) -> AsyncIterator[None]:  # noqa: ARG002
        """Refresh the pages while the server runs."""
        task = asyncio.create_task(self._refresh_forever())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _refresh_forever(self) -> None:
        while self._failure is None:
            try:
                is_complete, seconds = await asyncio.to_thread(self._refresh)
            except Exception as error:  # a page that is not updated any more must not look current
                self._failure = error
                self.stop()
                return
            if self.page.source.is_running or is_complete:
                await asyncio.sleep(self._pause(seconds))

    def _refresh(self) -> tuple[bool, float]:
        """Refresh the pages. Return whether all rows have been read, and the processor time in seconds."""
        began = time.thread_time()
        sources = [page.source for page in (self.page, *self._jobs.values())]
        for source in sources:
            with self._lock:
                source.refresh(self._reading_seconds)
        return all(source.is_complete for source in sources), time.thread_time() - began

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that refuses requests without the token or from the page of another web site."""

        async def respond(request: Request) -> Response:
            origin = request.headers.get("origin")
            if origin is not None and urlsplit(origin).netloc != request.headers["host"]:
                raise _error(403, "requests from other web sites are refused")
            if not secrets.compare_digest(request.query_params.get("token", "").encode(), self.token.encode()):
                raise _error(403, "the token is missing or invalid: use the address that the command printed")
            return await endpoint(request)

        return respond

    async def _show_page(self, request: Request) -> Response:
        html = await self._on_page(request.query_params.get("run", ""), lambda page: page.html())
        if html is None:
            raise _error(404, NO_SUCH_RUN)
        return HTMLResponse(html, headers=HEADERS)

    async def _on_page(self, job: str, function: Callable[[LivePage | LiveSweepPage], T]) -> T | None:
        """Call a function with the page of a job in another thread; None if there is no such job."""

        def call() -> T | None:
            with self._lock:
                page = self._page_of(job)
                return None if page is None else function(page)

        return await asyncio.to_thread(call)

    def _page_of(self, job: str) -> LivePage | LiveSweepPage | None:
        """Return the page of a job, or of the run or the sweep if the name is empty; None if there is no such job."""
        if not job or not isinstance(self.page, LiveSweepPage):
            return self.page
        if job not in self._jobs:
            folder = self.page.folder_of(job)
            if folder is None:
                return None
            # The versions of a page that is opened again are later than those that a browser may still have.
            live = LiveRun(folder, version=time.monotonic_ns() // 1_000_000)
            live.refresh(self._opening_seconds)
            self._jobs[job] = LivePage(live, sweep=self._address(), takes_changes=self._takes_changes)
        return self._jobs[job]

    async def _send_changes(self, request: Request) -> Response:
        try:  # the browser sends the header when it connects again
            since = int(request.headers.get("last-event-id") or request.query_params["since"])
        except (KeyError, ValueError):
            raise _error(400, "the parameter since must be a number") from None
        changes = self._changes(request.query_params.get("run", ""), since)
        return StreamingResponse(changes, media_type="text/event-stream", headers=HEADERS)

    async def _changes(self, job: str, since: int) -> AsyncIterator[str]:
        """Yield the changes of a page after a version as server-sent events."""
        sent = time.monotonic()
        self._browsers[job] += 1
        try:
            yield "retry: 1000\n\n"
            while self._server is None or not self._server.should_exit:
                message = await self._on_page(job, partial(_message, since=since))
                if message is not None:
                    since = message["version"]
                    sent = time.monotonic()
                    yield f"id: {since}\ndata: {await asyncio.to_thread(as_json, message)}\n\n"
                elif time.monotonic() - sent > KEEP_ALIVE_SECONDS:
                    sent = time.monotonic()
                    yield ":\n\n"  # finds out whether the browser is still there
                await asyncio.sleep(CHECK_SECONDS)
        finally:
            self._browsers[job] -= 1
            if not self._browsers[job]:
                self._jobs.pop(job, None)  # it is opened again at the next request

    async def _control(self, request: Request) -> Response:
        """Change a run. The body is a JSON string with the changes, separated by spaces."""
        # Browsers send this header with each request of this kind; a form of another web site cannot send JSON.
        if "origin" not in request.headers or request.headers.get("content-type") != "application/json":
            raise _error(403, "changes are JSON and require the header Origin")
        content = b""
        async for piece in request.stream():
            content += piece
            if len(content) > MAX_BYTES:
                raise _error(413, f"more than {MAX_BYTES:,} bytes")
        try:
            text = json.loads(content)
            if not isinstance(text, str):
                raise ValueError("they are not a JSON string")
            changes = shlex.split(text)
        except (ValueError, RecursionError) as error:
            raise _error(400, f"the changes cannot be read: {error}") from None
        page = await self._on_page(request.query_params.get("run", ""), lambda page: page)
        if not isinstance(page, LivePage):
            raise _error(404, NO_SUCH_RUN)
        try:
            answer = await asyncio.to_thread(request_changes, str(page.source.folder), changes, seconds=CHANGE_SECONDS)
        except InstrumentError as error:
            raise _error(409, str(error)) from None
        if answer.problem is not None:
            raise _error(409, answer.problem)
        made = "\n".join(f"after {answer.step} steps  {change}" for change in answer.changes)
        return PlainTextResponse(made, headers=HEADERS)


def _message(page: LivePage | LiveSweepPage, since: int) -> dict[str, Any] | None:
    """Return the changes of a page after a version; None if there are none."""
    return None if page.source.version == since else page.changes(since)


def _error(status: int, message: str) -> HTTPException:
    return HTTPException(status, message, HEADERS)
