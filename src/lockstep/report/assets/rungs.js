// One rung at a time: what it launches, over time, in memory, line by line.
const FIRST = "small_tile (tree)"; // shown before another one is chosen

function rungsSection() {
  const rungs = data.rungs.filter((r) => r.launches);
  let at = Math.max(0, rungs.findIndex((r) => r.title === FIRST)), launch = 0;
  const place = h("div", { class: "rung" });
  const select = h("select", { id: "rung", "aria-label": "rung", onchange: () => choose(+select.value) }, rungs.map((r, i) => h("option", { value: i }, r.title)));
  const previous = h("button", { type: "button", onclick: () => choose(at - 1) }, "‹ lower");
  const next = h("button", { type: "button", onclick: () => choose(at + 1) }, "higher ›");

  function choose(i) {
    at = Math.max(0, Math.min(rungs.length - 1, i));
    launch = 0;
    draw();
  }
  function draw() {
    const rung = rungs[at];
    select.value = at;
    previous.disabled = at === 0;
    next.disabled = at === rungs.length - 1;
    const shown = rung.launches[launch];
    place.replaceChildren(
      ...[h("h3", { class: "name" }, rung.title), rung.summary ? h("p", {}, rung.summary) : null,
        rung.why_not ? h("p", { class: "bad" }, rung.why_not) : null,
        rung.launches.length > 1 ? h("div", { class: "controls", role: "group", "aria-label": "launches" }, rung.launches.map((l, i) =>
          h("button", { type: "button", "aria-pressed": String(i === launch), onclick: () => { launch = i; draw(); } }, l.kernel))) : null,
        launchFacts(shown),
        shown.hazards.length ? h("ul", { class: "bad" }, shown.hazards.map((text) => h("li", {}, text))) : null,
        phasesView(shown), stripView(shown), memoryView(shown), occupancyView(shown), sourceView(shown)].filter(Boolean));
  }
  const made = section("rungs", data.kind === "ladder" ? "Rung by rung" : "The kernel",
    rungs.length > 1 ? h("div", { class: "controls" }, h("label", { for: "rung" }, "Rung"), select, previous, next) : null, place);
  draw();
  return made;
}

function launchFacts(launch) {
  const fact = (value, name) => h("li", {}, h("b", {}, value), h("span", {}, name));
  const size = (sizes) => sizes.filter((n, i) => n > 1 || i === 0).join(" × ");
  return h("ul", { class: "facts" },
    fact(size(launch.grid), "blocks"), fact(size(launch.block), "threads of a block"),
    fact(launch.shared_bytes ? `${(launch.shared_bytes / 1024).toFixed(1)} KB` : "none", "shared memory"),
    fact(number(launch.depth), "depth, warp instructions"), fact(number(launch.instructions), "warp instructions in all"),
    fact(launch.active_lanes.toFixed(1), "of 32 lanes active"), fact(number(launch.sectors), "sectors"),
    fact(number(launch.wavefronts), "wavefronts"), fact(number(launch.conflicts), "lost to bank conflicts"),
    fact(launch.hazards.length ? String(launch.hazards.length) : "none", "hazards"));
}

function meter(value) {
  return [h("span", { class: "meter", "aria-hidden": "true" }, h("i", { style: `width:${(100 * Math.min(1, value)).toFixed(1)}%` })), percent(value)];
}

function phasesView(launch) {
  if (!launch.phases.length) return null;
  return h("div", { class: "phases" }, h("h3", {}, "Phases"), h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "phases" }, table(
    ["phase", "share of depth", "threads busy", "warps busy", "#instructions", "#sectors", "#conflicts"],
    launch.phases.map((p) => [
      h("span", {}, h("i", { style: `display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-inline-end:.4em;background:${phaseColour(p.name)}` }), p.name),
      h("span", {}, meter(p.share)), h("span", {}, meter(p.threads)), h("span", {}, meter(p.warps)),
      number(p.instructions), number(p.sectors), number(p.conflicts)]))));
}

function stepsSection() {
  if (!data.steps.length) return null;
  const start = Math.max(0, data.steps.findIndex((s) => s.title === FIRST));
  let view;
  const place = h("div");
  const about = h("p", { class: "quiet small" });
  function show(i) {
    const steps = data.steps[i];
    view = tilesView(steps);
    about.textContent = (steps.problem ? `${steps.title}, ${steps.problem}, block 0. ` : "") + "Blue is negative, orange positive, each matrix after each phase on a scale of its own; dark is −∞, empty is not written yet. A frame marks what the phase changed.";
    place.replaceChildren(about, view);
  }
  show(start);
  const made = section("tiles", "What a block holds",
    h("p", {}, `${data.kind === "ladder" ? "A small problem, step by step" : "Block 0, step by step"}: the state of one block after each phase. Step with the buttons or, once the picture has the focus, with the arrow keys; Page Up and Page Down go by tile.`),
    data.steps.length > 1 ? h("div", { class: "controls" }, choice("Block of", data.steps.map((s, i) => [i, s.title]), start, (i) => show(+i))) : null, place);
  made.repaint = () => view.repaint();
  return made;
}
