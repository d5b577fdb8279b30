// Effects of interventions over time: norms before and after, and the fraction of changed elements.

RUN.push((report) => {
  if (!report.effects.length) return hide("interventions");
  fillSelect("effects-hook", report.effects.map((one, i) => [i, `${one.label}${one.settings ? ` — ${one.settings}` : ""}`]));
  drawOn(["effects-hook", "effects-location"], () => drawEffects(report));
});

function drawEffects(report) {
  const one = report.effects[Number(document.getElementById("effects-hook").value)];
  const row = one.locations.indexOf(fillSelect("effects-location", one.locations));
  const { norm_before: before = [], norm_after: after = [], changed_fraction: changed = [] } = rowOf(one, row);
  const type = axisType([...before, ...after]);
  const line = (y, name, more) => stepLine(one.first, y, name, { mode: "lines+markers", marker: { size: 5 }, ...more });
  plot("effects-chart", [
    line(before, "norm before", { line: { color: report.colours[1], dash: "dot" } }),
    line(after, "norm after", { line: { color: report.colours[0] } }),
    line(changed, "fraction changed", { yaxis: "y2", line: { color: report.colours[2], shape: "hv" } }),
  ], {
    height: 400,
    xaxis: { title: { text: stepTitle(one) }, anchor: "y2" },
    yaxis: { title: { text: "L2 norm" }, domain: [0.38, 1], type, exponentformat: "e" },
    yaxis2: { title: { text: "changed" }, domain: [0, 0.28], range: [-0.03, 1.05], tickformat: ".0%", automargin: true, gridcolor: colour("line") },
  });
}
