// Updates of a page that is served while its run is in progress: only changed groups of steps and texts are received.

const ORIGINAL = Object.fromEntries(["main", "nav"].map((name) => [name, document.querySelector(name).cloneNode(true)]));
const texts = {}; // the received HTML of parts of the page, by id
const opened = new Set(); // the findings whose consequences are shown

document.addEventListener("toggle", ({ target }) => opened[target.open ? "add" : "delete"](target.dataset.of), true);

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
    setPart(id, html);
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
    for (const [key, parts] of Object.entries(changes.parts)) {
      for (const [at, changed] of Object.entries(parts)) mergeGroups(report[key][at], changed);
    }
    Object.assign(report, changes.lanes);
    redraws.forEach((draw) => draw());
  }
  document.documentElement.dataset.version = report.version;
}

/** Replace the content of a part of the page. Opened consequences stay open. */
function setPart(id, html) {
  const part = document.getElementById(id);
  part.innerHTML = html;
  part.querySelectorAll("details").forEach((each) => { each.open = opened.has(each.dataset.of); });
}

/** Insert or replace groups of steps of a part of the data. */
function mergeGroups(known, { groups, first, last, statistics, ...labels }) {
  Object.assign(known, labels);
  const rows = Object.entries(statistics).flatMap(([name, cells]) => cells.map((row, i) => [known.statistics[name][i], row]));
  const lists = [[known.groups, groups], [known.first, first], [known.last, last], ...rows];
  groups.forEach((group, column) => {
    let at = known.groups.lastIndexOf(group);
    if (at < 0) {
      at = known.groups.filter((other) => other < group).length;
      for (const [list] of lists) list.splice(at, 0, null);
    }
    for (const [list, cells] of lists) list[at] = cells[column];
  });
}

/** Draw all charts again, with new layers, hooks and statistics. The choices in the drop-down lists are kept. */
function rebuild(report) {
  const chosen = [...document.querySelectorAll("select")].map(({ id, selectedOptions }) => [id, selectedOptions[0]?.text]);
  document.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.purge(chart));
  for (const [name, element] of Object.entries(ORIGINAL)) document.querySelector(name).replaceWith(element.cloneNode(true));
  for (const [id, html] of Object.entries(texts)) setPart(id, html);
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
