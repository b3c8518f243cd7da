"use strict";
// Everything is on the page without this script; it adds hovering, smoothing, sorting, filtering and copying.
document.documentElement.classList.add("script");
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const make = (tag, name) => Object.assign(document.createElement(tag), { className: name });

function shortNumber(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function smoothed(values, weight) {
  let mean = 0, share = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

function chart(figure) {
  const plot = figure.querySelector(".plot");
  const source = figure.querySelector("script");
  const data = source === null ? {} : JSON.parse(source.textContent);
  if (!data.lines) return;
  const log = data.log ? Math.log : (value) => value;
  const across = (step) => (step - data.x[0]) / (data.x[1] - data.x[0] || 1);
  const up = (value) => (log(value) - log(data.y[0])) / (log(data.y[1]) - log(data.y[0]) || 1);
  const shown = data.lines.map((line) => line.values);

  function smooth(weight) {
    data.lines.forEach((line, index) => {
      if (!line.smooth) return;
      shown[index] = smoothed(line.values, weight);
      const places = line.steps.map((step, at) => `${1000 * across(step)} ${1000 * (1 - up(shown[index][at]))}`);
      figure.querySelector(`[data-line="${index}"]`).setAttribute("d", "M" + places.join("L"));
    });
  }
  const slider = figure.querySelector(".smoothing");
  if (slider) {
    smooth(Number(slider.value));
    slider.addEventListener("input", () => smooth(Number(slider.value)));
  }

  const cursor = make("div", "cursor"), tip = make("div", "tip");
  tip.setAttribute("role", "status");
  const steps = [...new Set(data.lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  let at = -1;
  const nearest = (line, step) => line.steps.reduce((best, other, index) => (Math.abs(other - step) < Math.abs(line.steps[best] - step) ? index : best), 0);

  function show(index) {
    at = Math.min(Math.max(index, 0), steps.length - 1);
    const step = steps[at], place = across(step);
    const rows = [];
    const reach = (data.x[1] - data.x[0]) / 40;
    data.lines.forEach((line, number) => {
      if (!line.steps.length) return;
      const closest = nearest(line, step);
      if (Math.abs(line.steps[closest] - step) <= reach) rows.push([line.name, shown[number][closest], line.values[closest]]);
    });
    tip.replaceChildren();
    const head = make("div", ""); head.textContent = `${plot.querySelector(".x-label").textContent} ${shortNumber(step)}`; tip.append(head);
    for (const [name, value, raw] of rows.slice(0, 8)) {
      const row = make("div", ""), bold = make("b", "");
      row.textContent = name; bold.textContent = shortNumber(raw) + (value === raw ? "" : ` (smoothed ${shortNumber(value)})`); row.append(bold); tip.append(row);
    }
    cursor.style.left = `${100 * place}%`;
    tip.style.left = place < 0.5 ? `calc(${100 * place}% + 0.6rem)` : "auto";
    tip.style.right = place < 0.5 ? "auto" : `calc(${100 * (1 - place)}% + 0.6rem)`;
    plot.append(cursor, tip);
  }
  function hide() { cursor.remove(); tip.remove(); at = -1; }
  if (!steps.length || figure.classList.contains("trials")) return;
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const step = data.x[0] + ((event.clientX - box.left) / box.width) * (data.x[1] - data.x[0]);
    show(steps.reduce((best, other, index) => (Math.abs(other - step) < Math.abs(steps[best] - step) ? index : best), 0));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (event.key === "Escape") return hide();
    if (move === undefined) return;
    event.preventDefault();
    show(at < 0 ? (move > 0 ? 0 : steps.length - 1) : at + move);
  });
}

// A trial is one thing on the whole page: pointing at it anywhere lights it everywhere.
function light(trial) {
  for (const element of all("[data-trial]")) element.classList.toggle("lit", trial !== null && element.dataset.trial === trial);
  for (const holder of all(".trials")) holder.classList.toggle("has-lit", trial !== null);
  for (const spoken of all(".lit-name")) spoken.textContent = trial === null ? "" : all("tr[data-said]").find((row) => row.dataset.trial === trial)?.dataset.said || "";
}
function nearestTrial(plot, event) {
  const ctm = plot.querySelector("svg").getScreenCTM();
  let best = null, closest = 18;
  for (const path of all("path.line[data-trial]:not(.out)", plot)) {
    const points = pathPoints(path);
    for (let index = 0; index < points.length; index += 1) {
      const [ax, ay] = points[index], [bx, by] = points[Math.min(index + 1, points.length - 1)];
      const a = { x: ax * ctm.a + ctm.e, y: ay * ctm.d + ctm.f }, b = { x: bx * ctm.a + ctm.e, y: by * ctm.d + ctm.f };
      const length = (b.x - a.x) ** 2 + (b.y - a.y) ** 2;
      const t = length ? Math.min(Math.max(((event.clientX - a.x) * (b.x - a.x) + (event.clientY - a.y) * (b.y - a.y)) / length, 0), 1) : 0;
      const distance = Math.hypot(event.clientX - a.x - t * (b.x - a.x), event.clientY - a.y - t * (b.y - a.y));
      if (distance < closest) [closest, best] = [distance, path.dataset.trial];
    }
  }
  return best;
}
function pathPoints(path) {
  return path.getAttribute("d").slice(1).split("L").map((pair) => pair.split(" ").map(Number));
}
function trials(figure) {
  const plot = figure.querySelector(".plot");
  plot.addEventListener("pointermove", (event) => light(nearestTrial(plot, event)));
  plot.addEventListener("pointerdown", (event) => light(nearestTrial(plot, event)));
  plot.addEventListener("pointerleave", () => light(null));
  const order = all("path.line[data-trial]", plot).map((path) => path.dataset.trial);
  let at = -1;
  plot.addEventListener("keydown", (event) => {
    if (event.target !== plot) return;
    const move = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") light(null);
    if (move === undefined) return;
    event.preventDefault();
    at = (at + move + order.length) % order.length;
    light(order[at]);
  });
  plot.addEventListener("blur", () => light(null));
}
for (const [inside, outside] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
  const named = (event) => event.target.closest?.("tr[data-trial], .mark[data-trial]");
  document.addEventListener(inside, (event) => { const found = named(event); if (found) light(found.dataset.trial); });
  document.addEventListener(outside, (event) => { if (named(event)) light(null); });
}

// Parallel coordinates: each axis has two handles; trials outside of any axis's range fade.
const chosen = new Map(); // the ranges of axes, also after the figure was drawn again
function parallel(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const held = data.axes.join(" ");
  const ranges = chosen.get(held) ?? data.axes.map(() => [0, 1]);
  chosen.set(held, ranges);
  const section = figure.closest("section"), heard = section.querySelector(".heard");
  function apply() {
    let kept = 0;
    for (const [trial, places] of Object.entries(data.trials)) {
      const out = places.some((place, axis) => place === null ? ranges[axis][0] > 0 || ranges[axis][1] < 1 : place < ranges[axis][0] - 1e-6 || place > ranges[axis][1] + 1e-6);
      if (!out) kept += 1;
      for (const element of all("[data-trial]")) if (element.dataset.trial === trial) element.classList.toggle("out", out);
    }
    const total = Object.keys(data.trials).length;
    heard.textContent = kept < total ? `${kept} of ${total} trials` : "";
    all(".axis", figure).forEach((axis, index) => {
      const [low, high] = ranges[index];
      const held = axis.querySelector(".held");
      held.style.top = `${100 * (1 - high)}%`; held.style.bottom = `${100 * low}%`;
      held.hidden = low <= 0 && high >= 1;
    });
  }
  all(".handle", figure).forEach((handle) => {
    const axis = Number(handle.dataset.axis), end = handle.dataset.end === "high" ? 1 : 0;
    function move(place) {
      const limit = ranges[axis][1 - end];
      ranges[axis][end] = end ? Math.min(Math.max(place, limit), 1) : Math.max(Math.min(place, limit), 0);
      handle.style.top = `${100 * (1 - ranges[axis][end])}%`;
      handle.setAttribute("aria-valuenow", Math.round(100 * ranges[axis][end]));
      apply();
    }
    handle.addEventListener("pointerdown", (event) => { handle.setPointerCapture(event.pointerId); event.stopPropagation(); });
    handle.addEventListener("pointermove", (event) => {
      if (!handle.hasPointerCapture(event.pointerId)) return;
      event.stopPropagation();
      const box = handle.parentElement.getBoundingClientRect();
      move(1 - (event.clientY - box.top) / box.height);
    });
    handle.addEventListener("keydown", (event) => {
      const step = { ArrowUp: 0.05, ArrowDown: -0.05, PageUp: 0.25, PageDown: -0.25 }[event.key];
      if (event.key === "Escape") { event.preventDefault(); return move(end); }
      if (step === undefined) return;
      event.preventDefault(); event.stopPropagation();
      move(ranges[axis][end] + step);
    });
    handle.addEventListener("dblclick", () => move(end));
  });
  const place = () => {
    for (const handle of all(".handle", figure)) {
      handle.style.top = `${100 * (1 - ranges[Number(handle.dataset.axis)][handle.dataset.end === "high" ? 1 : 0])}%`;
    }
    apply();
  };
  section.querySelector(".clear").onclick = () => {
    ranges.forEach((range) => { range[0] = 0; range[1] = 1; });
    place();
  };
  if (ranges.some(([low, high]) => low > 0 || high < 1)) place();
}

// Sorts by the column whose head says so; also when rows have changed.
function sort(table) {
  const column = all("thead th", table).findIndex((head) => head.hasAttribute("aria-sort"));
  if (column < 0) return;
  const down = table.tHead.rows[0].cells[column].getAttribute("aria-sort") === "descending";
  const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === "" || y === "") return x === y ? 0 : x === "" ? 1 : -1;
    const order = Number.isNaN(Number(x)) || Number.isNaN(Number(y)) ? x.localeCompare(y) : Number(x) - Number(y);
    return down ? -order : order;
  });
  table.tBodies[0].append(...rows);
}
function sortable(table) {
  for (const head of all("thead th", table)) {
    head.querySelector("button")?.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of all("thead th", table)) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      sort(table);
    });
  }
}
function copies(button) {
  button.addEventListener("click", async () => {
    const text = button.previousElementSibling.textContent;
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch {
      getSelection().selectAllChildren(button.previousElementSibling); button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
const enhanced = new WeakSet();
function enhance(root) {
  const kinds = [["figure.chart", chart], ["figure.trials", trials], ["figure.parallel", parallel], ["table.sortable", sortable], [".copy", copies]];
  const fresh = all("figure.chart, table.sortable, .copy", root).filter((element) => !enhanced.has(element));
  for (const element of fresh) {
    enhanced.add(element);
    for (const [selector, act] of kinds) if (element.matches(selector)) act(element);
  }
}
enhance(document);
