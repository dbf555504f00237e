// Maps on canvases. A scene is { photo, grid, values, mask, units, dropped, query, tile, high, opacity, smooth }: what is
// null is not drawn. Values, mask and units, the cells that are opened or stand for their keys, are over the grid, row by row, as
// are the dropped; query is a patch of it.

import { colour } from "./colours.js";

// Makes a canvas as fine as the screen is; returns what to draw with, and its size.
export function fit(canvas) {
  const box = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  const width = Math.max(1, Math.round(box.width * scale));
  const height = Math.max(1, Math.round(box.height * scale));
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const context = canvas.getContext("2d");
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height, scale };
}

export function draw(canvas, scene) {
  const { context, width, height, scale } = fit(canvas);
  if (scene.photo) {
    context.imageSmoothingEnabled = true;
    context.imageSmoothingQuality = "high";
    context.drawImage(scene.photo, 0, 0, width, height);
  }
  const cells = { width: width / scene.grid[1], height: height / scene.grid[0] };
  if (scene.values) drawHeat(context, scene, width, height);
  if (scene.mask) drawMask(context, scene, cells);
  if (scene.mask && scene.units) drawUnits(context, scene, cells, scale);
  if (scene.dropped) drawDropped(context, scene, cells, scale);
  if (scene.tile) drawTile(context, scene, cells, scale);
  if (scene.query !== null && scene.query >= 0) drawQuery(context, scene, cells, scale);
}

function place(cell, grid, cells) {
  const x = Math.round((cell % grid[1]) * cells.width);
  const y = Math.round(Math.floor(cell / grid[1]) * cells.height);
  const right = Math.round(((cell % grid[1]) + 1) * cells.width);
  const bottom = Math.round((Math.floor(cell / grid[1]) + 1) * cells.height);
  return [x, y, right - x, bottom - y];
}

// A map as a small canvas: a pixel for each patch, or, smooth, several that lie between their values.
export function heatImage(values, grid, high, smooth) {
  const [rows, columns] = grid;
  const times = smooth ? Math.max(2, Math.min(16, Math.floor(256 / Math.max(rows, columns)))) : 1;
  const canvas = document.createElement("canvas");
  canvas.width = columns * times;
  canvas.height = rows * times;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const top = high > 0 ? high : 1;
  for (let y = 0; y < canvas.height; y += 1) {
    for (let x = 0; x < canvas.width; x += 1) {
      const value = smooth
        ? between(values, grid, (y + 0.5) / times - 0.5, (x + 0.5) / times - 0.5)
        : values[y * columns + x] ?? 0;
      colour(image.data, 4 * (y * canvas.width + x), value / top);
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function between(values, [rows, columns], y, x) {
  const top = Math.floor(y);
  const left = Math.floor(x);
  const at = (row, column) => {
    const inside = Math.min(rows - 1, Math.max(0, row)) * columns + Math.min(columns - 1, Math.max(0, column));
    return values[inside] ?? 0;
  };
  const [down, right] = [y - top, x - left];
  const upper = at(top, left) * (1 - right) + at(top, left + 1) * right;
  const lower = at(top + 1, left) * (1 - right) + at(top + 1, left + 1) * right;
  return upper * (1 - down) + lower * down;
}

function drawHeat(context, scene, width, height) {
  context.globalAlpha = scene.opacity;
  context.imageSmoothingEnabled = scene.smooth;
  context.drawImage(heatImage(scene.values, scene.grid, scene.high, scene.smooth), 0, 0, width, height);
  context.globalAlpha = 1;
}

// What is not kept goes dark.
function drawMask(context, scene, cells) {
  context.fillStyle = `rgb(10 12 16 / ${0.2 + 0.75 * scene.opacity})`;
  scene.mask.forEach((kept, cell) => {
    if (!kept) context.fillRect(...place(cell, scene.grid, cells));
  });
}

// The borders of cells, bright around those that are opened.
function drawUnits(context, scene, cells, scale) {
  const [rows, columns] = scene.grid;
  const at = (values, row, column) => (row < rows && column < columns ? values[row * columns + column] : null);
  for (const bright of [false, true]) {
    context.beginPath();
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const [x, y, width, height] = place(row * columns + column, scene.grid, cells);
        const own = at(scene.units, row, column);
        const border = (down, right, from, to) => {
          const near = at(scene.mask, row, column) || at(scene.mask, row + down, column + right);
          if (at(scene.units, row + down, column + right) === own || Boolean(near) !== bright) return;
          context.moveTo(...from);
          context.lineTo(...to);
        };
        border(0, 1, [x + width, y], [x + width, y + height]);
        border(1, 0, [x, y + height], [x + width, y + height]);
      }
    }
    context.strokeStyle = bright ? "#fde725" : "rgb(255 255 255 / 0.3)";
    context.lineWidth = (bright ? 1.5 : 0.75) * scale;
    context.stroke();
  }
}

// What is no longer there is grey and hatched.
function drawDropped(context, scene, cells, scale) {
  context.strokeStyle = "rgb(200 204 210 / 0.55)";
  context.lineWidth = Math.max(1, scale * 0.75);
  const step = Math.max(4 * scale, cells.width / 3);
  for (const cell of scene.dropped) {
    const [x, y, width, height] = place(cell, scene.grid, cells);
    context.fillStyle = "rgb(92 97 104 / 0.92)";
    context.fillRect(x, y, width, height);
    context.save();
    context.beginPath();
    context.rect(x, y, width, height);
    context.clip();
    context.beginPath();
    // Lines of the whole picture, so that they meet from patch to patch.
    for (let start = Math.floor((x - y - height) / step) * step; start < x + width - y; start += step) {
      context.moveTo(start + y, y);
      context.lineTo(start + y + height, y + height);
    }
    context.stroke();
    context.restore();
  }
}

function drawTile(context, scene, cells, scale) {
  if (scene.query === null || scene.query < 0) return;
  const [rows, columns] = scene.tile;
  const top = Math.floor(Math.floor(scene.query / scene.grid[1]) / rows) * rows;
  const left = Math.floor((scene.query % scene.grid[1]) / columns) * columns;
  const bottom = Math.min(top + rows, scene.grid[0]);
  const right = Math.min(left + columns, scene.grid[1]);
  const box = [left * cells.width, top * cells.height, (right - left) * cells.width, (bottom - top) * cells.height];
  context.setLineDash([4 * scale, 3 * scale]);
  outline(context, box, scale);
  context.setLineDash([]);
}

function drawQuery(context, scene, cells, scale) {
  outline(context, place(scene.query, scene.grid, cells), 2 * scale);
}

// White within black: visible on any ground.
function outline(context, [x, y, width, height], line) {
  context.lineJoin = "miter";
  context.strokeStyle = "#000";
  context.lineWidth = 2.2 * line;
  context.strokeRect(x, y, width, height);
  context.strokeStyle = "#fff";
  context.lineWidth = line;
  context.strokeRect(x, y, width, height);
}

// The cell under a pointer; null outside.
export function cellAt(canvas, event, grid) {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor(((event.clientX - box.left) / box.width) * grid[1]);
  const row = Math.floor(((event.clientY - box.top) / box.height) * grid[0]);
  return row >= 0 && row < grid[0] && column >= 0 && column < grid[1] ? row * grid[1] + column : null;
}
