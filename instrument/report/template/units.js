// Dead and saturated units by layer over time.

const UNITS = ["dead_fraction", "saturated_fraction", "zero_fraction"];

RUN.push((report) => {
  const choices = [];
  for (const statistic of UNITS) {
    report.series.forEach((series, i) => {
      const activations = series.kind === "forward" && series.role === "output";
      if (series.statistics[statistic] && (activations || statistic === "dead_fraction")) choices.push([`${statistic}|${i}`, `${statistic} of ${series.label}`, activations]);
    });
  }
  if (!choices.length) return hide("units");
  choices.sort((one, other) => other[2] - one[2]); // features of the data, which hooks=inputs records, are no units of the network
  fillSelect("units-choice", choices);
  drawOn(["units-choice"], () => {
    const [statistic, i] = document.getElementById("units-choice").value.split("|");
    const series = withValues(report.series[Number(i)], statistic);
    heatmap("units-chart", report, series, statistic);
    const known = report.series.some((one) => one.statistics.dead_fraction);
    setText("units-note", `${statistic} = ${report.statistics[statistic].formula}.` + (known ? "" : " To show dead units, record dead_fraction, for example with hooks=dead_relu."));
  });
});

/** The series, restricted to the locations that have a statistic. */
function withValues(series, statistic) {
  const kept = series.locations.map((_, i) => i).filter((i) => series.statistics[statistic][i].some((value) => value !== null));
  const statistics = Object.fromEntries(Object.entries(series.statistics).map(([name, rows]) => [name, kept.map((i) => rows[i])]));
  return { ...series, locations: kept.map((i) => series.locations[i]), statistics };
}
