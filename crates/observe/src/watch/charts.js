"use strict";
// All text from runs goes through textContent or setAttribute: nothing of it is ever markup.
const WIDTH = 480, HEIGHT = 240, LEFT = 62, RIGHT = 14, TOP = 12, BOTTOM = 26, COLOURS = 8;
const POLL_MS = 1000;
const hidden = new Set();
const opened = new Map();
let runs = [];

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
function drawing(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// ---- numbers that people can read ----
function significant(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-4 || size >= 1e6) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}
function scaled(value, base, suffixes) {
  let index = 0;
  while (Math.abs(value) >= base * 0.99995 && index + 1 < suffixes.length) { value /= base; index += 1; }
  return significant(value) + suffixes[index];
}
const units = {
  plain: { show: significant, scale: () => 1 },
  count: { show: value => scaled(value, 1000, ["", "k", "M", "G", "T", "P"]), scale: () => 1 },
  bytes: {
    show: value => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]),
    scale: size => [2 ** 40, 2 ** 30, 2 ** 20, 1024].find(scale => size >= scale) || 1,
  },
  time: {
    show: ms => ms >= 3.6e6 ? significant(ms / 3.6e6) + " h" : ms >= 6e4 ? significant(ms / 6e4) + " min"
      : ms >= 1000 ? significant(ms / 1000) + " s" : significant(ms) + " ms",
    scale: size => [3.6e6, 6e4, 1000].find(scale => size >= scale) || 1,
  },
};

