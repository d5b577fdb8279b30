// Decompresses the data in this page and draws all charts.

async function unpacked(id) {
  const text = document.getElementById(id).textContent.trim();
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function start() {
  const [library, data] = await Promise.all([unpacked("plotly"), unpacked("data")]);
  const script = document.createElement("script");
  script.textContent = library;
  document.head.append(script);
  const report = JSON.parse(data);
  const { colours } = report;
  Object.defineProperty(report, "colours", { get: () => (DARK.matches ? colours.map((shade) => LIGHTER[shade] ?? shade) : colours) });
  drawAll(report);
  document.documentElement.dataset.drawn = "yes";
  if (typeof follow === "function") follow(report);
}

function drawAll(report) {
  NAMES = report.names;
  for (const draw of report.runs ? SWEEP : RUN) {
    try {
      draw(report);
    } catch (error) {
      showError(`A chart cannot be drawn: ${error}.`, error); // continue with the other charts
    }
  }
}

function showError(words, error) {
  const note = document.createElement("p");
  note.className = "error-text";
  note.textContent = words;
  document.querySelector("main").prepend(note);
  console.error(error);
}

// In the frame of a notebook, a link to a section of the page would load the notebook.
document.addEventListener("click", (event) => {
  const part = document.querySelector(event.target.closest("nav a")?.getAttribute("href") ?? "nothing");
  if (!part) return;
  event.preventDefault();
  part.scrollIntoView();
});

document.getElementById("copy")?.addEventListener("click", async (event) => {
  const text = document.getElementById("config");
  try {
    await navigator.clipboard.writeText(text.textContent);
  } catch {
    getSelection().selectAllChildren(text); // if a page from disk may not write to the clipboard
    document.execCommand("copy");
  }
  event.target.textContent = "Copied";
});

start().catch((error) => {
  const old = typeof DecompressionStream === "undefined" ? " Use a browser from 2023 or later." : "";
  showError(`The charts cannot be drawn: ${error}.${old}`, error);
});
