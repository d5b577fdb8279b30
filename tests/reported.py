"""Runs to be reported on, a browser to look at reports with, and what a page carries."""

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
import torch
from conftest import run_in
from torch import nn
from waiting import HANGS

import instrument

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from instrument.actions.base import Context

EVERYTHING = {
    "acts": {"layers": "**", "kind": "forward", "action": "record", "stats": ["default", "dead_fraction"]},
    "flow": {"layers": "**", "kind": "full_backward", "role": "grad_output", "action": "record"},
    "gradients": {"layers": "**", "kind": "parameter_grad", "action": "record"},
    "updates": {
        "layers": "**",
        "kind": "step_post",
        "role": "update",
        "action": "record",
        "stats": ["l2", "update_ratio"],
    },
    "tame": {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 0.5},
}
SPREAD = {"layers": "**", "kind": "forward", "action": "record", "stats": "none", "quantiles": True, "histogram": 16}
KEPT = {"layers": "0", "kind": "forward", "action": "record", "stats": "none", "tensors": True, "samples": 1}
IMAGE = {"layers": ".", "kind": "forward_pre", "action": "record", "stats": "none", "tensors": True, "samples": 1}
FILTERS = {
    "layers": "0",
    "kind": "step_post",
    "role": "param",
    "params": "weight",
    "action": "record",
    "tensors": True,
    "stats": "none",
}
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
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
    """A short training of a model on random numbers, with hooks."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with instrument.attach(model, hooks, optimizer=optimizer, out=folder) as probe:
        for step in range(steps):
            at_step(step, model)
            loss = model(torch.randn(8, *shape)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss, samples=8)
    return instrument.load(folder)


def convolutional() -> nn.Module:
    """A small network of images: [N, 3, 8, 8] to [N, 2]."""
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(180, 2))


def deep(layers: int) -> nn.Module:
    """So many modules one after the other, of vectors of 4."""
    return nn.Sequential(*(nn.Linear(4, 4) if i % 2 == 0 else nn.ReLU() for i in range(layers)))


def as_if_killed(folder: Path, to: Path) -> Callable[[int, nn.Module], None]:
    """For `at_step`: a copy of the run's folder as it is in the middle, which no process holds."""

    def copy(step: int, model: nn.Module) -> None:
        if step == 3:
            shutil.copytree(folder, to)

    return copy


def data_of(html: str) -> dict[str, Any]:
    """The numbers that a page carries."""
    found = re.search(r'<script id="data"[^>]*>([^<]*)</script>', html)
    assert found is not None
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return data


@pytest.fixture(scope="session")
def reported_run(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """A run with something of everything."""
    return train(tmp_path_factory.mktemp("report") / "whole", convolutional(), HOOKS, shape=(3, 8, 8))


def fail_late(tensor: torch.Tensor, context: Context) -> torch.Tensor:
    """For a hook: fail at the second step."""
    if context.step:
        raise ValueError("odd")
    return tensor


@pytest.fixture(scope="session")
def reported_sweep(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """A sweep with pairs of the same seed with and without an intervention, and with jobs that failed."""
    folder = tmp_path_factory.mktemp("sweep")
    tame = "{layers:'**',kind:parameter_grad,action:clip,norm:0.01}"
    odd = "{layers:'layers.0',kind:forward,action:modify,fn:{_target_:reported.fail_late}}"
    tiny = ("name=two", "data=digits", "model=mlp", "model.sizes=[64,8,10]", "train.steps=4")
    hooks = (
        "+hooks.acts={layers:'**',kind:forward,action:record}",
        f"+hooks.tame={tame},null",
        f"+hooks.odd={odd},null",
    )
    answer = run_in(folder, "-m", *tiny, *hooks, "seed=1,2", f"hydra.sweep.dir={folder / 'jobs'}")
    assert answer.code == 1, answer.err
    return instrument.load(folder / "jobs")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium, where there is one."""
    program = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if program is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, headless=True, args=FLAGS)
        yield opened
        opened.close()


def new_page(browser: Browser, **options: Any) -> Page:
    """A page that waits as long as it takes."""
    page = browser.new_page(**options)
    page.set_default_timeout(HANGS * 1000)
    return page
