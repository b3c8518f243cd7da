// The board: takes the token from the address, asks for one view as server-sent events, and puts sections where they belong.
{
const STORE = "zero-trial-token", CHOSEN = "zero-trial-chosen", KEPT_LINES = 4000, HIDDEN_SECONDS = 20, STEADY_SECONDS = 5;
const main = document.querySelector("main"), form = document.querySelector("form.login"), link = document.querySelector(".link");
const crumbs = document.querySelector(".crumbs"), bar = document.querySelector(".chosen"), waiting = main.firstElementChild;
const picked = new Set(JSON.parse(sessionStorage.getItem(CHOSEN) ?? "[]"));
let stream = null, retry = 0, timer = 0, renewed = false;

// Takes the token from the address, and out of it: it stays neither in the bar nor in the history.
function takeToken() {
  const found = /^#token=([^&]+)$/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(STORE, decodeURIComponent(found[1]));
  history.replaceState(null, "", location.pathname);
}
const token = () => sessionStorage.getItem(STORE) ?? "";

// #/run/0001?metric=... -> what the server is asked for
function view() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [kind, names] = path.split("/");
  const asked = new URLSearchParams(query);
  asked.set("view", kind || "all");
  for (const name of (names ?? "").split(",").filter(Boolean)) asked.append("name", decodeURIComponent(name));
  return asked;
}

function say(word, tone) { link.textContent = word; link.className = `link ${tone}`; }

async function open() {
  close();
  if (!token()) return login("");
  const mine = (stream = new AbortController());
  const asked = view();
  try {
    const answer = await fetch(`${location.pathname.replace(/\/$/, "")}/live?${asked}`, {
      headers: { Authorization: `Bearer ${token()}` }, signal: mine.signal, cache: "no-store",
    });
    if (answer.status === 401 || answer.status === 403) return login(token() ? "This token was rejected." : "");
    if (answer.status === 404) return missing((await answer.json()).message);
    if (answer.ok) {
      const began = Date.now();
      renewed = true; // the newest lines of the log come again
      try { await read(answer.body.getReader()); } finally { if (Date.now() - began > 1000 * STEADY_SECONDS) retry = 0; }
      if (stream === mine) say("stream ended, reconnecting", "quiet");
    } else refused(answer.status, (await answer.json()).message);
  } catch (error) {
    if (mine.signal.aborted) return;
    say("connection lost, reconnecting", "bad");
  }
  if (stream === mine) timer = setTimeout(open, Math.min(1000 * 2 ** retry++, 10000));
}
function close() { clearTimeout(timer); stream?.abort(); stream = null; }

async function read(reader) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const [name, data] = text.slice(0, end).split("\n").map((line) => line.slice(line.indexOf(": ") + 2));
      text = text.slice(end + 2);
      handle(name, JSON.parse(data));
    }
  }
}
function handle(name, data) {
  if (name === "sections") { place(data); say("live", "good"); }
  if (name === "log") write(data.lines);
  if (name === "gone") missing(data.message);
}

// Sections: what is new is put in place of what was there, without disturbing who uses the rest.
function place({ order, fresh }) {
  waiting.remove();
  for (const section of [...main.children]) if (!order.includes(section.id)) section.remove();
  let before = null;
  for (const anchor of order) {
    let section = document.getElementById(anchor);
    if (anchor in fresh) {
      const made = parse(fresh[anchor]);
      if (section) morph(section, made); else section = made;
    }
    if (section !== (before ? before.nextElementSibling : main.firstElementChild)) {
      if (before) before.after(section); else main.prepend(section);
    }
    before = section;
  }
  enhance(main);
  all("table.sortable", main).forEach(sort);
  const above = main.querySelector(".above"); // its place is the path at the top
  if (above && !crumbs.querySelector(".above")) crumbs.lastElementChild.before(above.cloneNode(true));
  const heading = main.querySelector("h1")?.textContent ?? "";
  document.title = `${heading} · zero-trial`;
  mark();
}
function parse(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content.firstElementChild;
}
const keyOf = (node) => (node.nodeType === 1 ? node.id || node.dataset.key || node.dataset.trial || "" : "");
const OWN = new Set(["open", "aria-sort"]); // attributes that belong to who looks

