// Page of several runs: values by override, training curves, layers, and runs with and without each intervention.

SWEEP.push((report) => {
  const first = report.overrides.find((key) => key !== "seed") ?? report.overrides[0];
  const numbers = [...metricChoices(report), ...statisticChoices(report)];
  if (!first || !numbers.length) return hide("against");
  fillSelect("against-y", numbers);
  fillSelect("against-x", report.overrides, first);
  document.getElementById("against-colour").append(new Option(report.overrides.find((key) => ![first, "seed"].includes(key)) ?? ""));
  fillSelect("against-end", Object.entries(report.ends));
  drawOn(["against-y", "against-location", "against-end", "against-x", "against-colour", "against-view"], () => drawAgainst(report));
});

SWEEP.push((report) => {
  const phases = ["train", "eval"].filter((phase) => report.curves.some((one) => one[phase]));
  const names = metricsOf(report, report.curves.flatMap((one) => phases.map((phase) => one[phase] ?? {})));
  if (!names.length) return hide("training");
  fillSelect("training-metric", names);
  fillSelect("training-phase", phases);
  colourBy(report, "training-colour");
  drawOn(["training-metric", "training-phase", "training-scale", "training-colour"], () => drawRuns(report));
});

SWEEP.push((report) => {
  if (!report.series.length) return hide("layers");
  fillSelect("layers-series", report.series.map((series, i) => [i, series.label]));
  fillSelect("layers-end", Object.entries(report.ends));
  colourBy(report, "layers-colour");
  drawOn(["layers-series", "layers-statistic", "layers-end", "layers-colour"], () => drawLayers(report));
});

const MANY = 12; // maximum number of levels in a legend or on an axis

function colourBy(report, id) {
  const usual = report.overrides.find((key) => key !== "seed") ?? "";
  fillSelect(id, [["", "run"], ...report.overrides], usual);
}

function metricChoices(report) {
  return metricsOf(report, report.runs.map((run) => ({ statistics: run.metrics }))).map((name) => [`metric|${name}`, `${name} of the last evaluation`]);
}

function statisticChoices(report) {
  return report.series.flatMap((series, i) => Object.keys(series.statistics).map((name) => [`${i}|${name}`, `${name} of ${series.label}`]));
}

/** The selected value of each run; null if the run does not have it. */
function chosenNumbers(report) {
  const [from, name] = document.getElementById("against-y").value.split("|");
  const isMetric = from === "metric";
  document.getElementById("against-location").closest("label").hidden = isMetric;
  document.getElementById("against-end").closest("label").hidden = isMetric;
  if (isMetric) return [report.runs.map((run) => run.metrics[name] ?? null), report.metricUnits[name] ?? name];
  const series = report.series[Number(from)];
  const location = fillSelect("against-location", series.locations);
  const end = document.getElementById("against-end").value;
  const at = series.locations.indexOf(location);
  return [series.statistics[name][end].map((row) => row[at]), plain(`${name} of ${location}, ${report.ends[end]}`)];
}

