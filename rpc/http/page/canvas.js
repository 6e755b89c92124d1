// What every chart is drawn with, on this page and in the reports of `engine profile` and `engine bench`, which have
// this file in them: a canvas in CSS pixels, the plot inside it, round numbers, colours by their names in the style sheet.
const FONT = '11px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const STEPS = [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10];

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A cleared 2D context and its plot, what `pad` leaves of the canvas; null while the canvas has no size.
export function begin(canvas, pad, height = canvas.clientHeight, leastRatio = 1) {
  const width = canvas.clientWidth;
  if (!width || !height) return null;
  const ratio = Math.max(devicePixelRatio || 1, leastRatio);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = FONT;
  const plot = { left: pad.left, right: width - pad.right, top: pad.top, bottom: height - pad.bottom };
  plot.width = plot.right - plot.left;
  plot.height = plot.bottom - plot.top;
  plot.y = (part) => plot.bottom - part * plot.height;
  return { context, plot };
}

// The least round number that is not below `value`; its half is round, too.
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * STEPS.find((step) => step * power >= value * 0.999);
}

// Horizontal lines at 0, the half and `top`, with their numbers as `show` writes them; with `right`, also {top, show} there.
export function valueAxis({ context, plot }, top, show, right = null) {
  context.strokeStyle = colour("line");
  context.fillStyle = colour("dim");
  context.textBaseline = "middle";
  context.lineWidth = 1;
  for (const part of [0, 0.5, 1]) {
    const y = Math.round(plot.y(part)) + 0.5;
    context.beginPath();
    context.moveTo(plot.left, y);
    context.lineTo(plot.right, y);
    context.stroke();
    context.textAlign = "right";
    context.fillText(show(part * top), plot.left - 6, y);
    context.textAlign = "left";
    if (right !== null) context.fillText(right.show(part * right.top), plot.right + 6, y);
  }
  context.textBaseline = "alphabetic";
}

// A line through `points`, [x, value] with x in pixels; a value of null breaks it.
export function line({ context, plot }, points, top, name) {
  context.strokeStyle = colour(name);
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  let isDown = false;
  for (const [x, value] of points) {
    if (value !== null) {
      const y = plot.y(Math.min(1, value / top));
      if (isDown) context.lineTo(x, y);
      else context.moveTo(x, y);
    }
    isDown = value !== null;
  }
  context.stroke();
}
