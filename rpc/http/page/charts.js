// Charts: canvases drawn from numbers. Each call draws all of its canvas, in the colours that page.css names.
import { begin, ceiling, colour, line, valueAxis } from "./canvas.js";

const PAD = { left: 44, right: 44, top: 8, bottom: 20 };

export function compact(value) {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

export function duration(seconds) {
  if (seconds < 1) return `${+(1e3 * seconds).toPrecision(3)} ms`;
  return `${+seconds.toPrecision(3)} s`;
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
  const { context } = begin(canvas, PAD, height);
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
  const area = begin(canvas, PAD);
  if (area === null) return;
  const { context, plot } = area;
  const count = steps.step.length;
  const first = count - stepsShown(canvas, count);
  const latest = (column) => column.slice(first);
  const [prefill, decode, times] = [steps.prefill_tokens, steps.decode_tokens, steps.milliseconds].map(latest);
  const top = ceiling(Math.max(...prefill.map((n, i) => n + decode[i]), 1));
  const timeTop = ceiling(Math.max(...times, 0.001));
  valueAxis(area, top, compact, { top: timeTop, show: compact });
  context.fillText("tokens", 4, plot.bottom + 15);
  context.fillText("ms", plot.right + 6, plot.bottom + 15);
  const pitch = plot.width / prefill.length;
  const bar = (i, from, tokens, name) => {
    if (!tokens) return;
    context.fillStyle = colour(name);
    const height = Math.max(1, (tokens / top) * plot.height);
    context.fillRect(plot.left + i * pitch + 0.5, plot.y(from / top) - height, Math.max(1, Math.min(pitch - 1, 14)), height);
  };
  prefill.forEach((n, i) => { bar(i, 0, decode[i], "decode"); bar(i, decode[i], n, "prefill"); });
  line(area, times.map((ms, i) => [plot.left + (i + 0.5) * pitch, ms]), timeTop, "time");
  if (marked !== null && marked >= first) {
    context.fillStyle = colour("text");
    context.globalAlpha = 0.14;
    context.fillRect(plot.left + (marked - first) * pitch, plot.top, pitch, plot.height);
    context.globalAlpha = 1;
  }
}

// A bar per bucket, from the first that has any to the last.
export function histogram(canvas, { bounds, counts }) {
  const area = begin(canvas, PAD);
  if (area === null) return;
  const { context, plot } = area;
  const last = counts.findLastIndex((n) => n > 0);
  if (last < 0) { valueAxis(area, 1, compact); return; }
  const first = Math.max(0, counts.findIndex((n) => n > 0) - 1);
  const shown = counts.slice(first, Math.max(last + 2, first + 6));
  const top = ceiling(Math.max(...shown));
  valueAxis(area, top, compact);
  const pitch = plot.width / shown.length;
  const every = Math.ceil(54 / pitch);
  shown.forEach((n, i) => {
    context.fillStyle = colour("decode");
    const height = n ? Math.max(1, (n / top) * plot.height) : 0;
    context.fillRect(plot.left + i * pitch + 1, plot.bottom - height, pitch - 2, height);
    const bound = bounds[first + i];
    if (bound === undefined || i % every) return;
    context.fillStyle = colour("dim");
    context.textAlign = "center";
    context.fillText(duration(bound), plot.left + (i + 1) * pitch, plot.bottom + 15);
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
  const area = begin(canvas, PAD);
  if (area === null) return;
  const { context, plot } = area;
  const top = ceiling(Math.max(1, ...points.flatMap((p) => [p.output ?? 0, p.prompt ?? 0])));
  valueAxis(area, top, compact);
  const x = (ago) => plot.right - (ago / span) * plot.width;
  const end = points.at(-1)?.time ?? 0;
  for (const [key, name] of [["prompt", "prefill"], ["output", "decode"]]) {
    line(area, points.map((p) => [x(end - p.time), p[key]]), top, name);
  }
  context.fillStyle = colour("dim");
  for (const ago of [span, span / 2, 0]) {
    context.textAlign = "center";
    context.fillText(ago ? `${ago} s ago` : "now", x(ago), plot.bottom + 15);
  }
}