function drawAgainst(report) {
  const [numbers, title] = chosenNumbers(report);
  const [x, view] = ["against-x", "against-view"].map((id) => document.getElementById(id).value);
  const by = fillSelect("against-colour", [["", "none"], ...report.overrides.filter((key) => key !== x)]);
  document.getElementById("against-view").closest("label").hidden = !by;
  const known = report.runs.map((run, i) => ({ run, value: numbers[i] })).filter(({ run, value }) => run.status === "done" && value !== null);
  const seen = known.filter(({ value }) => typeof value === "number");
  const bad = known.filter(({ value }) => typeof value !== "number");
  const left = report.runs.length - known.length;
  const asMap = by && view === "map";
  setText("against-note", (asMap ? "" : "Each point is a run; lines connect the means of the runs with the same values. Bars: 95% Student's t intervals of means over seeds. ") + (left ? `${left} of ${report.runs.length} runs are not shown: they are not done, or do not have this value.` : ""));
  if (asMap) return drawGrid(seen, x, by, title);
  const levels = ordered(known.map((one) => one.run.overrides[x]));
  const numeric = levels.every((level) => typeof level === "number");
  const groups = by ? ordered(seen.map((one) => one.run.overrides[by])) : [null];
  const traces = groups.flatMap((group, i) => {
    const mine = seen.filter((one) => !by || one.run.overrides[by] === group);
    const name = by ? `${by} = ${short(String(group), 40)}` : "mean";
    const shade = report.colours[i % report.colours.length];
    const cells = levels.map((level) => mine.filter((one) => one.run.overrides[x] === level));
    return [
      {
        x: levels.map(plainLevel), y: cells.map((cell) => mean(cell.map((one) => one.value))), name: plain(name), legendgroup: name, mode: "lines",
        connectgaps: true, line: { color: shade }, error_y: { array: cells.map((cell) => halfWidth(report, cell)), color: shade, thickness: 1.5, width: 4 }, hoverinfo: "skip",
      },
      {
        x: mine.map((one) => plainLevel(one.run.overrides[x])), y: mine.map((one) => one.value), legendgroup: name, showlegend: false, mode: "markers",
        marker: { color: shade, size: 9 }, text: mine.map((one) => plain(`${one.run.name}, seed ${one.run.seed}`)),
        hovertemplate: `%{text}<br>${plain(x)} = %{x}<br>%{y:.5g}<extra></extra>`,
      },
    ];
  });
  if (bad.length) {
    traces.push({
      x: bad.map((one) => plainLevel(one.run.overrides[x])), y: bad.map(() => 1), yaxis: "y2", name: "not finite", mode: "markers",
      marker: { symbol: "x", size: 9, color: colour("bad") }, text: bad.map((one) => plain(`${one.run.name}, seed ${one.run.seed}: ${one.value}`)),
      hovertemplate: "%{text}<extra></extra>",
    });
  }
  plot("against-chart", traces, {
    height: 420,
    yaxis2: { overlaying: "y", range: [0, 1.04], visible: false, fixedrange: true },
    xaxis: { title: { text: plain(x) }, type: report.rates.includes(x) ? "log" : numeric ? "linear" : "category", ...levelTicks(levels, numeric) },
    yaxis: { title: { text: title }, type: axisType(seen.map((one) => one.value)) },
  });
}

/** One tick per level if there are few levels. */
function levelTicks(levels, numeric) {
  if (levels.length > MANY) return numeric ? {} : { nticks: MANY };
  return { tickmode: "array", tickvals: levels.map(plainLevel), ticktext: levels.map((level) => (numeric ? formatNumber(level) : plain(short(String(level), 28)))) };
}

function drawGrid(seen, x, by, title) {
  const [columns, rows] = [x, by].map((key) => ordered(seen.map((one) => one.run.overrides[key])));
  const cells = rows.map((row) => columns.map((column) => seen.filter((one) => one.run.overrides[x] === column && one.run.overrides[by] === row)));
  const values = cells.map((line) => line.map((cell) => mean(cell.map((one) => one.value))));
  const heading = `${title}: mean over runs`; // above the color bar, which is above the chart on a narrow page
  const namesOf = (levels) => (levels.length > MANY ? { nticks: MANY } : { tickmode: "array", tickvals: levels.map(plain), ticktext: levels.map((level) => plain(short(String(level), isNarrow() ? 12 : 28))) });
  const colours = colouredCells(values, scaleOf(values), isNarrow() ? heading : "", {
    x: columns.map(plain), y: rows.map(plain), xgap: 2, ygap: 2, text: values.map((line) => line.map(formatNumber)), texttemplate: "%{text}",
    hovertemplate: `${plain(x)} = %{x}<br>${plain(by)} = %{y}<br>%{customdata:.5g}<extra></extra>`,
  });
  plot("against-chart", [colours], {
    height: Math.max(260, 60 * rows.length + 120), title: { text: isNarrow() ? "" : heading, font: { size: 13 } }, margin: { l: 10, r: 10, t: 40, b: 10 },
    xaxis: { type: "category", title: { text: plain(x) }, showgrid: false, ...namesOf(columns) }, yaxis: { type: "category", title: { text: plain(by) }, showgrid: false, ...namesOf(rows) },
  });
}

function plainLevel(level) {
  return typeof level === "number" ? level : plain(level); // Plotly converts a number among strings to a string
}

