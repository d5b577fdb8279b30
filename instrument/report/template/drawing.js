// Common functions of all charts: colors of the page, axes, scales, short names, and controls.

// The tool bar is above the chart (style.css). The button that uploads a chart to a server of Plotly is removed.
const CONFIG = { responsive: true, displaylogo: false, showSendToCloud: false, displayModeBar: innerWidth < 700 ? false : "hover", modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
const DARK = matchMedia("(prefers-color-scheme: dark)");
const LIGHTER = { "#0072B2": "#4aa8e0", "#56B4E9": "#9ad4f5", "#D55E00": "#f08a3c" }; // the same hues on a dark page
const redraws = [];

/** Draw a chart now, when one of these drop-down lists changes, and when the page switches between light and dark. */
function drawOn(ids, draw) {
  for (const id of ids) document.getElementById(id).addEventListener("change", draw);
  redraws.push(draw);
  draw();
}
DARK.addEventListener("change", () => redraws.forEach((draw) => draw()));

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function isNarrow() {
  return innerWidth < 700;
}

/** Escape a text for Plotly, which interprets markup in labels. */
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** Shorten a long name by omitting its middle. */
function short(text, most = isNarrow() ? 18 : 44) {
  if (text.length <= most) return text;
  const tail = Math.ceil((most - 1) * 0.6);
  return `${text.slice(0, most - 1 - tail)}…${text.slice(-tail)}`;
}

function layout(more = {}) {
  const axis = { exponentformat: "e", gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true };
  const { xaxis, yaxis, ...rest } = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("text"), family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text") }, align: "left" },
    modebar: { orientation: "h", bgcolor: "rgba(0,0,0,0)", color: colour("muted"), activecolor: colour("accent") },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    margin: { l: 10, r: 10, t: 6, b: 10 },
    dragmode: isNarrow() ? false : "zoom",
    datarevision: performance.now(), // a page in progress adds steps to the arrays that are drawn
    uirevision: typeof follow === "function" ? [...document.querySelectorAll("select")].map((select) => select.value).join() : undefined,
    ...rest,
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, ...yaxis },
  };
}

function plot(id, traces, more) {
  const element = typeof id === "string" ? document.getElementById(id) : id;
  return Plotly.react(element, traces, layout(more), CONFIG);
}

/** A line over steps. */
function stepLine(x, y, name, more = {}) {
  const known = (i) => (y[i] ?? null) !== null;
  const alone = y.map((_, i) => known(i) && !known(i - 1) && !known(i + 1)); // a line does not show these points
  const points = alone.some(Boolean) ? { mode: "lines+markers", marker: { size: alone.map((is) => (is ? 7 : 0)) } } : { mode: "lines" };
  return { x, y, name, ...points, hovertemplate: `step %{x}<br>${name} %{y:.5g}<extra></extra>`, ...more };
}

/** Labels of groups of steps: `5`, or `0–9` if a group has several steps. */
function stepLabels(axis) {
  return axis.first.map((first, i) => (first === axis.last[i] ? `${first}` : `${first}–${axis.last[i]}`));
}

/** Ticks of an axis with one category for each group of steps: the groups with a round step, as many as fit. */
function stepTicks(axis) {
  const least = Math.max(1, (axis.last[axis.last.length - 1] - axis.first[0]) / (isNarrow() ? 5 : 15));
  const power = 10 ** Math.floor(Math.log10(least));
  const stride = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= least);
  const shown = axis.first.map((_, i) => i).filter((i) => Math.floor(axis.last[i] / stride) > Math.floor((axis.last[i - 1] ?? axis.first[0] - 1) / stride));
  const labels = stepLabels(axis);
  return { tickmode: "array", tickvals: shown.map((i) => labels[i]), ticktext: shown.map((i) => `${axis.first[i]}`) };
}

function stepTitle(axis, merged = "in groups") {
  const widest = Math.max(1, ...axis.first.map((first, i) => axis.last[i] - first + 1));
  return widest > 1 ? `step (${merged} of up to ${widest.toLocaleString()})` : "step";
}

/** The statistics of one location by name, each with one value for each group of steps. */
function rowOf(part, row = 0) {
  return Object.fromEntries(Object.entries(part.statistics).map(([name, rows]) => [name, rows[row]]));
}

/** The name of a location on an axis. */
function axisLabel(location) {
  return NAMES[location]?.[isNarrow() ? 1 : 0] ?? short(location);
}

/** An axis with one row per location, from top to bottom; as many names are shown as fit. */
function locationsAxis(locations, height) {
  const every = Math.max(1, Math.ceil((locations.length * 13) / Math.max(1, height - 80)));
  const shown = locations.filter((_, i) => i % every === 0);
  return {
    type: "category",
    categoryorder: "array",
    categoryarray: locations.map(plain),
    autorange: "reversed",
    tickmode: "array",
    tickvals: shown.map(plain),
    ticktext: shown.map((location) => plain(axisLabel(location))),
    tickfont: { size: 11 },
    showgrid: false,
  };
}

function heightOf(locations) {
  return Math.min(1500, Math.max(230, locations.length * 17 + 110));
}

