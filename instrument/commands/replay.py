"""`python -m instrument.replay RUN [--steps 48:53] hooks=everything`: repeat steps of a run with other record hooks.

The replay begins at the last checkpoint before these steps, or at the start of the run, and writes to a new folder. Loss,
accuracy, gradient norm and learning rate of each repeated step and evaluation are compared with the recorded ones.

With `--ops`, the table `operators` has every operator of these steps, with its layer, its line of code and a fingerprint of its
bits. `instrument.diff` of two such replays names the first operator that differs.

With `--intervene`, interventions may differ from those of the run in these steps: the replay is a counterfactual.

Exit codes: 0, equal; 1, a value differs, no step could be compared, or the replay fails; 2, the arguments are invalid, or
an exact replay cannot be expected (see `--force`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from instrument.commands.hydra_errors import composition_problem
from instrument.commands.hydra_main import command
from instrument.commands.job import importing, read_config, read_overrides, report_errors, report_writer
from instrument.commands.verbs import add_json, parser_of, with_arguments
from instrument.config.experiment import TRACKERS, InitFromConfig, SinkConfig
from instrument.config.parse import named_specs
from instrument.config.spec_file import conf_folder
from instrument.errors import ConfigError, InstrumentError, Problem
from instrument.formatting import counted, shown_path
from instrument.storage.run_folder import check_process_count
from instrument.training.distributed.torchrun import is_rank_zero
from instrument.training.replay import RUN, RecordedRun, Replay

if TYPE_CHECKING:
    from instrument.training.verification import ReplayCertificate

COMPARISON = "comparison.png"
CONFIG_NAME = "replayed_run"  # root configuration of the replay, which is not a file
# An override below these keys changes no value of the training. The device and a dataset in another folder are compared
# with those of the run.
ALLOWED = (
    *("hooks", "sink", "budget", "reduce", "report", "quiet", "name", "device"),
    *("data.ids", "data.num_workers", "data.pin_memory", "data.root"),
)


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("replay")
    parser.add_argument("run", metavar="RUN", help="the folder of the run")
    text = "hooks=SET, hooks.NAME.FIELD=VALUE, +hooks.NAME={...}"
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help=text)
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--steps", metavar="START:STOP", help="the steps in which hooks record (default: all)")
    steps.add_argument("--before-failure", metavar="N", type=int, help="the last N steps before the run ended")
    flags = {
        "--intervene": "allow interventions to be added, changed and removed: a counterfactual",
        "--ops": "record every operator of these steps, with its layer and line of code; requires --steps or --before-failure",
        "--force": "repeat the run even if an exact replay cannot be expected",
    }
    for flag, text in flags.items():
        parser.add_argument(flag, action="store_true", help=text)
    add_json(parser)
    return parser


@with_arguments(command_line, intermixed=True)
def main(args: argparse.Namespace) -> int:
    if args.ops and args.steps is None and args.before_failure is None:
        message = "requires --steps or --before-failure, because a step can have thousands of operators"
        raise ConfigError(Problem("--ops", message, fix="pass the step to examine, as in --steps 48"))
    run = RecordedRun.open(args.run, force=args.force)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    check_process_count(run.record, processes, RUN, f"instrument.replay {run.folder}")
    window = run.window(args.steps, args.before_failure, is_counterfactual=args.intervene)
    _store_config(run, args.overrides)
    original, output = sys.argv, sys.stdout

    def job(config: DictConfig) -> None:
        sys.argv = original  # for the entry `command` of run.json
        _replay(config, run, window, args, output)

    sys.argv = [original[0], *args.overrides]
    try:
        with redirect_stdout(sys.stderr if args.json else output):  # of the run, its hooks and its model
            command(job, CONFIG_NAME)
    finally:
        sys.argv = original
    return 0


def _store_config(run: RecordedRun, overrides: Sequence[str]) -> None:
    """Store the root configuration of a replay, to which Hydra applies the overrides.

    It is the configuration of the run without its outputs: remote storage, trackers, custom sinks, checkpoints, budget.
    A hook set that the overrides choose is added to the hooks of the run, as in a run.
    """
    _check_overrides(overrides)
    config: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(dict(run.record["config"])))  # type: ignore[assignment]
    hooks = dict(named_specs("hooks", config.get("hooks")))
    sink = {key: value for key, value in (config.get("sink") or {}).items() if key in _PARQUET_FIELDS}
    config |= {"plan": False, "resume": None, "report": False, "quiet": False, "objective": "loss", "sink": sink}
    config |= {"budget": {"time": None, "bytes": None}, "hooks": hooks or None}
    config["train"] |= {"checkpoint": {"every": 0}, "save": False}
    packaged: Any = OmegaConf.load(conf_folder() / "config.yaml")
    packaged.hydra.run.dir = f"runs/replays/{_label(run.folder)}/${{now:%Y-%m-%d_%H-%M-%S-%f}}"
    node = {"defaults": ["_self_", {"sink": None}, {"hooks": None}], **config, "hydra": packaged.hydra}
    ConfigStore.instance().store(CONFIG_NAME, node, provider="instrument.replay")


_PARQUET_FIELDS = set(SinkConfig.model_fields) - {"remote", "keep_local", "custom", *TRACKERS.builtin}


def _check_overrides(overrides: Sequence[str]) -> None:
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise ConfigError(composition_problem(error, overrides, [])) from None
    for override in parsed:
        key = override.key_or_group
        if not any(f"{key}.".startswith(f"{allowed}.") for allowed in (*ALLOWED, "hydra")):
            message = "a replay repeats the training of the run, so this key cannot be overridden"
            fix = "to train with another configuration, use python -m instrument"
            raise ConfigError(Problem(key, message, given=override.input_line, allowed=", ".join(ALLOWED), fix=fix))


def _label(folder: Path) -> str:
    """Return the path of a run below `runs`, or the name of its folder."""
    runs = (Path.cwd() / "runs").resolve()
    resolved = folder.resolve()
    return str(resolved.relative_to(runs)) if resolved.is_relative_to(runs) else resolved.name


def _replay(config: DictConfig, run: RecordedRun, window: range, args: argparse.Namespace, output: TextIO) -> None:
    with report_errors() as (folder, _):
        parsed, raw = read_config(config)
        replay = Replay(run, parsed.hooks, window, intervene=args.intervene, force=args.force, operators=args.ops)
        raw["hooks"] = replay.recorded_hooks(raw["hooks"])
        with importing():
            from instrument.training import runner
            from instrument.training.terminal import Terminal
            from instrument.training.verification import certify_replay, write_certificate

        terminal = Terminal(quiet=parsed.quiet)
        error: Exception | None = None
        try:
            changes: dict[str, object] = {"hooks": replay.hooks, "rules": replay.rules}
            if replay.begin and parsed.mode == "train":  # the checkpoint has the weights
                changes["init_from"] = InitFromConfig()
            replayed, overrides = parsed.model_copy(update=changes), read_overrides()
            make_report = report_writer(replayed, folder)
            runner.run(replayed, folder, terminal, raw=raw, overrides=overrides, make_report=make_report, source=replay)
        except ConfigError:
            raise
        except Exception as caught:  # The replay of a run that failed may fail too.
            error = caught
        if is_rank_zero():
            certificate = certify_replay(run.folder, folder, changes_evaluation=replay.changes_evaluation)
            content = write_certificate(certificate, folder)
            if certificate.counterfactual:
                from instrument.analysis.load import load
                from instrument.plot import replay as compare

                with suppress(InstrumentError):  # without matplotlib
                    compare(load(folder)).savefig(folder / COMPARISON)
            if replay.left_out and not parsed.quiet:
                print(f"record hooks that are not scheduled in these steps: {', '.join(replay.left_out)}")
            summary = _summary(certificate, replay, shown_path(folder), has_failed=error is not None)
            print(content if args.json else summary, file=output)
            if error is None and not certificate.holds:
                raise SystemExit(1)
        if error is not None:
            raise error


def _summary(certificate: ReplayCertificate, replay: Replay, folder: Path, *, has_failed: bool) -> str:
    start = f"its checkpoint after {certificate.begin} steps" if certificate.begin else "its start"
    lines = [
        f"replay of {certificate.source} from {start}, up to step {certificate.stop - 1}",
        "compared: loss, accuracy, gradient norm and learning rate of "
        f"{counted(certificate.steps, 'step')} and {counted(certificate.evaluations, 'evaluation')}"
        + (f", and {counted(certificate.fingerprints, 'fingerprint')}" if certificate.fingerprints else ""),
    ]
    lines += [f"repeated: {change}, by instrument.control" for change in certificate.changes]
    lines += [f"not repeated: {change}, by instrument.control" for change in certificate.changes_left_out]
    lines += [f"forced, although {note}" for note in replay.notes]
    if certificate.counterfactual:
        names = ", ".join(certificate.counterfactual)
        lines.append(f"COUNTERFACTUAL from step {certificate.first_step} on, with other interventions: {names}")
    where = " before this step" if certificate.counterfactual else ""
    if certificate.difference is None:
        equal = f"EQUAL BITS: all compared values{where} are equal"
        lines.append(equal if certificate.steps else f"no step{where} to compare")
    else:
        lines.append(f"NOT EQUAL: {certificate.difference}")
        lines += [f"likely reason: {reason}" for reason in certificate.reasons]
    if certificate.counterfactual:
        effect = certificate.effect
        none = f"no effect up to step {certificate.stop - 1}: all values have equal bits; later steps may differ"
        lines.append(none if effect is None else f"first effect at {effect}")
    if certificate.repeats_failure:
        lines.append("the replay failed with the error of the run")
    elif has_failed:
        is_failed = replay.run.record["status"] == "failed"
        lines.append(f"the replay failed{' with a different error' if is_failed else ', and the run did not'}")
    elif certificate.repeats_failure is False:
        lines.append("the replay completed the step in which the run failed")
    lines.append(f"certificate  {folder}/certificate.json")
    if replay.operators:
        from instrument.analysis.load import load
        from instrument.comparison.operators import non_finite_operators

        lines += non_finite_operators(load(folder))
    if (folder / COMPARISON).exists():
        lines.append(f"comparison   {folder / COMPARISON}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
