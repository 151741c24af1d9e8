// The climb: one row per rung, three measures side by side. Counts are those of a results file, for a problem
// that was also timed, or else those of the traces on this page.
function climbSection() {
  const rungs = data.rungs.filter((r) => r.counted);
  const counts = data.counts ?? tracedCounts(rungs);
  let shape = (data.times.find((t) => t.shape === counts.problem) ?? data.times[0])?.shape ?? null;
  const times = (of) => data.times.find((t) => t.shape === of) ?? { times: {}, where: "" };
  const panels = h("div", { class: "panels" });
  const rows = h("div", { class: "wide" });

  const counted = (r) => counts.rows[r.title];
  const depth = (r) => counted(r)?.depth;
  const traffic = (r) => counted(r) && (counted(r).global_bytes * counts.heads) / 2 ** 20;
  const time = (r) => times(shape).times[r.title];

  function draw() {
    panels.replaceChildren(
      ladderChart("Depth", "warp instructions one after the other in a block", rungs, depth, number),
      ladderChart("Traffic", "MB moved to and from global memory", rungs, traffic, (v) => `${number(v)} MB`),
      shape ? ladderChart("Time", `measured, ${shape}`, rungs, time, duration)
        : h("p", { class: "quiet" }, "No times: no results of the suite “ladder” are here."));
    rows.replaceChildren(table(
      ["rung", "what is new", "#depth", "#lanes", "#MB", "#conflicts", "#occupancy", `#time`],
      data.rungs.map((r) => {
        const c = counted(r);
        if (!c) return [r.title, r.why_not, "", "", "", "", "", ""];
        const lost = c.shared_wavefronts ? c.bank_conflicts / c.shared_wavefronts : 0;
        const measured = times(counts.problem).times[r.title];
        return [
          r.title + (r.constant_time ? " (constant-time)" : ""), r.summary, number(c.depth),
          c.active_lanes.toFixed(1), number(traffic(r)), percent(lost),
          c.occupancy === null ? "–" : percent(c.occupancy), measured ? duration(measured) : "–",
        ];
      })));
  }

  const wrong = rungs.filter((r) => !r.counted.right || r.counted.hazards);
  const made = section("climb", "The climb",
    h("p", {}, `Every rung of the ladder, from the first to the last. Depth and traffic are counted by the lockstep machine for ${counts.problem} (traffic: one head times ${counts.heads}); the plan is for ${data.gpu}; times are measured. Scales are logarithmic, shorter is better.`),
    wrong.length ? h("p", { class: "bad" }, `Wrong or with hazards: ${wrong.map((r) => r.title).join(", ")}`)
      : h("p", { class: "good" }, "Every output keeps the error rule, and the machine found no hazard."),
    data.times.length ? h("div", { class: "controls" },
      choice("Times of", data.times.map((t) => [t.shape, t.shape]), shape, (value) => { shape = value; draw(); })) : null,
    panels,
    data.times.length ? h("p", { class: "quiet small" }, `Times: ${times(shape).where}.`) : null,
    h("details", { open: true }, h("summary", {}, `The same as a table, all for ${counts.problem}`), rows));
  draw();
  return made;
}

// What the traces of this page counted, in the form of `data.counts`.
function tracedCounts(rungs) {
  const [, batch, heads] = /B(\d+) H(\d+)/.exec(data.problem) ?? [null, 1, 1];
  const occupancy = (r) => (r.plan ? Math.min(...r.plan.launches.map((l) => l.occupancy)) : null);
  const rows = Object.fromEntries(rungs.map((r) => [r.title, { ...r.counted, occupancy: occupancy(r) }]));
  return { problem: data.problem, heads: batch * heads, rows };
}

function ladderChart(title, unit, rungs, value, text) {
  const shown = rungs.filter((r) => value(r));
  const least = d3.min(shown, value), most = d3.max(shown, value);
  const domain = [least / 2, most * (most / least > 50 ? 12 : 4)];
  return chart(`${title}: ${unit}, by rung`, (width) => Plot.plot({
    width, height: 30 + 21 * rungs.length, marginLeft: Math.min(188, width * 0.48), marginTop: 22, style: SMALL,
    x: { type: "log", domain, ticks: width < 420 ? 3 : 5, grid: true, label: null, axis: "top", tickFormat: (v) => (+v.toPrecision(1) === +v.toPrecision(4) && /^1/.test(String(v).replace(/^0\.0*/, "")) ? text(v) : "") },
    y: { domain: rungs.map((r) => r.title), label: null, tickSize: 0 },
    marks: [
      Plot.ruleY(shown, { x1: domain[0], x2: value, y: "title", stroke: "currentColor", strokeOpacity: 0.18, strokeWidth: 7 }),
      Plot.lineX(rungs, { x: value, y: "title", stroke: "var(--accent)", strokeOpacity: 0.55 }),
      Plot.dot(shown, { x: value, y: "title", r: 4.5, fill: "var(--accent)" }),
      Plot.text(shown, { x: value, y: "title", dx: 9, textAnchor: "start", text: (r) => text(value(r)), fill: "currentColor" }),
    ],
  }), h("span", {}, h("b", {}, title), ` · ${unit}`));
}
