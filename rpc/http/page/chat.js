// Chat: a conversation with /v1/chat/completions, streamed; it lives in this page only. Answers are shown as Markdown.
import { markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);

export class Chat {
  #messages = [];
  #abort = null;

  constructor() {
    $("ask").addEventListener("submit", (event) => { event.preventDefault(); this.#send(); });
    $("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("new-chat").addEventListener("click", () => this.clear());
    $("key").value = sessionStorage.getItem("key") ?? "";
    $("key").addEventListener("input", () => sessionStorage.setItem("key", $("key").value));
  }

  // Abort the answer that is streaming; false if none is.
  stop() {
    const isStreaming = this.#abort !== null;
    this.#abort?.abort();
    return isStreaming;
  }

  clear() {
    this.stop();
    this.#messages = [];
    $("log").replaceChildren($("empty"));
    $("empty").hidden = false;
    $("error").hidden = true;
    $("message").focus();
  }

  async #send() {
    const text = $("message").value.trim();
    if (text === "" || this.#abort !== null) return;
    $("message").value = "";
    $("error").hidden = true;
    const conversation = this.#messages;
    conversation.push({ role: "user", content: text });
    addTurn("user", "You").text.textContent = text;
    const answer = addAnswer();
    this.#setStreaming(answer, true);
    const reply = new Reply(() => answer.show(reply.text));
    try {
      await reply.read(request(conversation), this.#abort.signal);
    } catch (error) {
      if (error.name !== "AbortError") showError(error.message);
      else reply.finish = "stopped by you";
    }
    this.#setStreaming(answer, false);
    answer.show(reply.text, true);
    if (reply.text === "") answer.turn.remove();
    else conversation.push({ role: "assistant", content: reply.text });
    showFacts(reply);
  }

  #setStreaming(answer, isStreaming) {
    this.#abort = isStreaming ? new AbortController() : null;
    answer.turn.classList.toggle("streaming", isStreaming);
    // A screen reader says the answer when it is whole, not piece by piece.
    $("log").setAttribute("aria-busy", isStreaming);
    $("send").hidden = isStreaming;
    $("stop").hidden = !isStreaming;
  }
}

// One answer as it arrives, and when.
class Reply {
  text = "";
  usage = null;
  finish = null;
  #asked = performance.now();
  #first = null;
  #last = null;
  #onText;

  constructor(onText) { this.#onText = onText; }

  async read(body, signal) {
    const key = sessionStorage.getItem("key");
    const headers = { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      this.#take(event);
    }
  }

  #take(event) {
    this.usage = event.usage ?? this.usage;
    const choice = event.choices[0];
    if (choice === undefined) return;
    this.finish = choice.finish_reason ?? this.finish;
    const piece = choice.delta.content;
    if (!piece) return;
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.text += piece;
    this.#onText(piece);
  }

  // Milliseconds; null before the first text.
  get ttft() { return this.#first === null ? null : this.#first - this.#asked; }

  // Tokens per second after the first; null when there are too few to tell.
  get speed() {
    const tokens = this.usage?.completion_tokens ?? 0;
    return tokens < 2 || this.#last <= this.#first ? null : (1000 * (tokens - 1)) / (this.#last - this.#first);
  }
}

function request(messages) {
  const system = $("system").value.trim();
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  return {
    messages: system === "" ? messages : [{ role: "system", content: system }, ...messages],
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    stream: true,
    stream_options: { include_usage: true },
  };
}

// Documents of server-sent events; the last one, [DONE], is not given out.
async function* events(stream) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = stream.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the server closed the connection before the answer ended");
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function addTurn(role, name) {
  $("empty").hidden = true;
  const turn = document.createElement("article");
  turn.className = `turn ${role}`;
  const title = document.createElement("h3");
  title.textContent = name;
  const text = document.createElement("p");
  turn.append(title, text);
  $("log").append(turn);
  $("log").scrollTop = $("log").scrollHeight;
  return { turn, text };
}

// The model's turn: shown anew with the next frame, however many pieces have come by then.
function addAnswer() {
  const { turn, text: first } = addTurn("assistant", "Model"), body = document.createElement("div");
  body.className = "markdown";
  first.replaceWith(body);
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "copy";
  copy.textContent = "Copy";
  turn.querySelector("h3").after(copy);
  let text = "", frame = 0;
  copy.addEventListener("click", async () => {
    copy.textContent = (await copied(text)) ? "Copied" : "Not allowed";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  const draw = () => {
    const log = $("log");
    // Who has scrolled up to read stays there.
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    body.replaceChildren(markdown(text));
    if (follows) log.scrollTop = log.scrollHeight;
    frame = 0;
  };
  const show = (all, now = false) => {
    text = all;
    if (now) cancelAnimationFrame(frame), draw();
    else frame ||= requestAnimationFrame(draw);
  };
  return { turn, show };
}

// The clipboard is there on https and on this machine only; elsewhere a selected field is what works.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = false;
}

function showFacts(reply) {
  const usage = reply.usage;
  const set = (name, value) => { $(`fact-${name}`).textContent = value ?? "–"; };
  set("ttft", reply.ttft === null ? null : `${reply.ttft.toFixed(0)} ms`);
  set("speed", reply.speed === null ? null : `${reply.speed.toFixed(1)} tokens/s`);
  set("prompt", usage && `${usage.prompt_tokens} tokens`);
  set("cached", usage && `${usage.prompt_tokens_details.cached_tokens} tokens`);
  set("answer", usage && `${usage.completion_tokens} tokens`);
  set("finish", reply.finish);
}
