// The colours of the maps: 256 steps whose lightness grows evenly, so that they keep their order in grey and for
// colour-blind readers. A path through OKLCh from deep violet over blue and green to yellow.

const STEPS = 256;
const LIGHTNESS = [0.2, 0.94];
const HUE = [300, 104];
const MOST_CHROMA = 0.155;

function linearRgb(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
    -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
    -0.0041960863 * long - 0.7034186147 * medium + 1.707614701 * short,
  ];
}

// As much chroma as a screen can show at this lightness and hue.
function screenColour(lightness, hue) {
  let low = 0;
  let high = MOST_CHROMA;
  for (let step = 0; step < 16; step += 1) {
    const middle = (low + high) / 2;
    const inside = linearRgb(lightness, middle, hue).every((part) => part >= 0 && part <= 1);
    if (inside) low = middle;
    else high = middle;
  }
  return linearRgb(lightness, low, hue).map((part) => {
    const clipped = Math.min(1, Math.max(0, part));
    return Math.round(255 * (clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055));
  });
}

// RAMP[3 i], RAMP[3 i + 1], RAMP[3 i + 2]: red, green and blue of step i.
export const RAMP = new Uint8ClampedArray(3 * STEPS);
for (let step = 0; step < STEPS; step += 1) {
  const share = step / (STEPS - 1);
  const lightness = LIGHTNESS[0] + share * (LIGHTNESS[1] - LIGHTNESS[0]);
  RAMP.set(screenColour(lightness, HUE[0] + share * (HUE[1] - HUE[0])), 3 * step);
}

// Writes the colour of a share in [0, 1] into four bytes of an image.
export function colour(bytes, position, share) {
  const step = 3 * Math.round((STEPS - 1) * Math.min(1, Math.max(0, share)));
  bytes[position] = RAMP[step];
  bytes[position + 1] = RAMP[step + 1];
  bytes[position + 2] = RAMP[step + 2];
  bytes[position + 3] = 255;
}

export function drawRamp(canvas) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, 1);
  for (let x = 0; x < canvas.width; x += 1) colour(image.data, 4 * x, x / (canvas.width - 1));
  context.putImageData(image, 0, 0);
}
