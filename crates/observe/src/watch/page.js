// ---- the page ----
function drawCharts(shown) {
  const one = shown.length === 1 ? shown[0] : null;
  const curves = (key, name) => shown.map(run => ({ name: one ? name : run.name, colour: run.colour, points: run.curves[key] }));
  const losses = one
    ? [{ name: "training", colour: 0, points: one.curves.loss }, { name: "validation", colour: 1, points: one.curves.validation, dotted: one.curves.validation.length <= 100 }]
    : shown.flatMap(run => [
      { name: run.name, colour: run.colour, points: run.curves.loss },
      { name: `${run.name}, validation`, colour: run.colour, points: run.curves.validation, dashed: true, dotted: run.curves.validation.length <= 100 }]);
  const charts = [
    lineChart("Loss", units.plain, false, losses, one ? one.skipped : [], one ? one.spikes : []),
    lineChart("Learning rate", units.plain, true, curves("lr", "learning rate")),
    lineChart("Tokens per second", units.count, true, curves("tokens_per_s", "all ranks").concat(one ? limitLine(one) : []), [], [], one ? limitOf(one) : ""),
    lineChart("Gradient norm before clipping", units.plain, true, curves("grad_norm", "gradient norm")),
  ];
  if (one) {
    charts.push(layerChart("Memory of rank 0", units.bytes, one.memory,
      "Each category at its own peak within the step; these need not fall together, so the peak of all may lie below their sum.", "peak of all"));
    charts.push(layerChart("Time per step", units.time, one.times, "", ""));
    const plan = one.expected && one.expected.plan;
    if (plan && one.rank_memory.length) charts.push(planChart("Memory against the plan", plan, one.rank_memory));
    if (one.ranks.length) charts.push(rankChart("Ranks, and who waits for whom", one.ranks));
    if (one.timeline.length) charts.push(timelineChart("Ranks in the last steps", one.timeline));
    if (one.waits.length) charts.push(waitMap("Who waited when", one.waits));
    if (one.layer_norms && one.layer_norms.rows.length) charts.push(layerMap("Gradient norm by layer", one.layer_norms));
  } else {
    const totals = key => shown.map(run => ({ name: run.name, colour: run.colour, points: run[key].totals }));
    charts.push(lineChart("Memory of rank 0, peak", units.bytes, true, totals("memory")));
    charts.push(lineChart("Time per step", units.time, true, totals("times")));
  }
  if (shown.some(run => run.curves.entropy.length)) {
    charts.push(lineChart("Busiest expert, times the even share", units.plain, true, curves("imbalance", "of all layers")));
    charts.push(lineChart("Router entropy", units.plain, true, curves("entropy", "mean of layers")));
    if (shown.some(run => run.curves.dropped.some(point => point[1] > 0))) {
      charts.push(lineChart("Share of choices dropped", units.plain, true, curves("dropped", "mean of layers")));
    }
    if (one) charts.push(expertMap("Tokens per expert in the last step", one.routing));
  }
  document.getElementById("charts").replaceChildren(...(shown.length ? charts : []));
}
function drawRuns() {
  document.getElementById("runs").replaceChildren(...runs.map(run => {
    const box = element("input", { type: "checkbox" });
    box.checked = !hidden.has(run.path);
    box.addEventListener("change", () => { box.checked ? hidden.delete(run.path) : hidden.add(run.path); draw(); });
    const done = run.step === null ? "no step yet"
      : `step ${run.step}${run.steps_planned ? ` of ${run.steps_planned}` : ""}`;
    const left = run.eta_s === null ? "" : `, ${units.time.show(run.eta_s * 1000)} left`;
    const quiet = run.state === "silent" ? `, nothing for ${units.time.show(run.idle_s * 1000)}` : "";
    const share = run.steps_planned ? Math.min(100, 100 * (run.step || 0) / run.steps_planned) : 0;
    const bar = element("i"); bar.style.width = `${share}%`;
    return element("div", { class: `run s${run.colour}${hidden.has(run.path) ? " off" : ""}` },
      element("label", {}, box, run.name, element("span", { class: `state ${run.state}` }, run.state)),
      element("p", {}, `${done}${left}${quiet}${run.why ? `: ${run.why}` : ""}${run.log_problem ? `; ${run.log_problem}` : ""}`), element("p", {}, run.path), element("div", { class: "bar" }, bar));
  }));
}
function drawNumbers(shown) {
  const place = document.getElementById("numbers");
  if (shown.length === 1) {
    const list = element("dl", { class: "tiles" });
    for (const { name, value, remark } of shown[0].tiles) {
      const text = element("dd", {}, value);
      if (remark) text.append(element("small", {}, remark));
      list.append(element("div", {}, element("dt", {}, name), text));
    }
    const empty = shown[0].log_problem || (shown[0].state === "starting" ? "The run is starting: its first step is not done yet." : "There is no step in its log.");
    place.replaceChildren(shown[0].tiles.length ? list : element("p", { class: "empty" }, empty));
    return;
  }
  const names = [...new Set(shown.flatMap(run => run.tiles.map(tile => tile.name)))];
  place.replaceChildren(names.length ? table(shown, names.map(name => [name, shown.map(run => {
    const tile = run.tiles.find(tile => tile.name === name);
    return tile ? { text: tile.value, remark: tile.remark } : { text: "" };
  })])) : "");
}
function table(shown, rows) {
  const head = element("tr", {}, element("th", {}), ...shown.map(run => element("th", { scope: "col" }, run.name)));
  const body = rows.map(([name, cells]) => element("tr", {}, element("th", { scope: "row" }, name),
    ...cells.map(({ text, remark }) => {
      const cell = element("td", text.length > 40 ? { class: "long" } : {}, text);
      if (remark) cell.append(element("small", {}, remark));
      return cell;
    })));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}