// Makes `old` like `made`: nodes that stay keep focus, scrolling, what was typed and what was opened.
function morph(old, made) {
  if (old.isEqualNode(made)) return;
  if (old.nodeType !== made.nodeType || old.nodeName !== made.nodeName || keyOf(old) !== keyOf(made)) return old.replaceWith(made);
  if (old.nodeType !== 1) { if (old.data !== made.data) old.data = made.data; return; }
  if (old.matches("figure")) return redraw(old, made);
  if (old.matches(".lines, .filter")) return;
  for (const { name } of [...old.attributes]) if (!made.hasAttribute(name) && !OWN.has(name)) old.removeAttribute(name);
  for (const { name, value } of made.attributes) if (old.getAttribute(name) !== value && !OWN.has(name)) old.setAttribute(name, value);
  const keyed = new Map([...old.children].filter(keyOf).map((child) => [keyOf(child), child]));
  let at = old.firstChild;
  for (const next of [...made.childNodes]) {
    const same = keyOf(next) ? keyed.get(keyOf(next)) : at;
    if (!same || keyOf(same) !== keyOf(next)) { old.insertBefore(next, at); continue; }
    if (same !== at) old.insertBefore(same, at);
    const after = same.nextSibling;
    morph(same, next);
    at = after;
  }
  while (at) { const after = at.nextSibling; at.remove(); at = after; }
}
// A chart is redrawn as a whole; the slider, the focus and the pointer's place stay.
function redraw(old, made) {
  const knob = old.querySelector(".smoothing"), fresh = made.querySelector(".smoothing");
  if (knob && fresh) { fresh.value = knob.value; made.querySelector(".plot").dataset.kept = ""; }
  const places = all("[tabindex], button, input", old), focus = places.indexOf(document.activeElement);
  const over = old.querySelector(".plot:hover") && pointer;
  old.replaceWith(made);
  enhance(made.parentElement);
  if (focus >= 0) all("[tabindex], button, input", made)[focus]?.focus({ preventScroll: true });
  if (over) made.querySelector(".plot").dispatchEvent(new PointerEvent("pointermove", over));
}
let pointer = null;
document.addEventListener("pointermove", (event) => { pointer = { clientX: event.clientX, clientY: event.clientY, bubbles: true }; });

// The log: lines are text, never markup.
function write(lines) {
  const pane = main.querySelector(".lines");
  if (!pane) return;
  main.querySelector(".silent")?.setAttribute("hidden", "");
  const wanted = main.querySelector(".filter").value.toLowerCase();
  const made = document.createDocumentFragment();
  if (renewed) pane.replaceChildren();
  renewed = false;
  for (const { t, r, l, m } of lines) {
    const row = make("div", ["ERROR", "CRITICAL"].includes(l) ? "error" : l === "WARNING" ? "warning" : "");
    const when = t === null ? "" : new Date(t * 1000).toISOString().slice(11, 19);
    const head = make("span", "when");
    head.textContent = [when, r === null ? "" : `rank ${r}`].filter(Boolean).join(" ");
    row.append(head, m.replace(/^\[rank=\d+\] /, ""));
    row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
    made.append(row);
  }
  pane.append(made);
  while (pane.childElementCount > KEPT_LINES) pane.firstElementChild.remove();
  if (main.querySelector(".follow").checked) pane.scrollTop = pane.scrollHeight;
}

