// Draws a report's charts from the JSON in the page. All share one range of time, in seconds: zooming one zooms all.
// It follows rpc/http/page/canvas.js in the report's one script.
(() => {
  const PAD = { left: 66, right: 24, top: 22, bottom: 22 };
  const MIN_SPAN = 1e-4;
  const charts = JSON.parse(document.getElementById("data").textContent);
  if (!charts.length) return;
  const canvases = [...document.querySelectorAll("canvas")];
  const tip = document.getElementById("tip");
  const ends = charts.flatMap((c) => (c.kind === "lanes" ? c.spans.map((s) => s.times.at(-1)) : [c.ends.at(-1) ?? 0]));
  const full = [0, ends.reduce((a, b) => Math.max(a, b), MIN_SPAN)];
  let range = full;

  const show = (value) => (value >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4)));
  const seconds = (t) => `${t.toFixed(range[1] - range[0] < 0.1 ? 5 : 3)} s`;

  // The first index whose value is above `t`, in ascending values.
  function above(values, t) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] > t) high = middle; else low = middle + 1;
    }
    return low;
  }

  function timeAxis({ context, plot }) {
    const step = ceiling((range[1] - range[0]) / Math.max(2, Math.min(8, Math.floor(plot.width / 90))));
    context.fillStyle = colour("dim");
    context.textAlign = "center";
    for (let t = Math.ceil(range[0] / step) * step; t <= range[1]; t += step)
      context.fillText(`${+t.toFixed(9)} s`, plot.x(t), plot.bottom + 15);
  }

  // The unit stands above the axis: beside a long number it would not fit.
  function unitAbove({ context, plot }, unit) {
    context.fillStyle = colour("dim");
    context.textAlign = "left";
    context.fillText(unit, 2, plot.top - 10);
  }

  function clip({ context, plot }) {
    context.beginPath();
    context.rect(plot.left, 0, plot.width, plot.bottom);
    context.clip();
  }

  const total = (chart, i) => chart.series.reduce((sum, s) => sum + s.values[i], 0);
  const visible = (chart) => [Math.max(above(chart.starts, range[0]) - 1, 0), above(chart.starts, range[1])];

  // Where several that are narrower than a column of the screen share one, the greatest is drawn.
  function bars(chart, area) {
    const { context, plot } = area;
    const [first, last] = visible(chart), colours = chart.series.map((s) => colour(s.colour));
    let top = 0;
    const columns = new Map(), wide = [];
    for (let i = first; i < last; i++) {
      const value = total(chart, i), column = Math.floor(plot.x(chart.starts[i]));
      if (chart.ends[i] < range[0]) continue;
      top = Math.max(top, value);
      if (plot.x(chart.ends[i]) - plot.x(chart.starts[i]) > 1) {
        wide.push([column, { i }]);
        continue;
      }
      const known = columns.get(column);
      if (known === undefined || value > known.value) columns.set(column, { i, value });
    }
    top = ceiling(top);
    valueAxis(area, top, show);
    unitAbove(area, chart.unit);
    timeAxis(area);
    clip(area);
    for (const [column, { i }] of [...columns, ...wide]) {
      const start = plot.x(chart.starts[i]), end = plot.x(chart.ends[i]);
      const [x, width] = end - start > 1 ? [start, end - start] : [column, 1];
      let sum = 0;
      chart.series.forEach((s, n) => {
        if (!s.values[i]) return;
        const low = plot.y(sum / top), high = plot.y((sum += s.values[i]) / top);
        context.fillStyle = colours[n];
        context.fillRect(x, high, width > 4 ? width - 0.5 : width, low - high);
      });
    }
  }

  function lines(chart, area) {
    const [first, last] = visible(chart);
    let top = 0;
    for (const s of chart.series) for (let i = first; i < last; i++) top = Math.max(top, s.values[i]);
    top = ceiling(top);
    valueAxis(area, top, show);
    unitAbove(area, chart.unit);
    timeAxis(area);
    clip(area);
    for (const s of chart.series) {
      const points = [];
      for (let i = first; i < last; i++) points.push([chart.starts[i], s.values[i]], [chart.ends[i], s.values[i]]);
      line(area, points.map(([t, value]) => [area.plot.x(t), value]), top, s.colour);
    }
  }

  const laneCount = (chart) => chart.spans.reduce((most, s) => Math.max(most, s.lane + 1), 1);
  const laneHeight = (chart) => Math.min(14, Math.max(2, 420 / laneCount(chart)));

  function lanes(chart, area) {
    const { context, plot } = area;
    const each = laneHeight(chart), colours = chart.parts.map((p) => colour(p.colour));
    timeAxis(area);
    context.fillStyle = colour("dim");
    context.textAlign = "right";
    context.fillText(show(laneCount(chart)), plot.left - 6, plot.top + laneCount(chart) * each);
    context.fillText("1", plot.left - 6, plot.top + 10);
    clip(area);
    for (const { lane, times } of chart.spans) {
      if (times.at(-1) < range[0] || times[0] > range[1]) continue;
      for (let part = 0; part + 1 < times.length; part++) {
        const x = plot.x(times[part]);
        context.fillStyle = colours[part];
        context.fillRect(x, plot.top + lane * each, Math.max(plot.x(times[part + 1]) - x, 0.5), each > 4 ? each - 2 : each);
      }
    }
  }

  const DRAW = { bars, lines, lanes };

  function draw() {
    charts.forEach((chart, n) => {
      if (chart.kind === "lanes")
        canvases[n].style.height = `${laneCount(chart) * laneHeight(chart) + PAD.top + PAD.bottom}px`;
      const area = begin(canvases[n], PAD, undefined, 2);
      if (area === null) return;
      area.plot.x = (t) => area.plot.left + ((t - range[0]) / (range[1] - range[0])) * area.plot.width;
      DRAW[chart.kind](chart, area);
    });
    document.getElementById("range").textContent = `${seconds(range[0])} to ${seconds(range[1])}`;
  }

  function zoom(from, to) {
    const span = Math.min(Math.max(to - from, MIN_SPAN), full[1] - full[0]);
    const start = Math.min(Math.max(from, full[0]), full[1] - span);
    range = [start, start + span];
    draw();
  }

  function scale(factor) {
    const middle = (range[0] + range[1]) / 2, half = ((range[1] - range[0]) / 2) * factor;
    zoom(middle - half, middle + half);
  }

  function shift(part) {
    const by = (range[1] - range[0]) * part;
    zoom(range[0] + by, range[1] + by);
  }

  function at(canvas, event) {
    const box = canvas.getBoundingClientRect(), width = box.width - PAD.left - PAD.right;
    const part = Math.min(Math.max((event.clientX - box.left - PAD.left) / width, 0), 1);
    return { t: range[0] + part * (range[1] - range[0]), y: event.clientY - box.top };
  }

  function describe(chart, { t, y }) {
    if (chart.kind === "lanes") {
      const lane = Math.floor((y - PAD.top) / laneHeight(chart));
      const span = chart.spans.find((s) => s.lane === lane && s.times[0] <= t && t <= s.times.at(-1));
      if (!span) return "";
      const parts = chart.parts.map((p, n) => `${p.name}  ${show(1e3 * (span.times[n + 1] - span.times[n]))} ms`);
      return [span.label, ...parts].join("\n");
    }
    const i = above(chart.starts, t) - 1;
    if (i < 0 || (chart.kind === "bars" && t > chart.ends[i])) return "";
    const values = chart.series.filter((s) => s.values[i]).map((s) => `${s.name}  ${show(s.values[i])} ${chart.unit}`);
    return [`${seconds(chart.starts[i])}, number ${i + 1}`, ...values].join("\n");
  }

  function hover(canvas, chart, event) {
    tip.textContent = describe(chart, at(canvas, event));
    tip.hidden = !tip.textContent;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  }

  canvases.forEach((canvas, n) => {
    let from = null, brush = null;
    canvas.addEventListener("pointerdown", (event) => {
      from = { t: at(canvas, event).t, x: event.clientX };
      canvas.setPointerCapture(event.pointerId);
      brush = canvas.parentElement.appendChild(Object.assign(document.createElement("div"), { className: "brush" }));
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!from) return hover(canvas, charts[n], event);
      const left = canvas.getBoundingClientRect().left;
      brush.style.left = `${Math.min(from.x, event.clientX) - left}px`;
      brush.style.width = `${Math.abs(event.clientX - from.x)}px`;
    });
    canvas.addEventListener("pointerup", (event) => {
      if (from && Math.abs(event.clientX - from.x) > 4)
        zoom(Math.min(from.t, at(canvas, event).t), Math.max(from.t, at(canvas, event).t));
    });
    canvas.addEventListener("lostpointercapture", () => { brush?.remove(); from = null; });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    canvas.addEventListener("dblclick", () => zoom(...full));
  });

  const actions = {
    "+": () => scale(0.5), "=": () => scale(0.5), "-": () => scale(2), 0: () => zoom(...full), Escape: () => zoom(...full),
    ArrowLeft: () => shift(-0.2), ArrowRight: () => shift(0.2),
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
    actions[event.key]();
    event.preventDefault();
  });
  document.getElementById("in").addEventListener("click", actions["+"]);
  document.getElementById("out").addEventListener("click", actions["-"]);
  document.getElementById("reset").addEventListener("click", actions[0]);
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  matchMedia("print").addEventListener("change", draw);
  draw();
})();
