// One block over time: lanes, and warps.
function spansOf(strip) {
  const spans = [];
  for (let i = 0; i < strip.spans.length; i += 4) {
    const [warp, start, end, phase] = strip.spans.slice(i, i + 4);
    spans.push({ warp, start, end, phase: phase < 0 ? null : strip.phases[phase] });
  }
  return spans;
}

function stripView(launch) {
  const strip = launch.strip;
  const spans = spansOf(strip);
  const warps = Math.ceil(strip.threads.length / 32);
  const phases = strip.phases.filter((name) => spans.some((s) => s.phase === name));
  const readout = h("p", { class: "readout", "aria-live": "polite" }, "Point at a strip to read it.");
  const waits = h("span", {}, h("i", { style: "background:var(--empty);border:1px solid var(--line)" }), "idle or waiting");
  return h("div", { class: "strips" },
    h("h3", {}, "Threads and warps over time"),
    h("p", { class: "quiet small" }, `Block ${strip.block}, ${strip.threads.length} threads in ${warps} ${warps === 1 ? "warp" : "warps"}. Time runs to the right, in warp instructions: ${number(strip.length)} in all, ${strip.barriers} block ${strip.barriers === 1 ? "barrier" : "barriers"}. Threads are busy ${percent(strip.busy)} of it.`),
    legend(phases, waits),
    h("figure", { class: "strip lanes" }, h("figcaption", {}, "Lanes: a row per thread, thread 0 on top"),
      laneCanvas(strip, spans, readout), timeAxis(strip)),
    h("figure", { class: "strip warps" }, h("figcaption", {}, "Warps: a row per warp; empty where it waits at a barrier"),
      warpCanvas(strip, spans, warps, readout), timeAxis(strip)),
    readout);
}

function timeAxis(strip) {
  return h("div", { class: "axis", "aria-hidden": "true" },
    [0, 0.25, 0.5, 0.75, 1].map((f) => h("span", {}, number(Math.round(f * strip.length)))));
}

function laneCanvas(strip, spans, readout) {
  const bins = strip.rows[0].length, threads = strip.threads.length;
  const canvas = h("canvas", { width: bins, height: threads, role: "img", "aria-label": `activity of ${threads} threads over time, ${percent(strip.busy)} busy` });
  canvas.style.height = `${Math.max(48, Math.min(256, threads * 2))}px`;
  const phaseAt = phasesByBin(strip, spans, bins);
  const image = new ImageData(bins, threads);
  strip.threads.forEach((row, thread) => {
    const text = strip.rows[row], phases = phaseAt[thread >> 5];
    for (let x = 0; x < bins; x++) {
      const level = +text[x];
      if (!level) continue;
      const { r, g, b } = d3.rgb(phaseColour(phases[x] ?? "(outside)"));
      image.data.set([r, g, b, 60 + (195 * level) / 9], 4 * (thread * bins + x));
    }
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.addEventListener("pointermove", (event) => {
    const x = Math.floor((event.offsetX / canvas.clientWidth) * bins), y = Math.floor((event.offsetY / canvas.clientHeight) * threads);
    if (x < 0 || x >= bins || y < 0 || y >= threads) return;
    const level = strip.rows[strip.threads[y]][x];
    readout.textContent = `thread ${y} (warp ${y >> 5}, lane ${y & 31}), from ${number(Math.round((x / bins) * strip.length))}: busy ${Math.round((100 * level) / 9)} %, ${phaseAt[y >> 5][x] ?? "waiting"}`;
  });
  return canvas;
}

// The phase that each warp spends most of a bin in.
function phasesByBin(strip, spans, bins) {
  const warps = Math.ceil(strip.threads.length / 32);
  const best = Array.from({ length: warps }, () => new Float64Array(bins));
  const phase = Array.from({ length: warps }, () => new Array(bins).fill(null));
  const width = Math.max(strip.length, 1) / bins;
  for (const s of spans) {
    if (s.phase === null) continue;
    for (let x = Math.floor(s.start / width); x < bins && x * width < s.end; x++) {
      const covered = Math.min(s.end, (x + 1) * width) - Math.max(s.start, x * width);
      if (covered > best[s.warp][x]) { best[s.warp][x] = covered; phase[s.warp][x] = s.phase; }
    }
  }
  return phase;
}

function warpCanvas(strip, spans, warps, readout) {
  const width = 1200, row = warps > 16 ? 8 : 14;
  const canvas = h("canvas", { width, height: warps * row, role: "img", "aria-label": `${warps} warps over time` });
  canvas.style.height = `${warps * row}px`;
  const context = canvas.getContext("2d");
  const x = (time) => (time / Math.max(strip.length, 1)) * width;
  for (const s of spans) {
    if (s.phase === null) continue;
    context.fillStyle = phaseColour(s.phase);
    context.fillRect(x(s.start), s.warp * row + 1, Math.max(0.5, x(s.end) - x(s.start)), row - 2);
  }
  context.fillStyle = "rgba(128,128,128,.9)";
  for (const time of strip.barrier_times) context.fillRect(x(time) - 0.5, 0, 1, canvas.height);
  canvas.addEventListener("pointermove", (event) => {
    const time = (event.offsetX / canvas.clientWidth) * strip.length, warp = Math.floor((event.offsetY / canvas.clientHeight) * warps);
    const span = spans.find((s) => s.warp === warp && s.start <= time && time < s.end);
    if (span) readout.textContent = `warp ${warp}: ${span.phase ?? "waits at a barrier"}, from ${number(span.start)} to ${number(span.end)}`;
  });
  return canvas;
}
