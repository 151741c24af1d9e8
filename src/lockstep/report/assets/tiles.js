// What a block holds, phase after phase.
const PLACES = { Q: [2, 1], K: [1, 2], S: [2, 2], m: [2, 3], l: [2, 3], P: [2, 4], V: [1, 5], acc: [2, 5] };

function tileColours() {
  const dark = document.documentElement.dataset.theme === "dark";
  const colours = new Uint8ClampedArray(4 * 256);
  const scale = d3.interpolateRgbBasis(dark ? ["#4aa3ff", "#1c3350", "#20242b", "#54301c", "#ff9142"] : ["#1f6fc4", "#a9cdf0", "#ffffff", "#f7c59f", "#cc5a0a"]);
  for (let code = 0; code <= 200; code++) {
    const { r, g, b } = d3.rgb(scale(code / 200));
    colours.set([r, g, b, 255], 4 * code);
  }
  colours.set(dark ? [10, 12, 15, 255] : [70, 76, 86, 255], 4 * 254);
  return colours;
}

function tilesView(steps) {
  const arrays = new Map(steps.arrays.map((a) => [a.name, { ...a, turned: a.role === "out" || /^K( stage|$)/.test(a.role), codes: null, scale: 0 }]));
  const attention = steps.arrays.some((a) => a.role === "acc");
  const grid = h("div", { class: "tiles" + (attention ? "" : " free") });
  const status = h("p", { class: "status", role: "status", "aria-live": "polite" });
  const readout = h("p", { class: "readout" }, "Point at a matrix to read a value.");
  const largest = d3.max(steps.arrays.filter((a) => a.role !== "out"), (a) => Math.max(a.rows, a.columns)) ?? 1;
  const zoom = largest <= 16 ? 12 : largest <= 70 ? 4 : largest <= 100 ? 3 : 2;
  const slots = new Map();
  for (const array of arrays.values()) {
    const rows = array.turned ? array.columns : array.rows, columns = array.turned ? array.rows : array.columns;
    const scale = array.role === "out" ? Math.min(zoom, 2) : zoom;
    array.canvas = h("canvas", { width: columns, height: rows, role: "img" });
    array.canvas.style.width = `${Math.max(columns * scale, columns === 1 ? 10 : 0)}px`;
    array.canvas.style.height = `${rows * scale}px`;
    array.canvas.addEventListener("pointermove", (event) => readValue(array, event, readout));
    array.figure = h("figure", { "data-array": array.name }, h("figcaption", { title: `${array.rows} × ${array.columns}, ${array.place}` }, h("b", {}, array.turned ? array.role.replace(/^(K|out)/, "$1ᵀ") : array.role),
      columns * scale > 60 ? [` ${rows}×${columns}`, h("br"), array.place] : null), array.canvas);
    const role = array.role.split(/[ ,]/)[0];
    const at = attention ? (array.role.includes("or V") ? [1, 2] : PLACES[role] ?? [3, 1]) : null;
    const key = String(at);
    if (!slots.has(key)) {
      const box = h("div", { class: role === "m" || role === "l" ? "side" : "stack" });
      if (at) box.style.gridArea = at[0] === 3 ? "3 / 1 / 4 / 6" : `${at[0]} / ${at[1]}`;
      slots.set(key, box);
      grid.append(box);
    }
    slots.get(key).append(array.figure);
  }

  let at = 0, timer = null;
  const slider = h("input", { type: "range", min: 0, max: steps.steps.length - 1, value: 0, "aria-label": "step", oninput: () => go(+slider.value) });
  const play = h("button", { type: "button", "aria-pressed": "false", onclick: toggle }, "Play");

  function go(step) {
    at = Math.max(0, Math.min(steps.steps.length - 1, step));
    slider.value = at;
    const known = {};
    for (let i = 0; i <= at; i++) Object.assign(known, steps.steps[i].changed);
    const now = steps.steps[at];
    for (const array of arrays.values()) {
      array.codes = known[array.name]?.codes ?? null;
      array.scale = known[array.name]?.scale ?? 0;
      array.figure.classList.toggle("changed", array.name in now.changed);
      paintTile(array);
    }
    const changed = steps.arrays.filter((a) => a.name in now.changed).map((a) => a.role);
    status.replaceChildren(h("b", {}, now.phase), ` · ${now.tile ? `tile ${now.tile}, ` : ""}step ${at + 1} of ${steps.steps.length}, at ${number(now.time)} of ${now.kernel}; changed: ${changed.join(", ") || "nothing that is shown"}`);
    slider.setAttribute("aria-valuetext", `${now.phase}, tile ${now.tile}`);
  }
  function tile(direction) {
    const next = steps.steps.findIndex((s, i) => i > at && s.tile !== steps.steps[at].tile);
    const before = steps.steps.findLastIndex((s, i) => i < at && (i === 0 || steps.steps[i - 1].tile !== s.tile));
    go(direction > 0 ? (next < 0 ? steps.steps.length - 1 : next) : Math.max(before, 0));
  }
  function toggle() {
    const playing = timer === null;
    if (playing) {
      if (at === steps.steps.length - 1) go(0);
      timer = setInterval(() => { if (at === steps.steps.length - 1 || !grid.isConnected) toggle(); else go(at + 1); }, 900);
    } else { clearInterval(timer); timer = null; }
    play.setAttribute("aria-pressed", String(playing));
    play.textContent = playing ? "Pause" : "Play";
  }
  const button = (text, label, action) => h("button", { type: "button", "aria-label": label, onclick: action }, text);
  const view = h("div", { class: "tile-steps", tabindex: "0", role: "group", "aria-label": "what a block holds; arrow keys step", onkeydown: (event) => {
    if (event.target === slider) return;
    const moves = { ArrowRight: () => go(at + 1), ArrowLeft: () => go(at - 1), PageDown: () => tile(1), PageUp: () => tile(-1), Home: () => go(0), End: () => go(steps.steps.length - 1) };
    if (moves[event.key]) { moves[event.key](); event.preventDefault(); }
  } },
  h("div", { class: "controls" },
    button("« tile", "previous tile", () => tile(-1)), button("‹ step", "previous step", () => go(at - 1)),
    button("step ›", "next step", () => go(at + 1)), button("tile »", "next tile", () => tile(1)), play, slider),
  status, h("div", { class: "wide" }, grid), readout);
  view.repaint = () => go(at);
  go(Math.max(0, steps.steps.findLastIndex((s) => s.tile === 1))); // the first tile is done
  return view;
}

