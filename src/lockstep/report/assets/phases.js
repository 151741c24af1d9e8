// Where the time goes: the share of each phase, measured by clock reads on a GPU.
function phasesSection() {
  if (!data.phase_times.length) return null;
  let at = 0;
  const place = h("div");
  const rows = h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "time by phase" });

  function draw() {
    const { shape, rows: measured } = data.phase_times[at];
    const parts = measured.flatMap((r) => Object.entries(r.shares).filter(([, share]) => share > 0)
      .map(([phase, share]) => ({ title: r.title, phase, share: 100 * share })));
    const names = [...new Set(parts.map((p) => p.phase))];
    place.replaceChildren(legend(names), chart(`Share of the time by phase, ${shape}, by rung`, (width) => Plot.plot({
      width, height: 34 + 26 * measured.length, marginLeft: Math.min(188, width * 0.48), marginRight: 58, marginTop: 22, style: SMALL,
      x: { domain: [0, 100], axis: "top", ticks: width < 420 ? 3 : 6, tickFormat: (v) => `${v} %`, label: null, grid: true },
      y: { domain: measured.map((r) => r.title), label: null, tickSize: 0 },
      marks: [
        Plot.barX(parts, Plot.stackX({ x: "share", y: "title", order: names, fill: (p) => phaseColour(p.phase), insetTop: 2, insetBottom: 2, title: (p) => `${p.phase}: ${percent(p.share / 100)}` })),
        Plot.text(measured, { x: 100, y: "title", dx: 6, textAnchor: "start", text: (r) => duration(r.microseconds), fill: "currentColor" }),
      ],
    })));
    rows.replaceChildren(table(["rung", "#time", "#with clock reads", ...names.map((name) => `#${name}`)],
      measured.map((r) => [r.title, duration(r.microseconds), duration(r.instrumented_microseconds),
        ...names.map((name) => (name in r.shares ? percent(r.shares[name]) : ""))])));
  }

  const made = section("phases", "Where the time goes",
    h("p", {}, "Each warp reads the clock where a phase begins; a phase lasts until the next one begins, waiting included. Shares are those of a build with these reads, the time at the end of a bar that of the kernel as it is. Depth, by contrast, counts instructions: where copies or tensor cores do the work, the two disagree."),
    h("div", { class: "controls" }, choice("Problem", data.phase_times.map((t, i) => [i, t.shape]), at, (i) => { at = +i; draw(); })),
    place, h("p", { class: "quiet small" }, `Times: ${data.phase_times[0].where}.`),
    h("details", {}, h("summary", {}, "The same as a table"), rows));
  draw();
  return made;
}
