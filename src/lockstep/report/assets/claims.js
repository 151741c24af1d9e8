// The ledger of claims, with filters.
function claimsSection() {
  const all = data.claims;
  const state = { verdicts: new Set(), document: "", lens: "", text: "" };
  const verdicts = [...new Set(all.map((c) => c.verdict))];
  const count = h("p", { id: "claims-count", role: "status", "aria-live": "polite" });
  const body = h("tbody");
  const cell = (label, ...content) => h("td", { "data-label": label }, ...content);
  const rows = all.map((c) => {
    const ours = Object.entries(c.ours).map(([label, value]) => (label ? `${number(value)} (${label})` : number(value))).join("; ");
    const figure = c.figure + (c.unit ? ` ${c.unit}` : "");
    return { c, text: [c.document, c.part, c.says, c.explanation].join(" ").toLowerCase(), row: h("tr", {},
      h("td", { class: `verdict ${c.verdict.replace(/ /g, "-")}` }, c.verdict),
      cell("document", `${c.document}`, c.part ? h("span", { class: "quiet" }, ` ${c.part}`) : null),
      cell("it says", c.says), cell("figure", figure), cell("we get", ours || "–"), cell("by", c.lens), cell("why", c.explanation || "")) };
  });
  function filter() {
    const shown = rows.filter(({ c, text }) => (!state.verdicts.size || state.verdicts.has(c.verdict)) &&
      (!state.document || c.document === state.document) && (!state.lens || c.lens === state.lens) && text.includes(state.text));
    body.replaceChildren(...shown.map((r) => r.row));
    count.textContent = `${shown.length} of ${all.length} claims` + (shown.length ? `: ${verdicts.map((v) => [v, shown.filter((r) => r.c.verdict === v).length]).filter(([, n]) => n).map(([v, n]) => `${n} ${v}`).join(", ")}` : "");
  }
  const toggles = verdicts.map((verdict) => h("button", { type: "button", "aria-pressed": "false", "data-verdict": verdict, onclick: (event) => {
    const on = !state.verdicts.has(verdict);
    if (on) state.verdicts.add(verdict); else state.verdicts.delete(verdict);
    event.currentTarget.setAttribute("aria-pressed", String(on));
    filter();
  } }, `${verdict} (${all.filter((c) => c.verdict === verdict).length})`));
  const pick = (label, key) => choice(label, [["", "all"], ...[...new Set(all.map((c) => c[key]))].map((v) => [v, v])], "", (v) => { state[key] = v; filter(); });
  const search = h("input", { type: "search", placeholder: "Search", "aria-label": "search claims", oninput: () => { state.text = search.value.toLowerCase(); filter(); } });
  filter();
  return section("claims", "Claims, put to the test",
    h("p", {}, "What documents about these kernels say, beside what we get: by the plan, the trace, a measured time or plain arithmetic. Verdicts are computed."),
    h("div", { class: "controls" }, h("span", { role: "group", "aria-label": "verdicts", class: "controls" }, toggles), pick("document", "document"), pick("by", "lens"), search),
    count,
    data.times.length ? h("p", { class: "quiet small" }, `Times: ${data.times[0].where}.`) : null,
    h("div", { class: "wide" }, h("table", { class: "ledger" },
      h("thead", {}, h("tr", {}, ["verdict", "document", "it says", "figure", "we get", "by", "why"].map((t) => h("th", { scope: "col" }, t)))), body)));
}
