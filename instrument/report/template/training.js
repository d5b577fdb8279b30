// Training curves, with lanes below that show the steps of interventions and alerts.

RUN.push((report) => {
  const phases = [report.metrics.train, report.metrics.eval, report.metrics.rollout].filter(Boolean);
  const names = metricsOf(report, phases);
  if (!names.length) return hide("training");
  fillSelect("training-metric", names);
  drawOn(["training-metric", "training-scale"], () => drawTraining(report));
});

/** The names of the metrics in some of these curves. Those of every run come first. */
function metricsOf(report, curves) {
  const names = new Set(curves.flatMap((one) => Object.keys({ ...one.statistics, ...one.bad })));
  return [...report.metricNames.filter((name) => names.delete(name)), ...names];
}

function drawTraining(report) {
  const metric = document.getElementById("training-metric").value;
  const { train, eval: evaluation, rollout } = report.metrics;
  const traces = [];
  if (train?.statistics[metric]) traces.push(stepLine(train.first, train.statistics[metric][0], "training", { line: { color: report.colours[0], width: 1.8 } }));
  if (evaluation?.statistics[metric]) {
    const marker = { color: report.colours[1], size: 8, symbol: "diamond" };
    traces.push(stepLine(evaluation.first, evaluation.statistics[metric][0], "evaluation", { mode: "lines+markers", marker, line: { dash: "dot" } }));
  }
  if (rollout?.statistics[metric]) traces.push(stepLine(rollout.first, rollout.statistics[metric][0], "rollouts", { line: { color: report.colours[2 % report.colours.length] } }));
  if (train?.bad[metric]) traces.push(crosses(train.bad[metric], `${metric} not finite`, 1));
  if (evaluation?.bad[metric]) traces.push(crosses(evaluation.bad[metric], `${metric} of an evaluation not finite`, 0.95));
  const alertLanes = ["rules", "alerts"].filter((name) => report.alerts.some((alert) => alert.lane === name));
  const lanes = [...report.acted.map((one) => one.hook), ...alertLanes];
  report.acted.forEach((one, i) => traces.push(lane(one, report.colours[(i + 2) % report.colours.length])));
  for (const name of alertLanes) traces.push(alertLane(name, report.alerts.filter((alert) => alert.lane === name)));
  const share = lanes.length ? Math.min(0.45, 0.09 * lanes.length + 0.05) : 0;
  const type = axisType([train, evaluation, rollout].flatMap((axis) => axis?.statistics[metric] ?? []), document.getElementById("training-scale").value);
  plot("training-chart", traces, {
    height: 320 + 24 * lanes.length,
    xaxis: { title: { text: train ? stepTitle(train, "means") : "step" }, anchor: lanes.length ? "y3" : "y" },
    yaxis: { title: { text: report.metricUnits[metric] ?? metric }, domain: [share, 1], type },
    yaxis2: { overlaying: "y", range: [0, 1.05], visible: false, fixedrange: true },
    yaxis3: {
      domain: [0, Math.max(0, share - 0.06)], type: "category", categoryarray: lanes.map(plain).reverse(), categoryorder: "array",
      tickvals: lanes.map(plain), ticktext: lanes.map((name) => plain(short(name, 18))),
      range: [-0.6, lanes.length - 0.4], fixedrange: true, automargin: true, gridcolor: colour("line"), tickfont: { size: 11 },
    },
  });
}

/** Steps at which a metric is not a finite number, along the upper edge. */
function crosses(steps, name, height) {
  return {
    x: steps, y: steps.map(() => height), yaxis: "y2", name, mode: "markers",
    marker: { symbol: "x", size: 8, color: colour("bad") }, hovertemplate: `${name} at step %{x}<extra></extra>`,
  };
}

function lane(one, shade) {
  const x = [];
  for (const [begin, end] of one.steps) x.push(begin, end, null);
  return {
    x, y: x.map((step) => (step === null ? null : plain(one.hook))), yaxis: "y3", name: plain(one.hook), showlegend: false,
    mode: "lines+markers", line: { width: 7, color: shade }, marker: { size: 6, symbol: "square", color: shade },
    hovertemplate: `${plain(one.hook)} fired at ${one.count.toLocaleString()} steps, here at %{x}<extra></extra>`,
  };
}

function alertLane(name, alerts) {
  return {
    x: alerts.map((alert) => alert.step), y: alerts.map(() => name), yaxis: "y3", name, showlegend: false, mode: "markers",
    marker: { symbol: "triangle-up", size: 11, color: alerts.map((alert) => colour(alert.severity === "error" ? "bad" : "warn")) },
    text: alerts.map((alert) => plain(wrapped(`${alert.rule}: ${alert.message}`)).replace(/\n/g, "<br>")),
    hovertemplate: "step %{x}<br>%{text}<extra></extra>",
  };
}

function wrapped(text, most = 70) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines[lines.length - 1].length + word.length > most) lines.push("");
    lines[lines.length - 1] += `${word} `;
  }
  return lines.slice(0, 8).join("\n");
}
