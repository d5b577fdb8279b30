// Updates of a page that is served while its run is in progress: only changed groups of steps and texts are received.

const ORIGINAL = Object.fromEntries(["main", "nav"].map((name) => [name, document.querySelector(name).cloneNode(true)]));
const texts = {}; // the received HTML of parts of the page, by id

function follow(report) {
  const parameters = new URLSearchParams(location.search);
  parameters.set("since", report.version);
  const source = new EventSource(`changes?${parameters}`);
  source.onopen = () => setText("connection", "Connected: the page is updated while the run is in progress.");
  source.onmessage = (event) => update(report, JSON.parse(event.data));
  source.onerror = () => {
    const ended = source.readyState === EventSource.CLOSED;
    setText("connection", ended ? "The page is not updated any more: start the command again." : "The connection is lost: connecting again.");
  };
}

function update(report, changes) {
  report.version = changes.version;
  for (const [id, html] of Object.entries(changes.html)) {
    texts[id] = html;
    document.getElementById(id).innerHTML = html;
  }
  if (changes.whole) {
    const { colours, ...numbers } = changes.whole; // the colors of the page are unchanged
    Object.assign(report, numbers);
    rebuild(report);
  } else if (changes.curves) { // of a sweep
    report.runs = changes.runs;
    for (const [run, curves] of Object.entries(changes.curves)) report.curves[run] = curves;
    redraws.forEach((draw) => draw());
  } else {
    changes.series.forEach((one, i) => mergeGroups(report.series[i], one, Object.keys(one.statistics).map((name) => [report.series[i].statistics[name], one.statistics[name]])));
    changes.effects.forEach((one, i) => mergeGroups(report.effects[i], one, ["norm_before", "norm_after", "changed_fraction"].filter((name) => one[name]).map((name) => [report.effects[i][name], one[name]])));
    for (const [phase, one] of Object.entries(changes.metrics)) {
      const known = report.metrics[phase];
      mergeGroups(known, one, metricsOf(report, [one]).map((name) => [[known[name]], [one[name]]]));
      known.bad = changes.bad[phase];
    }
    changes.distributions.forEach((one, i) => {
      const known = report.distributions[i];
      mergeGroups(known, one, ["steps", "levels", "quantiles", "low", "high", "counts"].map((name) => [[known[name]], [one[name]]]));
      Object.assign(known, { of: one.of, several: one.several });
    });
    Object.assign(report, changes.lanes);
    redraws.forEach((draw) => draw());
  }
  document.documentElement.dataset.version = report.version;
}

/** Insert or replace groups of steps. Each table is a pair: the known rows, and the rows of the changed groups. */
function mergeGroups(known, changed, tables) {
  changed.groups.forEach((group, column) => {
    let at = known.groups.lastIndexOf(group);
    if (at < 0) {
      at = known.groups.filter((other) => other < group).length;
      known.groups.splice(at, 0, group);
      known.first.splice(at, 0, null);
      known.last.splice(at, 0, null);
      for (const [rows] of tables) rows.forEach((row) => row.splice(at, 0, null));
    }
    known.first[at] = changed.first[column];
    known.last[at] = changed.last[column];
    for (const [rows, cells] of tables) rows.forEach((row, i) => { row[at] = cells[i][column]; });
  });
}

/** Draw all charts again, with new layers, hooks and statistics. The choices in the drop-down lists are kept. */
function rebuild(report) {
  const chosen = [...document.querySelectorAll("select")].map(({ id, selectedOptions }) => [id, selectedOptions[0]?.text]);
  document.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.purge(chart));
  for (const [name, element] of Object.entries(ORIGINAL)) document.querySelector(name).replaceWith(element.cloneNode(true));
  for (const [id, html] of Object.entries(texts)) document.getElementById(id).innerHTML = html;
  redraws.length = 0;
  const position = scrollY;
  drawAll(report);
  for (const [id, text] of chosen) {
    const select = document.getElementById(id);
    const option = [...select.options].find((one) => one.text === text);
    if (!option || option.selected) continue;
    option.selected = true;
    select.dispatchEvent(new Event("change"));
  }
  scrollTo({ top: position, behavior: "instant" });
}

/** Send changes to the run, and show what it answers. */
async function change(text) {
  setText("changed", "The run makes the change when its current step ends.");
  const headers = { "content-type": "application/json" };
  try {
    const response = await fetch(`control${location.search}`, { method: "POST", headers, body: JSON.stringify(text) });
    setText("changed", await response.text());
    document.getElementById("changed").className = `mono ${response.ok ? "" : "bad"}`;
  } catch {
    setText("changed", "The connection is lost.");
  }
}

const form = document.getElementById("change");
form?.addEventListener("submit", (event) => {
  event.preventDefault();
  change(document.getElementById("changes").value);
});
form?.querySelectorAll("[value]").forEach((button) => button.addEventListener("click", () => {
  if (button.value !== "stop" || confirm("Stop the run?")) change(button.value);
}));
