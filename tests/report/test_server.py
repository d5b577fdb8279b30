"""`python -m instrument.watch RUN --web`: the page in a browser, its updates, and who can read it."""

from __future__ import annotations

import http.client
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import torch
from attached_runs import train_step
from report_fixtures import EVERYTHING, SPREAD, new_page
from run_folders import write_run
from torch import nn
from waiting import TIMEOUT, wait_until

import instrument
from instrument.analysis import step_history
from instrument.analysis.run_history import history_of
from instrument.commands import watch
from instrument.report.charts import charts
from instrument.report.live_run import LiveRun
from instrument.report.live_server import LivePage, LiveServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

RANKS = {"layers": "**", "kind": "step_post", "role": "param", "action": "record", "stats": "none", "spectrum": 1}
HOOKS = {**{name: spec for name, spec in EVERYTHING.items() if name != "flow"}, "spread": SPREAD, "ranks": RANKS}


class Training:
    """A training whose steps are made on request."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.attached = ExitStack()
        attached = instrument.attach(self.model, HOOKS, optimizer=self.optimizer, out=folder)
        self.probe = self.attached.enter_context(attached)

    def step(self, count: int) -> None:
        for _ in range(count):
            train_step(self.model, self.optimizer, self.probe, torch.randn(8, 4))


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    training = Training(tmp_path_factory.mktemp("served") / "run")
    yield training
    training.attached.close()


@pytest.fixture
def own_training(tmp_path: Path) -> Iterator[Training]:
    """A training of one test."""
    training = Training(tmp_path / "run")
    yield training
    training.attached.close()


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[str]:
    """Serve the page of a run, which is refreshed without pauses, and yield its address."""
    server = LiveServer(folder, lambda seconds: 0.02, opening_seconds=10, reading_seconds=10, **options)
    addresses: list[str] = []
    thread = Thread(target=lambda: server.serve(0, addresses.append))
    thread.start()
    wait_until(lambda: addresses)
    yield addresses[0]
    server.stop()
    thread.join()


@pytest.fixture(scope="module")
def address(training: Training) -> Iterator[str]:
    with serving(training.folder) as address:
        yield address


def answer(address: str, method: str = "GET", body: str | None = None, **headers: str) -> tuple[int, str, str]:
    """Return status, content type and the first line of the body of a page."""
    split = urlsplit(address)
    connection = http.client.HTTPConnection(split.hostname or "", split.port or 0, timeout=TIMEOUT)
    try:
        connection.request(method, f"{split.path}?{split.query}", body, headers)
        found = connection.getresponse()
        return found.status, found.headers["content-type"], found.readline().decode()
    finally:
        connection.close()


def test_only_the_printed_address_is_answered(address: str) -> None:
    start, token = address.split("?token=")
    assert start.startswith("http://127.0.0.1:")
    assert answer(address)[:2] == (200, "text/html; charset=utf-8")
    port = urlsplit(address).port
    assert answer(address, Host=f"localhost:{port}", Origin=f"http://localhost:{port}")[0] == 200
    assert answer(start)[0] == answer(f"{start}?token={token[:-1]}")[0] == 403
    assert answer(address, Host="example.org")[0] == 400
    assert answer(address, Origin="http://example.org")[0] == answer(address, Origin="null")[0] == 403
    assert answer(address, "POST")[0] == 405
    changes = f"{start}changes?token={token}"
    assert answer(f"{start}changes?since=0")[0] == 403
    assert answer(f"{changes}&since=0", Origin="http://example.org")[0] == 403
    assert answer(changes)[0] == answer(f"{changes}&since=x")[0] == 400
    assert (
        answer(f"{start}control?token={token}", "POST", Origin=start.removesuffix("/"))[0] == 404
    )  # without --control
    assert answer(f"{changes}&since=0")[:2] == (200, "text/event-stream; charset=utf-8")


def traces(page: Page, chart: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.evaluate(
        "id => document.getElementById(id).data.map(({x, y, z, name}) => ({x, y, z, name}))", chart
    )
    return found


def steps_of(page: Page, chart: str) -> int:
    """Return the number of steps in the first trace of a chart; 0 if it is not drawn."""
    steps: int = page.evaluate("id => document.getElementById(id).data?.[0].x.length ?? 0", chart)
    return steps


def open_address(browser: Browser, address: str) -> tuple[Page, list[str]]:
    """Open a page and wait until it is drawn. Return it, and a list of its errors."""
    page = new_page(browser)
    errors = errors_of(page)
    page.goto(address)
    page.wait_for_selector("html[data-drawn=yes]")
    return page, errors


def errors_of(page: Page) -> list[str]:
    """Return a list to which the messages of the console and the errors of a page are added."""
    errors: list[str] = []
    page.on("console", lambda message: errors.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: errors.append(str(error)))
    return errors


@pytest.mark.slow
def test_values_change_without_a_reload(training: Training, address: str, browser: Browser) -> None:
    page = new_page(browser)
    errors = errors_of(page)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(urlsplit(request.url).path))
    page.goto(address)
    page.wait_for_selector("html[data-drawn=yes]")
    page.evaluate("window.marker = 1")
    assert page.locator("#layers").is_hidden()  # nothing is recorded yet
    training.step(3)
    wait_until(lambda: steps_of(page, "heatmap-chart") == 3)
    page.select_option("#heatmap-statistic", "max")
    page.select_option("#layer-location", "2")
    training.step(4)
    wait_until(lambda: steps_of(page, "training-chart") == steps_of(page, "heatmap-chart") == 7)
    training.probe.event("data", "a <b>message</b>", severity="error")
    training.step(1)
    page.wait_for_selector("#findings tr.error")
    assert "a <b>message</b>" in page.inner_text("#findings")
    assert page.inner_text(".status") == "running"
    training.attached.close()
    page.wait_for_selector(".status.done")
    wait_until(lambda: page.locator("#coverage tbody tr").count() == len(HOOKS))
    wait_until(lambda: steps_of(page, "heatmap-chart") == 8)
    assert page.input_value("#heatmap-statistic") == "max"
    assert page.input_value("#layer-location") == "2"
    assert page.evaluate("document.getElementById('layer-histogram').data.length") == 8
    (loss,) = [trace for trace in traces(page, "training-chart") if trace["name"] == "training"]
    run = instrument.load(training.folder)
    assert loss["y"] == pytest.approx(run.metrics["loss"].tolist(), rel=1e-5)
    assert page.evaluate("window.marker") == 1
    assert errors == []
    assert set(requests) == {"/", "/changes"}
    page.close()


@pytest.mark.slow
def test_opened_consequences_stay_open_in_an_update(address: str, browser: Browser) -> None:
    page, errors = open_address(browser, address)
    show = """() => setPart("findings", ["a", "b"].map((of) => `<details data-of="${of}"><summary>${of}</summary></details>`).join(""))"""
    page.evaluate(show)
    page.click("#findings details[data-of=b] summary")
    wait_until(lambda: page.evaluate("opened.has('b')"))
    page.evaluate(show)
    assert page.locator("#findings details[open]").inner_text() == "b"
    assert errors == []
    page.close()


@pytest.mark.slow
def test_data_are_those_of_the_report(own_training: Training) -> None:
    own_training.step(8)
    own_training.attached.close()
    live = LiveRun(own_training.folder)
    live.refresh()
    found, expected = charts(live), charts(history_of(instrument.load(own_training.folder)))
    (ranks,) = [one["statistics"] for one in expected["series"] if one["hook"] == "ranks"]
    assert [*ranks] == ["spectral_norm", "stable_rank", "effective_rank"]
    for one in (found, expected):
        del one["version"]
        for part in ("series", "effects", "distributions"):  # the rows of a file are sorted
            one[part].sort(key=lambda each: (each["label"], each.get("location", "")))
    assert found == expected


def test_changes_contain_only_new_groups_of_steps(own_training: Training) -> None:
    own_training.step(2)
    live = LiveRun(own_training.folder)
    page = LivePage(live)
    live.refresh()
    assert len(page.changes(0)["whole"]["series"]) == 4
    before = live.version
    own_training.step(1)
    live.refresh()
    changes = page.changes(before)
    parts = changes["parts"]
    assert {
        tuple(one["first"])
        for one in (*parts["series"], *parts["effects"], *parts["distributions"], *parts["metrics"].values())
    } == {(2,)}
    assert set(changes["html"]) == {"summary"}
    assert not live.refresh()
    assert page.changes(live.version)["html"] == {}


@pytest.mark.slow
def test_memory_of_the_page_is_flat(own_training: Training, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page shows groups of steps. Live memory is the least of three sizes: a collection keeps what a task in progress refers to."""
    monkeypatch.setattr(step_history, "MOST", 16)
    own_training.step(1)
    with serving(own_training.folder) as address:
        page, _ = open_address(browser, address)
        session = page.context.new_cdp_session(page)
        last_step = "document.getElementById('training-chart').data?.[0].x.at(-1) ?? -1"

        def collected_size() -> int:
            page.evaluate("new Promise(done => requestIdleCallback(done))")
            session.send("HeapProfiler.collectGarbage")
            size: int = session.send("Runtime.getHeapUsage")["usedSize"]
            return size

        sizes = []
        for _ in range(12):
            own_training.step(40)
            first = own_training.probe.step - 65  # of the last group of steps, or later
            wait_until(lambda first=first: page.evaluate(last_step) > first)
            sizes.append(min(collected_size() for _ in range(3)))
        assert steps_of(page, "training-chart") <= 16
        assert min(sizes[9:]) < 1.3 * min(sizes[1:4])
        page.close()


