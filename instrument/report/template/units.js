// Dead and saturated units, layer by layer over time.

const UNITS = ["dead_fraction", "saturated_fraction", "zero_fraction"];

RUN.push((report) => {
  const choices = [];
  for (const statistic of UNITS) {
    report.series.forEach((series, i) => {
      const activations = series.kind === "forward" && series.role === "output";
      if (series.statistics[statistic] && (activations || statistic === "dead_fraction")) choices.push([`${statistic}|${i}`, `${statistic} of ${series.label}`]);
    });
  }
  if (!choices.length) return hide("units");
  fill("units-choice", choices);
  const draw = () => {
    const [statistic, i] = document.getElementById("units-choice").value.split("|");
    const series = withValues(report.series[Number(i)], statistic);
    heatmap("units-chart", report, series, statistic);
    const known = report.series.some((one) => one.statistics.dead_fraction);
    say("units-note", `${statistic} = ${report.statistics[statistic].formula}.` + (known ? "" : " For dead units, record dead_fraction: hooks=dead_relu does."));
  };
  onChange(["units-choice"], draw);
  drawn(draw);
});

/** A series with just the places that have a statistic at all. */
function withValues(series, statistic) {
  const kept = series.places.map((_, i) => i).filter((i) => series.statistics[statistic][i].some((value) => value !== null));
  const statistics = Object.fromEntries(Object.entries(series.statistics).map(([name, rows]) => [name, kept.map((i) => rows[i])]));
  return { ...series, places: kept.map((i) => series.places[i]), statistics };
}
