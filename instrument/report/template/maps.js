// Feature maps, gradient maps and filters: the channels of one location side by side, with the input image.

RUN.push((report) => {
  if (!report.maps?.shown.length) return hide("maps");
  const kinds = [...new Set(report.maps.shown.map((map) => map.what))];
  fillSelect("maps-what", kinds, kinds.includes("feature maps") ? "feature maps" : kinds[0]);
  drawOn(["maps-what", "maps-location", "maps-scale"], () => drawMaps(report));
});

function drawMaps(report) {
  const [what, scale] = ["maps-what", "maps-scale"].map((id) => document.getElementById(id).value);
  const nameOf = (map) => `${map.location} — ${map.label}`;
  const all = report.maps.shown.filter((map) => map.what === what);
  const location = fillSelect("maps-location", [...new Set(all.map(nameOf))]);
  const shown = all.filter((map) => nameOf(map) === location);
  const high = Math.max(...shown.map((map) => map.mosaic.high));
  const shared = { low: shown.some((map) => map.mosaic.low < 0) ? -high : 0, high };
  const root = document.getElementById("maps-charts");
  root.replaceChildren();
  for (const map of shown) {
    const title = document.createElement("h3");
    title.textContent = `Step ${map.step}`;
    const row = document.createElement("div");
    const input = report.maps.images[map.image];
    row.className = input ? "map" : "map alone";
    root.append(title, row);
    if (input) image(row, input);
    mosaic(row, map.mosaic, { shared, step: map.mosaic }[scale], map.what);
  }
  const { channels, pixels } = shown[0].mosaic;
  const { shown: drawn, locations, pictures } = report.maps;
  const places = new Set(drawn.map((map) => `${map.what} ${map.location} ${map.label}`));
  setText("maps-note",
    `Recorded shape ${shown[0].shape.join(" × ")}.` +
    (scale === "channel" ? " Each channel of each step is divided by its largest magnitude." : "") +
    (channels[0] < channels[1] ? ` ${channels[0]} of ${channels[1]} channels are shown.` : "") +
    (pixels[0] < pixels[2] ? ` Maps are averaged over squares from ${pixels[2]} × ${pixels[3]} to ${pixels[0]} × ${pixels[1]} pixels.` : "") +
    (shown[0].samples > 1 ? ` The first of ${shown[0].samples} recorded samples is shown.` : "") +
    (drawn.length < pictures ? ` To limit the size of this page, ${drawn.length} of ${pictures} recorded pictures are shown, from ${places.size} of ${locations} locations.` : "") +
    (shown.some((map) => map.image !== null) || what.startsWith("filter") ? "" : " To show the input image as well, record it at the same steps with {layers: \".\", kind: forward_pre, action: record, tensors: true, samples: 1}."));
}

/** Draw the input image, in gray from its smallest to its largest value, or in color. */
function image(row, { z, low, high, colours }) {
  const at = chart(row);
  const trace = colours
    ? { type: "image", z, hovertemplate: "input<extra></extra>" }
    : { type: "heatmap", z, zmin: low, zmax: high, colorscale: "Greys", showscale: false, hovertemplate: "input %{z:.5g}<extra></extra>" };
  const range = colours ? "input" : `input, ${formatNumber(low)} to ${formatNumber(high)}`;
  plot(at, [trace], { ...pictureLayout(at, z, 0, 22), title: { text: range, font: { size: 11 }, y: 0.99, yanchor: "top" } });
}

/** Draw the channels side by side. Without bounds, each channel has its own color scale, up to its largest magnitude. */
function mosaic(row, { z, pixels }, bounds, name) {
  const at = chart(row);
  const columns = Math.round((z[0].length + 1) / (pixels[1] + 1));
  const channel = (y, x) => Math.floor(y / (pixels[0] + 1)) * columns + Math.floor(x / (pixels[1] + 1));
  const largest = [];
  z.forEach((line, y) => line.forEach((value, x) => { largest[channel(y, x)] = Math.max(largest[channel(y, x)] ?? 0, Math.abs(value)); }));
  const relative = (value, y, x) => (value === null ? null : value / (largest[channel(y, x)] || 1));
  const { low, high } = bounds ?? { low: z.flat().some((value) => value < 0) ? -1 : 0, high: 1 };
  const trace = {
    type: "heatmap", zmin: low, zmax: high, hoverongaps: false, colorscale: low < 0 ? SIGNED : VIRIDIS, customdata: z,
    z: bounds ? z : z.map((line, y) => line.map((value, x) => relative(value, y, x))),
    text: z.map((line, y) => line.map((_, x) => channel(y, x))),
    colorbar: { thickness: 12, title: { text: bounds ? name : `${name} / largest of the channel`, side: "right" } },
    hovertemplate: "map %{text}<br>%{customdata:.5g}<extra></extra>",
  };
  plot(at, [trace], pictureLayout(at, z, 75, 6));
}

function chart(row) {
  const at = document.createElement("div");
  at.className = "chart picture";
  row.append(at);
  return at;
}

/** The layout of a picture with square pixels, without axes. */
function pictureLayout(at, z, beside, above) {
  const height = Math.min(isNarrow() ? 260 : 640, Math.max(130, ((at.clientWidth - beside) * z.length) / z[0].length)) + above + 4;
  const hidden = { visible: false, fixedrange: isNarrow(), constrain: "domain" };
  return {
    height, margin: { l: 0, r: 0, t: above, b: 4 }, dragmode: false,
    xaxis: hidden, yaxis: { ...hidden, autorange: "reversed", scaleanchor: "x" },
  };
}