function ordered(levels) {
  const known = [...new Set(levels)], isNumber = (level) => typeof level === "number";
  return [...known.filter(isNumber).sort((a, b) => a - b), ...known.filter((level) => !isNumber(level))];
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/** Half the width of Student's interval of the mean of runs that differ only in their seed; NaN for other runs. */
function halfWidth(report, cell) {
  const average = mean(cell.map((one) => one.value)), others = new Set(cell.map(({ run }) => JSON.stringify({ ...run.overrides, seed: null })));
  if (cell.length < 2 || others.size > 1) return NaN;
  const variance = cell.reduce((sum, { value }) => sum + (value - average) ** 2, 0) / (cell.length - 1);
  return report.students[cell.length - 2] * Math.sqrt(variance / cell.length);
}

/** The color and the legend label of each run, by override or by run. */
function runStyles(report, by) {
  const levels = by ? ordered(report.runs.map((run) => run.overrides[by])) : report.runs.map((run) => run.name);
  const isFew = levels.length <= MANY;
  const shown = new Set();
  return report.runs.map((run) => {
    const level = by ? run.overrides[by] : run.name;
    const i = levels.indexOf(level);
    const name = by ? `${by} = ${short(String(level), 40)}` : run.name;
    const first = !shown.has(name);
    shown.add(name);
    const color = isFew ? report.colours[i % report.colours.length] : VIRIDIS[Math.round((i / (levels.length - 1)) * (VIRIDIS.length - 1))][1];
    return {
      name: plain(name), legendgroup: name, showlegend: first && isFew,
      line: { color, width: 1.5, dash: isFew && i >= report.colours.length ? "dot" : "solid" },
      text: plain(`${run.name}: ${Object.entries(run.overrides).map(([key, value]) => `${key}=${value}`).join(", ")}`),
    };
  });
}

function drawRuns(report) {
  const [metric, phase, scale, by] = ["training-metric", "training-phase", "training-scale", "training-colour"].map((id) => document.getElementById(id).value);
  const traces = runStyles(report, by).flatMap((look, i) => {
    const axis = report.curves[i][phase];
    if (!axis?.statistics[metric]) return [];
    const mode = phase === "eval" ? { mode: "lines+markers", marker: {} } : {};
    return [stepLine(axis.first, axis.statistics[metric][0], look.name, { ...mode, ...look, hovertemplate: `${look.text}<br>step %{x}<br>${metric} %{y:.5g}<extra></extra>` })];
  });
  const type = axisType(traces.map((trace) => trace.y), scale);
  const bad = [...new Set(report.curves.flatMap((axes) => axes[phase]?.bad[metric] ?? []))].sort((a, b) => a - b);
  if (bad.length) traces.push(crosses(bad, `${metric} of a run not finite`, 1));
  const grouped = report.curves.find((axes) => axes[phase])?.[phase];
  plot("training-chart", traces, {
    height: 420, xaxis: { title: { text: grouped ? stepTitle(grouped) : "step" } }, yaxis: { title: { text: report.metricUnits[metric] ?? metric }, type },
    yaxis2: { overlaying: "y", range: [0, 1.04], visible: false, fixedrange: true },
  });
}

function drawLayers(report) {
  const series = report.series[Number(document.getElementById("layers-series").value)];
  const names = Object.keys(series.statistics);
  const before = document.getElementById("layers-statistic").value;
  const statistic = fillSelect("layers-statistic", names, names.includes(before) ? before : names.includes("l2") ? "l2" : names[0]);
  const end = document.getElementById("layers-end").value;
  const values = series.statistics[statistic][end];
  const type = axisType(values);
  const height = heightOf(series.locations) + 40;
  const traces = runStyles(report, document.getElementById("layers-colour").value).map((look, i) => ({
    x: onAxis(values[i], type), y: series.locations.map(plain), mode: "lines+markers", marker: { size: 5 }, ...look,
    hovertemplate: `${look.text}<br>%{y}<br>${statistic} %{x:.5g}<extra></extra>`,
  }));
  plot("layers-chart", traces, {
    height, xaxis: { title: { text: `${report.statistics[statistic].axis}, ${report.ends[end]}` }, type, exponentformat: "e" },
    yaxis: { ...locationsAxis(series.locations, height), showgrid: true },
  });
  setText("layers-note", omittedValuesNote(values, type) + (series.left_out.length ? `Omitted to limit the size of this page: ${series.left_out.join(", ")}.` : ""));
}
