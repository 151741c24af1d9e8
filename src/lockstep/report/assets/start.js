// Put the page together.
(function start() {
  const ladder = data.kind === "ladder";
  document.getElementById("title").textContent = document.title;
  document.getElementById("about").textContent = `Lockstep ${data.version}, ${data.made}` + (ladder ? `. Traced: one head of ${data.problem}.` : "");
  document.getElementById("footer").textContent = "Charts by Observable Plot and D3 (ISC licence), which this page carries; it loads nothing from elsewhere.";
  const sections = ladder
    ? [climbSection(), phasesSection(), rooflineSection(), rungsSection(), stepsSection(), claimsSection(), peersSection(), auditsSection()]
    : [rungsSection(), stepsSection()];
  const main = document.getElementById("main");
  const present = sections.filter(Boolean);
  main.replaceChildren(...present);
  document.getElementById("contents").append(...present.map((s) => h("a", { href: `#${s.id}` }, s.querySelector("h2").textContent)));

  const button = document.getElementById("theme"), root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  function wear(theme) {
    root.dataset.theme = theme;
    button.setAttribute("aria-pressed", String(theme === "dark"));
    redrawAll();
    present.forEach((s) => s.repaint?.());
  }
  let worn = system.matches ? "dark" : "light";
  const choose = (theme) => { worn = theme; wear(worn); };
  button.addEventListener("click", () => choose(worn === "dark" ? "light" : "dark"));
  system.addEventListener("change", () => choose(system.matches ? "dark" : "light"));
  addEventListener("beforeprint", () => wear("light"));
  addEventListener("afterprint", () => wear(worn));
  wear(worn);
  root.dataset.ready = "true";
})();
