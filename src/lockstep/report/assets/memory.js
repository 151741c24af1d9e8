// Shared memory by banks, global memory by sectors, what fits a multiprocessor.
const CELL = 19;

function memoryView(launch) {
  const shared = launch.arrays.filter((a) => a.space === "shared"), global = launch.arrays.filter((a) => a.space === "global");
  return h("div", { class: "panels memory" },
    h("div", {}, h("h3", {}, "Shared memory: banks"),
      shared.length ? arrayBars(shared, "wavefronts", "conflicts") : h("p", { class: "quiet" }, "This kernel has no shared memory."),
      launch.banks.length ? accessMap(launch.banks, bankMap, "wavefronts") : null),
    h("div", {}, h("h3", {}, "Global memory: sectors"),
      global.length ? arrayBars(global, "sectors used", "wasted") : h("p", { class: "quiet" }, "This kernel does not touch global memory."),
      launch.global.length ? accessMap(launch.global, sectorMap, "sectors") : null));
}

function arrayBars(arrays, needed, extra) {
  const rows = arrays.flatMap((a) => [
    { key: `${a.array}, ${a.does}`, part: needed, value: a.needed },
    { key: `${a.array}, ${a.does}`, part: extra, value: a.extra },
  ]);
  const total = d3.sum(rows, (r) => r.value), lost = d3.sum(rows.filter((r) => r.part === extra), (r) => r.value);
  return chart(`${needed} and ${extra} by array`, (width) => Plot.plot({
    width, height: 34 + 19 * arrays.length, marginLeft: Math.min(132, width * 0.4), marginTop: 20, style: SMALL,
    x: { label: null, axis: "top", ticks: 4, tickFormat: "~s", grid: true }, y: { label: null, domain: arrays.map((a) => `${a.array}, ${a.does}`), tickSize: 0 },
    color: { domain: [needed, extra], range: ["#4a8fd0", "#d9534f"], legend: true },
    marks: [Plot.barX(rows, { x: "value", y: "key", fill: "part", title: (r) => `${r.key}: ${number(r.value)} ${r.part}` })],
  }), `${number(total)} in all, ${lost ? `${number(lost)} (${percent(lost / total)}) ${extra}` : `none ${extra}`}`);
}

function accessMap(accesses, draw, unit) {
  const order = [...accesses].sort((a, b) => (b.total - b.total_ideal) - (a.total - a.total_ideal) || b.total - a.total);
  const place = h("div");
  const show = (i) => place.replaceChildren(draw(order[i]));
  show(0);
  return h("div", { class: `map ${unit}` },
    h("div", { class: "controls" }, choice("Access", order.map((a, i) => [i,
      `line ${a.line}: ${a.kind} ${a.array} (${number(a.total)} ${unit}${a.total > a.total_ideal ? `, ${(a.total / a.total_ideal).toPrecision(3)}×` : ""})`]), 0, show)),
    place);
}

function svg(width, height, label, ...children) {
  const make = (tag, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const root = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  root.append(...children.map(([tag, attributes, text]) => make(tag, attributes, text)));
  return root;
}

// Lanes that are served together: all 32 up to 4 bytes, 16 at 8, 8 at 16.
function pieces(access) {
  const words = Math.max(1, access.size / 4), count = 32 / words;
  return d3.range(words).map((i) => {
    const cells = new Map();
    for (let lane = i * count; lane < (i + 1) * count; lane++) {
      const address = access.addresses[lane];
      if (address === null) continue;
      for (let w = 0; w < words; w++) {
        const word = (address >> 2) + w;
        if (!cells.has(word)) cells.set(word, []);
        if (!cells.get(word).includes(lane)) cells.get(word).push(lane);
      }
    }
    const banks = d3.rollup([...cells.keys()], (v) => v.length, (word) => word % 32);
    return { first: i * count, last: (i + 1) * count - 1, cells, banks, worst: d3.max(banks.values()) ?? 0 };
  }).filter((piece) => piece.cells.size);
}

function bankMap(access) {
  const all = pieces(access);
  const piece = all[d3.maxIndex(all, (p) => p.worst)];
  const lines = [...new Set([...piece.cells.keys()].map((w) => Math.floor(w / 32)))].sort((a, b) => a - b);
  const left = 64, top = 30;
  const parts = [["text", { x: left - 6, y: 18, "text-anchor": "end", "font-size": 11, fill: "currentColor" }, "bank"]];
  for (let bank = 0; bank < 32; bank++) {
    const n = piece.banks.get(bank) ?? 0;
    if (bank % 4 === 0) parts.push(["text", { x: left + (bank + 0.5) * CELL, y: 18, "text-anchor": "middle", "font-size": 10, fill: "currentColor" }, bank]);
    if (n > 1) parts.push(["rect", { x: left + bank * CELL, y: top - 7, width: CELL, height: 5, fill: "#d9534f" }]);
  }
  lines.forEach((line, row) => {
    parts.push(["text", { x: left - 6, y: top + row * CELL + 14, "text-anchor": "end", "font-size": 10, fill: "var(--quiet)" }, `byte ${line * 128}`]);
    for (let bank = 0; bank < 32; bank++) {
      const lanes = piece.cells.get(line * 32 + bank);
      const conflict = lanes && piece.banks.get(bank) > 1;
      parts.push(["rect", { x: left + bank * CELL + 1, y: top + row * CELL + 1, width: CELL - 2, height: CELL - 2, rx: 2, fill: lanes ? (conflict ? "#d9534f" : "#4a8fd0") : "var(--empty)" }]);
      if (lanes) parts.push(["text", { x: left + (bank + 0.5) * CELL, y: top + row * CELL + 14, "text-anchor": "middle", "font-size": 10, fill: "#fff" }, lanes.length > 1 ? `${lanes[0]}+` : lanes[0]]);
    }
  });
  const text = `Warp ${access.warp}, ${access.size} bytes a lane: ${access.cost} wavefronts where ${access.ideal} would do.` +
    (all.length > 1 ? ` Lanes ${piece.first} to ${piece.last}, which are served together.` : "");
  return h("figure", {}, h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "bank map" },
    svg(left + 32 * CELL + 4, top + lines.length * CELL + 4, text, ...parts)),
  h("figcaption", {}, `${text} Numbers are lanes (a plus: more of them ask for the same word); a row is 128 bytes, a column a bank. Red: a bank that has to serve several words, one after the other. Of all accesses of this line by this block, the worst.`));
}

