"""Create the pictures in docs/images: screenshots of reports, and figures of the guides and the gallery.

The script repeats the runs of docs/report.md and docs/guides/healthy.md, opens their reports, and runs the code of the pages in FIGURES.

    python docs/screenshots.py

It requires Chromium (Debian: chromium) and takes about four minutes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
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
DOCS = Path(__file__).parent
# The figures that the code of each page saves. A page may use the runs of the pages before it.
FIGURES = {
    "index": ("gpt2",),
    "guides/attention": ("attention", "positions", "lens"),
    "guides/induction": ("induction-attention", "induction-ablation", "induction-training"),
    "guides/causal_tracing": ("causal-tracing",),
    "guides/linear_steering": ("linear-steering",),
    "guides/attribution": ("attribution",),
    "guides/examples": ("feature-maps", "gradient-maps", "gradient-change", "cam", "grad-cam"),
    "guides/replay": ("replay",),
    "guides/diff": ("diff",),
    "gallery/glorot_init": ("glorot-init-std", "glorot-init-histograms"),
    "gallery/he_init": ("he-init",),
    "gallery/batch_norm": ("batch-norm-inputs", "batch-norm-gradients", "batch-norm-noise"),
    "gallery/leaky_relu": ("leaky-relu",),
    "gallery/recurrent_gradients": ("recurrent-gradients", "recurrent-clipping"),
    "gallery/adam_update": ("adam-update",),
    "gallery/residual_stream": ("residual-stream",),
    "gallery/random_labels": ("random-labels-accuracy", "random-labels-gradients"),
    "gallery/lottery_ticket": ("lottery-ticket",),
    "gallery/neural_collapse": ("neural-collapse",),
    "gallery/noise_scale": ("noise-scale",),
    "gallery/gradient_tails": ("gradient-tails",),
}
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# ([\w-]+\.py)$", re.M)
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
CLIP = "{layers:'**',kind:parameter_grad,action:clip,norm:1}"
SETS = "hooks=[inputs,activations,gradients,parameters,dead_relu]"
CHECKED = ["model=mlp", "data=digits", SETS, "train.steps=200", "train.eval_every=50"]
RUNS = {
    "healthy": CHECKED,
    "diverging": [*CHECKED, "optimizer.lr=30"],
    "mnist_hooks": ["+exp=mnist_hooks"],
    "bad_init": ["-m", "+exp=bad_init", "apply.init.std=0.02,0.18"],
    "dying_relu": ["-m", "+exp=dying_relu", "optimizer.lr=0.1,4"],
    "clipping": ["-m", "+exp=clipping", f"hooks.tame={CLIP},null", "seed=1,2,3"],
}


@dataclass(frozen=True)
class Shot:
    """One screenshot.

    Attributes:
        file: The name of the image file.
        run: The folder of the run or sweep.
        part: The CSS selector of the element to show; None for the top of the page.
        width: The width of the browser window, in pixels.
        height: The height of the browser window, in pixels.
        dark: Whether to use dark mode.
        choices: The id and the label of each option to select in a drop-down list first.
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
    Shot("dying-relu-histogram.png", "dying_relu/1", "#layer .pair", choices=(("layer-location", "layers.3.0"),)),
    Shot("healthy-training.png", "healthy", "#training"),
    Shot("healthy-layers.png", "healthy", "#heatmap-chart", choices=(("heatmap-statistic", "std"),)),
    Shot("healthy-flow.png", "healthy", "#flow"),
    Shot("healthy-units.png", "healthy", "#units"),
    Shot("healthy-diverging.png", "diverging", "#findings", width=1000),
    Shot("healthy-bad-init.png", "bad_init/0", "#findings", width=1000),
    Shot("healthy-dying-relu.png", "dying_relu/1", "#findings", width=1000),
    Shot("clipping-training.png", "clipping", "#training"),
    Shot("clipping-effects.png", "clipping", "#effects > .scroll"),
)


def make_runs(folder: Path) -> None:
    """Make all runs of docs/report.md and docs/guides/healthy.md."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    for name, arguments in RUNS.items():
        folder_key = "hydra.sweep.dir" if "-m" in arguments else "hydra.run.dir"
        command = [sys.executable, "-m", "instrument", *arguments, f"{folder_key}={folder / name}", "quiet=true"]
        subprocess.run(command, check=True, env=environment)


def take_screenshot(browser: Browser, shot: Shot, folder: Path) -> Image.Image:
    """Create the report of a run and return one screenshot of it."""
    page_file = instrument.report.make(folder / shot.run).save(folder / "page.html")
    page = browser.new_page(
        viewport={"width": shot.width, "height": shot.height}, color_scheme="dark" if shot.dark else "light"
    )
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-drawn=yes]")
    for select, choice in shot.choices:
        page.select_option(f"#{select}", label=choice)
    page.wait_for_timeout(500)  # wait for the animations of the charts
    image = page.screenshot() if shot.part is None else page.locator(shot.part).screenshot()
    page.close()
    return Image.open(io.BytesIO(image)).convert("RGB")


def make_figures(folder: Path) -> None:
    """Run the commands and the Python code of the pages in a folder, and copy their figures."""
    for page, names in FIGURES.items():
        namespace: dict[str, object] = {}
        for language, text in BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8")):
            if language == "sh":
                command = re.sub("^python", shlex.quote(sys.executable), text, flags=re.M)
                subprocess.run(command, shell=True, check=True, cwd=folder)
                continue
            if file := FILE.match(text):
                (folder / file[1]).write_text(text, encoding="utf-8")
                continue
            with contextlib.chdir(folder), contextlib.redirect_stdout(None):
                exec(text, namespace)
        for name in names:
            prefix = page.partition("/")[0].removesuffix("s")
            Image.open(folder / f"{name}.png").convert("RGB").save(IMAGES / f"{prefix}-{name}.png", optimize=True)


def main() -> None:
    """Make all runs, screenshots and figures."""
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    IMAGES.mkdir(exist_ok=True)
    with TemporaryDirectory() as scratch, sync_playwright() as playwright:
        make_figures(Path(scratch))
        make_runs(Path(scratch))
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        for shot in SHOTS:
            take_screenshot(browser, shot, Path(scratch)).save(IMAGES / shot.file, optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
