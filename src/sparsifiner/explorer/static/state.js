// What is being looked at, and the link that says so. Layers, heads, rows and columns count from 1 in links and on the
// page, from 0 in requests and here. Settings that are null are the model's own.

export const SHOWN = ["photo", "mask", "used", "full", "estimate"];

const NUMBERS = { keep: [0, 1], tau: [0, 0.999], basis_threshold: [0, 1e6], token_keep: [0, 1] };
const SHORT = { basis_threshold: "basis", token_keep: "tokens" };

export function firstState(about) {
  const { grid, prefix, layers } = about.model;
  const middle = Math.floor(grid[0] / 2) * grid[1] + Math.floor(grid[1] / 2);
  return {
    image: about.images[0]?.id ?? null,
    layer: Math.floor(layers.length / 2),
    head: 0,
    query: prefix.length + middle,
    show: "used",
    opacity: 0.7,
    smooth: false,
    settings: ownSettings(),
  };
}

export function ownSettings() {
  return { keep: null, tau: null, basis_threshold: null, residual: null, tile: null, token_keep: null };
}

// “class token” is “class” in a link, “extra token 2” is “extra-2”.
function slug(name) {
  return name.replace(" token", "").replaceAll(" ", "-");
}

// The link's state over the model's; what does not fit is left out and complained of.
export function readLink(hash, about) {
  const state = firstState(about);
  const complaints = [];
  const link = new URLSearchParams(hash.replace(/^#/, ""));
  const take = (name, read, expected) => {
    if (!link.has(name)) return;
    const value = read(link.get(name));
    if (value === undefined) complaints.push(`The link’s ${name} “${link.get(name)}” does not fit this model: ${expected}.`);
    else value.into(state);
  };
  readPlace(take, about);
  readSettings(take, about);
  return { state, complaints };
}

function readPlace(take, about) {
  const { layers, prefix, grid } = about.model;
  take(
    "image",
    (id) => (about.images.some((image) => image.id === id) ? { into: (s) => (s.image = id) } : undefined),
    "it is not offered here",
  );
  take("layer", whole(layers.length, "layer"), `it has layers 1 to ${layers.length}`);
  take("head", whole(Math.max(...layers.map((layer) => layer.heads)), "head"), "it has fewer heads");
  take(
    "patch",
    (text) => {
      const named = prefix.findIndex((name) => slug(name) === text);
      if (named >= 0) return { into: (s) => (s.query = named) };
      const [row, column] = text.split(",").map(Number);
      const inside = (value, count) => Number.isInteger(value) && value >= 1 && value <= count;
      if (!inside(row, grid[0]) || !inside(column, grid[1])) return undefined;
      return { into: (s) => (s.query = prefix.length + (row - 1) * grid[1] + column - 1) };
    },
    `it has ${grid[0]} × ${grid[1]} patches`,
  );
  take("show", (name) => (SHOWN.includes(name) ? { into: (s) => (s.show = name) } : undefined), "there is no such map");
}

function readSettings(take, about) {
  for (const [name, [low, high]] of Object.entries(NUMBERS)) {
    const read = (text) => {
      const value = text.trim() === "" ? NaN : Number(text);
      if (!(value >= low && value <= high) || (value === 0 && name.endsWith("keep"))) return undefined;
      return { into: (s) => (s.settings[name] = value) };
    };
    take(SHORT[name] ?? name, read, "it is out of range");
  }
  const yes = { on: true, off: false };
  take(
    "residual",
    (text) => (text in yes ? { into: (s) => (s.settings.residual = yes[text]) } : undefined),
    "it is on or off",
  );
  take(
    "tile",
    (text) => {
      const { grid } = about.model;
      const fits = (tile) => {
        const sides = /^(\d+)x(\d+)$/.exec(tile)?.slice(1).map(Number);
        return tile === "none" || sides?.every((side, axis) => side >= 1 && side <= grid[axis]);
      };
      const own = text === about.settings.tile; // which may be one per layer
      return own || fits(text) ? { into: (s) => (s.settings.tile = text) } : undefined;
    },
    "it is none or ROWSxCOLUMNS within the grid",
  );
}

function whole(count, name) {
  return (text) => {
    const value = Number(text);
    if (!Number.isInteger(value) || value < 1 || value > count) return undefined;
    return { into: (s) => (s[name] = value - 1) };
  };
}

// The link of a state; an image that only this page has is left out.
export function writeLink(state, about) {
  const { prefix, grid } = about.model;
  const link = new URLSearchParams();
  if (about.images.some((image) => image.id === state.image)) link.set("image", state.image);
  link.set("layer", state.layer + 1);
  link.set("head", state.head + 1);
  const cell = state.query - prefix.length;
  link.set("patch", cell < 0 ? slug(prefix[state.query]) : `${Math.floor(cell / grid[1]) + 1},${(cell % grid[1]) + 1}`);
  link.set("show", state.show);
  for (const [name, value] of Object.entries(state.settings)) {
    if (value === null) continue;
    link.set(SHORT[name] ?? name, typeof value === "boolean" ? (value ? "on" : "off") : String(value));
  }
  return `#${link.toString().replaceAll("%2C", ",")}`;
}
