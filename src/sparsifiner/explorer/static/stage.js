// The picture, the maps beside it, and how a patch, a layer, a head and a map are chosen.

import { drawRamp } from "./colours.js";
import { cellAt, draw } from "./draw.js";
import { cellOf, complain, isThere, page, refresh, writeAddress } from "./page.js";
import { SHOWN } from "./state.js";
import { element, find, percent, whereabouts } from "./words.js";

const MAPS = {
  photo: ["Photo", "as the model takes it"],
  mask: ["Connections", "the keys this patch keeps"],
  used: ["Sparse map", "what is computed"],
  full: ["Full map", "what dense attention would be"],
  estimate: ["Low-rank map", "the predictor’s estimate"],
};
const OF_CELLS = {
  mask: ["Opened cells", "the keys this patch sees one by one"],
  estimate: ["Standing cells", "what keys get through the cell that stands for them"],
};
const HEAT = ["used", "full", "estimate"];

// ------------------------------------------------------------------------------------------------ showing

// A map's name and what it shows, which depends on how keys are chosen.
function about(name) {
  return (page.about.model.pattern === "cells" && OF_CELLS[name]) || MAPS[name];
}

function layerNow() {
  return page.run.layers[page.state.layer];
}

function droppedCells() {
  const { cells } = layerNow();
  if (!cells) return null;
  const left = new Set(cells);
  const [rows, columns] = page.about.model.grid;
  return Array.from({ length: rows * columns }, (_, cell) => cell).filter((cell) => !left.has(cell));
}

function tileNow() {
  const tiles = page.run.settings.tile.split(","); // one, or one per layer
  const tile = tiles[page.state.layer] ?? tiles[0];
  return tile === "none" || layerNow().dense ? null : tile.split("x").map(Number);
}

// One scale for all maps, so that they can be compared.
function scaleTop() {
  if (!page.view) return 1;
  const { full, used } = page.view.maps;
  return Math.max(...full.patches.filter((value) => value !== null), ...used.patches.filter((value) => value !== null));
}

function scene(name, overlay) {
  const maps = page.view?.maps;
  return {
    photo: overlay || !HEAT.includes(name) ? page.photo : null,
    grid: page.about.model.grid,
    values: HEAT.includes(name) ? maps?.[name]?.patches ?? null : null,
    mask: name === "mask" ? maps?.mask.patches ?? null : null,
    units: page.view?.cells ?? null,
    dropped: droppedCells(),
    query: cellOf(page.state.query),
    tile: tileNow(),
    high: scaleTop(),
    opacity: overlay ? page.state.opacity : 1,
    smooth: page.state.smooth,
  };
}

export function showMaps() {
  draw(find("stage-canvas"), scene(page.state.show, true));
  for (const name of SHOWN) {
    draw(find(`map-${name}`), scene(name, false));
    find(`map-${name}-note`).textContent = captionOf(name);
  }
  showLegend();
  showPrefix();
  showVeil();
}

function captionOf(name) {
  const { view, run } = page;
  if (name === "estimate" && view && !view.maps.estimate) return "nothing is predicted here";
  if (name === "used" && run.settings.residual && view?.maps.estimate) return `what is computed, with ${page.about.model.pattern === "cells" ? "standing cells" : "the residual"}`;
  return about(name)[1];
}

function showLegend() {
  const isHeat = HEAT.includes(page.state.show);
  find("legend").classList.toggle("plain", !isHeat);
  find("legend-low").textContent = isHeat ? "0" : "";
  find("legend-high").textContent = isHeat ? percent(scaleTop(), scaleTop() < 0.01 ? 2 : 1) : "";
  const texts = {
    photo: "the part of the image that the model takes",
    mask: "lit: kept keys; dark: not computed",
    estimate: "share of this patch’s attention; below 0 is drawn as 0",
  };
  find("legend-text").textContent = texts[page.state.show] ?? "share of this patch’s attention";
}

