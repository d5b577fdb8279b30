// Heat map of a statistic over layers and steps; a click on a row shows the layer.

RUN.push((report) => {
  if (!report.series.length) return hide("layers");
  const preferred = report.series.findIndex((series) => series.kind === "forward" && series.role === "output");
  fillSelect("heatmap-series", report.series.map((series, i) => [i, series.label]), Math.max(0, preferred));
  drawOn(["heatmap-series", "heatmap-statistic", "heatmap-scale"], () => drawHeatmap(report));
  const list = document.getElementById("layer-location");
  list.addEventListener("change", () => openLayer(report, list.value));
  const chart = document.getElementById("heatmap-chart");
  const open = (location) => {
    openLayer(report, location);
    document.getElementById("layer").scrollIntoView({ behavior: "smooth", block: "nearest" });
  };
  const locations = () => chosenSeries(report).locations;
  chart.on("plotly_click", (event) => open(locations().find((location) => plain(location) === event.points[0].y)));
  chart.addEventListener("click", (event) => {
    const name = event.target.closest(".ytick")?.textContent;
    const location = locations().find((one) => axisLabel(one) === name);
    if (location) open(location);
  });
});

function chosenSeries(report) {
  return report.series[Number(document.getElementById("heatmap-series").value)];
}

function drawHeatmap(report) {
  const series = chosenSeries(report);
  const names = Object.keys(series.statistics);
  const before = document.getElementById("heatmap-statistic").value;
  const statistic = fillSelect("heatmap-statistic", names, names.includes(before) ? before : series.usual);
  heatmap("heatmap-chart", report, series, statistic, document.getElementById("heatmap-scale").value);
  setText("heatmap-note", heatmapNote(report, series, statistic));
  const open = document.getElementById("layer-location").value;
  fillSelect("layer-location", series.locations);
  openLayer(report, series.locations.includes(open) ? open : series.locations[0]);
}

function heatmapNote(report, series, statistic) {
  const about = report.statistics[statistic];
  const several = { mean: "mean", max: "maximum", min: "minimum" }[about.merged];
  const grouped = series.first.some((first, i) => first !== series.last[i]);
  return `${statistic} = ${about.formula}. ` +
    (grouped ? `Steps are grouped to limit the size of this page: each cell shows the ${several} of several steps. ` : "") +
    (series.several ? `Values of several calls, micro-batches or processes in a step are merged: the ${several} is shown. ` : "") +
    "Empty cells have no value. Gray cells are zero on a logarithmic scale. Click a row to show the layer below.";
}

function heatmap(id, report, series, statistic, choice = "auto") {
  const values = series.statistics[statistic];
  const scale = scaleOf(values, choice, choice === "log" ? null : report.statistics[statistic].bounds);
  const height = heightOf(series.locations);
  const labels = stepLabels(series);
  const crosses = notFinite(series, labels);
  // With a color bar above the cells, Plotly takes labels of steps for empty, and draws the legend over the bar.
  const [bar, standoff] = isNarrow() ? [70 + 24 * crosses.length, 30] : [0, 8];
  const legend = { ...layout().legend, ...(isNarrow() ? { yref: "container", y: 1, yanchor: "top" } : {}) };
  const cells = colouredCells(values, scale, report.statistics[statistic].axis + (scale.log ? " [logarithmic]" : ""), {
    x: labels, y: series.locations.map(plain), xgap: labels.length > 80 ? 0 : 1, ygap: series.locations.length * 4 > height ? 0 : 1,
    hovertemplate: `%{y}<br>step %{x}<br>${statistic} %{customdata:.5g}<extra></extra>`,
  });
  plot(id, [cells, ...crosses], {
    height: height + bar,
    legend,
    margin: { l: 10, r: 10, t: 6 + bar, b: 46 },
    xaxis: { type: "category", automargin: false, title: { text: stepTitle(series), standoff }, ...stepTicks(series), tickangle: 0, showgrid: false },
    yaxis: locationsAxis(series.locations, height),
  });
}

/** Whether a tensor has non-finite elements. Infinite attention scores are masked keys. */
function isNotFinite(series, row, column) {
  const counts = series.role === "scores" ? ["nan_count"] : ["nan_count", "inf_count"];
  return counts.some((name) => series.statistics[name]?.[row][column] > 0);
}

/** Crosses at tensors with non-finite elements, for any statistic, because other statistics do not include them. */
function notFinite(series, labels) {
  const x = [];
  const y = [];
  series.locations.forEach((location, row) => labels.forEach((label, column) => {
    if (isNotFinite(series, row, column)) { x.push(label); y.push(plain(location)); }
  }));
  if (!x.length) return [];
  const marker = { symbol: "x-thin", size: 6, line: { color: "#D55E00", width: 1.6 } };
  return [{ x, y, type: "scatter", mode: "markers", marker, name: "NaN or infinite values", showlegend: true, hovertemplate: "%{y}, step %{x}: NaN or infinite values<extra></extra>" }];
}
