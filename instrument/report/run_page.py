"""Texts and tables of the page of one run, and its mosaics of recorded tensors; `instrument.report.charts` prepares the charts."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from itertools import cycle
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import yaml

from ..analysis.config_comparison import rules_of
from ..analysis.diagnosis import Finding, diagnoses
from ..analysis.findings import findings
from ..analysis.load import Run
from ..analysis.overview import coverage_rows
from ..analysis.plot_data import RecordedSeries, evenly_spaced, rank_in
from ..analysis.run_history import RunHistory, history_of
from ..analysis.tensor_images import TensorMaps, image_of, limits, maps_in, mosaic, smaller
from ..config.experiment import ForwardConfig
from ..formatting import format_number
from ..plot.look import CATEGORIES
from .charts import charts, evidence, rounded
from .panels import RUN_PANELS, Panel, panels

MAX_EVENTS = 200
MAX_ALERTS = 8
OUTCOMES = {
    "killed": "The run was killed: its last steps may be missing, and it has no coverage table.",
    "running": "The run is in progress: this page shows the data recorded so far.",
    "interrupted": "The run was interrupted.",
    "deleted": "The folder of the run was deleted: this page shows the data that was read before.",
    "unknown": "run.json cannot be read: this page shows the tables only.",
}
PARTS = {
    "findings": "Findings",
    "training": "Training",
    "layers": "Layers",
    "flow": "Gradient flow",
    "units": "Units",
    "maps": "Maps",
    "interventions": "Interventions",
    "coverage": "Coverage",
    "events": "Events",
    "model": "Model",
}
MAX_VALUES = 260_000  # maximum number of values in all mosaics together
PIXELS, CHANNELS, STEPS = 48, 64, 6  # maximum side of a map or an input image, channels per mosaic, steps per location
FEWEST_PIXELS = 8
ASPECT = 2.6  # ratio of columns to rows of a mosaic
LocationMaps = list[TensorMaps]  # of one location, one per step


def content(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the template, and the data of the charts."""
    history = history_of(run)
    shown = panels(run, RUN_PANELS)
    others = frozenset().union(*(panel.shown for panel in shown.values()))
    numbers = {**charts(history), "maps": maps(run, history.order, others)}
    return values(history, numbers, findings(run), run.problems, shown), numbers