// Tokens without a place in the picture: what they get of the chosen patch, and whether they are chosen themselves.
function showPrefix() {
  const map = page.view?.maps[HEAT.includes(page.state.show) ? page.state.show : "full"];
  for (const button of find("prefix").children) {
    const index = Number(button.dataset.query);
    button.setAttribute("aria-pressed", String(page.state.query === index));
    button.querySelector(".number").textContent = map ? percent(map.prefix[index]) : "";
  }
}

function showVeil() {
  const veil = find("veil");
  const { view } = page;
  veil.hidden = Boolean(view) && !layerNow().dense;
  veil.textContent = view
    ? "Dense layer: the budget covers every token."
    : "This patch was dropped before this layer. Choose one that is not hatched, or an earlier layer.";
}

export function showPlace() {
  const { model } = page.about;
  const { layer: chosen, head } = page.state;
  find("layer-name").textContent = `${chosen + 1} of ${model.layers.length}`;
  page.run.layers.forEach((layer, index) => {
    const label = find(`layer-${index}`);
    label.classList.toggle("dense", layer.dense);
    label.style.setProperty("--share", layer.recall);
    const sparse = `recall ${percent(layer.recall)}, keeps ${percent(layer.kept_share)} of its connections`;
    label.title = `Layer ${index + 1}: ${layer.dense ? "dense" : sparse}, ${layer.tokens} tokens`;
    const input = label.querySelector("input");
    input.setAttribute("aria-label", label.title);
    input.checked = index === chosen;
  });
  [...find("heads").children].forEach((label, index) => {
    label.hidden = index >= model.layers[chosen].heads;
    label.querySelector("input").checked = index === head;
  });
}

function hover(cell) {
  if (cell === null || !page.view) {
    find("hover").textContent = "";
    return;
  }
  const { full, used, mask } = page.view.maps;
  const parts = [
    `full ${percent(full.patches[cell] ?? 0, 2)}`,
    `sparse ${percent(used.patches[cell] ?? 0, 2)}`,
    mask.patches[cell] ? "kept" : "not kept",
  ];
  const values = full.patches[cell] === null ? "dropped" : parts.join(", ");
  find("hover").textContent = `${whereabouts(cell + page.about.model.prefix.length, page.about.model)}: ${values}`;
}

// ------------------------------------------------------------------------------------------------ choosing

function choose(query) {
  if (!isThere(query)) {
    const where = whereabouts(query, page.about.model);
    complain(`The patch in ${where} was dropped before layer ${page.state.layer + 1}: it is no longer there to ask about.`);
    return;
  }
  page.state.query = query;
  refresh("view");
}

// The next patch in a direction that is still there; it stays where there is none.
function step(down, right) {
  const [rows, columns] = page.about.model.grid;
  const first = page.about.model.prefix.length;
  const cell = cellOf(page.state.query);
  let [row, column] = [Math.floor(cell / columns), cell % columns];
  if (cell < 0) [row, column] = [-down, -right]; // from a prefix token to the first patch
  for (;;) {
    row += down;
    column += right;
    if (row < 0 || row >= rows || column < 0 || column >= columns) return;
    const query = first + row * columns + column;
    if (isThere(query)) {
      choose(query);
      return;
    }
  }
}

// The first or last patch of the row that is still there.
function edge(last) {
  const columns = page.about.model.grid[1];
  const row = Math.floor(Math.max(0, cellOf(page.state.query)) / columns);
  const start = page.about.model.prefix.length + row * columns;
  const inRow = Array.from({ length: columns }, (_, column) => start + column).filter(isThere);
  if (inRow.length) choose(last ? inRow.at(-1) : inRow[0]);
}

function chooseLayer(layer) {
  if (layer < 0 || layer >= page.about.model.layers.length) return;
  page.state.layer = layer;
  page.state.head = Math.min(page.state.head, page.about.model.layers[layer].heads - 1);
  refresh("view");
}

