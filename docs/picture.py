"""Create docs/terminal.svg, the terminal output of the first command in the README.

Run `python docs/picture.py` in the root of the repository. If the environment variable INSTRUMENT_DATA is a folder with MNIST, the
run uses MNIST; otherwise it uses the digits of scikit-learn.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.terminal_theme import MONOKAI

from instrument.commands.job import read_config
from instrument.config.spec_file import conf_folder
from instrument.training.runner import run
from instrument.training.terminal import Terminal

TARGET = Path(__file__).resolve().with_name("terminal.svg")

# The default format of Rich downloads a font. This format uses an installed monospace font.
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""


def main() -> None:
    """Run the experiment on a recording console and write its output as SVG."""
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config, raw = read_config(compose("config", ["+exp=mnist_hooks"]))
    terminal = Terminal()
    terminal.console = Console(file=io.StringIO(), record=True, width=120, highlight=False, color_system="truecolor")
    terminal.console.print("[bold green]$[/] python -m instrument +exp=mnist_hooks", highlight=False)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run(config, Path("runs/mnist_hooks/2026-11-21_09-00-00"), terminal, raw=raw, overrides={})
    terminal.console.print()  # without an empty line, the image clips descenders of the last line
    image = terminal.console.export_svg(title="instrument", theme=MONOKAI, code_format=FORMAT)
    TARGET.write_text(image)


if __name__ == "__main__":
    main()
