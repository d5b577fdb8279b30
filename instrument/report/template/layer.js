// One layer: statistics over steps, quantiles, and histogram over time.

function openLayer(report, location) {
  const series = chosenSeries(report);
  const row = series.locations.indexOf(location);
  document.getElementById("layer-location").value = location;
  const type = series.parameters ? `parameter of a ${series.types[location]}` : series.types[location];
  setText("layer-title", `${location}, ${type}`);
  drawCurves(report, series, row);
  const same = report.distributions.filter((one) => one.location === location && ["kind", "role", "phase"].every((key) => one[key] === series[key]));
  const distribution = same.find((one) => one.hook === series.hook) ?? same[0];
  const spread = distribution && { ...rowOf(distribution), steps: distribution.first, of: distribution.of, several: distribution.several };
  drawQuantiles(report, spread);
  drawHistograms(spread);
}

function drawCurves(report, series, row) {
  const chosen = document.getElementById("heatmap-statistic").value;
  const names = Object.keys(series.statistics).filter((name) => series.statistics[name][row].some((value) => value !== null));
  const type = axisType(series.statistics[chosen][row], document.getElementById("heatmap-scale").value);
  const traces = names.map((name, i) => ({
    x: series.first, y: series.statistics[name][row], name: isNarrow() ? name : report.statistics[name].axis, mode: "lines+markers", marker: { size: 4 },
    line: { color: report.colours[i % report.colours.length], dash: i >= report.colours.length ? "dot" : "solid" },
    visible: name === chosen ? true : "legendonly", hovertemplate: `step %{x}<br>${name} %{y:.5g}<extra></extra>`,
  }));
  plot("layer-curves", traces, {
    height: isNarrow() ? 380 : 340,
    ...(isNarrow() ? { legend: { ...layout().legend, entrywidth: 0.5, entrywidthmode: "fraction" } } : {}),
    xaxis: { title: { text: stepTitle(series) } },
    yaxis: { type },
  });
}

function drawQuantiles(report, distribution) {
  const traces = distribution?.quantiles.some(Boolean) ? quantileBands(distribution, report) : [];
  setText("layer-range-note", traces.length ? "" : "Not recorded. Set quantiles: true in the hook to show bands of quantiles.");
  document.getElementById("layer-range").hidden = !traces.length;
  if (traces.length) plot("layer-range", traces, { height: 320, xaxis: { title: { text: "step" } }, yaxis: { title: { text: "value" }, exponentformat: "e" } });
}

function quantileBands(distribution, report) {
  const levels = distribution.levels.find(Boolean);
  const at = (i) => distribution.quantiles.map((row) => (row ? row[i] : null));
  const traces = [];
  for (let i = 0; i < Math.floor(levels.length / 2); i += 1) {
    const name = `${formatNumber(100 * levels[i])} to ${formatNumber(100 * levels[levels.length - 1 - i])}%`;
    traces.push(band(distribution.steps, at(i), at(levels.length - 1 - i), name, report.colours[0], 0.14 + 0.12 * i));
  }
  if (levels.length % 2) {
    const middle = (levels.length - 1) / 2;
    const name = levels[middle] === 0.5 ? "median" : `${100 * levels[middle]}%`;
    traces.push(stepLine(distribution.steps, at(middle), name, { line: { color: report.colours[0], width: 2 } }));
  }
  return traces;
}

/** A band between two lines: one polygon for each range of steps without missing values. */
function band(x, low, high, name, shade, opacity) {
  const alpha = Math.round(Math.min(opacity, 0.9) * 255).toString(16).padStart(2, "0");
  const known = x.map((_, i) => i).filter((i) => (low[i] ?? null) !== null);
  const ends = known.filter((i) => !known.includes(i + 1));
  const pieces = ends.map((end, i) => known.filter((at) => at <= end && at > (ends[i - 1] ?? -1)));
  const outline = (below, above) => pieces.flatMap((piece) => [...piece.map(below), ...[...piece].reverse().map(above), null]);
  return {
    x: outline((i) => x[i], (i) => x[i]), y: outline((i) => low[i], (i) => high[i]), name, mode: "lines", line: { width: 0 }, fill: "toself",
    fillcolor: shade + alpha, hoveron: "points", hovertemplate: `step %{x}<br>%{y:.5g}<extra>${name}</extra>`,
  };
}

/** Draw the histogram of each step as a column with the recorded bin edges; nothing is rebinned. */
function drawHistograms(distribution) {
  const shown = distribution ? distribution.counts.map((_, i) => i).filter((i) => distribution.counts[i] && distribution.high[i] !== null) : [];
  document.getElementById("layer-histogram").hidden = !shown.length;
  setText("layer-histogram-note", !shown.length ? "Not recorded. Set histogram: true in the hook to show the histogram over time." :
    `Color: fraction of the step's finite elements in each of ${distribution.counts[shown[0]].length} equal bins from the smallest to the largest value. ` +
    (distribution.of > shown.length ? `${shown.length} of ${distribution.of} recorded steps are shown. ` : "") +
    (distribution.several ? "If a step has several calls or processes, the first one is shown." : ""));
  if (!shown.length) return;
  const shares = shown.map((i) => {
    const all = distribution.counts[i].reduce((sum, count) => sum + count, 0) || 1;
    return distribution.counts[i].map((count) => count / all);
  });
  const steps = shown.map((i) => distribution.steps[i]);
  const span = shown.reduce((most, i) => Math.max(most, distribution.high[i]), -Infinity) - shown.reduce((least, i) => Math.min(least, distribution.low[i]), Infinity);
  const traces = shown.map((step, i) => histogramColumn(distribution, step, shares[i], steps, i, span || 1));
  const least = shares.flat().reduce((low, share) => (share > 0 ? Math.min(low, share) : low), 1);
  const ticks = powers(Math.min(least, 0.1), 1, Math.log10);
  plot("layer-histogram", traces, {
    height: 340,
    coloraxis: {
      cmin: Math.log10(Math.min(least, 0.1)), cmax: 0, colorscale: VIRIDIS,
      colorbar: { title: { text: "fraction [logarithmic]", side: "right" }, thickness: 12, tickvals: ticks.values, ticktext: ticks.words },
    },
    xaxis: { title: { text: "step" } },
    yaxis: { title: { text: "value" }, exponentformat: "e" },
  });
}

function histogramColumn(distribution, i, shares, steps, at, span) {
  const [low, high] = [distribution.low[i], distribution.high[i]];
  const edges = shares.map((_, bin) => low + (bin * (high - low)) / shares.length).concat(high);
  const thin = span / 100; // half height of the column if all values are equal
  const left = at > 0 ? (steps[at - 1] + steps[at]) / 2 : steps[at] - (steps.length > 1 ? (steps[1] - steps[0]) / 2 : 0.5);
  const right = at < steps.length - 1 ? (steps[at] + steps[at + 1]) / 2 : steps[at] + (steps[at] - left);
  return {
    type: "heatmap", x: [left, right], y: high > low ? edges : [low - thin, low + thin], coloraxis: "coloraxis", hoverongaps: false,
    z: (high > low ? shares : [1]).map((share) => [share > 0 ? Math.log10(share) : null]),
    customdata: distribution.counts[i].map((count, bin) => [count, shares[bin]]).map((cell) => [cell]),
    hovertemplate: `step ${distribution.steps[i]}<br>around %{y:.4g}<br>%{customdata[0]:,} elements, %{customdata[1]:.2%}<extra></extra>`,
  };
}
