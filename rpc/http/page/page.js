// The page's frame: views, theme, shortcuts. Read next: chat.js, engine.js.
import { Chat } from "./chat.js";
import { EngineView } from "./engine.js";

const $ = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const chat = new Chat();
const engine = new EngineView();

function showTheme() {
  document.documentElement.dataset.theme = localStorage.getItem("theme") ?? (dark.matches ? "dark" : "light");
  engine.draw();
}

function switchTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  // Back at what the system wants, the page follows the system again.
  if ((theme === "dark") === dark.matches) localStorage.removeItem("theme");
  else localStorage.setItem("theme", theme);
  showTheme();
}

function show(name) {
  for (const view of ["chat", "engine"]) {
    const tab = $(`tab-${view}`);
    tab.setAttribute("aria-selected", view === name);
    tab.tabIndex = view === name ? 0 : -1;
    $(`view-${view}`).hidden = view !== name;
  }
  history.replaceState(null, "", name === "chat" ? "#" : `#${name}`);
  engine.show(name === "engine");
}

function openHelp() {
  if (!$("shortcuts").open) $("shortcuts").showModal();
}

const SHORTCUTS = {
  1: () => { show("chat"); $("tab-chat").focus(); },
  2: () => { show("engine"); $("tab-engine").focus(); },
  "/": () => { show("chat"); $("message").focus(); },
  n: () => { show("chat"); chat.clear(); },
  p: () => engine.hold(),
  t: switchTheme,
  "?": openHelp,
};

function onKey(event) {
  const isField = event.target.matches("input, textarea");
  if (event.key === "Escape" && !$("shortcuts").open) {
    if (!chat.stop() && isField) event.target.blur();
  } else if (!isField && !$("shortcuts").open && !event.ctrlKey && !event.metaKey && !event.altKey) {
    const action = SHORTCUTS[event.key];
    if (action === undefined) return;
    event.preventDefault();
    action();
  }
}

function onTabKey(event) {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  const other = event.currentTarget.id === "tab-chat" ? "engine" : "chat";
  show(other);
  $(`tab-${other}`).focus();
}

for (const view of ["chat", "engine"]) {
  $(`tab-${view}`).addEventListener("click", () => show(view));
  $(`tab-${view}`).addEventListener("keydown", onTabKey);
}
$("theme").addEventListener("click", switchTheme);
$("help").addEventListener("click", openHelp);
dark.addEventListener("change", showTheme);
document.addEventListener("keydown", onKey);
if (matchMedia("(max-width: 760px)").matches) $("settings").open = false;
showTheme();
show(location.hash === "#engine" ? "engine" : "chat");
if (location.hash !== "#engine") $("message").focus();
