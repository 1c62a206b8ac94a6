"use strict";
// The norms of layers over steps, on the page of a run. It is loaded before page.js, whose helpers it calls.

let norms = null;

async function showNorms() {
  try {
    norms = await read("norms");
  } catch (error) {
    // What the page showed before is of other steps.
    norms = null;
    byId("norms-section").hidden = true;
    tell(`The norms cannot be read: ${error.message}`);
    return;
  }
  const { steps, layers, total, unknown, unreadable, nonfinite } = norms.table;
  const known = layers.filter((layer) => layer.norms.some((norm) => norm !== null));
  byId("norms-section").hidden = !known.length;
  const worst = known.find(isBad) || known[0];
  const names = known.map((layer) => layer.name);
  const kept = byId("layer").value;
  options(byId("layer"), names, names.includes(kept) ? kept : worst && worst.name);
  byId("layers").replaceChildren(...known.map((layer) => {
    const found = layer.norms.filter((norm) => norm !== null);
    const figures = [found[0], found.at(-1), Math.min(...found), Math.max(...found)];
    const bad = badSteps(layer);
    const button = make("button", { type: "button", click: () => chooseLayer(layer.name) }, layer.name);
    const told = bad.length ? `${count(bad.length, "step")}, first ${bad[0]}` : "";
    return make("tr", {}, make("td", { class: "path" }, button), cell(layer.leaves.toLocaleString("en"), "number"),
      ...figures.map((figure) => cell(metric(figure), "number")), cell(told, "bad"));
  }));
  const many = (numbers) => (numbers.length > 8 ? `${numbers.slice(0, 8).join(", ")}, …` : numbers.join(", "));
  const notes = [
    nonfinite.length ? `Values that are not finite are in ${count(nonfinite.length, "step")} of the run: ${many(nonfinite)}` : "",
    steps.length < total ? `${steps.length} of ${count(total, "step")} are shown, evenly chosen` : "",
    unknown.length ? `Steps without vital signs: ${many(unknown)}` : "",
    unreadable.length ? `Steps that cannot be read: ${many(unreadable)}` : "",
    norms.layers > layers.length ? `The first ${layers.length} of ${count(norms.layers, "layer")} are shown` : "",
  ].filter(Boolean);
  byId("norms-notes").textContent = notes.map((note) => `${note}.`).join(" ");
  showNormChart();
}

const isBad = (layer) => layer.nonfinite.some((number) => number > 0);
const badSteps = (layer) => norms.table.steps.filter((_, place) => layer.nonfinite[place] > 0);

function chooseLayer(name) {
  byId("layer").value = name;
  showNormChart();
}

function showNormChart() {
  const layer = norms && norms.table.layers.find((each) => each.name === byId("layer").value);
  if (!layer) return;
  const { steps } = norms.table;
  const [width, height, foot] = [1000, 150, 18];
  const svg = byId("norms");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const slot = width / steps.length;
  const points = layer.norms.map((norm, place) => [place, norm]).filter((point) => point[1] !== null);
  const values = points.map((point) => point[1]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const isLog = low > 0 && high / low > 50;
  const scaled = isLog ? Math.log : (value) => value;
  const span = scaled(high) - scaled(low);
  const at = (value) => 10 + (height - foot - 22) * (span > 0 ? (scaled(high) - scaled(value)) / span : 0.5);
  const middle = (place) => place * slot + slot / 2;
  // A gap in the line is a step without the layer, or without vital signs.
  const line = points.map(([place, value], n) => `${n && points[n - 1][0] === place - 1 ? "L" : "M"}${middle(place)} ${at(value)}`);
  const bad = steps.flatMap((step, place) => (layer.nonfinite[place] > 0
    ? [make("rect", { class: "bad", x: middle(place) - 2, y: 4, width: 4, height: height - foot - 4 },
      make("title", {}, `step ${step}: ${count(layer.nonfinite[place], "value")} not finite`))]
    : []));
  const dots = points.map(([place, value]) => make("circle", { class: "dot", cx: middle(place), cy: at(value), r: 3 },
    make("title", {}, `step ${steps[place]}: ${metric(value)}`)));
  const every = Math.max(1, Math.ceil(steps.length / 12));
  const labels = steps.flatMap((step, place) => (place % every
    ? [] : [make("text", { x: middle(place), y: height - 4, "text-anchor": "middle" }, step)]));
  const floor = make("line", { class: "axis", x1: 0, x2: width, y1: height - foot, y2: height - foot });
  svg.replaceChildren(floor, ...bad, make("path", { class: "metric", d: line.join("") }), ...dots, ...labels);
  const marked = badSteps(layer);
  const text = [
    `Norm of ${layer.name} in ${count(points.length, "step")}: ${metric(low)} to ${metric(high)}${isLog ? ", on a logarithmic scale" : ""}`,
    marked.length ? `red: ${count(marked.length, "step")} with values that are not finite, first step ${marked[0]}` : "",
  ].filter(Boolean);
  byId("norms-text").textContent = `${text.join("; ")}.`;
}
