// The interactive picture of docs/why.md: three rules on a quadratic, a slider for the delay, one for the time.
// The paths are computed by the library (delay_paths.js); nothing is calculated here but where to draw them.
(() => {
  "use strict";
  const data = window.delayPaths;
  const root = document.getElementById("delay-picture");
  if (!data || !root) return;

  const SVG = "http://www.w3.org/2000/svg";
  const PLANE = { width: 420, height: 420, reach: data.radius * 1.08 };
  const CURVE = { width: 420, height: 240, left: 46, right: 16, top: 10, bottom: 34, low: 1e-4, high: 10 };

  const element = (name, attributes = {}, parent = null, text = "") => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };
  const picture = (size, label) => {
    const svg = element("svg", { viewBox: `0 0 ${size.width} ${size.height}`, role: "img", "aria-label": label });
    root.querySelector(".delay-pictures").append(svg);
    return svg;
  };

  // ---- The plane
  const scale = PLANE.width / (2 * PLANE.reach);
  const x = (value) => (value + PLANE.reach) * scale;
  const y = (value) => (PLANE.reach - value) * scale;
  const plane = picture(PLANE, "Paths of the three rules on a quadratic of two variables");
  element("circle", { cx: x(0), cy: y(0), r: data.radius * scale, class: "set" }, plane);
  const clip = element("clipPath", { id: "delay-set" }, plane);
  element("circle", { cx: x(0), cy: y(0), r: data.radius * scale }, clip);
  const levels = element("g", { class: "levels", "clip-path": "url(#delay-set)" }, plane);
  for (const level of [0.003, 0.03, 0.1, 0.25, 0.5, 1, 2, 4]) {
    const [rx, ry] = data.curvatures.map((curvature) => Math.sqrt((2 * level) / curvature) * scale);
    element("ellipse", { cx: x(data.optimum[0]), cy: y(data.optimum[1]), rx, ry }, levels);
  }
  element("text", { x: x(data.optimum[0]), y: y(data.optimum[1]) + 4, class: "mark" }, plane, "×");

  // ---- The loss
  const curve = picture(CURVE, "Excess loss of the three rules against the update");
  const along = (t) => CURVE.left + ((CURVE.width - CURVE.left - CURVE.right) * t) / data.steps;
  const up = (loss) => {
    const share = Math.log(Math.min(Math.max(loss, CURVE.low), CURVE.high) / CURVE.low) / Math.log(CURVE.high / CURVE.low);
    return CURVE.height - CURVE.bottom - share * (CURVE.height - CURVE.top - CURVE.bottom);
  };
  for (let power = -4; power <= 1; power++) {
    element("line", { x1: along(0), x2: along(data.steps), y1: up(10 ** power), y2: up(10 ** power), class: "grid" }, curve);
    const label = element("text", { x: along(0) - 6, y: up(10 ** power) + 4, class: "tick end" }, curve, "10");
    element("tspan", { dy: -5, "font-size": 9 }, label, String(power).replace("-", "−"));
  }
  for (let t = 0; t <= data.steps; t += 100)
    element("text", { x: along(t), y: CURVE.height - CURVE.bottom + 16, class: "tick" }, curve, String(t));
  element("text", { x: along(data.steps / 2), y: CURVE.height - 3, class: "tick" }, curve, "update");
  const now = element("line", { y1: CURVE.top, y2: CURVE.height - CURVE.bottom, class: "now" }, curve);

  // ---- What moves
  const drawn = data.rules.map((rule) => {
    const group = element("g", { class: `rule ${rule.name}` }, plane);
    return {
      rule,
      trail: element("polyline", { class: "trail" }, group),
      late: element("line", { class: "late" }, group),
      asked: element("circle", { r: 5, class: "asked" }, group),
      query: element("circle", { r: 4, class: "query" }, group),
      loss: element("polyline", { class: "trail" }, element("g", { class: `rule ${rule.name}` }, curve)),
      cell: root.querySelector(`[data-loss="${rule.name}"]`),
    };
  });

  const delay = root.querySelector("[name=delay]");
  const time = root.querySelector("[name=time]");
  const play = root.querySelector("button");
  delay.max = data.delays.length - 1;
  time.max = data.steps;
  const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;

  const show = () => {
    const d = Number(delay.value), t = Number(time.value);
    root.querySelector("[data-delay]").textContent = data.delays[d];
    root.querySelector("[data-time]").textContent = t;
    const points = (list) => list.slice(0, t + 1).map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
    for (const { rule, trail, late, asked, query, loss, cell } of drawn) {
      const here = rule.queries[d][t];
      const there = rule.queries[d][Math.max(0, t - data.delays[d])];
      trail.setAttribute("points", points(rule.outputs[d]));
      query.setAttribute("cx", x(here[0])); query.setAttribute("cy", y(here[1]));
      asked.setAttribute("cx", x(there[0])); asked.setAttribute("cy", y(there[1]));
      late.setAttribute("x1", x(here[0])); late.setAttribute("y1", y(here[1]));
      late.setAttribute("x2", x(there[0])); late.setAttribute("y2", y(there[1]));
      const losses = rule.losses[d].slice(0, t + 1);
      loss.setAttribute("points", losses.map((value, i) => `${along(i).toFixed(1)},${up(value).toFixed(1)}`).join(" "));
      cell.textContent = rule.losses[d][t].toPrecision(2);
    }
    now.setAttribute("x1", along(t)); now.setAttribute("x2", along(t));
  };

  let running = null;
  const stop = () => { cancelAnimationFrame(running); running = null; play.textContent = "Play"; };
  const advance = () => {
    if (Number(time.value) >= data.steps) return stop();
    time.value = Number(time.value) + 1;
    show();
    running = requestAnimationFrame(advance);
  };
  play.addEventListener("click", () => {
    if (running !== null) return stop();
    if (Number(time.value) >= data.steps) time.value = 0;
    play.textContent = "Pause";
    running = requestAnimationFrame(advance);
  });
  delay.addEventListener("input", show);
  time.addEventListener("input", () => { stop(); show(); });
  delay.value = data.delays.indexOf(24);
  time.value = data.steps;
  root.hidden = false;
  play.hidden = still;
  show();
})();
