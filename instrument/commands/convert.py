"""`python -m instrument.convert FILE --from nvdlfw|msprobe [-o FILE]`: convert a configuration of another tool.

The result is an experiment file. Without `-o`, it is printed. Everything without counterpart is a comment in the file and a
line on stderr.

Exit codes: 0, the file was converted; 1, the output cannot be written; 2, the arguments or the file are invalid.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from instrument.commands.verbs import parser_of, with_arguments
from instrument.config.parse import parse_hooks
from instrument.errors import ConfigError, Problem
from instrument.importers.conversion import ConvertedExperiment, read_source
from instrument.importers.msprobe import convert_msprobe
from instrument.importers.nvdlfw import convert_nvdlfw

CONVERTERS: Mapping[str, Callable[[Any], ConvertedExperiment]] = {"nvdlfw": convert_nvdlfw, "msprobe": convert_msprobe}


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("convert")
    parser.add_argument("file", metavar="FILE", type=Path, help="the configuration file: YAML or JSON")
    text = "nvdlfw: nvidia-dlfw-inspect and Transformer Engine; msprobe: Ascend msprobe"
    parser.add_argument("--from", dest="tool", required=True, choices=tuple(CONVERTERS), help=text)
    text = "the experiment file, such as conf/exp/mine.yaml (default: stdout)"
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help=text)
    return parser


@with_arguments(command_line)
def main(args: argparse.Namespace) -> int:
    if args.out is not None and args.out.exists():
        message = "already exists, and existing files are not overwritten"
        raise ConfigError(Problem("--out", message, given=str(args.out)))
    experiment = CONVERTERS[args.tool](read_source(args.file))
    parse_hooks(experiment.hooks)
    name = re.sub(r"[^\w-]+", "_", (args.out or args.file).stem)
    text = experiment.to_yaml(name, args.file.name)
    for note in experiment.notes:
        print(f"{args.file.name}: {note}", file=sys.stderr)
    if args.out is None:
        print(text, end="")
        return 0
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"{args.out}: cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{args.out}: {len(experiment.hooks)} hooks, {len(experiment.notes)} notes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
