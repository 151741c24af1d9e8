// Measured kernels under the roofs of the GPU.
function rooflineSection() {
  const roof = data.roofline;
  if (!roof || !roof.points.length) {
    return section("roofline", "Roofline", h("p", { class: "quiet" }, "No times: no results of the suites “ladder” and “gpu” are here."));
  }
  const shapes = [...new Set(roof.points.filter((p) => p.group === "rung").map((p) => p.case))];
  const cases = [...new Set(roof.points.filter((p) => !shapes.includes(p.case)).map((p) => p.case))];
  let shape = shapes[0], production = "";
  const place = h("div");

  function draw() {
    const points = roof.points.filter((p) => p.case === shape || (production ? p.case === production : cases.includes(p.case)));
    place.replaceChildren(chart("Roofline: TFLOP/s over operations per byte", (width) => rooflinePlot(width, roof, points),
      `Bytes of a rung are those that its plan asks of global memory; caches serve a part of them, so a rung may lie above the sloped line, which is the bandwidth of the memory itself. Bytes of the others are the least there is: q, k and v in, out back. Peaks are those of the data sheet: ${number(roof.bandwidth)} GB/s, ${roof.fp32} TFLOP/s without and ${roof.tensor} with tensor cores.`));
  }
  const made = section("roofline", `Roofline, ${roof.gpu}`,
    h("p", {}, "Every rung as it was timed, the production kernels of Lockstep, and those of others. Point at a dot to read it; the table below has the same numbers."),
    h("div", { class: "controls" },
      choice("Rungs at", shapes.map((s) => [s, s]), shape, (v) => { shape = v; draw(); }),
      choice("Production kernels at", [["", "all cases"], ...cases.map((c) => [c, c])], "", (v) => { production = v; draw(); })),
    place,
    h("details", {}, h("summary", {}, "As a table"), h("div", { class: "wide" }, table(
      ["kernel", "case", "#operations per byte", "#TFLOP/s"],
      roof.points.map((p) => [p.name, p.case, number(p.intensity), number(p.tflops)])))));
  draw();
  return made;
}

function rooflinePlot(width, roof, points) {
  const x0 = Math.min(0.5, d3.min(points, (p) => p.intensity) / 1.5), x1 = d3.max(points, (p) => p.intensity) * 2;
  const y0 = d3.min(points, (p) => p.tflops) / 2;
  const line = (top) => {
    const knee = (top * 1e3) / roof.bandwidth;
    return [{ x: x0, y: (x0 * roof.bandwidth) / 1e3 }, { x: knee, y: top }, { x: x1, y: top }];
  };
  const groups = { rung: "#e07b1f", Lockstep: "#2f7fd6", others: "#8a929c" };
  const narrow = width < 620;
  const height = Math.max(340, Math.min(560, width * 0.55)), marginLeft = 52, marginRight = narrow ? 12 : 30, marginTop = 20, marginBottom = 42;
  const x = d3.scaleLog([x0, x1], [marginLeft, width - marginRight]), y = d3.scaleLog([y0, roof.tensor * 1.6], [height - marginBottom, marginTop]);
  const labels = apart(points.filter((p) => p.group === "rung"), x, y);
  return Plot.plot({
    width, height, marginLeft, marginRight, marginTop, marginBottom, style: SMALL,
    x: { type: "log", domain: [x0, x1], label: "operations per byte", grid: true, ticks: narrow ? 4 : 8, tickFormat: "~s" },
    y: { type: "log", domain: [y0, roof.tensor * 1.6], label: "TFLOP/s", grid: true, ticks: 6, tickFormat: "~g" },
    color: { domain: Object.keys(groups), range: Object.values(groups), legend: true },
    symbol: { domain: Object.keys(groups), range: ["circle", "diamond", "times"] },
    marks: [
      Plot.line(line(roof.tensor), { x: "x", y: "y", stroke: "currentColor", strokeOpacity: 0.75, clip: true }),
      Plot.line(line(roof.fp32), { x: "x", y: "y", stroke: "currentColor", strokeOpacity: 0.5, strokeDasharray: "5,4", clip: true }),
      Plot.text([{ x: x1, y: roof.tensor, t: "tensor cores" }, { x: x1, y: roof.fp32, t: "fp32" }],
        { x: "x", y: "y", text: "t", textAnchor: "end", dy: -7, dx: -4, fill: "currentColor" }),
      narrow ? null : Plot.link(labels, { x1: "x", y1: "from", x2: "x", y2: "y", stroke: "currentColor", strokeOpacity: 0.35 }),
      Plot.dot(points, { x: "intensity", y: "tflops", stroke: "group", symbol: "group", r: 4, strokeWidth: 1.8 }),
      narrow ? null : Plot.text(labels, { x: "x", y: "y", text: "name", textAnchor: "start", dx: 9, fontSize: 10.5, fill: "currentColor", stroke: "var(--paper)", strokeWidth: 3, paintOrder: "stroke" }),
      Plot.tip(points, Plot.pointer({ x: "intensity", y: "tflops", fill: "var(--raised)", title: (p) => `${p.name}\n${p.case}\n${number(p.tflops)} TFLOP/s, ${number(p.intensity)} operations per byte` })),
    ],
  });
}

// Labels beside their points, moved up or down where they would lie on one another or on a point.
function apart(points, x, y) {
  const placed = [];
  for (const p of d3.sort(points, (p) => -p.tflops)) {
    const left = x(p.intensity) + 9, right = left + 6.1 * p.name.length;
    const free = (at) => placed.every((o) => Math.abs(o.at - at) > 12 || o.left > right || o.right < left)
      && points.every((o) => Math.abs(y(o.tflops) - at) > 9 || x(o.intensity) < left - 5 || x(o.intensity) > right);
    const shift = d3.range(0, 40).flatMap((i) => [6 * i, -6 * i]).find((s) => free(y(p.tflops) + s)) ?? 0;
    placed.push({ name: p.name, at: y(p.tflops) + shift, left, right, x: p.intensity, from: p.tflops, y: y.invert(y(p.tflops) + shift) });
  }
  return placed;
}