def values(
    history: RunHistory,
    numbers: Mapping[str, Any],
    all_findings: Sequence[Finding],
    problems: Sequence[str],
    shown: Mapping[str, Panel] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the values of the template. Of the data of the charts (`numbers`), `acted` and `alerts` are needed."""
    info, layers = history.info, history.layers
    hooks = dict.fromkeys(hook for row in layers for hook in row["hooks"])
    return {
        "title": info.get("name") or history.folder.name,
        "status": info["status"],
        "facts": _facts(history),
        "diagnoses": [(each, evidence(history, each.lead)) for each in diagnoses(all_findings)],
        "findings": [finding for finding in all_findings if not finding.rule],
        "interventions": bool(numbers["acted"]),
        "has_alerts": bool(numbers["alerts"]),
        "coverage": coverage_rows(history.coverage),
        "events": history.events[:MAX_EVENTS],
        "more_events": max(0, history.event_counts.total() - MAX_EVENTS),
        "tree": _tree(layers),
        "colour_of": dict(zip(hooks, cycle(CATEGORIES), strict=False)),
        "command": _command(info.get("command") or []),
        "config": yaml.safe_dump(info.get("config"), sort_keys=False, allow_unicode=True),
        "sweep": None,
        "takes_changes": False,
        "parts": list(PARTS.items()),
        "panels": shown,
        "alerts": [*(_alert("files", problem) for problem in problems), *_alerts(history)],
    }


def _command(arguments: list[str]) -> str:
    """Return the command line that started the run, as far as `sys.argv` shows it."""
    modules = {"__main__.py": "instrument", "instrument": "instrument", "replay.py": "instrument.replay"}
    module = modules.get(Path(arguments[0]).name) if arguments else None
    return shlex.join(arguments if module is None else ["python", "-m", module, *arguments[1:]])


def _facts(history: RunHistory) -> list[tuple[str, str]]:
    info = history.info
    data = info.get("data") or {}
    config, replay, forward = info.get("config") or {}, info.get("replay"), None
    if config.get("mode") == "forward":
        passes = ForwardConfig.model_validate(config.get("forward") or {})
        forward = f"forward, no training: {passes}"
    samples = f"{data['train_samples']:,}" if data.get("train_samples") else None
    if samples and forward is None:
        samples += f" for training, {data.get('eval_samples') or 0:,} for evaluation"
    origin, first = None, 0
    if replay:
        first, stop = replay["steps"]
        what = "counterfactual" if replay["counterfactual"] else "replay"
        origin = f"{what} of {replay['source']}, steps {first} to {stop - 1}"
    means = info.get("metrics") or {}
    steps = history.step - first
    total = history.steps if info["status"] == "running" else None
    of_forward = {} if forward is None else {f"mean {name}": means.get(name) for name in ("loss", "accuracy")}
    started, ended = (datetime.fromisoformat(info[key]) if info.get(key) else None for key in ("started", "ended"))
    facts = {
        "origin": origin,
        "model": (config.get("model") or {}).get("_target_"),
        "data": data.get("dataset"),
        "mode": forward,
        "samples": samples,
        "device": info.get("device"),
        "steps" if forward is None else "batches": f"{steps:,}" + (f" of {total:,}" if total else ""),
        **{name: format_number(mean) or None for name, mean in of_forward.items()},
        "weights": (info.get("init_from") or {}).get("path"),
        "seed": info.get("seed"),
        "started": None if started is None else started.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "duration": None if started is None or ended is None else ended - started,
        "overhead": None if info.get("overhead") is None else f"{info['overhead']:+.1%} per step",
        "parameters": f"{sum(row['parameters'] for row in history.layers):,}" if history.layers else None,
        "torch": (info.get("versions") or {}).get("torch"),
        "revision": (info.get("git_revision") or "")[:12] or None,
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _alerts(history: RunHistory) -> list[dict[str, Any]]:
    """Return the problems shown at the top of the page, the most severe ones first. Firings of rules are findings."""
    info = history.info
    alerts: list[dict[str, Any]] = []
    if info["status"] == "stopped":
        alerts.append(_alert("stopped", f"The run was stopped before its last step: {info.get('error')}", "warning"))
    elif info.get("error") and info["status"] != "interrupted":
        alerts.append(_alert(info["status"], info["error"]))
    elif info["status"] in OUTCOMES:
        alerts.append(_alert(info["status"], OUTCOMES[info["status"]], "warning"))
    if info.get("recording_stopped"):
        alerts.append(_alert("recording", info["recording_stopped"]))
    rules, known = rules_of(info), {alert["message"] for alert in alerts}
    more = [event for event in history.events if event["rule"] not in rules and event["message"] not in known]
    for severity in ("error", "warning"):
        alerts += [event for event in more if event["severity"] == severity]
    if len(alerts) > MAX_ALERTS:
        rest = f"{len(alerts) - MAX_ALERTS} more warnings are listed under Events"
        alerts = [*alerts[:MAX_ALERTS], _alert("events", rest, "warning")]
    return alerts


def _alert(rule: str, message: str, severity: str = "error") -> dict[str, Any]:
    return {"severity": severity, "rule": rule, "message": message, "step": None}


def _tree(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    nodes: dict[str, dict[str, Any]] = {}
    for row in layers:
        above, _, name = row["layer"].rpartition(".")
        nodes[row["layer"]] = {**row, "name": name or ".", "type": row["module_type"], "children": []}
        if row["layer"]:
            nodes[above if above in nodes else ""]["children"].append(nodes[row["layer"]])
    return nodes.get("")


def maps(run: Run, order: Sequence[str], others: Collection[tuple[RecordedSeries, str]] = ()) -> dict[str, Any]:
    """Return feature maps, gradient maps and filters at some steps, as mosaics with their input images.

    The number of values on the page is limited. The last step of each location is added first, then its first step,
    then the steps between. If the limit is too low, maps are downsampled; maps that still do not fit are omitted, and `others`, which the
    page shows in another way.

    Returns:
        `shown`, the mosaics in the order of the locations; `images`, to which the mosaics refer by index; `locations` and `pictures`,
        the total numbers of both.
    """
    all_maps = [one for one in maps_in(run) if (one.series, one.location) not in others]
    locations = _locations(all_maps, order)
    sizes = range(PIXELS, FEWEST_PIXELS, -4)
    fitting = (size for size in sizes if sum(_size(each[-1], size) for each in locations) <= MAX_VALUES // 2)
    pixels = next(fitting, FEWEST_PIXELS)
    chosen: list[tuple[int, int, TensorMaps]] = []  # with the turn in which each is added, and the rank of its location
    for rank, location in enumerate(locations):
        steps = [location[at] for at in evenly_spaced(len(location), STEPS)]
        chosen += [(turn, rank, one) for turn, one in enumerate(dict.fromkeys([steps[-1], steps[0], *steps]))]
    images: dict[tuple[TensorMaps, int], int] = {}  # the index of each input image
    shown: dict[tuple[int, int], dict[str, Any]] = {}
    room = MAX_VALUES
    for _, rank, one in sorted(chosen, key=itemgetter(0)):
        if _size(one, pixels) > room:
            continue
        image = image_of(one, all_maps)
        number = None if image is None else images.setdefault(image, len(images))
        picture = shown[rank, one.batch.step] = _picture(run, one, pixels, number)
        room -= sum(len(row) for row in picture["mosaic"]["z"])
    of = {"locations": len(locations), "pictures": sum(len(location) for location in locations)}
    drawn = [_input_image(image.values(run, sample)) for image, sample in images]
    return {"shown": [shown[rank] for rank in sorted(shown)], "images": drawn, **of}


def _locations(all_maps: list[TensorMaps], order: Sequence[str]) -> list[LocationMaps]:
    """Return the maps of each location in forward order, one for each step; of several calls the first."""
    rank = rank_in(order)
    locations: dict[tuple[str, str, str], LocationMaps] = {}
    for one in all_maps:
        if not one.is_image:
            at = locations.setdefault((one.what, one.series.label, one.location), [])
            if one.batch.step not in {other.batch.step for other in at}:
                at.append(one)
    return sorted(locations.values(), key=lambda location: (location[0].what, rank(location[0].layer)))


def _size(one: TensorMaps, pixels: int) -> int:
    """Return the approximate number of values in a mosaic of maps with at most `pixels` per side."""
    return min(CHANNELS, one.shape[-3]) * min(pixels, max(one.shape[-2:])) ** 2


def _picture(run: Run, one: TensorMaps, pixels: int, image: int | None) -> dict[str, Any]:
    return {
        "what": one.what,
        "label": one.series.label,
        "location": one.location,
        "step": one.batch.step,
        "shape": list(one.shape),
        "samples": one.shape[0] if len(one.shape) == 4 and not one.series.is_of_parameters else 1,
        "mosaic": _mosaic(one.values(run), pixels),
        "image": image,
    }


def _mosaic(values: np.ndarray, most: int) -> dict[str, Any]:
    """Return a mosaic with its color limits and the numbers of shown and recorded channels and pixels."""
    cut = values[:CHANNELS]
    if cut.ndim == 4:
        cut = cut[:, : max(1, CHANNELS // len(cut))] if cut.shape[1] > 3 else cut
    low, high = limits(values)
    pixels = smaller(cut, most)
    count = int(np.prod(cut.shape[:-2]))
    wide = None if count > len(cut) else max(1, min(count, round((ASPECT * count) ** 0.5)))
    return {
        "z": rounded(mosaic(pixels, columns=wide)),
        "low": rounded(low),
        "high": rounded(high),
        "channels": [count, int(np.prod(values.shape[:-2]))],
        "pixels": [*pixels.shape[-2:], *values.shape[-2:]],
    }


def _input_image(values: np.ndarray) -> dict[str, Any]:
    """Return an input image: one channel as values, three channels as colors from 0 to 255."""
    pixels = smaller(values, PIXELS)
    finite = pixels[np.isfinite(pixels)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if len(pixels) == 1:
        return {"z": rounded(pixels[0]), "low": rounded(low), "high": rounded(high), "colours": False}
    shades = np.nan_to_num((pixels - low) / ((high - low) or 1.0) * 255.0).round().astype(int)
    return {"z": shades.transpose(1, 2, 0).tolist(), "low": 0, "high": 255, "colours": True}
