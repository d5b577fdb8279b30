// The size of gradients and of updates, layer by layer, at the first and the last step that was recorded.

RUN.push((report) => {
  const gradients = report.series.filter((series) => series.gradient && series.statistics.l2);
  const updates = report.series.filter((series) => series.statistics.update_ratio);
  if (!gradients.length && !updates.length) return hide("flow");
  if (gradients.length) {
    const usual = gradients.findIndex((series) => series.kind === "parameter_grad");
    fill("flow-series", gradients.map((series, i) => [i, series.label]), Math.max(0, usual));
    const draw = () => dumbbells("flow-chart", report, gradients[Number(document.getElementById("flow-series").value)], "l2", "gradient norm (l2)");
    onChange(["flow-series"], draw);
    drawn(draw);
  } else document.getElementById("flow-gradients").hidden = true;
  if (updates.length) {
    fill("updates-series", updates.map((series, i) => [i, series.label]));
    const chosen = () => updates[Number(document.getElementById("updates-series").value)];
    const draw = () => dumbbells("updates-chart", report, chosen(), "update_ratio", isNarrow() ? "update ratio" : "update ratio: norm of the update / norm of the parameter", report.usualUpdates);
    onChange(["updates-series"], draw);
    drawn(draw);
  } else say("updates-note", "Not recorded. It needs a hook: {layers: \"**\", kind: step_post, role: update, action: record, stats: [default, update_ratio]}, or hooks=parameters.");
});

function ends(series, statistic) {
  const rows = series.statistics[statistic];
  const labels = stepLabels(series);
  const first = rows.map((row) => row.findIndex((value) => value !== null));
  const last = rows.map((row) => row.findLastIndex((value) => value !== null));
  return [first, last].map((places) => ({
    values: rows.map((row, i) => (places[i] < 0 ? null : row[places[i]])),
    steps: places.map((place) => (place < 0 ? "" : labels[place])),
  }));
}

/** The steps at the ends of all places: one, or from the first to the last of several. */
function stepsOf(end) {
  const known = [...new Set(end.steps.filter(Boolean))];
  return known.length > 1 ? `${known[0]} and others` : known[0];
}

function dumbbells(id, report, series, statistic, title, healthy = null) {
  const [first, last] = ends(series, statistic);
  const y = series.places.map(plain);
  const height = heightOf(series.places);
  const zeros = [...first.values, ...last.values].filter((value) => value === 0).length;
  const dots = (end, name, symbol, shade) => ({
    x: end.values.map((value) => (value > 0 ? value : null)), y, customdata: end.steps, name, mode: "markers",
    marker: { symbol, size: 9, color: shade, line: { width: 2, color: shade } },
    hovertemplate: `%{y}<br>step %{customdata}<br>${statistic} %{x:.5g}<extra></extra>`,
  });
  const lines = { x: [], y: [], mode: "lines", line: { color: colour("line"), width: 3 }, hoverinfo: "skip", showlegend: false };
  y.forEach((place, i) => { if (first.values[i] > 0 && last.values[i] > 0) { lines.x.push(first.values[i], last.values[i], null); lines.y.push(place, place, null); } });
  const shapes = healthy ? [{ type: "rect", xref: "x", yref: "paper", x0: healthy[0], x1: healthy[1], y0: 0, y1: 1, fillcolor: "#009E73", opacity: 0.13, line: { width: 0 }, layer: "below" }] : [];
  plot(id, [lines, dots(first, `first recorded (${stepsOf(first)})`, "circle-open", report.colours[1]), dots(last, `last (${stepsOf(last)})`, "circle", report.colours[0])], {
    height, shapes,
    xaxis: { type: "log", title: { text: title + (zeros ? `; ${zeros} of zero not drawn` : "") }, exponentformat: "e", dtick: isNarrow() ? 2 : 1 },
    yaxis: { ...placesAxis(series.places, height), showgrid: true },
  });
}
