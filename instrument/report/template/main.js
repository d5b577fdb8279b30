// Unpacks what the page carries, and draws it. Everything is in this file: nothing is asked of any other place.

async function unpacked(id) {
  const text = document.getElementById(id).textContent.trim();
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function begin() {
  const [library, data] = await Promise.all([unpacked("plotly"), unpacked("data")]);
  const script = document.createElement("script");
  script.textContent = library;
  document.head.append(script);
  const report = JSON.parse(data);
  const { colours } = report;
  Object.defineProperty(report, "colours", { get: () => (DARK.matches ? colours.map((shade) => LIGHTER[shade] ?? shade) : colours) });
  NAMES = report.names;
  for (const draw of report.runs ? SWEEP : RUN) {
    try {
      draw(report);
    } catch (error) {
      complain(`One of the charts cannot be drawn: ${error}.`, error); // the others can
    }
  }
  document.documentElement.dataset.drawn = "yes";
}

function complain(words, error) {
  const note = document.createElement("p");
  note.className = "error-text";
  note.textContent = words;
  document.querySelector("main").prepend(note);
  console.error(error);
}

// In a notebook's frame a link to a part of the page would load the notebook.
document.querySelector("nav").addEventListener("click", (event) => {
  const part = document.querySelector(event.target.closest("a")?.getAttribute("href") ?? "nothing");
  if (!part) return;
  event.preventDefault();
  part.scrollIntoView();
});

document.getElementById("copy")?.addEventListener("click", async (event) => {
  const text = document.getElementById("config");
  try {
    await navigator.clipboard.writeText(text.textContent);
  } catch {
    getSelection().selectAllChildren(text); // where a page from disk may not write to the clipboard
    document.execCommand("copy");
  }
  event.target.textContent = "Copied";
});

begin().catch((error) => {
  const old = typeof DecompressionStream === "undefined" ? " A browser of 2023 or later is needed." : "";
  complain(`The charts cannot be drawn: ${error}.${old}`, error);
});
