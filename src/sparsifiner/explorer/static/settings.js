// The controls that change how sparse the model is.

import { page, refresh } from "./page.js";
import { ownSettings } from "./state.js";
import { element, find, short } from "./words.js";

function mean(keep) {
  return Array.isArray(keep) ? keep.reduce((sum, value) => sum + value, 0) / keep.length : keep;
}

function current(name) {
  return page.state.settings[name] ?? page.about.settings[name];
}

export function showSettings() {
  const keep = current("keep");
  const budget = Math.max(1, Math.ceil(mean(keep) * page.about.model.tokens - 1e-9));
  const words = Array.isArray(keep) ? "per layer, on average" : budget === 1 ? "1 key" : `${budget} keys`;
  set("keep", mean(keep), `${short(mean(keep))} · ${words}`);
  set("tau", current("tau"), short(current("tau")));
  set("basis_threshold", current("basis_threshold"), short(current("basis_threshold")));
  find("residual").checked = current("residual");
  find("tile").value = current("tile");
  const tokens = current("token_keep");
  find("drops").checked = tokens < 1;
  find("token_keep").disabled = tokens >= 1;
  if (tokens < 1) find("token_keep").value = tokens;
  find("token_keep-value").textContent = tokens < 1 ? `keeps ${short(tokens)}` : "off";
}

function set(name, value, words) {
  const input = find(name);
  input.value = value;
  input.setAttribute("aria-valuetext", words);
  find(`${name}-value`).textContent = words;
}

function change(name, value) {
  page.state.settings[name] = value;
  showSettings();
  refresh("run");
}

export function buildSettings() {
  const own = page.about.settings;
  const highest = {
    tau: Math.min(0.999, Math.max(5 * own.tau, 0.1)),
    basis_threshold: Math.max(5 * own.basis_threshold, 0.02),
  };
  for (const [name, high] of Object.entries(highest)) Object.assign(find(name), { max: high, step: high / 200 });
  for (const name of ["keep", "tau", "basis_threshold", "token_keep"]) {
    find(name).addEventListener("input", (event) => change(name, Number(Number(event.target.value).toPrecision(3))));
  }
  find("residual").addEventListener("change", (event) => change("residual", event.target.checked));
  find("tile").addEventListener("change", (event) => change("tile", event.target.value));
  const { pattern } = page.about.model;
  find("tile").disabled = !["learned", "cells"].includes(pattern);
  if (pattern === "cells") {
    for (const name of ["tau", "basis_threshold"]) find(name).closest(".control").hidden = true;
    find("residual-name").textContent = "Standing cells";
    find("residual-hint").textContent = "Cells that are not opened stand for their keys.";
  }
  buildTiles();
  find("token_keep").value = own.token_keep < 1 ? own.token_keep : 0.7;
  find("drops").addEventListener("change", (event) => {
    change("token_keep", event.target.checked ? Number(find("token_keep").value) : 1);
  });
  const blocks = page.about.model.token_blocks;
  find("drops").disabled = !blocks;
  find("drops-hint").textContent = blocks ? dropsHint(blocks) : "The blocks of this model cannot drop tokens.";
  find("reset").addEventListener("click", () => {
    page.state.settings = ownSettings();
    refresh("run");
  });
}

function dropsHint(blocks) {
  const evit = page.about.model.token_method === "evit";
  const where = `${evit ? "After the attention of" : "Before"} layers ${blocks.map((block) => block + 1).join(", ")}`;
  const which = evit ? "those the class token attends to most" : "those DynamicViT’s network chooses";
  return `${where} only this share of the patches goes on: ${which}. The others are hatched, and later layers cannot be asked about them.`;
}

// A few tiles that fit, the model's own, and that of the link.
export function buildTiles() {
  const [rows, columns] = page.about.model.grid;
  const sides = [[2, 2], [2, 4], [4, 4], [1, columns]].filter(([down, across]) => down <= rows && across <= columns);
  const names = new Set(["none", page.about.settings.tile, ...sides.map((tile) => tile.join("x"))]);
  if (page.state.settings.tile) names.add(page.state.settings.tile);
  const told = (name) => (name === "none" ? "none: a list for each" : name.replace("x", " × "));
  const options = [...names].map((name) =>
    element("option", { value: name, textContent: name.includes(",") ? "the model’s own, by layer" : told(name) }),
  );
  find("tile").replaceChildren(...options);
}
