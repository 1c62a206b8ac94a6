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
  // First the one that is worst; of those without a fault the one with the most arrays.
  const worst = known.find(isBad) || known.reduce((most, each) => (most && most.leaves >= each.leaves ? most : each), null);
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
  // A gap in the line is a step without the layer, or without vital signs.
  const points = steps.map((step, place) => [step, layer.norms[place]]);
  const values = layer.norms.filter((norm) => norm !== null);
  const isLog = Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 50;
  const marks = (x, height) => steps.flatMap((step, place) => (layer.nonfinite[place] > 0
    ? [make("rect", { class: "bad", x: x(place) - 2, y: 4, width: 4, height: height - 24 },
      make("title", {}, `step ${step}: ${count(layer.nonfinite[place], "value")} not finite`))]
    : []));
  const [low, high, found] = drawLine(byId("norms"), points, { marks, at: isLog ? Math.log : undefined });
  const marked = badSteps(layer);
  const text = [
    `Norm of ${layer.name} in ${count(found, "step")}: ${metric(low)} to ${metric(high)}${isLog ? ", on a logarithmic scale" : ""}`,
    marked.length ? `red: ${count(marked.length, "step")} with values that are not finite, first step ${marked[0]}` : "",
  ].filter(Boolean);
  byId("norms-text").textContent = `${text.join("; ")}.`;
}