function chooseHead(head) {
  if (head < 0 || head >= page.about.model.layers[page.state.layer].heads) return;
  page.state.head = head;
  refresh("view");
}

function chooseMap(name) {
  page.state.show = name;
  markMap();
  writeAddress();
  redraw();
}

export function markMap() {
  for (const input of find("maps").querySelectorAll("input")) input.checked = input.value === page.state.show;
}

function redraw() {
  if (page.run) showMaps();
}

const KEYS = {
  ArrowUp: () => step(-1, 0),
  ArrowDown: () => step(1, 0),
  ArrowLeft: () => step(0, -1),
  ArrowRight: () => step(0, 1),
  Home: () => edge(false),
  End: () => edge(true),
  "[": () => chooseLayer(page.state.layer - 1),
  "]": () => chooseLayer(page.state.layer + 1),
  ",": () => chooseHead(page.state.head - 1),
  ".": () => chooseHead(page.state.head + 1),
  c: () => page.about.model.prefix.length && choose(0),
  ...Object.fromEntries(SHOWN.map((name, index) => [String(index), () => chooseMap(name)])),
};

// ------------------------------------------------------------------------------------------------ building

export function buildStage() {
  const stage = find("stage");
  const canvas = find("stage-canvas");
  const { grid, image, prefix } = page.about.model;
  document.documentElement.style.setProperty("--aspect", `${image[1]} / ${image[0]}`);
  canvas.addEventListener("click", (event) => {
    const cell = cellAt(canvas, event, grid);
    if (cell !== null && page.run) choose(prefix.length + cell);
  });
  canvas.addEventListener("pointermove", (event) => hover(cellAt(canvas, event, grid)));
  canvas.addEventListener("pointerleave", () => hover(null));
  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS) || !page.run) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  new ResizeObserver(redraw).observe(stage);
  find("opacity").value = page.state.opacity;
  find("opacity").addEventListener("input", (event) => {
    page.state.opacity = Number(event.target.value);
    redraw();
  });
  find("smooth").addEventListener("change", (event) => {
    page.state.smooth = event.target.checked;
    redraw();
  });
  drawRamp(find("ramp"));
  buildMaps();
  buildPlace();
}

function radio(name, value, chosen) {
  const input = element("input", { type: "radio", name, value: String(value) });
  input.addEventListener("change", () => chosen(value));
  return input;
}

function number(text = "") {
  return element("span", { className: "number", textContent: text });
}

function buildPlace() {
  const { layers, prefix } = page.about.model;
  const strip = layers.map((_, index) =>
    element(
      "label",
      { id: `layer-${index}` },
      radio("layer", index, chooseLayer),
      element("span", { className: "level" }),
      number(String(index + 1)),
    ),
  );
  find("layers").replaceChildren(...strip);
  const most = Math.max(...layers.map((layer) => layer.heads));
  const heads = Array.from({ length: most }, (_, index) =>
    element("label", {}, radio("head", index, chooseHead), number(String(index + 1))),
  );
  find("heads").replaceChildren(...heads);
  const buttons = prefix.map((name, index) => {
    const button = element("button", { type: "button", className: "quiet" }, `${name} `, number());
    button.dataset.query = String(index);
    button.title = `Ask what the ${name} attends to; the number is what the chosen patch pays it`;
    button.addEventListener("click", () => choose(index));
    return button;
  });
  find("prefix").replaceChildren(...buttons);
}

function buildMaps() {
  const maps = SHOWN.map((name, index) =>
    element(
      "label",
      { title: `Key ${index}` },
      radio("map", name, chooseMap),
      element("canvas", { id: `map-${name}`, "aria-hidden": "true" }),
      element("span", { className: "name", textContent: about(name)[0] }),
      element("span", { className: "hint", id: `map-${name}-note` }),
    ),
  );
  find("maps").replaceChildren(...maps);
}
