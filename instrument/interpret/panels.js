// Attention probabilities: one map for each head of a layer.

RUN.push((report) => {
  const layers = report.panels.attention;
  fillSelect("attention-layer", layers.map((layer, i) => [i, `${layer.location} — ${layer.label}`]));
  drawOn(["attention-layer"], () => drawAttention(layers));
});

function drawAttention(layers) {
  const layer = layers[Number(document.getElementById("attention-layer").value)];
  const root = document.getElementById("attention-charts");
  root.replaceChildren();
  const [rows, columns] = [layer.z[0].length, layer.z[0][0].length];
  const averaged = rows < layer.queries.length || columns < layer.keys.length;
  layer.z.forEach((z, i) => {
    const cell = document.createElement("div");
    const title = document.createElement("h3");
    title.textContent = layer.heads.length ? `Head ${layer.heads[i]}` : "";
    cell.append(title);
    root.append(cell);
    const at = chart(cell);
    const side = Math.min(at.clientWidth, 420);
    const trace = {
      type: "heatmap", z, zmin: 0, zmax: layer.high, colorscale: VIRIDIS, showscale: false, hoverongaps: false,
      text: averaged ? undefined : z.map((line, y) => line.map((_, x) => `query ${tokenName(layer.queries[y])}, key ${tokenName(layer.keys[x])}`)),
      hovertemplate: averaged ? "%{z:.4f}<extra></extra>" : "%{text}<br>%{z:.4f}<extra></extra>",
    };
    plot(at, [trace], {
      height: Math.max(120, Math.round((side * rows) / columns)), margin: { l: 30, r: 4, t: 4, b: 26 }, dragmode: false,
      xaxis: { ...tokenAxis(layer.keys, averaged, side), title: { text: "key", font: { size: 11 }, standoff: 4 } },
      yaxis: { ...tokenAxis(layer.queries, averaged, side), title: { text: "query", font: { size: 11 }, standoff: 4 }, autorange: "reversed" },
    });
  });
  setText("attention-note",
    `Step ${layer.step}, sample ${layer.sample}. Recorded shape in the model ${layer.shape.join(" × ")}. Colors from 0 (dark) to ${formatNumber(layer.high)}.` +
    (layer.heads.length < layer.total ? ` ${layer.heads.length} of ${layer.total} heads are shown.` : "") +
    (averaged ? ` Maps are averaged over squares from ${layer.queries.length} × ${layer.keys.length} to ${rows} × ${columns} pixels.` : "") +
    (layer.keys.some(([, id]) => id !== null) ? " The labels are token ids." : " The labels are positions."));
}

function tokenName([position, id]) {
  return id === null ? `${position}` : `${position} (token ${id})`;
}

/** An axis with as many labels as fit: token ids, or positions. */
function tokenAxis(names, averaged, side) {
  if (averaged) return { showticklabels: false, showgrid: false, fixedrange: isNarrow() };
  const labels = names.map(([position, id]) => String(id ?? position));
  const every = Math.max(1, Math.ceil((names.length * (7 * Math.max(...labels.map((label) => label.length)) + 8)) / side));
  const shown = names.map((_, i) => i).filter((i) => i % every === 0);
  return {
    tickvals: shown, ticktext: shown.map((i) => labels[i]), tickfont: { size: 10 }, tickangle: 0,
    showgrid: false, zeroline: false, fixedrange: isNarrow(),
  };
}
