// Source with heat per line.
const HEATS = {
  instructions: "warp instructions", executions: "executions by warps", conflicts: "bank conflicts (wavefronts lost)",
  sectors: "sectors of global memory", wasted: "sectors wasted", divergent: "warps that diverge",
};

function sourceView(launch) {
  const lines = launch.listing.flatMap((f) => Object.values(f.lines));
  const kinds = Object.keys(HEATS).filter((kind) => lines.some((line) => line[kind]));
  let kind = kinds[0];
  const place = h("div");
  const [kernel, ...inlined] = launch.listing; // the kernel, then what it calls, the hottest first
  const heat = (f) => d3.sum(Object.values(f.lines), (line) => line[kind] ?? 0);
  const draw = () => place.replaceChildren(...[kernel, ...d3.sort(inlined, (f) => -heat(f))].map((f, i) => functionView(f, kind, lines, i < 4)));
  draw();
  return h("div", { class: "heat" },
    h("h3", {}, "Source, line by line"),
    h("div", { class: "controls" },
      choice("Heat shows", kinds.map((k) => [k, HEATS[k]]), kind, (value) => { kind = value; draw(); })),
    place);
}

function functionView(f, kind, all, open) {
  const source = data.sources[f.source];
  const most = d3.max(all, (line) => line[kind] ?? 0) || 1;
  const whole = d3.sum(all, (line) => line[kind] ?? 0) || 1;
  const own = d3.sum(Object.values(f.lines), (line) => line[kind] ?? 0);
  const columns = ["lanes", "sectors", "conflicts"].filter((c) => c !== kind && all.some((line) => line[c]));
  const rows = source.lines.map((text, i) => {
    const at = source.first + i;
    const counts = f.lines[at];
    const heat = counts ? Math.sqrt((counts[kind] ?? 0) / most) : 0;
    return h("tr", {},
      h("td", { class: "number quiet" }, String(at)),
      h("td", { class: "number", style: heat ? `background:rgba(var(--heat),${(0.85 * heat).toFixed(3)})` : null }, counts?.[kind] ? number(counts[kind]) : ""),
      columns.map((c) => h("td", { class: "number quiet" }, counts?.[c] ? number(counts[c]) : "")),
      h("td", { class: "code" + (counts ? "" : " never"), style: heat ? `background:rgba(var(--heat),${(0.3 * heat).toFixed(3)})` : null }, text,
        counts?.hazards ? h("span", { class: "hazard" }, `  ← ${counts.hazards.join("; ")}`) : null));
  });
  const head = h("tr", {}, ["line", kind, ...columns, "source"].map((name) => h("th", { scope: "col" }, name)));
  return h("details", { open },
    h("summary", {}, h("code", {}, source.name), h("span", { class: "quiet" }, ` · ${source.file}, ${percent(own / whole)} of ${HEATS[kind]}`)),
    h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": `source of ${source.name}` },
      h("table", { class: "source" }, h("thead", {}, head), h("tbody", {}, rows))));
}