/** Format a number with four digits. */
function formatNumber(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"]
  .map((shade, i, all) => [i / (all.length - 1), shade]);
const ZERO = "#9a9a9a"; // color of zeros on a logarithmic scale
const SIGNED = ["#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f"]
  .map((shade, i, all) => [i / (all.length - 1), shade]);

/** The color scale of values: linear, or logarithmic for a wide range; symmetric around zero if there are negative values. */
function scaleOf(values, choice = "auto", bounds = null) {
  const all = values.flat().filter((value) => value !== null);
  const sizes = all.map(Math.abs).filter((size) => size > 0).sort((a, b) => a - b);
  const smallest = sizes[0] ?? 1;
  const largest = sizes[sizes.length - 1] ?? 1;
  const signed = all.some((value) => value < 0);
  if (bounds) return { to: (value) => value, low: bounds[0], high: bounds[1], colours: VIRIDIS, log: false, ticks: null };
  const typical = sizes[Math.floor(sizes.length / 2)] ?? 1;
  const wide = signed ? largest / typical > 100 : largest / smallest > 100;
  const log = choice === "log" || (choice === "auto" && wide);
  if (!log) {
    const low = signed ? -largest : all.reduce((least, value) => Math.min(least, value), largest);
    return { to: (value) => value, low, high: largest, colours: signed ? SIGNED : VIRIDIS, log: false, ticks: null };
  }
  if (!signed) return magnitudes(smallest, largest, all.some((value) => value === 0));
  const floor = Math.max(smallest, largest / 1e6);
  const to = (value) => Math.sign(value) * Math.log10(1 + Math.abs(value) / floor);
  const positive = powers(floor, largest, to);
  const ticks = {
    values: [...positive.values.map((value) => -value).reverse(), 0, ...positive.values],
    words: [...positive.words.map((word) => `−${word}`).reverse(), "0", ...positive.words],
  };
  return { to, low: to(-largest), high: to(largest), colours: SIGNED, log: true, ticks };
}

/** The logarithmic color scale of magnitudes; zeros have a separate color below all others. */
function magnitudes(smallest, largest, hasZero) {
  const [low, high] = [Math.log10(smallest), Math.log10(largest)];
  const step = Math.max(high - low, 0.3) / 12;
  const ticks = powers(smallest, largest, Math.log10);
  if (!hasZero) return { to: Math.log10, low, high, colours: VIRIDIS, log: true, ticks };
  const floor = low - 2 * step;
  const edge = (low - step / 2 - floor) / (high - floor);
  const colours = [[0, ZERO], [edge, ZERO], ...VIRIDIS.map(([at, shade]) => [edge + at * (1 - edge), shade])];
  const withZero = { values: [low - 1.25 * step, ...ticks.values], words: ["0", ...ticks.words] };
  return { to: (value) => (value === 0 ? low - 1.25 * step : Math.log10(value)), low: floor, high, colours, log: true, ticks: withZero };
}

function powers(smallest, largest, to) {
  const first = Math.ceil(Math.log10(smallest) - 1e-9);
  const last = Math.floor(Math.log10(largest) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / 7));
  const values = [];
  for (let power = first; power <= last; power += every) values.push(power);
  if (!values.length) return { values: [to(smallest), to(largest)], words: [formatNumber(smallest), formatNumber(largest)] };
  return { values: values.map((power) => to(10 ** power)), words: values.map((power) => `1e${power}`) };
}

/** The type of an axis for these values: logarithmic for a wide range. A logarithmic axis omits values that are not positive. */
function axisType(values, choice = "auto") {
  const all = values.flat().filter((value) => value !== null);
  const wide = all.every((value) => value >= 0) && all.some((value) => value > 0) && scaleOf([all], choice).log;
  return choice === "log" || (choice === "auto" && wide) ? "log" : "linear";
}

/** The values, without those that a logarithmic axis omits: Plotly would connect them to the edge of the chart. */
function onAxis(values, type) {
  return type === "log" ? values.map((value) => (value > 0 ? value : null)) : values;
}

/** A note with the number of values that a logarithmic axis omits. */
function omittedValuesNote(values, type) {
  const lost = type === "log" ? values.flat().filter((value) => value !== null && value <= 0).length : 0;
  return lost ? `Values that are zero or negative, which the logarithmic axis omits: ${lost}. ` : "";
}

/** The cells of a heat map in the colors of a scale, with a color bar. */
function colouredCells(values, scale, title, more) {
  const bar = { title: { text: isNarrow() ? title : title.replace(" [", "<br>["), side: isNarrow() ? "top" : "right" }, thickness: 12, len: 1, outlinewidth: 0 };
  const lying = isNarrow() ? { orientation: "h", y: 1.02, yanchor: "bottom", x: 0.5, ypad: 0 } : {};
  const ticks = scale.ticks ? { tickvals: scale.ticks.values, ticktext: scale.ticks.words } : {};
  return {
    type: "heatmap", customdata: values, z: values.map((row) => row.map((value) => (value === null ? null : scale.to(value)))),
    zmin: scale.low, zmax: scale.high, colorscale: scale.colours, hoverongaps: false, colorbar: { ...bar, ...lying, ...ticks }, ...more,
  };
}

/** Fill a drop-down list and return the selected value. Entries are texts, or pairs of a value and a text. */
function fillSelect(id, entries, chosen) {
  const select = document.getElementById(id);
  const before = chosen ?? select.value;
  const pairs = entries.map((entry) => (Array.isArray(entry) ? entry : [entry, entry]));
  const same = pairs.length === select.options.length && pairs.every(([value, text], i) => select.options[i].value === String(value) && select.options[i].text === text);
  if (!same) select.replaceChildren(...pairs.map(([value, text]) => new Option(text, value))); // an open list stays open
  if (pairs.some(([value]) => String(value) === String(before))) select.value = before;
  select.closest("label").hidden = pairs.length < 2;
  return select.value;
}

function setText(id, text) {
  document.getElementById(id).textContent = text;
}

function hide(id) {
  const part = document.getElementById(id);
  if (part) part.hidden = true;
  document.querySelector(`nav a[href="#${id}"]`)?.closest("li").remove();
}

let NAMES = {}; // the names of each location on a wide and on a narrow page
const RUN = []; // the functions that draw the sections of a run's page, in order
const SWEEP = []; // the same for a page of several runs