@pytest.mark.slow
def test_page_of_a_sweep_follows_its_jobs(browser: Browser, tmp_path: Path) -> None:
    training = Training(tmp_path / "sweep" / "0")
    training.step(2)
    with serving(tmp_path, sweep=str(tmp_path / "sweep")) as address:
        page, errors = open_address(browser, address)
        assert page.inner_text("#runs tbody tr td:nth-child(3)") == "2"
        rows = [{"step": step, "loss": 1.0 / (step + 1)} for step in range(4)]
        overrides, metrics = {"optimizer.lr": 0.1}, {"loss": 0.25}
        write_run(tmp_path / "sweep" / "1", overrides=overrides, used={"metrics": metrics}, rows={"metrics": rows})
        training.step(3)
        wait_until(lambda: [len(trace["x"]) for trace in traces(page, "training-chart")] == [5, 4])
        assert page.locator("#runs tbody tr").count() == 2
        assert [trace["y"] for trace in traces(page, "against-chart")][-1] == [0.25]
        page.click("#runs tbody tr:first-child a")
        page.wait_for_selector("html[data-drawn=yes]")
        wait_until(lambda: steps_of(page, "heatmap-chart") == 5)
        training.step(1)
        wait_until(lambda: steps_of(page, "heatmap-chart") == 6)
        page.click("text=All runs of the sweep")
        page.wait_for_selector("#runs")
        assert answer(f"{address}&run=7")[0] == 404
        assert errors == []
        page.close()
    training.attached.close()