function flatten(value, prefix, into) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, inner] of Object.entries(value)) flatten(inner, prefix ? `${prefix}.${key}` : key, into);
  } else if (value !== null && value !== undefined) {
    into.set(prefix, typeof value === "string" ? value : JSON.stringify(value));
  }
  return into;
}
function drawConfiguration(all) {
  const place = document.getElementById("configuration");
  const shown = all.filter(run => run.ds_config || run.recipe);
  const flat = shown.map(run => {
    const { ds_config: _, ...recipe } = run.recipe || {};
    return flatten(run.ds_config, "ds_config", flatten(recipe, "", flatten(run.facts, "", new Map())));
  });
  if (shown.length < 2) {
    const facts = shown.length ? flatten(shown[0].facts, "", new Map()) : new Map();
    if (!facts.size) { place.replaceChildren(); return; }
    const rows = [...facts].map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value)));
    place.replaceChildren(element("h2", {}, "The run"), element("table", {}, element("tbody", {}, ...rows)));
    return;
  }
  const keys = [...new Set(flat.flatMap(map => [...map.keys()]))];
  const differing = keys.filter(key => key !== "name" && key !== "measured peak" && new Set(flat.map(map => map.get(key))).size > 1);
  place.replaceChildren(element("h2", {}, "Where the configurations differ"), differing.length
    ? table(shown, differing.map(key => [key, flat.map(map => ({ text: map.get(key) ?? "—" }))]))
    : element("p", { class: "none" }, "They are the same."));
}
function drawDocuments(shown) {
  const all = shown.flatMap(run => run.documents.map(([name, text]) => {
    const key = `${run.path} ${name}`;
    const title = shown.length > 1 ? `${run.name}: ${name}` : name;
    const made = element("details", {}, element("summary", {}, title), element("pre", {}, text));
    made.open = opened.get(key) ?? false;
    made.addEventListener("toggle", () => opened.set(key, made.open));
    return made;
  }));
  document.getElementById("documents").replaceChildren(...(all.length ? [element("h2", {}, "Configuration and sample"), ...all] : []));
}
function draw() {
  const shown = runs.filter(run => !hidden.has(run.path));
  document.title = runs.length === 1 ? `${runs[0].name} – ferrospeed` : `${runs.length} runs – ferrospeed`;
  document.querySelector("h1").textContent = runs.length === 1 ? runs[0].name : `${runs.length} runs`;
  drawRuns(); drawNumbers(shown); drawCharts(shown); drawConfiguration(shown);
  if (!document.querySelector("#documents pre:hover")) drawDocuments(shown);
}
let last = "";
async function poll() {
  const link = document.getElementById("link");
  try {
    const answer = await fetch("runs.json", { cache: "no-cache" });
    if (!answer.ok) throw new Error(answer.statusText);
    const text = await answer.text();
    if (text !== last && !document.querySelector("figure svg:hover")) {
      last = text;
      runs = JSON.parse(text).runs;
      runs.forEach((run, index) => { run.colour = index % COLOURS; });
      draw();
    }
    link.className = "";
    link.textContent = `as of ${new Date().toLocaleTimeString()}`;
  } catch {
    link.className = "lost";
    link.textContent = "connection lost: is `ferrospeed watch` still running?";
  }
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}
poll();
