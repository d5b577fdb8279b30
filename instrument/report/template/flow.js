// Norms of gradients and update ratios of all layers, at the first and the last recorded step.

RUN.push((report) => {
  const gradients = report.series.filter((series) => series.gradient && series.statistics.l2);
  const updates = report.series.filter((series) => series.statistics.update_ratio);
  if (!gradients.length && !updates.length) return hide("flow");
  if (gradients.length) {
    const usual = gradients.findIndex((series) => series.kind === "parameter_grad");
    fillSelect("flow-series", gradients.map((series, i) => [i, series.label]), Math.max(0, usual));
    const draw = () => dumbbells("flow-chart", report, gradients[Number(document.getElementById("flow-series").value)], "l2", "gradient norm (l2)");
    drawOn(["flow-series"], draw);
  } else document.getElementById("flow-gradients").hidden = true;
  fillSelect("updates-series", updates.map((series, i) => [i, series.label]));
  if (updates.length) {
    const chosen = () => updates[Number(document.getElementById("updates-series").value)];
    const draw = () => dumbbells("updates-chart", report, chosen(), "update_ratio", isNarrow() ? "update ratio" : "update ratio: norm of the update / norm of the parameter", report.usualUpdates);
    drawOn(["updates-series"], draw);
  } else setText("updates-note", "Not recorded. Add a hook such as {layers: \"**\", kind: step_post, role: update, action: record, stats: [default, update_ratio]}, or pass hooks=parameters.");
});

function firstAndLast(series, statistic) {
  const rows = series.statistics[statistic];
  const labels = stepLabels(series);
  return [0, labels.length - 1].map((at) => ({
    values: rows.map((row) => row[at]), step: labels[at],
    bad: rows.filter((row, i) => row[at] === null && isNotFinite(series, i, at)).length,
  }));
}

/** Notes on the values that have no dot on the logarithmic axis. */
function hiddenValuesNotes(first, last) {
  const ends = first.step === last.step ? [last] : [first, last];
  const zeros = [...first.values, ...last.values].filter((value) => value === 0).length;
  const words = zeros ? [`◁ ${zeros} zero`] : [];
  for (const end of ends) {
    const missing = end.values.filter((value) => value === null).length - end.bad;
    if (end.bad) words.push(`${end.bad} not finite at step ${end.step}`);
    if (missing) words.push(`${missing} not recorded at step ${end.step}`);
  }
  return words.length ? [words.join("; ")] : [];
}

function dumbbells(id, report, series, statistic, title, healthy = null) {
  const [first, last] = firstAndLast(series, statistic);
  const y = series.locations.map(plain);
  const height = heightOf(series.locations);
  const sizes = [...first.values, ...last.values].filter((value) => value > 0);
  const least = sizes.reduce((low, value) => Math.min(low, value), healthy?.[0] ?? 1);
  const most = sizes.reduce((high, value) => Math.max(high, value), healthy?.[1] ?? least);
  const edge = least / Math.max(2, (most / least) ** 0.05); // position of zeros, left of all other values
  const dots = (end, name, symbol, shade) => ({
    x: end.values.map((value) => (value === 0 ? edge : value)), y, customdata: end.values, name: `${name} (step ${end.step})`, mode: "markers",
    marker: { symbol: end.values.map((value) => (value === 0 ? "triangle-left-open" : symbol)), size: 9, color: shade, line: { width: 2, color: shade } },
    hovertemplate: `%{y}<br>step ${end.step}<br>${statistic} %{customdata:.5g}<extra></extra>`,
  });
  const lines = { x: [], y: [], mode: "lines", line: { color: colour("line"), width: 3 }, hoverinfo: "skip", showlegend: false };
  y.forEach((location, i) => { if (first.values[i] > 0 && last.values[i] > 0) { lines.x.push(first.values[i], last.values[i], null); lines.y.push(location, location, null); } });
  const shapes = healthy ? [{ type: "rect", xref: "x", yref: "paper", x0: healthy[0], x1: healthy[1], y0: 0, y1: 1, fillcolor: "#009E73", opacity: 0.13, line: { width: 0 }, layer: "below" }] : [];
  const decades = Math.log10(most / edge);
  const ticks = decades < 2 ? { nticks: 6 } : { dtick: Math.max(1, Math.ceil(decades / (isNarrow() ? 4 : 9))) };
  plot(id, [lines, dots(first, "first recorded", "circle-open", report.colours[1]), dots(last, "last", "circle", report.colours[0])], {
    height, shapes,
    annotations: hiddenValuesNotes(first, last).map((text, i) => ({ text, showarrow: false, xref: "paper", yref: "paper", x: 1, y: 1.02 + 0.001 * i, xanchor: "right", yanchor: "bottom", font: { size: 11, color: colour("muted") } })),
    xaxis: { type: "log", title: { text: title }, tickangle: 0, ...ticks },
    yaxis: { ...locationsAxis(series.locations, height), showgrid: true },
  });
}
