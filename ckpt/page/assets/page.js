"use strict";
// The page of a run. Texts from checkpoints become text nodes only, never markup. Norms are in norms.js.

const SVG = "http://www.w3.org/2000/svg";
const MOST_ROWS = 500;
const MOST_TILES = 40;
const MOST_KEPT = 12;
const UNKNOWN = "not known: no digests";
const OTHER_CHUNKS = "not known: other chunks";
const PHASES = ["waited", "staged", "written"];
const byId = (id) => document.getElementById(id);
const embedded = byId("data") ? JSON.parse(byId("data").textContent) : null;

let run = null;
let chosen = null; // The number of the step that is shown, and its contents. Numbers of steps are texts.
let shown = null;
let isPinned = false; // Whether the user has chosen a step; otherwise the latest is followed.
let showsAll = false;
const contents = new Map();

// ---- reading ----

async function read(path) {
  if (embedded) {
    if (path === "run" || path === "norms") return embedded[path];
    const found = embedded.steps[path.slice("step/".length)];
    if (!found) throw new Error("The file has no leaves of this step. Export more with --steps.");
    return found;
  }
  const answer = await fetch(path, { credentials: "same-origin" });
  const told = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(told.error);
  return told;
}

async function contentsOf(step) {
  const entry = run.listing.steps.find((each) => each.step === step);
  const key = `${step} ${entry ? entry.committed : ""}`;
  if (!contents.has(key)) contents.set(key, await read(`step/${step}`));
  // A live page would otherwise keep the leaves of every step that it has shown.
  const kept = contents.get(key);
  contents.delete(key);
  contents.set(key, kept);
  for (const old of [...contents.keys()].slice(0, -MOST_KEPT)) contents.delete(old);
  return kept;
}

async function refresh() {
  try {
    const found = await read("run");
    const isNew = JSON.stringify(withoutAges(found)) !== JSON.stringify(withoutAges(run));
    run = found;
    tell("");
    if (isNew) await showRun();
    else showAbout();
  } catch (error) {
    tell(`The run cannot be read: ${error.message}`);
  }
  if (!embedded) setTimeout(refresh, ((run && run.poll_seconds) || 2) * 1000);
}

function withoutAges(found) {
  if (!found) return null;
  const settled = (each) => ({ ...each, age_seconds: 0 });
  const { steps, attempts } = found.listing;
  return { ...found, listing: { ...found.listing, steps: steps.map(settled), attempts: attempts.map(settled) } };
}

function tell(text) {
  byId("failure").textContent = text;
  byId("failure").hidden = !text;
}

// ---- texts ----