def test_changes_require_the_token_and_the_origin(own_training: Training) -> None:
    own_training.step(1)
    with serving(own_training.folder, takes_changes=True) as address:
        url = address.replace("/?", "/control?")
        origin = address.partition("/?")[0]
        json_type = {"Content-Type": "application/json"}
        assert answer(url, "POST", **json_type)[0] == answer(url, "POST", Origin=origin)[0] == 403
        assert answer(url, "POST", Origin="http://example.org", **json_type)[0] == 403
        assert answer(url.partition("?")[0], "POST", Origin=origin, **json_type)[0] == 403
        assert answer(url, "GET", Origin=origin)[0] == 405
        for unreadable in (None, "null", "[1]", '"\\"a"'):
            assert answer(url, "POST", unreadable, Origin=origin, **json_type)[0] == 400
        large = '"' + "x" * 70_000 + '"'
        assert answer(url, "POST", large, Origin=origin, **json_type)[0] == 413
        answers: list[tuple[int, str, str]] = []
        change = ("POST", '"hooks.acts.every=2"')
        sender = Thread(target=lambda: answers.append(answer(url, *change, Origin=origin, **json_type)))
        sender.start()
        wait_until(lambda: list((own_training.folder / "control").glob("*.json")))
        own_training.step(1)
        sender.join()
        ((status, _, line),) = answers
        assert status == 200
        assert "hooks.acts.every: not set -> 2" in line
        own_training.attached.close()