// ---- charts ----
function tickStep(span) {
  const rough = span / 5, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map(factor => factor * power).find(step => step >= rough * 0.99) || span;
}
function frameAround(xs, ys, fromZero, unit) {
  const finite = values => values.filter(Number.isFinite);
  xs = finite(xs); ys = finite(ys);
  if (!xs.length || !ys.length) return null;
  const lowest = values => values.reduce((a, b) => Math.min(a, b)), highest = values => values.reduce((a, b) => Math.max(a, b));
  let x0 = lowest(xs), x1 = highest(xs), low = lowest(ys), high = highest(ys);
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (fromZero) { low = Math.min(low, 0); high = Math.max(high, 0); }
  const size = Math.max(Math.abs(low), Math.abs(high));
  const missing = Math.max(0, (size === 0 ? 1 : size * 0.01) - (high - low));
  high += fromZero ? missing : missing / 2;
  low -= fromZero ? 0 : missing / 2;
  const scale = unit.scale(size), step = tickStep((high - low) / scale) * scale;
  const first = Math.floor(low / step), count = Math.min(12, Math.max(1, Math.ceil(high / step) - first));
  const ticks = Array.from({ length: count + 1 }, (_, index) => (first + index) * step);
  const y0 = ticks[0], y1 = ticks[count];
  return {
    x0, x1, ticks, unit,
    x: value => LEFT + (value - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT),
    y: value => HEIGHT - BOTTOM - (value - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM),
  };
}
function axes(frame) {
  const parts = [];
  for (const tick of frame.ticks) {
    const y = frame.y(tick).toFixed(1);
    parts.push(drawing("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
    parts.push(drawing("text", { class: "tick", x: LEFT - 6, y: Number(y) + 4, "text-anchor": "end" }, frame.unit.show(tick)));
  }
  const label = (value, anchor) => parts.push(
    drawing("text", { class: "tick", x: frame.x(value).toFixed(1), y: HEIGHT - 8, "text-anchor": anchor }, units.count.show(value)));
  if (frame.x1 - frame.x0 <= 1) { label((frame.x0 + frame.x1) / 2, "middle"); return parts; }
  label(frame.x0, "start"); label(frame.x1, "end");
  const step = Math.max(1, tickStep(frame.x1 - frame.x0)), room = (frame.x1 - frame.x0) * 0.1;
  for (let value = Math.ceil(frame.x0 / step) * step; value < frame.x1 - room; value += step) {
    if (value > frame.x0 + room) label(value, "middle");
  }
  return parts;
}
function path(frame, points) {
  return points.map(([x, y], index) => `${index ? "L" : "M"}${frame.x(x).toFixed(1)} ${frame.y(y).toFixed(1)}`).join("");
}
/** A curve in pieces: it breaks where a value is no number. */
function pieces(points) {
  const all = [[]];
  for (const point of points) {
    if (point[1] === null) all.push([]); else all[all.length - 1].push(point);
  }
  return all.filter(piece => piece.length);
}
function nearestPoint(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
}
function figure(title, note, legend, svg, frame, series) {
  const made = element("figure", {}, element("figcaption", {}, title));
  const names = element("p", { class: "legend" });
  for (const { name, colour, dashed } of legend) {
    names.append(element("span", {}, element("i", { class: `s${colour}${dashed ? " dashed" : ""}` }), name), " ");
  }
  made.append(names);
  if (!frame) { made.append(element("p", { class: "none" }, "Nothing is recorded yet.")); return made; }
  made.append(svg);
  if (note) made.append(element("p", { class: "note" }, note));
  const cross = drawing("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const tip = element("div", { class: "tip", hidden: "" });
  svg.append(cross); made.append(tip);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width * WIDTH;
    const x = frame.x0 + (place - LEFT) / (WIDTH - LEFT - RIGHT) * (frame.x1 - frame.x0);
    const near = series.filter(one => one.points.length)
      .map(one => ({ ...one, point: nearestPoint(one.points, x) })).filter(one => one.point[1] !== null);
    if (!near.length) return;
    const step = near.reduce((best, one) => Math.abs(one.point[0] - x) < Math.abs(best - x) ? one.point[0] : best, near[0].point[0]);
    cross.setAttribute("x1", frame.x(step)); cross.setAttribute("x2", frame.x(step));
    cross.setAttribute("visibility", "visible");
    tip.replaceChildren(element("div", {}, `step ${step}`), ...near.map(one =>
      element("div", {}, element("i", { class: `s${one.colour}` }), `${one.name} ${frame.unit.show(one.value ? one.value(one.point) : one.point[1])}`)));
    tip.hidden = false;
    const around = made.getBoundingClientRect();
    const left = frame.x(step) / WIDTH * box.width + box.left - around.left;
    const flip = left > around.width / 2;
    tip.style.left = flip ? "" : `${left + 10}px`;
    tip.style.right = flip ? `${around.width - left + 10}px` : "";
    tip.style.top = `${box.top - around.top + 12}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); });
  return made;
}
function newSvg(title) {
  return drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
}
/** Lines over steps: {name, colour, points, dashed, dotted}. */
function lineChart(title, unit, fromZero, lines, skipped = [], spikes = [], also = "") {
  const shown = lines.filter(line => line.points.length);
  const points = shown.flatMap(line => line.points);
  const frame = frameAround(points.map(point => point[0]), points.map(point => point[1]).filter(value => value !== null), fromZero, unit);
  const svg = newSvg(title);
  let broken = false;
  if (frame) {
    svg.append(...axes(frame));
    for (const line of shown) {
      for (const piece of pieces(line.points)) {
        svg.append(drawing("path", { class: `line s${line.colour}${line.dashed ? " dash" : ""}`, d: path(frame, piece) }));
        if (line.dotted || piece.length === 1) {
          for (const [x, y] of piece) svg.append(drawing("circle", { class: `dot s${line.colour}`, cx: frame.x(x), cy: frame.y(y), r: 3 }));
        }
      }
      for (const [x, y] of line.points) {
        if (y !== null) continue;
        broken = true;
        svg.append(drawing("path", { class: "broken", d: `M${(frame.x(x) - 3).toFixed(1)} ${TOP + 1}l6 6m0 -6l-6 6` }));
      }
    }
    for (const step of skipped) {
      if (step < frame.x0 || step > frame.x1) continue;
      const x = frame.x(step).toFixed(1);
      svg.append(drawing("line", { class: "skipped", x1: x, x2: x, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM - 8 }));
    }
  }
  if (frame) {
    for (const step of spikes) {
      if (step < frame.x0 || step > frame.x1) continue;
      svg.append(drawing("path", { class: "spike", d: `M${(frame.x(step) - 4).toFixed(1)} ${TOP}h8l-4 7z` }));
    }
  }
  const notes = also ? [also] : [];
  if (spikes.length) notes.push("Triangles at the upper edge: the loss jumps.");
  if (broken) notes.push("Crosses at the upper edge: values that are no numbers.");
  if (skipped.length) notes.push("Marks at the lower edge: steps that were skipped.");
  return figure(title, notes.join(" "), shown, svg, frame, shown);
}
/** Layers over steps that add up. */
function layerChart(title, unit, layers, note, outline) {
  const rows = layers.rows;
  const totals = outline ? layers.totals : [];
  const heights = rows.map(row => row[1].reduce((sum, value) => sum + value, 0)).concat(totals.map(point => point[1]).filter(v => v !== null));
  const frame = frameAround(rows.map(row => row[0]), heights, true, unit);
  const svg = newSvg(title);
  const legend = layers.names.map((name, colour) => ({ name, colour }));
  const series = legend.map(({ name, colour }) => ({
    name, colour, points: rows.map(row => [row[0], row[1][colour]]),
  }));
  if (frame) {
    svg.append(...axes(frame));
    const edge = index => [
      index === 0 ? frame.x0 : (rows[index - 1][0] + rows[index][0]) / 2,
      index + 1 === rows.length ? frame.x1 : (rows[index][0] + rows[index + 1][0]) / 2,
    ];
    let floor = rows.map(() => 0);
    layers.names.forEach((_, layer) => {
      const ceiling = rows.map((row, index) => floor[index] + row[1][layer]);
      const up = [], down = [];
      rows.forEach((_, index) => {
        const [start, end] = edge(index);
        up.push([start, ceiling[index]], [end, ceiling[index]]);
        down.push([start, floor[index]], [end, floor[index]]);
      });
      svg.append(drawing("path", { class: `area s${layer}`, d: path(frame, up.concat(down.reverse())) + "Z" }));
      floor = ceiling;
    });
    for (const piece of pieces(totals)) svg.append(drawing("path", { class: `line s${COLOURS}`, d: path(frame, piece) }));
  }
  if (outline) {
    legend.push({ name: outline, colour: COLOURS });
    series.push({ name: outline, colour: COLOURS, points: totals });
  }
  return figure(title, note, legend, svg, frame, series);
}
