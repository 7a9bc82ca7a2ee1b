// ---- what ranks did and held, and what binds ----
/** What ranks did in recent steps, a bar each, and who waits for whom. */
function rankChart(title, ranks) {
  const parts = [["forward", "forward_ms"], ["backward", "backward_ms"], ["waiting for others", "wait_ms"], ["optimizer", "optimizer_ms"]];
  const total = rank => parts.reduce((sum, [, key]) => sum + rank[key], 0);
  const longest = Math.max(1e-9, ...ranks.map(total)), high = (HEIGHT - TOP - BOTTOM) / ranks.length;
  const svg = newSvg(title), place = ms => LEFT + ms / longest * (WIDTH - LEFT - RIGHT);
  const every = Math.ceil(ranks.length / 16);
  ranks.forEach((rank, index) => {
    let start = 0;
    const y = TOP + index * high;
    if (index % every === 0) svg.append(drawing("text", { class: "tick", x: LEFT - 6, y: (y + high / 2 + 4).toFixed(1), "text-anchor": "end" }, `rank ${index}`));
    parts.forEach(([name, key], colour) => {
      const bar = drawing("rect", { class: `area s${colour}`, x: place(start).toFixed(1), y: y.toFixed(1),
        width: Math.max(0, place(start + rank[key]) - place(start)).toFixed(1), height: Math.max(0.5, high - 2).toFixed(1) });
      const hint = drawing("title", {});
      hint.textContent = `rank ${index}, ${name}: ${units.time.show(rank[key])}`;
      bar.append(hint); svg.append(bar);
      start += rank[key];
    });
  });
  for (const share of [0, 0.5, 1]) {
    svg.append(drawing("text", { class: "tick", x: place(share * longest).toFixed(1), y: HEIGHT - 8,
      "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" }, units.time.show(share * longest)));
  }
  const work = ranks.map(rank => rank.forward_ms + rank.backward_ms);
  const slowest = work.indexOf(Math.max(...work));
  const waiting = ranks.map((rank, index) => [index, rank.wait_ms]).filter(([index, wait]) => index !== slowest && wait > 0.05 * longest);
  const mean = waiting.reduce((sum, [, wait]) => sum + wait, 0) / Math.max(1, waiting.length);
  const names = waiting.slice(0, 8).map(([index]) => index).join(", ") + (waiting.length > 8 ? ", …" : "");
  const note = waiting.length
    ? `Rank${waiting.length > 1 ? "s" : ""} ${names} wait${waiting.length > 1 ? "" : "s"} ${units.time.show(mean)} a step for rank ${slowest}.`
    : "No rank waits long for another.";
  return plainFigure(title, svg, parts.map(([name], colour) => ({ name, colour })), `${note} Mean of the last steps.`);
}
/** A picture with a legend and a note, without a pointer's cross. */
function plainFigure(title, svg, legend, note) {
  const made = element("figure", {}, element("figcaption", {}, title));
  const names = element("p", { class: "legend" });
  for (const { name, colour } of legend) names.append(element("span", {}, element("i", { class: `s${colour}` }), name), " ");
  made.append(names, svg);
  if (note) made.append(element("p", { class: "note" }, note));
  return made;
}
function hinted(shape, text) {
  const hint = drawing("title", {});
  hint.textContent = text;
  shape.append(hint);
  return shape;
}
function box(kind, x, y, width, height, more = {}) {
  return drawing("rect", { class: kind, x: x.toFixed(1), y: y.toFixed(1), width: Math.max(0, width).toFixed(2), height: Math.max(0.5, height).toFixed(1), ...more });
}
function rowLabel(text, y) {
  return drawing("text", { class: "tick", x: LEFT - 6, y: (y + 4).toFixed(1), "text-anchor": "end" }, text);
}
/** The last steps on one clock: ranks begin a step together, for its end is agreed on. */
function timelineChart(title, steps) {
  const parts = [["forward", "forward_ms"], ["backward", "backward_ms"], ["waiting for others", "wait_ms"], ["optimizer", "optimizer_ms"]];
  const ranks = steps[steps.length - 1].ranks.length, high = (HEIGHT - TOP - BOTTOM) / ranks;
  const length = step => Math.max(step.step_ms, ...step.ranks.map(rank => parts.reduce((sum, [, key]) => sum + rank[key], 0)));
  const all = Math.max(1e-9, steps.reduce((sum, step) => sum + length(step), 0));
  const place = ms => LEFT + ms / all * (WIDTH - LEFT - RIGHT), svg = newSvg(title);
  const every = Math.ceil(ranks / 16);
  for (let rank = 0; rank < ranks; rank += every) svg.append(rowLabel(`rank ${rank}`, TOP + (rank + 0.5) * high));
  let begin = 0;
  steps.forEach((step, index) => {
    step.ranks.forEach((rank, row) => {
      let at = begin;
      parts.forEach(([name, key], colour) => {
        const bar = box(`area s${colour}`, place(at), TOP + row * high, place(at + rank[key]) - place(at), high - 1.5);
        svg.append(hinted(bar, `step ${step.step}, rank ${row}, ${name}: ${units.time.show(rank[key])}`));
        at += rank[key];
      });
    });
    const x = place(begin).toFixed(1);
    svg.append(drawing("line", { class: "grid", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    if (index % Math.ceil(steps.length / 4) === 0) svg.append(drawing("text", { class: "tick", x, y: HEIGHT - 8, "text-anchor": "start" }, `step ${step.step}`));
    begin += length(step);
  });
  const note = `${units.time.show(all)} in all. Where there is no colour a rank reads, logs, or waits at the end of the step.`;
  return plainFigure(title, svg, parts.map(([name], colour) => ({ name, colour })), note);
}
/** A field per row and stretch of steps, the fuller the more. */
function fieldMap(title, names, rows, share, say, note) {
  const svg = newSvg(title), high = (HEIGHT - TOP - BOTTOM) / names.length, wide = (WIDTH - LEFT - RIGHT) / rows.length;
  const every = Math.ceil(names.length / 16);
  const short = name => name.length > 9 ? `…${name.slice(-8)}` : name;
  names.forEach((name, row) => { if (row % every === 0) svg.append(rowLabel(short(name), TOP + (row + 0.5) * high)); });
  rows.forEach(([step, values], column) => values.forEach((value, row) => {
    const field = box("area s0", LEFT + column * wide, TOP + row * high, wide, high - 0.5, { "fill-opacity": Math.min(1, Math.max(0.03, share(value))).toFixed(3) });
    svg.append(hinted(field, `step ${step}, ${say(names[row], value)}`));
  }));
  svg.append(drawing("text", { class: "tick", x: LEFT, y: HEIGHT - 8, "text-anchor": "start" }, units.count.show(rows[0][0])));
  svg.append(drawing("text", { class: "tick", x: WIDTH - RIGHT, y: HEIGHT - 8, "text-anchor": "end" }, units.count.show(rows[rows.length - 1][0])));
  return plainFigure(title, svg, [], note);
}
function waitMap(title, rows) {
  const ranks = rows[rows.length - 1][1].length, names = Array.from({ length: ranks }, (_, rank) => `rank ${rank}`);
  const percent = value => `${significant(100 * value)} %`;
  const means = names.map((_, rank) => rows.reduce((sum, row) => sum + row[1][rank], 0) / rows.length);
  const most = means.indexOf(Math.max(...means)), least = means.indexOf(Math.min(...means));
  const note = `Rank ${most} waits most, ${percent(means[most])} of all steps; rank ${least} least, ${percent(means[least])}.`;
  return fieldMap(title, names, rows, value => value, (name, value) => `${name} waits ${percent(value)} of it`, note);
}
/** Norms differ by powers of ten, so a field is as full as the logarithm says. */
function layerMap(title, norms) {
  const positive = norms.rows.flatMap(row => row[1]).filter(value => value > 0);
  const low = Math.log(positive.reduce((a, b) => Math.min(a, b), Infinity)), high = Math.log(positive.reduce((a, b) => Math.max(a, b), 0));
  const share = value => value > 0 ? (high > low ? 0.1 + 0.9 * (Math.log(value) - low) / (high - low) : 1) : 0;
  const last = norms.rows[norms.rows.length - 1][1], largest = last.indexOf(Math.max(...last));
  const cut = norms.of > norms.names.length ? ` ${norms.of - norms.names.length} layers in the middle are left out.` : "";
  return fieldMap(title, norms.names, norms.rows, share, (name, value) => `${name}: ${significant(value)}`,
    `Before clipping; the fuller the larger, by powers. In the last step ${norms.names[largest]} has most: ${significant(last[largest])}.${cut}`);
}
/** Bytes by category: what was planned for a rank beside what each rank's allocator counted. */
function planChart(title, plan, ranks) {
  const order = ["parameters", "gradients", "optimizer", "activations", "buffers", "total"];
  const names = order.filter(name => plan[name] || ranks.some(rank => rank[name]));
  const values = names.flatMap(name => [plan[name] || 0, ...ranks.map(rank => rank[name] || 0)]);
  const frame = frameAround([0, 1], values, true, units.bytes), svg = newSvg(title);
  for (const tick of frame.ticks) {
    const y = frame.y(tick).toFixed(1);
    svg.append(drawing("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }), rowLabel(units.bytes.show(tick), Number(y)));
  }
  const group = (WIDTH - LEFT - RIGHT) / names.length, floor = frame.y(0);
  names.forEach((name, index) => {
    const left = LEFT + index * group + group * 0.08, wide = group * 0.84 / (ranks.length + 1);
    const bar = (place, bytes, kind, text) => svg.append(hinted(box(kind, left + place * wide, frame.y(bytes), wide * 0.92, floor - frame.y(bytes)), text));
    bar(0, plan[name] || 0, "area s1", `${name}, planned: ${units.bytes.show(plan[name] || 0)}`);
    ranks.forEach((rank, place) => bar(place + 1, rank[name] || 0, "area s0", `${name}, rank ${place}: ${units.bytes.show(rank[name] || 0)}`));
    svg.append(drawing("text", { class: "tick", x: (left + group * 0.42).toFixed(1), y: HEIGHT - 8, "text-anchor": "middle" }, name));
  });
  const totals = ranks.map(rank => rank.total || 0), most = totals.indexOf(Math.max(...totals));
  const off = plan.total ? 100 * (totals[most] - plan.total) / plan.total : 0;
  const verdict = plan.total ? `, ${significant(Math.abs(off))} % ${off < 0 ? "below" : "above"} the plan of ${units.bytes.show(plan.total)}` : "";
  const note = `Rank ${most} held most: ${units.bytes.show(totals[most])}${verdict}. Categories peak at different times; the first step does not count.`;
  return plainFigure(title, svg, [{ name: "planned", colour: 1 }, { name: ranks.length > 1 ? "measured, a bar per rank" : "measured", colour: 0 }], note);
}
/** The limit of the machine that is nearest, [name, tokens per second], where it was measured. */
function nearestLimit(run) {
  const limits = Object.entries((run.expected && run.expected.limits) || {}).filter(([, value]) => value > 0);
  return limits.length ? limits.reduce((least, one) => one[1] < least[1] ? one : least) : null;
}
/** What binds: of the machine's limits, and the part of a step that takes longest. */
function limitOf(run) {
  const row = run.times.rows[run.times.rows.length - 1];
  if (!row) return "";
  const values = row[1].map((value, index) => [run.times.names[index], value]);
  const all = values.reduce((sum, [, value]) => sum + value, 0);
  if (!(all > 0)) return "";
  const waits = run.ranks.length ? run.ranks.reduce((sum, rank) => sum + rank.wait_ms, 0) / run.ranks.length : 0;
  const [name, value] = waits > 0.5 * all ? ["waiting for other ranks", waits] : values.reduce((most, one) => one[1] > most[1] ? one : most);
  const phase = `${name}, ${significant(100 * value / all)} % of a step.`;
  const limit = nearestLimit(run), speeds = run.curves.tokens_per_s.filter(point => point[1] !== null);
  if (!limit || !speeds.length) return `What binds: ${phase}`;
  const speed = speeds[speeds.length - 1][1], others = Object.entries(run.expected.limits).filter(([other]) => other !== limit[0]);
  const further = others.map(([other, most]) => `${other} ${units.count.show(most)}`).join(", ");
  return `What binds: ${limit[0]}, which allows ${units.count.show(limit[1])} tokens per second at its measured peak`
    + `${further ? ` (${further})` : ""}; the run reaches ${significant(100 * speed / limit[1])} % of that. Longest: ${phase}`;
}

/** Who got how many tokens in the last step: a row per layer, a field per expert, darker where it is busier. */
function expertMap(title, layers) {
  const rows = layers.length, columns = Math.max(...layers.map(layer => layer.tokens_per_expert.length));
  const svg = newSvg(title);
  const wide = (WIDTH - LEFT - RIGHT) / columns, high = (HEIGHT - TOP - BOTTOM) / rows;
  layers.forEach((layer, row) => {
    const busiest = Math.max(1, ...layer.tokens_per_expert);
    layer.tokens_per_expert.forEach((tokens, expert) => {
      const field = drawing("rect", { class: "area s0", x: (LEFT + expert * wide).toFixed(1), y: (TOP + row * high).toFixed(1),
        width: Math.max(0.5, wide - 0.5).toFixed(1), height: Math.max(0.5, high - 0.5).toFixed(1), "fill-opacity": (tokens / busiest).toFixed(3) });
      const hint = drawing("title", {});
      hint.textContent = `layer ${layer.layer}, expert ${expert}: ${tokens} tokens`;
      field.append(hint); svg.append(field);
    });
  });
  return plainFigure(title, svg, [], "A row per layer, a field per expert; within a row, the fuller the more tokens.");
}

/** The nearest limit as a line, where a run has steps. */
function limitLine(run) {
  const limit = nearestLimit(run), points = run.curves.tokens_per_s;
  if (!limit || !points.length) return [];
  return [{ name: `allowed by ${limit[0]}`, colour: 3, dashed: true, points: [[points[0][0], limit[1]], [points[points.length - 1][0], limit[1]]] }];
}