@pytest.mark.slow
def test_page_changes_a_run(browser: Browser, own_training: Training) -> None:
    own_training.step(1)
    with serving(own_training.folder, takes_changes=True) as address:
        page, _ = open_address(browser, address)
        page.fill("#changes", "hooks.acts.ever=2")
        page.click("#change [type=submit]")
        page.wait_for_selector("output.bad")
        assert "this field cannot change" in page.inner_text("#changed")
        page.fill("#changes", "hooks.acts.every=2 disable=spread")
        page.click("#change [type=submit]")
        wait_until(lambda: list((own_training.folder / "control").glob("*.json")))
        own_training.step(1)
        page.wait_for_selector("output:not(.bad):has-text('after 2 steps')")
        assert "hooks.acts.every: not set -> 2\nafter 2 steps  hooks.spread: enabled -> disabled" in page.inner_text(
            "#changed"
        )
        page.on("dialog", lambda dialog: dialog.accept())
        page.click("#change [value=stop]")
        wait_until(lambda: list((own_training.folder / "control").glob("*.json")))
        own_training.step(1)
        assert own_training.probe.should_stop
        page.close()
        own_training.attached.close()
    assert instrument.load(own_training.folder).info["status"] == "stopped"


def test_failed_refresh_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    server = LiveServer(tmp_path / "run", lambda seconds: 0.02, opening_seconds=1, reading_seconds=1)
    monkeypatch.setattr(server.page.source, "refresh", lambda seconds: 1 / 0)
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            server.serve(0, lambda address: None)
        except ZeroDivisionError as error:
            failures.append(error)

    thread = Thread(target=serve)  # the main thread may have an event loop
    thread.start()
    thread.join(TIMEOUT)
    assert len(failures) == 1


def test_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "instrument.report.live_server")
    write_run(tmp_path / "run")
    assert watch.main([str(tmp_path / "run"), "--web"]) == 1
    assert "--web requires uvicorn: pip install" in capsys.readouterr().err


def test_invalid_port_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        watch.main([str(write_run(tmp_path / "run")), "--web", "--port", "65536"])
    assert "--port: must be a number from 0 to 65535, given: 65536" in capsys.readouterr().err


def test_pause_depends_on_the_processor_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh that waits, for example for a busy machine, does not delay the next ones by minutes."""
    server = LiveServer(write_run(tmp_path / "run"), float, opening_seconds=1, reading_seconds=1)
    monkeypatch.setattr(server.page.source, "refresh", lambda seconds: time.sleep(0.3))
    is_complete, seconds = server._refresh()
    assert is_complete
    assert seconds < 0.2


def test_port_in_use_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert watch.main([str(tmp_path / "run"), "--web", "--port", str(port)]) == 1
    assert capsys.readouterr().err == f"--port {port}: Address already in use\n"
