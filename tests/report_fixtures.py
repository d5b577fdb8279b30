"""Runs and sweeps for tests of reports, a headless browser, and the data embedded in a report."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import run_in
from waiting import TIMEOUT

if TYPE_CHECKING:  # The process that distributes the tests imports this module without PyTorch.
    import torch
    from playwright.sync_api import Browser, Page
    from torch import nn

    import instrument
    from instrument.actions.base import Context

RECORD = {"layers": "**", "action": "record"}
EVERYTHING = {
    "acts": {**RECORD, "kind": "forward", "stats": ["default", "dead_fraction"]},
    "flow": {**RECORD, "kind": "full_backward", "role": "grad_output"},
    "gradients": {**RECORD, "kind": "parameter_grad"},
    "updates": {**RECORD, "kind": "step_post", "role": "update", "stats": ["l2", "update_ratio"], "spectrum": 2},
    "tame": {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 0.5},
}
SPREAD = {**RECORD, "kind": "forward", "stats": "none", "quantiles": True, "histogram": 16}
KEPT = {"layers": "0", "kind": "forward", "action": "record", "stats": "none", "tensors": True, "samples": 1}
IMAGE = {"layers": ".", "kind": "forward_pre", "action": "record", "stats": "none", "tensors": True, "samples": 1}
WEIGHTS = {"layers": "0", "kind": "step_post", "role": "param", "params": "weight"}
FILTERS = {**WEIGHTS, "action": "record", "tensors": True, "stats": "none"}
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--process-per-site"]
HOOKS = {**EVERYTHING, "spread": SPREAD, "maps": KEPT, "image": IMAGE, "filters": FILTERS}


def train(
    folder: Path,
    model: nn.Module,
    hooks: dict[str, Any],
    *,
    steps: int = 6,
    shape: tuple[int, ...] = (4,),
    at_step: Callable[[int, nn.Module], None] = lambda step, model: None,
) -> instrument.Run:
    """Train a model on random numbers of shape [8, *shape] with hooks, and load the run.

    `at_step` is called with the step index and the model before each step.
    """
    import torch
    from attached_runs import train_step

    import instrument

    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with instrument.attach(model, hooks, optimizer=optimizer, out=folder) as probe:
        for step in range(steps):
            at_step(step, model)
            train_step(model, optimizer, probe, torch.randn(8, *shape))
    return instrument.load(folder)


def convolutional() -> nn.Module:
    """Create a small convolutional network from [N, 3, 8, 8] to [N, 2]."""
    from torch import nn

    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(180, 2))


def deep(layers: int) -> nn.Module:
    """Create a sequence of alternating `Linear` and `ReLU` modules, from [N, 4] to [N, 4]."""
    from torch import nn

    return nn.Sequential(*(nn.Linear(4, 4) if i % 2 == 0 else nn.ReLU() for i in range(layers)))


def copy_unfinished(folder: Path, to: Path) -> Callable[[int, nn.Module], None]:
    """Create an `at_step` function that copies the unfinished run at step 3. No process holds the lock of the copy."""

    def copy(step: int, model: nn.Module) -> None:
        if step == 3:
            shutil.copytree(folder, to)

    return copy


def data_of(html: str) -> dict[str, Any]:
    """Return the data embedded in the HTML of a report."""
    found = re.search(r'<script id="data"[^>]*>([^<]*)</script>', html)
    assert found is not None
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return data


@pytest.fixture(scope="session")
def reported_run(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """Run with a hook of each kind of record that a report shows."""
    return train(tmp_path_factory.mktemp("report") / "whole", convolutional(), HOOKS, shape=(3, 8, 8))


def fail_late(tensor: torch.Tensor, context: Context) -> torch.Tensor:
    """Hook function that raises an error from the second step on.

    Raises:
        ValueError: The step index is not 0.
    """
    if context.step:
        raise ValueError("odd")
    return tensor


@pytest.fixture(scope="session")
def reported_sweep(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """Sweep with pairs of jobs of the same seed with and without an intervention, and with two failed jobs."""
    import instrument

    folder = tmp_path_factory.mktemp("sweep")
    tame = "{layers:'**',kind:parameter_grad,action:clip,norm:0.01}"
    odd = "{layers:'layers.0',kind:forward,action:modify,fn:{_target_:report_fixtures.fail_late}}"
    tiny = ("name=two", "data=digits", "model=mlp", "model.sizes=[64,8,10]", "train.steps=4")
    hooks = ("+hooks.acts={layers:'**',kind:forward,action:record}", f"+hooks.tame={tame},null")
    for name, code, jobs in (
        ("done", 0, ("+hooks.odd=null", "seed=1,2")),
        ("failed", 1, (f"+hooks.odd={odd}", "seed=1")),
    ):
        where = (f"hydra.sweep.dir={folder / name}", f"hydra.sweep.subdir={name}_${{hydra.job.num}}")
        answer = run_in(folder, "-m", *tiny, *hooks, *jobs, *where)
        assert answer.code == code, answer.err
    for job in (folder / "failed").glob("failed_*"):
        job.rename(folder / "done" / job.name)
    return instrument.load(folder / "done")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium; the test is skipped if it is not installed."""
    program = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if program is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, headless=True, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of the page that a test opens.

    Tests overwrite it: the browser compiles the script of the charts once per address, which takes a second.
    """
    return tmp_path_factory.mktemp("page") / "page.html"


def new_page(browser: Browser, *, width: int = 1400, dark: bool = False) -> Page:
    """Open a page with a timeout of `TIMEOUT` seconds. Pages share a context, and thereby the compiled scripts."""
    context = browser.contexts[0] if browser.contexts else browser.new_context()
    page = context.new_page()
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme="dark" if dark else "light")
    page.set_default_timeout(TIMEOUT * 1000)
    return page