// Trials that are chosen for a comparison.
function mark() {
  for (const box of all(".pick", main)) box.checked = picked.has(box.dataset.name);
  const names = [...picked].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  bar.hidden = names.length === 0 || view().get("view") === "compare";
  bar.firstElementChild.textContent = `${names.length} chosen`;
  bar.querySelector("a").href = `#/compare/${names.map(encodeURIComponent).join(",")}`;
  sessionStorage.setItem(CHOSEN, JSON.stringify(names));
}
main.addEventListener("change", (event) => {
  const { target } = event;
  if (target.matches(".pick")) { picked[target.checked ? "add" : "delete"](target.dataset.name); mark(); }
  if (target.matches(".metric")) location.hash = `${location.hash.split("?")[0]}?metric=${encodeURIComponent(target.value)}`;
  if (target.matches(".follow") && target.checked) { const pane = main.querySelector(".lines"); pane.scrollTop = pane.scrollHeight; }
});
main.addEventListener("input", (event) => {
  if (!event.target.matches(".filter")) return;
  const wanted = event.target.value.toLowerCase();
  for (const row of main.querySelector(".lines").children) row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
});
main.addEventListener("scroll", (event) => {
  if (!event.target.matches?.(".lines")) return;
  const { scrollTop, clientHeight, scrollHeight } = event.target;
  main.querySelector(".follow").checked = scrollTop + clientHeight >= scrollHeight - 4;
}, true);
main.addEventListener("click", (event) => {
  const section = document.getElementById(event.target.dataset?.to ?? "");
  section?.scrollIntoView({ behavior: "smooth" });
});
bar.querySelector("button").addEventListener("click", () => { picked.clear(); mark(); });

// Where one is, and going elsewhere.
function go() {
  if (location.hash.startsWith("#token=")) takeToken();
  const asked = view(), kind = asked.get("view"), names = asked.getAll("name");
  const parts = [make("a", "")];
  parts[0].href = "#/"; parts[0].textContent = "all";
  if (kind !== "all") { const here = make("span", ""); here.textContent = `${kind} ${kind === "compare" ? "" : names.join(", ")}`; parts.push(here); }
  crumbs.replaceChildren(...parts);
  crumbs.hidden = kind === "all";
  main.replaceChildren(waiting);
  say("connecting", "quiet");
  scrollTo(0, 0);
  open();
}
function missing(message) {
  close();
  notice("Not found", message);
  say("not found", "bad");
}
// An answer that may be another one soon: what is shown stays.
function refused(status, message) {
  if (!main.querySelector("section[id]")) notice("This page is unavailable now", message);
  say(`error ${status}, retrying`, "bad");
}
function notice(title, message) {
  const section = make("section", "missing"), head = make("h2", ""), text = make("p", ""), back = make("a", "button");
  head.textContent = title; text.textContent = message; back.textContent = "Back to all"; back.href = "#/";
  section.append(head, text, back);
  main.replaceChildren(section);
}
function login(message) {
  close();
  main.replaceChildren();
  bar.hidden = true; form.hidden = false;
  const fault = form.querySelector(".fault");
  fault.textContent = message; fault.hidden = message === "";
  say("logged out", "quiet");
  form.querySelector("input[type=password]").focus();
}
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const { user, password } = form.elements, given = form.elements.token.value.trim();
  let found = given;
  if (!given && user) {
    const body = JSON.stringify({ username: user.value, password: password.value });
    const answer = await fetch("/api/v1/auth/login", { method: "POST", body }).catch(() => null);
    if (!answer?.ok) return login(answer ? (await answer.json()).message : "The master does not answer.");
    found = (await answer.json()).token;
  }
  if (!found) return login("A token is needed.");
  sessionStorage.setItem(STORE, found);
  form.hidden = true; form.reset();
  go();
});
let asleep = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(asleep);
  if (document.hidden) asleep = setTimeout(() => { close(); say("paused", "quiet"); }, 1000 * HIDDEN_SECONDS);
  else if (!stream && form.hidden) open();
});
addEventListener("hashchange", () => { form.hidden = true; go(); });
go();
}
