// Production kernels beside those of others, and audits.
function peersSection() {
  if (!data.peers.length) return section("peers", "Peers", h("p", { class: "quiet" }, "No results of `lockstep bench gpu` are here."));
  const place = h("div");
  function show(i) {
    const found = data.peers[i], unit = found.rows[0].unit;
    const bars = found.rows.flatMap((row) => Object.entries(row.rate).map(([name, rate]) => ({ case: row.case, name, rate, ours: row.ours.includes(name) })));
    const names = [...new Set(bars.map((b) => b.name))];
    place.replaceChildren(
      chart(`${found.table}: ${unit} by kernel`, (width) => Plot.plot({
        width, height: 44 + d3.sum(found.rows, (r) => 15 * names.length + 16), marginLeft: Math.min(160, width * 0.4), marginTop: 36, marginRight: 46, style: SMALL,
        x: { axis: null, grid: true, ticks: width < 500 ? 3 : 6 }, y: { domain: names, label: null, tickSize: 0 },
        fy: { domain: found.rows.map((r) => r.case), label: null, axis: null, padding: 0.14 },
        color: { domain: ["Lockstep", "others"], range: ["#2f7fd6", "#a2a9b3"], legend: true },
        marks: [
          // above the title of the first case
          Plot.axisX({ anchor: "top", label: null, ticks: width < 500 ? 3 : 6, tickFormat: "~s", tickSize: 0, tickPadding: 20 }),
          Plot.barX(bars, { x: "rate", y: "name", fy: "case", fill: (b) => (b.ours ? "Lockstep" : "others"), insetTop: 0.5, insetBottom: 0.5 }),
          Plot.text(bars, { x: "rate", y: "name", fy: "case", text: (b) => number(b.rate), textAnchor: "start", dx: 4, fontSize: 10.5, fill: "currentColor" }),
          Plot.text(found.rows, { fy: "case", frameAnchor: "top-left", text: "case", dy: -11, fontWeight: 600, fill: "currentColor" }),
          Plot.ruleX([0]),
        ],
      }), `${unit === "µs" ? "µs, shorter is better" : `${unit}, longer is better`}. ${found.where}.`),
      h("details", {}, h("summary", {}, "As a table"), h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "peers as a table" }, table(
        ["case", ...names.map((n) => `#${n}`), "chosen", "#× best peer"],
        found.rows.map((row) => [row.case, ...names.map((n) => number(row.rate[n])), row.chosen ?? "–",
          row.best_peer && row.speed[row.chosen] ? `${row.speed[row.chosen].toFixed(2)} (${row.best_peer})` : "–"])))));
  }
  show(0);
  return section("peers", "Peers",
    h("p", {}, "Kernels of Lockstep and of others, timed in one run, each result checked before it is timed."),
    h("div", { class: "controls" }, choice("Table", data.peers.map((p, i) => [i, `${p.table} (${p.rows[0].unit})`]), 0, (i) => show(+i))), place);
}

function auditsSection() {
  const { machine, files } = data.audits;
  const verdict = (ok) => h("span", { class: ok ? "good" : "bad" }, ok ? "yes" : "no");
  return section("audits", "Audits",
    files.length ? files.map((audit) => h("div", {}, h("h3", {}, `Bits: ${audit.file}`),
      h("p", { class: audit.ok ? "good" : "bad" }, audit.ok ? "Every bit is the same." : "Bits differ."),
      h("p", { class: "quiet small" }, Object.entries(audit.shape).map(([k, v]) => `${k} ${v}`).join(", ")),
      h("div", { class: "wide" }, table(["kernel", "claim", "check", "#compared", "same bits"], audit.checks.map((c) =>
        [c.kernel, c.claim, c.check, String(c.comparisons ?? ""), c.skipped ? h("span", { class: "quiet" }, c.skipped) : verdict(c.ok)])))))
      : h("p", { class: "quiet" }, "No audit of bits is here. Give the page one: ", h("code", {}, "lockstep audit bits --json > bits.json; lockstep report --audit bits.json"), "."),
    machine.map((run) => h("details", {}, h("summary", {}, `The machine against the GPU: ${run.rows.filter((r) => r.bitwise).length} of ${run.rows.length} kernels agree bit for bit (${run.where})`),
      h("div", { class: "wide" }, table(["kernel", "same bits", "#largest error", "why they may differ"], run.rows.map((r) => [r.name, verdict(r.bitwise), number(r.largest_error), r.bitwise ? "" : r.why]))))));
}
