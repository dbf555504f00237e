// Elements and numbers as words.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "for" || name === "role" || name === "scope") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export const find = (id) => document.getElementById(id);

export function percent(share, digits = 1) {
  return `${(100 * share).toFixed(digits)} %`;
}

// Probabilities: what is nearly nothing or nearly all should not look like either.
export function chance(share) {
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  if (share < 1 && share > 0.9995) return "> 99.9 %";
  return percent(share);
}

// Three significant digits, without an exponent where people would not use one.
export function short(value) {
  if (value === 0) return "0";
  return Math.abs(value) < 1e-4 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

// A weight between 0 and 1 where there is little room.
export function weightOf(value) {
  return value < 0.0005 ? "0" : value.toFixed(3).replace(/^0/, "");
}

// Multiply-adds and connections: 178.8 M.
export function count(value) {
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : value >= 10 * size ? 1 : 2)} ${letter}`;
  }
  return String(Math.round(value));
}

// How much less or more: −34 %, +11 %.
export function difference(now, before) {
  const share = now / before - 1;
  if (Math.abs(share) < 0.0005) return "same";
  return `${share < 0 ? "−" : "+"}${(100 * Math.abs(share)).toFixed(Math.abs(share) < 0.1 ? 1 : 0)} %`;
}

// Where a token stands: “class token”, “row 5, column 8”.
export function whereabouts(query, model) {
  const cell = query - model.prefix.length;
  if (cell < 0) return model.prefix[query];
  return `row ${Math.floor(cell / model.grid[1]) + 1}, column ${(cell % model.grid[1]) + 1}`;
}
