// One block over time: lanes, and warps.
// Runs of bins in which a warp works in one phase, and how much of them, 1 to 9.
function runsOf(strip) {
  const runs = [];
  for (let i = 0; i < strip.warps.length; i += 5) {
    const [warp, start, end, phase, level] = strip.warps.slice(i, i + 5);
    runs.push({ warp, start, end, phase: strip.phases[phase], level });
  }
  return runs;
}

function stripView(launch) {
  const strip = launch.strip;
  const runs = runsOf(strip);
  const warps = Math.ceil(strip.threads.length / 32);
  const readout = h("p", { class: "readout", "aria-live": "polite" }, "Point at a strip to read it.");
  const waits = h("span", {}, h("i", { style: "background:var(--empty);border:1px solid var(--line)" }), "idle or waiting");
  return h("div", { class: "strips" },
    h("h3", {}, "Threads and warps over time"),
    h("p", { class: "quiet small" }, `Block ${strip.block}, ${strip.threads.length} threads in ${warps} ${warps === 1 ? "warp" : "warps"}. Time runs to the right, in warp instructions: ${number(strip.length)} in all, ${strip.barriers} block ${strip.barriers === 1 ? "barrier" : "barriers"}. Threads are busy ${percent(strip.busy)} of it.`),
    legend(strip.phases, waits),
    h("figure", { class: "strip lanes" }, h("figcaption", {}, "Lanes: a row per thread, thread 0 on top"),
      laneCanvas(strip, runs, readout), timeAxis(strip)),
    h("figure", { class: "strip warps" }, h("figcaption", {}, "Warps: a row per warp; paler where it waits at barriers for part of the time, empty where it only waits"),
      warpCanvas(strip, runs, warps, readout), timeAxis(strip)),
    readout);
}

function timeAxis(strip) {
  return h("div", { class: "axis", "aria-hidden": "true" },
    [0, 0.25, 0.5, 0.75, 1].map((f) => h("span", {}, number(Math.round(f * strip.length)))));
}

function laneCanvas(strip, runs, readout) {
  const bins = strip.rows[0].length, threads = strip.threads.length;
  const canvas = h("canvas", { width: bins, height: threads, role: "img", "aria-label": `activity of ${threads} threads over time, ${percent(strip.busy)} busy` });
  canvas.style.height = `${Math.max(48, Math.min(256, threads * 2))}px`;
  const phaseAt = phasesByBin(strip, runs, bins);
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

// The phase of each warp in the coarser bins of the lanes: that of the busiest finer one.
function phasesByBin(strip, runs, bins) {
  const warps = Math.ceil(strip.threads.length / 32), finer = strip.warp_bins / bins;
  const best = Array.from({ length: warps }, () => new Uint8Array(bins));
  const phase = Array.from({ length: warps }, () => new Array(bins).fill(null));
  for (const run of runs) {
    for (let x = Math.floor(run.start / finer); x * finer < run.end; x++) {
      if (run.level > best[run.warp][x]) { best[run.warp][x] = run.level; phase[run.warp][x] = run.phase; }
    }
  }
  return phase;
}

function warpCanvas(strip, runs, warps, readout) {
  const row = warps > 16 ? 8 : 14, bins = strip.warp_bins;
  const canvas = h("canvas", { width: bins, height: warps * row, role: "img", "aria-label": `${warps} warps over time` });
  canvas.style.height = `${warps * row}px`;
  const context = canvas.getContext("2d");
  for (const run of runs) {
    context.fillStyle = phaseColour(run.phase);
    context.globalAlpha = 0.2 + (0.8 * run.level) / 9;
    context.fillRect(run.start, run.warp * row + 1, run.end - run.start, row - 2);
  }
  context.globalAlpha = 0.9;
  context.fillStyle = "gray";
  for (const time of strip.barrier_times) context.fillRect((time / strip.length) * bins - 0.5, 0, 1, canvas.height);
  canvas.addEventListener("pointermove", (event) => {
    const bin = Math.floor((event.offsetX / canvas.clientWidth) * bins), warp = Math.floor((event.offsetY / canvas.clientHeight) * warps);
    const run = runs.find((r) => r.warp === warp && r.start <= bin && bin < r.end);
    readout.textContent = `warp ${warp}, from ${number(Math.round((bin / bins) * strip.length))}: ` + (run ? `${run.phase}, busy ${Math.round((100 * run.level) / 9)} %` : "waits at a barrier");
  });
  return canvas;
}
