// Charts: canvases drawn from numbers. Each call draws all of its canvas, in the colours that page.css names.
const FONT = '11px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const PAD = { left: 44, right: 44, top: 8, bottom: 20 };

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A 2D context in CSS pixels, cleared; null while the canvas has no size.
function begin(canvas, height = canvas.clientHeight) {
  const width = canvas.clientWidth;
  if (!width || !height) return null;
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = FONT;
  return { context, width, height };
}

// The least round number that is not below `value`; its half is round, too.
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999);
}

export function compact(value) {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

export function duration(seconds) {
  if (seconds < 1) return `${+(1e3 * seconds).toPrecision(3)} ms`;
  return `${+seconds.toPrecision(3)} s`;
}

// Horizontal lines with the left axis' numbers and, with `rightTop`, the right axis'.
function grid({ context, width, height }, top, rightTop = null) {
  context.strokeStyle = colour("line");
  context.fillStyle = colour("dim");
  context.textBaseline = "middle";
  context.lineWidth = 1;
  for (const part of [0, 0.5, 1]) {
    const y = Math.round(PAD.top + (1 - part) * (height - PAD.top - PAD.bottom)) + 0.5;
    context.beginPath();
    context.moveTo(PAD.left, y);
    context.lineTo(width - PAD.right, y);
    context.stroke();
    context.textAlign = "right";
    context.fillText(compact(part * top), PAD.left - 6, y);
    context.textAlign = "left";
    if (rightTop !== null) context.fillText(compact(part * rightTop), width - PAD.right + 6, y);
  }
  context.textBaseline = "alphabetic";
}

function line({ context, width, height }, points, top, name) {
  const plot = { w: width - PAD.left - PAD.right, h: height - PAD.top - PAD.bottom };
  context.strokeStyle = colour(name);
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  let isDown = false;
  for (const [x, y] of points) {
    if (y === null) { isDown = false; continue; }
    const at = [PAD.left + x * plot.w, PAD.top + (1 - Math.min(1, y / top)) * plot.h];
    if (isDown) context.lineTo(...at);
    else context.moveTo(...at);
    isDown = true;
  }
  context.stroke();
}

const STATES = { f: "free", c: "cached", u: "used", s: "shared" };

// One square per letter of `cells`, row by row, as large as `maxHeight` allows.
export function blockMap(canvas, cells, maxHeight) {
  const width = canvas.clientWidth;
  if (!width || !cells.length) return;
  let size = 30;
  while (size > 2 && Math.ceil(cells.length / Math.floor(width / size)) * size > maxHeight) size -= 1;
  const columns = Math.floor(width / size);
  const height = Math.ceil(cells.length / columns) * size;
  canvas.style.height = `${height}px`;
  const { context } = begin(canvas, height);
  const gap = size > 4 ? 1 : size > 3 ? 0.5 : 0;
  for (const [letter, name] of Object.entries(STATES)) {
    context.fillStyle = colour(name);
    for (let i = cells.indexOf(letter); i >= 0; i = cells.indexOf(letter, i + 1)) {
      context.fillRect((i % columns) * size, Math.floor(i / columns) * size, size - gap, size - gap);
    }
  }
}

// How many of the latest steps the chart has room for, and where a step of them is.
export function stepsShown(canvas, count) {
  return Math.max(1, Math.min(count, Math.floor((canvas.clientWidth - PAD.left - PAD.right) / 6)));
}

export function stepAt(canvas, x, count) {
  const shown = stepsShown(canvas, count);
  const place = Math.floor(((x - PAD.left) / (canvas.clientWidth - PAD.left - PAD.right)) * shown);
  return count - shown + Math.max(0, Math.min(shown - 1, place));
}

// Stacked bars of tokens and a line of milliseconds; `steps` are columns, `marked` an index or null.
export function stepBars(canvas, steps, marked) {
  const area = begin(canvas);
  if (area === null) return;
  const { context, width, height } = area;
  const count = steps.step.length;
  const first = count - stepsShown(canvas, count);
  const latest = (column) => column.slice(first);
  const [prefill, decode, times] = [steps.prefill_tokens, steps.decode_tokens, steps.milliseconds].map(latest);
  const top = ceiling(Math.max(...prefill.map((n, i) => n + decode[i]), 1));
  const timeTop = ceiling(Math.max(...times, 0.001));
  grid(area, top, timeTop);
  context.fillText("tokens", 4, height - 5);
  context.fillText("ms", width - PAD.right + 6, height - 5);
  const plot = height - PAD.top - PAD.bottom;
  const pitch = (width - PAD.left - PAD.right) / prefill.length;
  const bar = (i, from, tokens, name) => {
    if (!tokens) return;
    context.fillStyle = colour(name);
    const h = Math.max(1, (tokens / top) * plot);
    context.fillRect(PAD.left + i * pitch + 0.5, PAD.top + plot - (from / top) * plot - h, Math.max(1, Math.min(pitch - 1, 14)), h);
  };
  prefill.forEach((n, i) => { bar(i, 0, decode[i], "decode"); bar(i, decode[i], n, "prefill"); });
  line(area, times.map((ms, i) => [(i + 0.5) / times.length, ms]), timeTop, "time");
  if (marked !== null && marked >= first) {
    context.fillStyle = colour("text");
    context.globalAlpha = 0.14;
    context.fillRect(PAD.left + (marked - first) * pitch, PAD.top, pitch, plot);
    context.globalAlpha = 1;
  }
}

// A bar per bucket, from the first that has any to the last.
export function histogram(canvas, { bounds, counts }) {
  const area = begin(canvas);
  if (area === null) return;
  const { context, width, height } = area;
  const last = counts.findLastIndex((n) => n > 0);
  if (last < 0) { grid(area, 1); return; }
  const first = Math.max(0, counts.findIndex((n) => n > 0) - 1);
  const shown = counts.slice(first, Math.max(last + 2, first + 6));
  const top = ceiling(Math.max(...shown));
  grid(area, top);
  const plot = height - PAD.top - PAD.bottom;
  const pitch = (width - PAD.left - PAD.right) / shown.length;
  const every = Math.ceil(54 / pitch);
  shown.forEach((n, i) => {
    context.fillStyle = colour("decode");
    const h = n ? Math.max(1, (n / top) * plot) : 0;
    context.fillRect(PAD.left + i * pitch + 1, PAD.top + plot - h, pitch - 2, h);
    const bound = bounds[first + i];
    if (bound === undefined || i % every) return;
    context.fillStyle = colour("dim");
    context.textAlign = "center";
    context.fillText(duration(bound), PAD.left + (i + 1) * pitch, height - 5);
  });
}

// `quantile` of a histogram in the unit of its bounds, as if each bucket were filled evenly.
export function quantile({ bounds, counts }, q) {
  const total = counts.reduce((a, b) => a + b, 0);
  let left = q * total;
  for (let i = 0; i < counts.length; i += 1) {
    if (counts[i] && left <= counts[i]) {
      const from = i ? bounds[i - 1] : 0;
      return from + ((bounds[i] ?? from) - from) * (left / counts[i]);
    }
    left -= counts[i];
  }
  return null;
}

// Lines over the last `span` seconds. `points` are {time, output, prompt}; null breaks a line.
export function throughput(canvas, points, span) {
  const area = begin(canvas);
  if (area === null) return;
  const { context, width, height } = area;
  const top = ceiling(Math.max(1, ...points.flatMap((p) => [p.output ?? 0, p.prompt ?? 0])));
  grid(area, top);
  const end = points.at(-1)?.time ?? 0;
  for (const [key, name] of [["prompt", "prefill"], ["output", "decode"]]) {
    line(area, points.map((p) => [1 - (end - p.time) / span, p[key]]), top, name);
  }
  context.fillStyle = colour("dim");
  for (const ago of [span, span / 2, 0]) {
    context.textAlign = "center";
    const x = PAD.left + (1 - ago / span) * (width - PAD.left - PAD.right);
    context.fillText(ago ? `${ago} s ago` : "now", x, height - 5);
  }
}
