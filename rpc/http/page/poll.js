// Poll: asks /state again and again while the page can be seen, and tells one listener what came of it.
const PATIENCE = 4000; // ms without an answer: the engine stands still, or the server is gone

export class Poll {
  #onState;
  #onTrouble;
  #interval;
  #timer = null;
  #isAsking = false;

  // onState gets the document, onTrouble a few words; intervals are ms.
  constructor(onState, onTrouble, interval) {
    this.#onState = onState;
    this.#onTrouble = onTrouble;
    this.#interval = interval;
    document.addEventListener("visibilitychange", () => this.#ask());
    this.#ask();
  }

  every(interval) {
    this.#interval = interval;
    this.#ask();
  }

  async #ask() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#isAsking) return;
    this.#isAsking = true;
    const asked = performance.now();
    try {
      const response = await fetch("state", { signal: AbortSignal.timeout(PATIENCE) });
      const answer = await response.json();
      if (response.ok) this.#onState(answer);
      else this.#onTrouble(answer.error.message.replace("the engine is ", ""));
    } catch {
      this.#onTrouble("no answer");
    }
    this.#isAsking = false;
    this.#timer = setTimeout(() => this.#ask(), Math.max(50, this.#interval - (performance.now() - asked)));
  }
}
