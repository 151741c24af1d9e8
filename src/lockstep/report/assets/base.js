"use strict";
// What all scripts of the page use: the data, elements, numbers as text, colours of phases.
const data = JSON.parse(document.getElementById("data").textContent);

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return element;
}

function section(id, title, ...children) {
  return h("section", { id, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title), ...children);
}

function choice(label, options, chosen, changed) {
  const select = h("select", { onchange: () => changed(select.value) },
    options.map(([value, text]) => h("option", { value, selected: String(value) === String(chosen) }, text)));
  return h("label", {}, label, select);
}

function number(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return `${+(value / (unit === "k" ? 1e3 : size)).toPrecision(3)}${unit}`;
  }
  return Number.isInteger(value) ? String(value) : String(+value.toPrecision(3));
}

function percent(value) {
  return `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;
}

function duration(microseconds) {
  if (microseconds < 999.5) return `${+microseconds.toPrecision(3)} µs`;
  if (microseconds < 999500) return `${+(microseconds / 1e3).toPrecision(3)} ms`;
  return `${+(microseconds / 1e6).toPrecision(3)} s`;
}

function table(head, rows, attributes = {}) {
  const cell = (value, i) => h("td", {
    class: head[i].startsWith("#") ? "number" : null, "data-label": head[i].replace("#", "") || null,
  }, value ?? "");
  return h("table", attributes,
    h("thead", {}, h("tr", {}, head.map((name) =>
      h("th", { scope: "col", class: name.startsWith("#") ? "number" : null }, name.replace("#", ""))))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell)))));
}

const PHASES = {
  "load q": "#86a7dd", "load kv": "#4677b5", scores: "#ee8a2a", "scores at edges": "#b9641a",
  softmax: "#d9534f", output: "#4f9d57", "output at edges": "#2f7a4d", write: "#a678b4",
  join: "#8f6b58", "(outside)": "#8a929c",
};
const SPARE = ["#3fa7a0", "#c9a227", "#d26fa0", "#6d78c9", "#7f9a3d", "#b2735a"];

function phaseColour(name) {
  if (!(name in PHASES)) PHASES[name] = SPARE[Object.keys(PHASES).length % SPARE.length];
  return PHASES[name];
}

function legend(names, extra = []) {
  return h("div", { class: "legend" },
    names.map((name) => h("span", {}, h("i", { style: `background:${phaseColour(name)}` }), name)), extra);
}

// Charts are drawn for the width they have, and drawn anew when it changes.
const drawn = new Set();

function chart(label, draw, caption) {
  const place = h("div");
  const figure = h("figure", { "aria-label": label }, place, caption ? h("figcaption", {}, caption) : null);
  let width = 0;
  figure.redraw = () => {
    const now = Math.floor(place.clientWidth);
    if (!now) return;
    width = now;
    const plot = draw(now);
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", label);
    place.replaceChildren(plot);
  };
  new ResizeObserver(() => { if (Math.floor(place.clientWidth) !== width) figure.redraw(); }).observe(place);
  drawn.add(figure);
  return figure;
}

function redrawAll() {
  for (const figure of drawn) {
    if (figure.isConnected) figure.redraw();
    else drawn.delete(figure);
  }
}

const SMALL = { fontSize: "12px", background: "transparent", overflow: "visible" };