function sectorMap(access) {
  const unit = Math.min(access.size, 4), cells = 32 / unit;
  const used = new Map();
  access.addresses.forEach((address, lane) => {
    if (address === null) return;
    for (let b = 0; b < access.size; b += unit) {
      const place = Math.floor((address + b) / unit);
      if (!used.has(place)) used.set(place, lane);
    }
  });
  const sectors = [...new Set([...used.keys()].map((p) => Math.floor(p / cells)))].sort((a, b) => a - b);
  const wide = cells > 16 ? 13 : cells > 8 ? 20 : 34, left = 8, top = 22, per = cells > 8 ? 1 : 2;
  const parts = [];
  sectors.forEach((sector, i) => {
    const row = Math.floor(i / per), x0 = left + (i % per) * (cells * wide + 14), y = top + row * CELL;
    for (let c = 0; c < cells; c++) {
      const lane = used.get(sector * cells + c);
      parts.push(["rect", { x: x0 + c * wide + 1, y: y + 1, width: wide - 2, height: CELL - 2, rx: 2, fill: lane === undefined ? "var(--empty)" : "#4a8fd0", stroke: lane === undefined ? "#d9534f" : "none", "stroke-opacity": 0.6 }]);
      if (lane !== undefined && wide > 13) parts.push(["text", { x: x0 + (c + 0.5) * wide, y: y + 14, "text-anchor": "middle", "font-size": 10, fill: "#fff" }, lane]);
    }
  });
  const share = (used.size * unit) / (sectors.length * 32);
  const text = `Warp ${access.warp}, ${access.size} bytes a lane: ${access.cost} sectors where ${access.ideal} would do; ${percent(share)} of their bytes are used.`;
  parts.push(["text", { x: left, y: 14, "font-size": 11, fill: "currentColor" }, "32 bytes a sector, in order of address; numbers are lanes"]);
  return h("figure", {}, h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "sector map" },
    svg(left + per * (cells * wide + 14), top + Math.ceil(sectors.length / per) * CELL + 4, text, ...parts)),
  h("figcaption", {}, `${text} Outlined in red: moved, but not asked for. The worst access of this line by this block.`));
}

function occupancyView(launch) {
  const fits = launch.occupancy;
  if (!fits) return null;
  const limits = Object.entries(fits.limits).map(([name, blocks]) => ({ name, blocks }));
  return h("div", { class: "occupancy" }, h("h3", {}, "Occupancy"),
    chart("blocks that each resource of a multiprocessor allows", (width) => Plot.plot({
      width: Math.min(width, 560), height: 34 + 24 * limits.length, marginLeft: 74, marginTop: 20, marginRight: 40, style: SMALL,
      x: { label: null, axis: "top", ticks: 4, grid: true }, y: { label: null, domain: limits.map((l) => l.name), tickSize: 0 },
      marks: [
        Plot.barX(limits, { x: "blocks", y: "name", fill: (l) => (l.blocks === fits.blocks ? "#d9534f" : "#4a8fd0") }),
        Plot.text(limits, { x: "blocks", y: "name", text: (l) => String(l.blocks), dx: 6, textAnchor: "start", fill: "currentColor" }),
      ],
    }), `${fits.gpu}: ${fits.blocks} blocks of ${fits.threads} threads at a time, ${fits.warps} of ${fits.max_warps} warps (${percent(fits.warps / fits.max_warps)}), limited by ${fits.limited_by.join(" and ")}. ${fits.registers ? `${fits.registers} registers a thread` : "Registers left out"}, ${number(fits.shared)} bytes of shared memory a block. Bars are the blocks that each resource allows; red is the least.`));
}
