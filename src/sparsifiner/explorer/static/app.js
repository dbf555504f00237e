// The page: putting it together, following links, light and dark.

import * as api from "./api.js";
import { complain, page, refresh } from "./page.js";
import { sentence, showBasis, showClasses, showCosts, showPatch } from "./panels.js";
import { Pictures } from "./pictures.js";
import { buildSettings, buildTiles, showSettings } from "./settings.js";
import { buildStage, markMap, showMaps, showPlace } from "./stage.js";
import { firstState, readLink } from "./state.js";
import { element, find } from "./words.js";

const bases = new Map();

page.show = async () => {
  const { state, view, run, about } = page;
  showPlace();
  showMaps();
  showPatch(state, view, run, about.model);
  showClasses(run);
  showCosts(run, about.model);
  showSettings();
  const words = sentence(state, view, run, about.model);
  if (find("reading").textContent !== words) find("reading").textContent = words; // else it would be read out again
  if (about.model.pattern === "cells") return; // there is no basis
  const { layer, head } = state;
  const key = `${layer} ${head}`;
  if (!bases.has(key)) bases.set(key, await api.basis(layer, head));
  showBasis(bases.get(key), view, run.settings, about.model);
};

function buildHeader() {
  const { model, notes, limits, version } = page.about;
  const [height, width] = model.image;
  const facts = [model.name, `${height} × ${width} px`, `${model.tokens} tokens`, `${model.layers.length} layers`];
  find("basis").hidden = model.pattern === "cells";
  find("model").textContent = facts.join(" · ");
  const lines = [...notes, `sparsifiner ${version}`];
  find("notes").replaceChildren(...lines.map((note) => element("li", { textContent: note })));
  find("private").textContent =
    "Images you open stay in the memory of the computer that runs this page’s server and are gone when the page is " +
    "closed. Nothing is written to disk or sent anywhere else. " +
    `Up to ${limits.images} images of ${limits.bytes / 2 ** 20} MiB and ${limits.pixels / 1e6} million pixels each.`;
  find("problem-close").addEventListener("click", () => complain(""));
  find("share").addEventListener("click", copyLink);
  find("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address is for the link
    find("stage").focus();
  });
  buildTheme();
}

async function copyLink() {
  const button = find("share");
  try {
    await navigator.clipboard.writeText(window.location.href);
    button.textContent = "Copied";
    find("status").textContent = "The link is copied.";
  } catch {
    complain(`The browser does not let the page copy. The link is in the address bar: ${window.location.href}`);
  }
  setTimeout(() => (button.textContent = "Copy link"), 1500);
}

function buildTheme() {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const mark = () => find("theme").setAttribute("aria-pressed", String(isDark()));
  find("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("theme", document.documentElement.dataset.theme);
    } catch {
      // It then lasts as long as the page.
    }
    mark();
  });
  system.addEventListener("change", mark);
  mark();
}

// What the address says, over what the page shows: an image of the reader's own is in no link, and stays.
async function followLink() {
  const { hash } = window.location;
  const { state, complaints } = readLink(hash, page.about);
  const { image, opacity, smooth } = page.state;
  const named = new URLSearchParams(hash.slice(1)).has("image");
  page.state = { ...state, opacity, smooth, image: named ? state.image : image };
  page.state.head = Math.min(state.head, page.about.model.layers[state.layer].heads - 1);
  page.pictures.choose(page.state.image);
  markMap();
  buildTiles();
  await refresh("image");
  if (complaints.length) complain(complaints.join(" "));
}

async function start() {
  try {
    page.about = await api.about();
  } catch (problem) {
    complain(problem.message);
    return;
  }
  page.state = firstState(page.about);
  buildHeader();
  find("bench").hidden = false;
  buildStage();
  buildSettings();
  page.pictures = new Pictures(page.about, {
    onChoose: (id) => {
      page.state.image = id;
      page.pictures.choose(id);
      refresh("image");
    },
    onProblem: complain,
    onStatus: (text) => (find("status").textContent = text),
  });
  window.addEventListener("hashchange", followLink);
  await followLink();
}

start();
