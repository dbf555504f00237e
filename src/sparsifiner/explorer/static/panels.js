// The tables, facts and sentences beside the picture.

import { heatImage } from "./draw.js";
import { chance, count, difference, element, find, percent, short, weightOf, whereabouts } from "./words.js";

const STRONGEST = 5;

// The keys with the most attention: [{ where, value, kept }].
export function strongest(view, model) {
  const { full, mask } = view.maps;
  const keys = full.prefix.map((value, index) => ({
    where: model.prefix[index] ?? "fused token",
    value,
    kept: Boolean(mask.prefix[index]),
  }));
  full.patches.forEach((value, cell) => {
    if (value === null) return;
    keys.push({ where: whereabouts(cell + model.prefix.length, model), value, kept: Boolean(mask.patches[cell]) });
  });
  return keys.sort((a, b) => b.value - a.value).slice(0, STRONGEST);
}

// One sentence or two for those who cannot see the maps.
export function sentence(state, view, run, model) {
  const place = `Layer ${state.layer + 1}, head ${state.head + 1}, ${whereabouts(state.query, model)}:`;
  if (!view) return `${place} this patch was dropped before this layer. Choose another patch or an earlier layer.`;
  const best = strongest(view, model)
    .map((key) => `${key.where} (${percent(key.value)}${key.kept ? "" : ", not kept"})`)
    .join("; ");
  const isPrefix = state.query < model.prefix.length;
  let kept = `keeps ${view.kept} of ${view.tokens} keys, which hold ${percent(view.recall)} of its attention`;
  if (view.dense) kept = `this layer is dense: the budget of ${run.layers[state.layer].budget} covers all ${view.tokens} tokens`;
  else if (isPrefix) kept = "attends to everything, as every prefix token does";
  return `${place} ${kept}. Most attention: ${best}.`;
}

function fact(term, ...description) {
  return element("div", {}, element("dt", { textContent: term }), element("dd", {}, ...description));
}

function bar(share, label) {
  const made = element("span", { className: "bar" });
  made.style.setProperty("--share", Math.min(1, Math.max(0, share)));
  return label ? element("span", { className: "with-bar" }, made, element("span", { className: "number", textContent: label })) : made;
}

export function showPatch(state, view, run, model) {
  const layer = run.layers[state.layer];
  const facts = [fact("Query", whereabouts(state.query, model))];
  if (!view) {
    facts.push(fact("State", "dropped before this layer"));
  } else {
    facts.push(fact("Keys kept", `${view.kept} of ${view.tokens}`, bar(view.kept / view.tokens, percent(view.kept / view.tokens))));
    facts.push(fact("Recall", "attention on kept keys", bar(view.recall, percent(view.recall))));
    const list = strongest(view, model).map((key) =>
      element(
        "li",
        { className: key.kept ? "" : "lost" },
        element("span", { textContent: key.where }),
        element("span", { className: "number", textContent: percent(key.value) }),
        element("span", { className: "mark", textContent: key.kept ? "kept" : "dropped" }),
      ),
    );
    facts.push(fact("Most attention", element("ol", { className: "strongest" }, ...list)));
  }
  let kind = `sparse: at most ${layer.budget} of ${layer.tokens} keys by score, beside the prefix and itself`;
  if (layer.dense) kind = `dense: the budget of ${layer.budget} keys covers all ${layer.tokens} tokens`;
  else if (model.pattern === "cells") kind = `sparse: opens cells of at most ${layer.budget} of ${layer.tokens} keys`;
  else if (model.pattern === "linformer") kind = "low-rank attention only: no key is kept";
  facts.push(fact("This layer", kind));
  facts.push(fact("Its recall", "mean of this head’s patches", bar(layer.heads[state.head], percent(layer.heads[state.head]))));
  find("patch").replaceChildren(...facts);
}

export function showClasses(run) {
  const { predictions } = run;
  find("classes").hidden = !predictions;
  if (!predictions) {
    find("agreement").textContent = "This model predicts no classes.";
    return;
  }
  const same = predictions.dense === predictions.sparse;
  find("agreement").textContent = same ? "Dense and sparse agree." : "Dense and sparse do not agree.";
  find("agreement").classList.toggle("warn", !same);
  const rows = predictions.top.map((found) =>
    element(
      "tr",
      {},
      element("th", { scope: "row", textContent: found.name }),
      element("td", { className: found.class === predictions.dense ? "top" : "" }, bar(found.dense, chance(found.dense))),
      element("td", { className: found.class === predictions.sparse ? "top" : "" }, bar(found.sparse, chance(found.sparse))),
    ),
  );
  find("classes").tBodies[0].replaceChildren(...rows);
}

export function showCosts(run, model) {
  const { costs, connections } = run;
  const lines = [
    ["Attention", costs.dense_attention, costs.attention],
    ["Whole model", costs.dense_total, costs.total],
    ["Connections", connections.all, connections.kept],
  ];
  const rows = lines.map(([name, before, now]) => {
    const change = difference(now, before);
    return element(
      "tr",
      {},
      element("th", { scope: "row", textContent: name }),
      element("td", { className: "number", textContent: count(before) }),
      element("td", { className: "number", textContent: count(now) }),
      element("td", { className: `number ${now > 1.0005 * before ? "more" : "less"}`, textContent: change }),
    );
  });
  find("costs").tBodies[0].replaceChildren(...rows);
  showParts(costs, model);
}

// What sparse attention is made of, against the length of dense attention.
function showParts(costs, model) {
  const opens = model.pattern === "cells";
  const names = {
    core: "kept connections",
    predictor: opens ? "choice of cells" : "predictor",
    residual: opens ? "standing cells" : "residual",
  };
  const longest = Math.max(costs.attention, costs.dense_attention);
  const parts = Object.keys(names).map((name) => {
    const part = element("span", { className: name });
    part.style.setProperty("--share", costs[name] / longest);
    return part;
  });
  const line = element("span", { className: "dense-mark" });
  line.style.setProperty("--share", costs.dense_attention / longest);
  find("parts").replaceChildren(...parts, line);
  const text = Object.entries(names)
    .filter(([name]) => costs[name] > 0)
    .map(([name, words]) => element("span", { className: `key ${name}`, textContent: `${words} ${count(costs[name])}` }));
  find("parts-text").replaceChildren(...text, element("span", { className: "key dense-mark", textContent: "dense attention" }));
}

// The rows of w_up; entries up to the threshold are drawn as nothing, as they count.
export function showBasis(basis, view, settings, model) {
  const threshold = settings.basis_threshold;
  const high = Math.max(...basis.rows.map((row) => Math.max(...row)));
  const items = basis.rows.map((row, number) => {
    const values = row.map((value) => (value > threshold ? value : 0));
    const canvas = heatImage(values, model.grid, high, false);
    const best = row.indexOf(Math.max(...row));
    const weight = view?.coefficients?.[number];
    const known = weight !== undefined && weight !== null;
    const words = known ? `, weight ${short(weight)}` : "";
    canvas.setAttribute("role", "img");
    canvas.setAttribute(
      "aria-label",
      `Basis map ${number + 1}${words}, strongest at ${whereabouts(best + model.prefix.length, model)}`,
    );
    const used = known && weight > settings.tau;
    return element(
      "li",
      { className: known ? (used ? "used" : "unused") : "" },
      canvas,
      element("span", { className: "number", textContent: known ? weightOf(weight) : "" }),
    );
  });
  find("gallery").replaceChildren(...items);
}
