// EngineView: what /state says, as numbers, rows and charts. Read next: poll.js, charts.js.
import * as charts from "./charts.js";
import { Poll } from "./poll.js";
import { Rows } from "./rows.js";
import { Throughput } from "./throughput.js";

const $ = (id) => document.getElementById(id);
const LIVE = 300; // ms between pictures while the view is open
const BESIDE = 5000; // and while only the header shows something

export class EngineView {
  #state = null;
  #isOpen = false;
  #isHeld = false;
  #markedStep = null; // by number: it moves on with the chart
  #rows = new Rows($("rows"));
  #throughput = new Throughput();
  #poll;

  constructor() {
    this.#poll = new Poll((state) => this.#take(state), (trouble) => this.#complain(trouble), BESIDE);
    new ResizeObserver(() => this.draw()).observe($("view-engine"));
    const steps = $("steps");
    steps.addEventListener("pointermove", (event) => this.#mark(charts.stepAt(steps, event.offsetX, this.#numSteps)));
    steps.addEventListener("pointerleave", () => this.#mark(null));
    steps.addEventListener("blur", () => this.#mark(null));
    steps.addEventListener("keydown", (event) => this.#onStepKey(event));
  }

  show(isOpen) {
    this.#isOpen = isOpen;
    this.#poll.every(isOpen ? LIVE : BESIDE);
    this.draw();
  }

  // Hold the picture still, or let it go on.
  hold() {
    this.#isHeld = !this.#isHeld;
    this.#showPill();
  }

  draw() {
    if (this.#state === null || !this.#isOpen) return;
    this.#drawTiles();
    this.#drawBlocks();
    this.#drawSteps();
    this.#drawLatency("ttft", "time_to_first_token", "requests");
    this.#drawLatency("itl", "inter_token_latency", "tokens");
    this.#throughput.draw($("throughput"), $("throughput-note"));
    this.#rows.draw(this.#state);
    $("no-rows").hidden = this.#state.running.length + this.#state.waiting.length > 0;
  }

  #take(state) {
    $("key-field").hidden = !state.needs_key;
    if (this.#isHeld) return;
    this.#state = state;
    this.#throughput.add(state.time, state.totals);
    this.#showHeader();
    this.draw();
  }

  #complain(trouble) {
    $("engine-state").textContent = trouble;
    $("engine-state").className = "pill bad";
  }

  #showHeader() {
    const { name, device, dtype, version } = this.#state.model;
    $("model-name").textContent = name;
    $("model-facts").textContent = `${dtype} on ${device} · engine-llm ${version}`;
    document.title = `${name} · engine-llm`;
    this.#showPill();
  }

  #showPill() {
    const text = this.#isHeld ? "held (p goes on)" : (this.#state?.state ?? "connecting");
    // It is a live region: unchanged text must not be written again.
    if ($("engine-state").textContent !== text) $("engine-state").textContent = text;
    $("engine-state").className = text === "serving" ? "pill good" : "pill";
  }

  #drawTiles() {
    const { totals } = this.#state;
    const queries = totals.prefix_cache_queries;
    const rates = this.#throughput.latest;
    const values = {
      running: charts.compact(this.#state.num_running),
      waiting: charts.compact(this.#state.num_waiting),
      output: rates === null ? "–" : charts.compact(rates.output),
      prompt: rates === null ? "–" : charts.compact(rates.prompt),
      kv: percent(this.#state.kv_cache_usage),
      hits: queries ? percent(totals.prefix_cache_hits / queries) : "–",
      preemptions: charts.compact(totals.preemptions),
    };
    for (const [name, value] of Object.entries(values)) $(`tile-${name}`).textContent = value;
  }

  #drawBlocks() {
    const { block_groups: groups, num_blocks: total, block_size: size } = this.#state;
    const maps = $("block-maps");
    while (maps.children.length < groups.length) maps.append(newMap());
    groups.forEach((group, i) => {
      const canvas = maps.children[i];
      charts.blockMap(canvas, group.cells, 270 / groups.length);
      const window = group.window === null ? "" : `Window of ${group.window} tokens: `;
      canvas.setAttribute("aria-label", `${window}${group.used} in use, ${group.shared} shared, ${group.cached} cached, ${group.free} free`);
    });
    const perCell = groups[0].blocks_per_cell;
    const cell = perCell > 1 ? `; a square is ${perCell} blocks, in the state of most` : "";
    const pools = groups.length > 1 ? ` in each of ${groups.length} groups` : "";
    $("blocks-note").textContent = `${total.toLocaleString("en")} of ${size} tokens${pools}${cell}`;
    const sum = (name) => groups.reduce((n, group) => n + group[name], 0).toLocaleString("en");
    const words = { used: "in use", shared: "shared", cached: "cached, unused", free: "free" };
    const entries = Object.entries(words).map(([name, text]) => legendEntry(name, `${text} ${sum(name)}`));
    $("block-legend").replaceChildren(...entries);
  }

  // -- steps ---------------------------------------------------------------------------------

  get #numSteps() { return this.#state?.steps.step.length ?? 0; }

  #drawSteps() {
    const steps = this.#state.steps;
    if (!this.#numSteps) { $("steps-note").textContent = "no step yet"; return; }
    const found = steps.step.indexOf(this.#markedStep);
    charts.stepBars($("steps"), steps, found < 0 ? null : found);
    const i = found < 0 ? this.#numSteps - 1 : found;
    $("steps-note").textContent =
      `${found < 0 ? "latest, " : ""}step ${steps.step[i].toLocaleString("en")}: ${steps.prefill_tokens[i]} prefill + ` +
      `${steps.decode_tokens[i]} decode tokens in ${steps.rows[i]} ${steps.rows[i] === 1 ? "row" : "rows"}, ${steps.milliseconds[i].toFixed(1)} ms (device ${steps.device_milliseconds[i].toFixed(1)})`;
  }

  #mark(index) {
    this.#markedStep = index === null || !this.#numSteps ? null : this.#state.steps.step[index];
    if (this.#state !== null) this.#drawSteps();
  }

  #onStepKey(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move === undefined || !this.#numSteps) return;
    event.preventDefault();
    const from = this.#state.steps.step.indexOf(this.#markedStep);
    const next = (from < 0 ? this.#numSteps : from) + move;
    const first = this.#numSteps - charts.stepsShown($("steps"), this.#numSteps);
    this.#mark(next >= this.#numSteps ? null : Math.max(first, next));
  }

  #drawLatency(id, name, things) {
    const latency = this.#state.latency[name];
    charts.histogram($(id), latency);
    const total = latency.counts.reduce((a, b) => a + b, 0);
    if (!total) return;
    const parts = [50, 90, 99].map((p) => `p${p} ${charts.duration(charts.quantile(latency, p / 100))}`);
    $(`${id}-note`).textContent = `${parts.join(" · ")} · ${total.toLocaleString("en")} ${things}`;
    $(id).setAttribute("aria-label", $(`${id}-note`).textContent);
  }
}

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;

function newMap() {
  const canvas = document.createElement("canvas");
  canvas.className = "map";
  canvas.setAttribute("role", "img");
  return canvas;
}

function legendEntry(name, text) {
  const entry = document.createElement("li");
  const mark = document.createElement("i");
  mark.className = name;
  entry.append(mark, text);
  return entry;
}
