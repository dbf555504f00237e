// What the whole page shares: what is chosen, what the server has answered, and the asking.

import * as api from "./api.js";
import { writeLink } from "./state.js";
import { find } from "./words.js";

export const page = {
  about: null, // the model, its settings, the images
  state: null, // what is chosen
  pictures: null,
  photo: null, // of the image that is shown, once it is here
  run: null, // what the model did with it at these settings
  view: null, // what the chosen patch attends to; null if it was dropped before this layer
  show: () => {}, // draws all of that
};

const wanted = new Set();
let working = null;

// One round of requests at a time; what changes meanwhile is asked for in the next, and only as it is then.
export function refresh(...what) {
  what.forEach((part) => wanted.add(part));
  complain("");
  writeAddress();
  working ??= work().finally(() => (working = null));
  return working;
}

async function work() {
  const slow = setTimeout(() => find("stage").setAttribute("aria-busy", "true"), 150);
  try {
    while (wanted.size) {
      const parts = new Set(wanted);
      wanted.clear();
      try {
        await round(parts);
      } catch (problem) {
        if (!wanted.size) failed(problem); // else it is about what nobody asks for any more
      }
    }
  } finally {
    clearTimeout(slow);
    find("stage").setAttribute("aria-busy", "false");
  }
}

async function round(parts) {
  const { image, settings } = structuredClone(page.state);
  if (parts.has("image")) {
    page.photo = page.run = page.view = null; // nothing of the image before may be taken for this one's
    [page.photo, page.run] = await Promise.all([load(image), api.run(image, settings)]);
  } else if (parts.has("run") || !page.run) {
    page.run = await api.run(image, settings);
  }
  const { layer, head, query } = page.state;
  page.view = isThere(query) ? await api.view(image, settings, { layer, head, query }) : null;
  await page.show();
}

// An image, or null: why there is none is said by the request that goes with it.
function load(id) {
  return new Promise((resolve) => {
    const image = new Image();
    image.onload = () => resolve(image);
    image.onerror = () => resolve(null);
    image.src = api.imageAddress(id);
  });
}

function failed(problem) {
  if (!(problem instanceof api.Problem)) console.error(problem);
  const own = !page.about.images.some((image) => image.id === page.state.image);
  if (problem.status === 404 && own) page.pictures.lose(problem.message);
  else complain(problem.message);
}

export function complain(message) {
  find("problem-text").textContent = message;
  find("problem").hidden = !message;
}

export function writeAddress() {
  history.replaceState(null, "", writeLink(page.state, page.about));
}

// The cell of a token; below 0 for those that are no patches.
export function cellOf(query) {
  return query - page.about.model.prefix.length;
}

// Whether a token is left in the chosen layer.
export function isThere(query) {
  const cells = page.run?.layers[page.state.layer].cells;
  return !cells || cellOf(query) < 0 || cells.includes(cellOf(query));
}