function size(nbytes) {
  if (nbytes === null || nbytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let value = nbytes;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toPrecision(3) : Math.round(value)} ${units[unit]}`;
}

function age(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const [name, length] = units.find((each) => seconds >= each[1]) || ["s", 1];
  return `${Math.floor(seconds / length)} ${name} ago`;
}

const count = (number, noun, plural) =>
  `${number.toLocaleString("en")} ${number === 1 ? noun : plural || `${noun}s`}`;
const metric = (value) => (value === null ? "not finite" : Number(value.toPrecision(6)).toString());
const seconds = (value) => (value < 1 ? `${Number((value * 1000).toPrecision(2))} ms` : `${value.toFixed(2)} s`);
const pathOf = (leaf) => (leaf.item ? `${leaf.item}: ${leaf.path}` : leaf.path);

function typeOf(leaf) {
  if (leaf.dtype === null) return leaf.kind;
  const host = leaf.kind === "jax" ? "" : ` (${leaf.kind})`;
  return `${leaf.dtype}[${leaf.shape.join(", ")}]${host}`;
}

// ---- elements ----

function make(name, attributes = {}, ...children) {
  const drawn = ["svg", "rect", "path", "text", "circle", "line", "title", "g"].includes(name);
  const element = drawn ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "click") element.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value);
  }
  element.append(...children.filter((each) => each !== null));
  return element;
}

const cell = (text, kind) => make("td", kind ? { class: kind } : {}, text);
const head = (text, kind) => make("th", { scope: "col", class: kind }, text);

function options(select, values, kept, text = String) {
  select.replaceChildren(...values.map((each) => make("option", { value: each }, text(each))));
  if (values.map(String).includes(String(kept))) select.value = kept;
}

// ---- the run ----

function showAbout() {
  const steps = run.listing.steps;
  const total = run.listing.stored_bytes ? `, ${size(run.listing.stored_bytes)}` : "";
  const latest = steps.at(-1);
  const when = latest ? `; the latest ${age(latest.age_seconds)}` : "";
  const keeps = run.listing.keeps ? `; keeps ${run.listing.keeps}` : "";
  const live = embedded ? "; as it was when this file was written" : "; live";
  byId("about").textContent = `${count(steps.length, "step")}${total}${when}${keeps}${live}`;
}

async function showRun() {
  const steps = run.listing.steps;
  document.title = `${run.listing.root} – ckpt`;
  byId("root").textContent = run.listing.root;
  showAbout();
  // The metric by which the policy ranks steps comes first.
  const ranked = (run.listing.keeps || "").split(", ").flatMap((rule) => rule.match(/^best (?:[0-9]+ )?(.*)$/)?.slice(1) || []);
  const isRanked = (name) => ranked.includes(name);
  const metrics = [...new Set(steps.flatMap((each) => Object.keys(each.metrics)))]
    .sort().sort((a, b) => isRanked(b) - isRanked(a));
  options(byId("metric"), metrics, byId("metric").value);
  byId("metric").parentElement.hidden = !metrics.length;
  showOthers();
  const numbers = steps.map((each) => each.step);
  if (!isPinned || !numbers.includes(chosen)) chosen = numbers.length ? numbers.at(-1) : null;
  showSteps(metrics);
  showChart();
  await showStep();
  await showNorms();
}

function showOthers() {
  const others = run.listing.unreadable.map((each) => `Step ${each.step} is left out: ${each.reason}`);
  const states = { saving: "is being saved", dead: "was left unfinished by a dead writer",
    silent: "is unfinished, and its writer may be dead" };
  for (const each of run.listing.attempts) {
    const parts = [each.age_seconds === null ? "" : `begun ${age(each.age_seconds)}`,
      each.nbytes === null ? "" : `${size(each.nbytes)} so far`, each.owner].filter(Boolean);
    others.push(`Step ${each.step} ${states[each.state] || each.state}${parts.length ? `: ${parts.join(", ")}` : ""}`);
  }
  byId("others").replaceChildren(...others.map((text) => make("li", {}, text)));
}

const goes = (each) => each.goes_next === true;

function showSteps(metrics) {
  byId("steps-head").replaceChildren(
    head("step", "number"), ...metrics.map((name) => head(name, "number")), head("size", "number"),
    head("committed"), head("notes"),
  );
  const rows = [...run.listing.steps].reverse().map((each) => {
    const notes = each.pins.length ? [`pinned: ${each.pins.join(", ")}`] : [];
    if (each.writer !== "ckpt") notes.push(`written by ${each.writer}`);
    if (each.dropped.length) notes.push(`without ${each.dropped.join(", ")}`);
    if (goes(each)) notes.push("goes with the next save");
    if (each.drops_next.length) notes.push(`loses ${each.drops_next.join(", ")} with the next save`);
    const button = make("button", { type: "button", click: () => choose(each.step) }, each.step);
    return make(
      "tr", { "aria-current": each.step === chosen ? "true" : null },
      make("td", { class: "number" }, button),
      ...metrics.map((name) => cell(Object.hasOwn(each.metrics, name) ? metric(each.metrics[name]) : "", "number")),
      cell(size(each.stored_bytes), "number"),
      cell(each.committed ? each.committed.slice(0, 19).replace("T", " ") : "–"),
      cell(notes.join("; "), goes(each) ? "going" : ""),
    );
  });
  byId("steps").replaceChildren(...rows);
}

// Draws numbers over steps, in pixels, so that texts have one size in every window. The axis of
// steps is to scale. A point is [step, number or null]; a line has no part where a number is missing.
function drawLine(svg, points, { foot = 20, at = (value) => value, marks = () => [] }) {
  const [width, height, side] = [Math.max(svg.clientWidth, 240), 220, 28];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  const numbers = points.map((each) => Number(each[0]));
  const [first, span] = [numbers[0], numbers.at(-1) - numbers[0]];
  const x = (place) => (span > 0 ? side + ((width - 2 * side) * (numbers[place] - first)) / span : width / 2);
  const values = points.map((each) => each[1]).filter((each) => each !== null);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const share = (value) => (high > low ? (at(high) - at(value)) / (at(high) - at(low)) : 0.5);
  const y = (value) => 18 + (height - foot - 36) * share(value);
  const line = points.map(([, value], place) => (value === null ? ""
    : `${place && points[place - 1][1] !== null ? "L" : "M"}${x(place)} ${y(value)}`));
  const dots = points.flatMap(([step, value], place) => (value === null || points.length > 200 ? []
    : [make("circle", { class: "dot", cx: x(place), cy: y(value), r: 3 }, make("title", {}, `step ${step}: ${metric(value)}`))]));
  const limits = (values.length ? [...new Set([high, low])] : [])
    .map((value) => make("text", { x: 0, y: y(value) - 6 }, metric(value)));
  // The latest step is labelled, and before it each that has room.
  const labels = [];
  let free = Infinity;
  for (let place = points.length - 1; place >= 0; place -= 1) {
    const room = 4 * points[place][0].length + 8;
    const middle = Math.min(Math.max(x(place), room - 8), width - room + 8);
    if (middle + room > free) continue;
    free = middle - room;
    labels.push(make("text", { x: middle, y: height - 4, "text-anchor": "middle" }, points[place][0]));
  }
  const floor = make("line", { class: "axis", x1: 0, x2: width, y1: height - foot, y2: height - foot });
  svg.replaceChildren(floor, ...marks(x, height, width), make("path", { class: "metric", d: line.join("") }), ...dots, ...limits, ...labels);
  return [low, high, values.length];
}

function showChart() {
  const steps = run.listing.steps;
  const name = byId("metric").value;
  const points = steps.map((each) => [each.step, Object.hasOwn(each.metrics, name) ? each.metrics[name] : null]);
  const largest = Math.max(1, ...steps.map((each) => each.stored_bytes || 0));
  const foot = 48;
  // Below the line a tick for each step, as long as its share of the bytes; all of its column can be clicked.
  const marks = (x, height, width) => steps.flatMap((each, place) => {
    const long = 3 + (21 * (each.stored_bytes || 0)) / largest;
    const kind = goes(each) ? "going" : each.pins.length ? "pinned" : "step";
    const [left, right] = [place ? (x(place - 1) + x(place)) / 2 : 0,
      place < steps.length - 1 ? (x(place) + x(place + 1)) / 2 : width];
    const isChosen = each.step === chosen;
    return [
      make("rect", { class: `${kind}${isChosen ? " chosen" : ""}`, x: x(place) - 1, y: height - foot + 2, width: isChosen ? 4 : 2, height: long }),
      make("rect", { class: "column", x: left, y: 0, width: right - left, height: height - 20, click: () => choose(each.step) },
        make("title", {}, `step ${each.step}: ${size(each.stored_bytes)}`)),
    ];
  });
  const [low, high, found] = steps.length ? drawLine(byId("chart"), points, { foot, marks }) : [0, 0, 0];
  const pinned = steps.filter((each) => each.pins.length).length;
  const going = steps.filter(goes).length;
  const text = steps.length
    ? [found ? `Line: ${name}, ${metric(low)} to ${metric(high)}` : "",
       `${found ? "ticks" : "Ticks"}: bytes of ${count(steps.length, "step")}, at most ${size(largest)}`,
       pinned ? `${pinned} pinned` : "", going ? `${going} to go with the next save` : ""]
    : ["There are no steps yet"];
  byId("chart-text").textContent = `${text.filter(Boolean).join("; ")}.`;
}

async function choose(step) {
  isPinned = step !== run.listing.steps.at(-1).step;
  chosen = step;
  showsAll = false;
  for (const row of byId("steps").children) {
    const isIt = row.querySelector("button").textContent === step;
    if (isIt) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
  showChart();
  await showStep();
}

// ---- one step ----

async function showStep() {
  byId("step").hidden = chosen === null;
  byId("diff-title").closest("section").hidden = run.listing.steps.length < 2;
  if (chosen === null) return;
  byId("step-title").textContent = `Step ${chosen}`;
  const wanted = chosen;
  try {
    const found = await contentsOf(wanted);
    if (wanted !== chosen) return;
    shown = found;
    tell("");
  } catch (error) {
    tell(`Step ${wanted}: ${error.message}`);
    shown = null;
    for (const id of ["summary", "leaves", "treemap", "save", "diff"]) byId(id).replaceChildren();
    byId("snippet").textContent = byId("found").textContent = byId("save-text").textContent = "";
    return;
  }
  showSummary();
  showSnippet();
  showSave();
  showLeaves();
  showBases();
  await showDiff();
}

function showSummary() {
  const about = shown.summary;
  const pairs = [
    ["path", about.path],
    ["committed", about.committed ? `${about.committed.slice(0, 19).replace("T", " ")} UTC` : ""],
    ["arrays", `${size(about.nbytes)} in ${count(shown.leaves.filter((leaf) => leaf.dtype !== null).length, "array")}`],
    ["files", about.files ? `${count(about.files, "file")}, ${size(about.stored_bytes)}` : ""],
    ["items", about.unnamed ? "" : about.items.map((item) => `${item.name} (${item.handler})`).join(", ")],
    ["metrics", Object.entries(about.metrics).map(([name, value]) => `${name} = ${metric(value)}`).join(", ")],
    ["metadata", about.metadata || ""],
    ["begun from", about.parent || ""],
    ["written by", Object.entries(about.writer).map(([name, version]) => `${name} ${version}`).join(", ")],
  ].filter((pair) => pair[1]);
  byId("summary").replaceChildren(
    ...pairs.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]),
  );
}

function showSnippet() {
  const path = JSON.stringify(shown.summary.path);
  const lines = ["import ckpt", "", "# As it was saved; with `await` and without `sync` in asyncio.", `state = ckpt.sync.load(${path})`];
  const branches = topBranches();
  if (shown.summary.unnamed && branches.length > 1) {
    lines.push("", "# One branch alone:", `part = ckpt.sync.load(${path}, at=${JSON.stringify(branches[0])})`);
  } else if (!shown.summary.unnamed) {
    lines.push("", "# One item alone:", `part = ckpt.sync.load(${path}, items=[${JSON.stringify(shown.summary.items[0].name)}])`);
  }
  lines.push("", "# Onto other devices; `sharding` may also be a tree of shardings:",
    "import jax", "sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])",
    `target = ckpt.sync.metadata(${path}).target(sharding)`, `state = ckpt.sync.load(${path}, like=target)`);
  byId("snippet").textContent = lines.join("\n");
}

function topBranches() {
  const sizes = new Map();
  for (const leaf of shown.leaves) {
    const top = leaf.path.split(".")[0];
    sizes.set(top, (sizes.get(top) || 0) + leaf.nbytes);
  }
  return [...sizes].sort((a, b) => b[1] - a[1]).map((pair) => pair[0]).filter((name) => name !== "%root");
}

function showSave() {
  const times = run.statistics[chosen] || shown.summary.statistics;
  const has = times && times.written !== undefined;
  byId("save-title").hidden = byId("save").parentElement.hidden = !has;
  if (!has) return;
  const [width, row] = [Math.max(byId("save").clientWidth, 240), 22];
  const marks = [["blocked", 0, times.blocked || 0], ["waited", 0, times.waited || 0],
    ["staged", times.waited || 0, times.staged || 0], ["written", times.waited || 0, times.written]];
  const end = Math.max(0.001, ...marks.map((mark) => mark[2]));
  const svg = byId("save");
  svg.setAttribute("viewBox", `0 0 ${width} ${row * marks.length + 4}`);
  const scale = (width - 190) / end;
  svg.replaceChildren(...marks.flatMap(([name, from, to], place) => [
    make("text", { x: 0, y: place * row + 15 }, name),
    make("rect", { class: name, x: 80 + from * scale, y: place * row + 4, width: Math.max(1, (to - from) * scale), height: row - 8 }),
    make("text", { x: 88 + to * scale, y: place * row + 15 }, seconds(to)),
  ]));
  const share = times.written > 0 ? 1 - Math.min(1, (times.blocked || 0) / times.written) : 0;
  byId("save-text").textContent = `save() blocked for ${seconds(times.blocked || 0)}; everything was copied after ` +
    `${seconds(times.staged || 0)} and durable after ${seconds(times.written)}. ` +
    `Training could go on for ${Math.round(share * 100)} % of that time.`;
}

// ---- its leaves ----

function matching() {
  const wanted = byId("search").value.trim().toLowerCase();
  if (!wanted) return shown.leaves;
  return shown.leaves.filter((leaf) => `${pathOf(leaf)} ${typeOf(leaf)}`.toLowerCase().includes(wanted));
}

function showLeaves() {
  const leaves = matching();
  const part = showsAll ? leaves : leaves.slice(0, MOST_ROWS);
  byId("leaves").replaceChildren(...part.map((leaf) => {
    const place = leaf.same_as ? `the array at ${leaf.same_as}` : leaf.sharding;
    const last = leaf.dtype === null ? (leaf.value === null ? "" : `= ${leaf.value}`) : place;
    const codec = leaf.codec ? ` (${leaf.codec}: ${size(leaf.stored_bytes)})` : "";
    return make("tr", {}, cell(pathOf(leaf), "path"), cell(typeOf(leaf)),
      cell(leaf.dtype === null ? "" : size(leaf.nbytes), "number"), cell(last + codec));
  }));
  const total = leaves.reduce((sum, leaf) => sum + leaf.nbytes, 0);
  byId("found").textContent = `${count(leaves.length, "leaf", "leaves")}, ${size(total)}`;
  byId("more").hidden = part.length === leaves.length;
  byId("more-button").textContent = `Show all ${leaves.length.toLocaleString("en")} leaves`;
  showTreemap(leaves);
}

// The bytes of branches: as deep as it takes for there to be several, and none that is most of it.
function branches(leaves) {
  const total = leaves.reduce((sum, leaf) => sum + leaf.nbytes, 0);
  for (let depth = 1; ; depth += 1) {
    const sizes = new Map();
    for (const leaf of leaves) {
      const name = pathOf(leaf).split(".").slice(0, depth).join(".");
      sizes.set(name, (sizes.get(name) || 0) + leaf.nbytes);
    }
    const isDeepest = leaves.every((leaf) => pathOf(leaf).split(".").length <= depth);
    if (isDeepest || (sizes.size >= 4 && Math.max(...sizes.values()) < 0.7 * total)) return sizes;
  }
}

function showTreemap(leaves) {
  const sizes = branches(leaves);
  const tiles = [...sizes].filter((each) => each[1] > 0).sort((a, b) => b[1] - a[1]);
  const rest = tiles.splice(MOST_TILES);
  if (rest.length) tiles.push([`${rest.length} more`, rest.reduce((sum, each) => sum + each[1], 0)]);
  const area = byId("treemap");
  area.hidden = !tiles.length;
  const total = tiles.reduce((sum, each) => sum + each[1], 0);
  const boxes = squares(tiles.map((each) => each[1] / total), 0, 0, 100, 100, 4);
  area.replaceChildren(...tiles.map(([name, nbytes], place) => {
    const [x, y, wide, tall] = boxes[place];
    const share = Math.round((100 * nbytes) / total);
    const text = `${name} ${size(nbytes)}`;
    const tile = make("button", { type: "button", title: text, "aria-label": `${text}, ${share} percent`, click: () => search(name) }, text);
    for (const [key, value] of [["left", x], ["top", y], ["width", wide], ["height", tall]]) tile.style[key] = `${value}%`;
    tile.style.setProperty("--share", `${Math.min(90, 20 + share)}%`);
    return tile;
  }));
}

// Cuts a rectangle into parts of these shares that are as square as possible: the squarified
// treemap of Bruls, Huizing and van Wijk (2000). `ratio` is width to height of the whole area.
function squares(shares, x, y, wide, tall, ratio) {
  const found = [];
  let rest = [...shares];
  while (rest.length) {
    const whole = rest.reduce((sum, each) => sum + each, 0);
    const isWide = wide * ratio >= tall;
    let best = null;
    for (let some = 1; some <= rest.length; some += 1) {
      const row = rest.slice(0, some);
      const thick = row.reduce((sum, each) => sum + each, 0) / whole;
      const worst = Math.max(...row.map((each) => {
        const long = each / (thick * whole);
        const [a, b] = isWide ? [thick * wide * ratio, long * tall] : [thick * tall, long * wide * ratio];
        return Math.max(a / b, b / a);
      }));
      if (best !== null && worst > best.worst) break;
      best = { worst, some, thick };
    }
    let along = 0;
    for (const each of rest.slice(0, best.some)) {
      const long = each / (best.thick * whole);
      found.push(isWide ? [x, y + along * tall, best.thick * wide, long * tall] : [x + along * wide, y, long * wide, best.thick * tall]);
      along += long;
    }
    if (isWide) [x, wide] = [x + best.thick * wide, wide * (1 - best.thick)];
    else [y, tall] = [y + best.thick * tall, tall * (1 - best.thick)];
    rest = rest.slice(best.some);
  }
  return found;
}

function search(text) {
  byId("search").value = / more$/.test(text) ? "" : text;
  showsAll = false;
  showLeaves();
  byId("search").focus();
}

// ---- differences ----

function showBases() {
  const others = run.listing.steps.map((each) => each.step).filter((each) => each !== chosen).reverse();
  const before = others.find((each) => BigInt(each) < BigInt(chosen)) ?? others[0];
  const kept = byId("base").value;
  options(byId("base"), others, others.includes(kept) && byId("base").dataset.of === chosen ? kept : before);
  byId("base").dataset.of = chosen;
}

async function showDiff() {
  const base = byId("base").value;
  if (!base || !shown) return;
  let before;
  try {
    before = await contentsOf(base);
  } catch (error) {
    byId("diff-text").textContent = error.message;
    byId("diff").replaceChildren();
    return;
  }
  const rows = differences(before.leaves, shown.leaves);
  const same = shown.leaves.length - rows.filter((row) => row.what !== "removed").length;
  const unknown = rows.filter((row) => row.what.startsWith("not known")).length;
  const parts = [
    rows.length > unknown ? `${count(rows.length - unknown, "leaf", "leaves")} ${rows.length - unknown === 1 ? "differs" : "differ"}` : "",
    unknown ? `${count(unknown, "leaf", "leaves")} cannot be compared` : "",
    same ? `${same.toLocaleString("en")} ${same === 1 ? "is" : "are"} the same` : "",
  ].filter(Boolean);
  byId("diff-text").textContent = rows.length
    ? `${parts.join(", ")}.`
    : `Nothing: all ${count(same, "leaf", "leaves")} are the same.`;
  byId("diff").replaceChildren(...rows.slice(0, MOST_ROWS).map((row) =>
    make("tr", {}, cell(row.path, "path"), cell(row.what, row.what), cell(row.before), cell(row.after))));
}

function differences(before, after) {
  const old = new Map(before.map((leaf) => [pathOf(leaf), leaf]));
  const rows = [];
  const text = (leaf) => (leaf.dtype === null ? `${leaf.kind} ${leaf.value ?? ""}`.trim() : typeOf(leaf));
  for (const leaf of after) {
    const path = pathOf(leaf);
    const own = old.get(path);
    old.delete(path);
    if (!own) rows.push({ path, what: "added", before: "", after: text(leaf) });
    else if (text(own) !== text(leaf)) rows.push({ path, what: leaf.dtype === null ? "value" : "type", before: text(own), after: text(leaf) });
    else if (own.content === null || leaf.content === null) rows.push({ path, what: UNKNOWN, before: "", after: "" });
    else if (String(own.chunks) !== String(leaf.chunks)) rows.push({ path, what: OTHER_CHUNKS, before: "", after: "" });
    else if (own.content !== leaf.content) rows.push({ path, what: leaf.dtype === null ? "value" : "values", before: "", after: leaf.dtype === null ? text(leaf) : size(leaf.nbytes) });
  }
  for (const [path, leaf] of old) rows.push({ path, what: "removed", before: text(leaf), after: "" });
  const order = ["added", "removed", "type", "value", "values", UNKNOWN, OTHER_CHUNKS];
  return rows.sort((a, b) => order.indexOf(a.what) - order.indexOf(b.what));
}

// ---- what the user does ----

byId("metric").addEventListener("change", showChart);
byId("layer").addEventListener("change", showNormChart);
addEventListener("resize", () => {
  if (!run) return;
  showChart();
  showNormChart();
  if (shown) showSave();
});
byId("search").addEventListener("input", () => { showsAll = false; if (shown) showLeaves(); });
byId("base").addEventListener("change", showDiff);
byId("more-button").addEventListener("click", () => { showsAll = true; showLeaves(); });
byId("copy").addEventListener("click", async () => {
  const button = byId("copy");
  try {
    await navigator.clipboard.writeText(byId("snippet").textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(byId("snippet"));
    button.textContent = "Press Ctrl-C";
  }
});
byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});
document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !run) return;
  const numbers = run.listing.steps.map((each) => each.step);
  const place = numbers.indexOf(chosen);
  if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
  else if (event.key === "j" && place > 0) choose(numbers[place - 1]);
  else if (event.key === "k" && place < numbers.length - 1) choose(numbers[place + 1]);
});

refresh();
