"""The pictures of reports in docs/images: the runs of docs/report.md are made anew, reported on, and looked at by a browser.

    python docs/screenshots.py

It needs Chromium (Debian: chromium), and takes about a minute.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import instrument.report

IMAGES = Path(__file__).parent / "images"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
CLIP = "{layers:'**',kind:parameter_grad,action:clip,norm:1}"
RUNS = {
    "mnist_hooks": ["+exp=mnist_hooks"],
    "bad_init": ["-m", "+exp=bad_init", "apply.init.std=0.02,0.18"],
    "dying_relu": ["-m", "+exp=dying_relu", "optimizer.lr=0.1,4"],
    "clipping": ["-m", "+exp=clipping", f"hooks.tame={CLIP},null", "seed=1,2,3"],
}


@dataclass(frozen=True)
class Shot:
    """One picture.

    Attributes:
        file: Its name.
        run: The folder of the run or sweep.
        part: What is shown: a CSS selector, or the top of the page without one.
        width: Of the browser's window, in pixels.
        height: How much of the top is shown, in pixels.
        dark: In the dark.
        choices: What is chosen in drop-downs first.
    """

    file: str
    run: str
    part: str | None = None
    width: int = 1400
    height: int = 1500
    dark: bool = False
    choices: tuple[tuple[str, str], ...] = ()


SHOTS = (
    Shot("report.png", "mnist_hooks", height=1650),
    Shot("report-phone.png", "mnist_hooks", width=400, height=1800, dark=True),
    Shot("report-maps.png", "mnist_hooks", "#maps"),
    Shot("bad-init-layers.png", "bad_init/0", "#heatmap-chart"),
    Shot("bad-init-flow.png", "bad_init/0", "#flow-chart"),
    Shot("bad-init-cure.png", "bad_init", "#layers", choices=(("layers-statistic", "std"),)),
    Shot("dying-relu-training.png", "dying_relu/1", "#training", choices=(("training-scale", "log"),)),
    Shot("dying-relu-units.png", "dying_relu/1", "#units"),
    Shot("dying-relu-histogram.png", "dying_relu/1", "#layer .pair", choices=(("layer-place", "layers.3.0"),)),
    Shot("clipping-training.png", "clipping", "#training"),
    Shot("clipping-effects.png", "clipping", "#effects > .scroll"),
)


def make_runs(folder: Path) -> None:
    """Every run of the page, with its report."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    for name, arguments in RUNS.items():
        where = "hydra.sweep.dir" if "-m" in arguments else "hydra.run.dir"
        command = [sys.executable, "-m", "instrument", *arguments, f"{where}={folder / name}", "quiet=true"]
        subprocess.run(command, check=True, env=environment)


def take(browser: Browser, shot: Shot, folder: Path) -> Image.Image:
    """One picture of one report."""
    page_file = instrument.report.make(folder / shot.run).save(folder / "page.html")
    page = browser.new_page(
        viewport={"width": shot.width, "height": shot.height}, color_scheme="dark" if shot.dark else "light"
    )
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-drawn=yes]")
    for select, choice in shot.choices:
        page.select_option(f"#{select}", label=choice)
    page.wait_for_timeout(500)  # charts that slide into place
    taken = page.screenshot() if shot.part is None else page.locator(shot.part).screenshot()
    page.close()
    return Image.open(io.BytesIO(taken)).convert("RGB")


def main() -> None:
    """Make all of them."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    IMAGES.mkdir(exist_ok=True)
    with TemporaryDirectory() as scratch, sync_playwright() as playwright:
        make_runs(Path(scratch))
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        for shot in SHOTS:
            take(browser, shot, Path(scratch)).save(IMAGES / shot.file, optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
