// Throughput: rates out of totals that only grow, over the last two minutes.
import * as charts from "./charts.js";

const SPAN = 120; // seconds
const WINDOW = 2; // seconds over which a rate is taken: a prompt counts at once when it is complete
const GAP = 8; // seconds without a picture, as while the page was hidden: no rate is known for them

export class Throughput {
  #points = []; // {time, totals, output, prompt}; rates are null where unknown

  get latest() {
    const last = this.#points.at(-1);
    return last === undefined || last.output === null ? null : last;
  }

  add(time, { generation_tokens, prompt_tokens }) {
    const last = this.#points.at(-1);
    if (last !== undefined && (time === last.time)) return;
    if (last !== undefined && (time < last.time || generation_tokens < last.generation_tokens)) this.#points = []; // restarted
    const point = { time, generation_tokens, prompt_tokens, output: null, prompt: null };
    const before = this.#points.findLast((p) => time - p.time >= WINDOW) ?? this.#points[0];
    if (before !== undefined && time - before.time < GAP) {
      point.output = (generation_tokens - before.generation_tokens) / (time - before.time);
      point.prompt = (prompt_tokens - before.prompt_tokens) / (time - before.time);
    }
    this.#points = [...this.#points.filter((p) => time - p.time <= SPAN), point];
  }

  draw(canvas, note) {
    charts.throughput(canvas, this.#points, SPAN);
    const latest = this.latest;
    if (latest === null) return;
    note.textContent = `${charts.compact(latest.output)} output, ${charts.compact(latest.prompt)} prompt tokens/s`;
    canvas.setAttribute("aria-label", note.textContent);
  }
}