function paintTile(array) {
  const { canvas, codes, rows, columns, turned } = array;
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  canvas.setAttribute("aria-label", `${array.role}, ${rows} by ${columns}, ${codes ? "written" : "not written yet"}`);
  if (!codes) return;
  const bytes = atob(codes), colours = tileColours(), image = context.createImageData(canvas.width, canvas.height);
  for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
    const code = bytes.charCodeAt(r * columns + c);
    const at = turned ? c * rows + r : r * columns + c;
    image.data.set(colours.subarray(4 * code, 4 * code + 4), 4 * at);
  }
  context.putImageData(image, 0, 0);
}

function readValue(array, event, readout) {
  if (!array.codes) return;
  const x = Math.floor((event.offsetX / array.canvas.clientWidth) * array.canvas.width), y = Math.floor((event.offsetY / array.canvas.clientHeight) * array.canvas.height);
  const [r, c] = array.turned ? [x, y] : [y, x];
  if (r < 0 || c < 0 || r >= array.rows || c >= array.columns) return;
  const code = atob(array.codes).charCodeAt(r * array.columns + c);
  const value = code === 255 ? "nothing written" : code === 254 ? "−∞" : ((array.scale * (code - 100)) / 100).toPrecision(2);
  readout.textContent = `${array.name}[${r}, ${c}] in ${array.place}: ${value}`;
}
