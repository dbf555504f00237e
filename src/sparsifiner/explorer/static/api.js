// Requests to the server the page came from.

export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Problem("The server does not answer. Is “sparsifiner explore” still running?");
  }
  if (response.status === 204) return null;
  let body = null;
  try {
    body = await response.json();
  } catch {
    // Not JSON: only the status is left to tell.
  }
  if (!response.ok) throw new Problem(body?.error ?? `The server answered ${response.status}.`, response.status);
  return body;
}

function address(path, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined);
  return `${path}?${new URLSearchParams(given)}`;
}

export const about = () => ask("/api/about");
export const run = (image, settings) => ask(address("/api/run", { image, ...settings }));
export const view = (image, settings, place) => ask(address("/api/view", { image, ...settings, ...place }));
export const basis = (layer, head) => ask(address("/api/basis", { layer, head }));
export const imageAddress = (id, small = false) => `/api/images/${encodeURIComponent(id)}${small ? "?small=true" : ""}`;
export const openSession = () => ask("/api/sessions", { method: "POST" });
export const stillOpen = (session) => ask(`/api/sessions/${session}/alive`, { method: "POST" });
export const closeSession = (session) => navigator.sendBeacon(`/api/sessions/${session}/close`);
export const send = (session, file) =>
  ask(address(`/api/sessions/${session}/images`, { name: file.name || "image" }), {
    method: "POST",
    headers: { "content-type": "application/octet-stream" },
    body: file,
  });
