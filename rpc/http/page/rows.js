// Rows: the table of running and waiting sequences; a row of the table is used again for whoever is there next.
const COLUMNS = ["", "id", "", "n", "n", "n", "n", ""];

export class Rows {
  #body;

  constructor(body) { this.#body = body; }

  draw(state) {
    const sequences = [...state.running.map((s) => [s, true]), ...state.waiting.map((s) => [s, false])];
    while (this.#body.rows.length > sequences.length) this.#body.lastChild.remove();
    while (this.#body.rows.length < sequences.length) this.#body.append(newRow());
    sequences.forEach(([sequence, isRunning], i) => fill(this.#body.rows[i].cells, sequence, isRunning));
    const hidden = state.num_running + state.num_waiting - sequences.length;
    document.getElementById("rows-note").textContent =
      `${state.num_running} running, ${state.num_waiting} waiting${hidden ? `; ${hidden} not listed` : ""}`;
  }
}

function newRow() {
  const row = document.createElement("tr");
  for (const name of COLUMNS) row.insertCell().className = name;
  row.cells[2].append(document.createElement("span"));
  const progress = document.createElement("progress");
  progress.setAttribute("aria-label", "Output, of the most there will be");
  row.cells[7].append(progress);
  return row;
}

function fill(cells, sequence, isRunning) {
  const { number, choice, id, prompt_tokens: prompt, computed_tokens: computed, output_tokens: output } = sequence;
  const phase = phaseOf(sequence, isRunning);
  write(cells[0], choice ? `${number}.${choice}` : `${number}`);
  write(cells[1], id ?? "–");
  write(cells[2].firstChild, phase);
  cells[2].firstChild.className = `phase ${phase}`;
  [prompt, sequence.cached_tokens, computed, output].forEach((n, i) => write(cells[3 + i], n.toLocaleString("en")));
  cells[7].firstChild.max = sequence.max_output || 1;
  cells[7].firstChild.value = output;
}

function phaseOf({ computed_tokens: computed, prompt_tokens: prompt, output_tokens: output }, isRunning) {
  if (!isRunning) return output ? "preempted" : "waiting";
  return computed < prompt ? "prefill" : "decode";
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
