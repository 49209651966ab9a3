"use strict";
// Data, theme, the tree of calls, a call's numbers. Text of a trace reaches the document as text nodes only.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const state = { call: null, kept: null, redraw: [] };

function el(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

const sum = (list) => list.reduce((a, b) => a + b, 0);
const seconds = (s) => s >= 100 ? s.toFixed(0) + " s" : s >= 1 ? s.toFixed(2) + " s" : (s * 1e3).toFixed(s < 0.1 ? 1 : 0) + " ms";
const percent = (x) => (100 * x).toFixed(x < 0.0995 && x > 0 ? 1 : 0) + "%";
const count = (n) => n.toLocaleString("en");

// What cannot be seen, or would reorder its neighbours, is shown as a name.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const shown = (text) => text.replace(HIDDEN, (c) => {
  const code = c.codePointAt(0);
  return code < 32 ? String.fromCodePoint(0x2400 + code) : "\u27e8" + code.toString(16).toUpperCase().padStart(4, "0") + "\u27e9";
});

// -- arms: a drafter has a colour, its second arm is fainter or dashed --------------------------------------------------
const KNOWN = { suffix: 0, lookup: 1, recycling: 2, recycling_tree: 2 };
const drafter = (arm) => arm === "plain" ? "plain" : arm.split("@")[0];
const colours = new Map([["plain", "dp"]]);
for (const call of DATA.calls) {
  for (const arm of call.names) {
    const name = drafter(arm);
    if (colours.has(name)) continue;
    if (Object.hasOwn(KNOWN, name)) { colours.set(name, "d" + KNOWN[name]); continue; }
    const used = new Set(colours.values());
    let free = 3;
    while (used.has("d" + free) && free < 7) free++;
    colours.set(name, "d" + free);
  }
}
const colour = (arm) => colours.get(drafter(arm)) || "dp";
function shade(call, index) { // 0, or 1 for the second and further arms of a drafter
  const name = drafter(call.names[index]);
  return call.names.findIndex((other) => drafter(other) === name) < index ? 1 : 0;
}
const armClass = (call, index) => colour(call.names[index]) + (shade(call, index) ? " s1" : "");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ink = (arm) => css(colour(arm) === "dp" ? "--plain" : "--" + colour(arm));

// -- theme ----------------------------------------------------------------------------------------------------------------
const preference = matchMedia("(prefers-color-scheme: dark)");
const THEMES = ["auto", "light", "dark"];
let theme = "auto";
function paint() {
  const dark = theme === "dark" || (theme === "auto" && preference.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = "theme: " + theme;
  for (const draw of state.redraw) draw();
}
$("theme").addEventListener("click", () => { theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]; paint(); });
preference.addEventListener("change", paint);

// -- the tip: one for tokens and charts -----------------------------------------------------------------------------------
const tip = $("tip");
function showTip(title, rows, x, y) {
  tip.replaceChildren(el("b", "", title));
  const table = el("table");
  for (const [name, value] of rows) {
    const row = table.insertRow();
    row.insertCell().textContent = name;
    row.insertCell().textContent = value;
  }
  tip.append(table);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(6, Math.min(x, innerWidth - box.width - 8)) + "px";
  tip.style.top = (y + 14 + box.height > innerHeight ? Math.max(6, y - box.height - 18) : y + 14) + "px";
}
function hideTip() { tip.hidden = true; }
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

// -- the tree ---------------------------------------------------------------------------------------------------------------
function accepted(call) { return call.r.a.length ? 1 + sum(call.r.a) / call.r.a.length : 0; }

function leaf(call, index) {
  const button = el("button", "leaf");
  button.type = "button";
  button.setAttribute("role", "treeitem");
  button.setAttribute("aria-selected", "false");
  button.tabIndex = -1;
  button.dataset.call = index;
  button.append(el("b", "", shown(call.label) || "call " + (index + 1)));
  const facts = call.error ? el("small", "error", shown(call.error)) : el("small", "",
    count(call.completion_tokens) + " tokens, " + accepted(call).toFixed(2) + " a round, " + seconds(call.total_s));
  const strip = el("span", "strip");
  for (const [arm, tokens] of supplied(call)) {
    const part = el("i", colour(arm));
    part.style.flexGrow = tokens;
    strip.append(part);
  }
  button.append(facts, strip);
  return button;
}

function supplied(call) { // tokens by arm; what no drafter proposed is the target's
  const tokens = new Map();
  call.r.arm.forEach((arm, i) => {
    const name = call.names[arm];
    if (call.r.a[i]) tokens.set(name, (tokens.get(name) || 0) + call.r.a[i]);
    if (call.r.c[i] > call.r.a[i]) tokens.set("plain", (tokens.get("plain") || 0) + call.r.c[i] - call.r.a[i]);
  });
  return [...tokens].sort((a, b) => (a[0] === "plain") - (b[0] === "plain") || b[1] - a[1]);
}

function buildTree() {
  const below = new Map(); // how many runs and calls each run holds
  const keys = (call) => call.path.map((_, i) => call.path.slice(0, i + 1).map((run) => run[0]).join("/"));
  for (const call of DATA.calls) {
    const own = keys(call);
    own.forEach((key, i) => below.set(key, (below.get(key) || new Set()).add(own[i + 1] || call)));
  }
  const lists = new Map([["", $("tree")]]);
  DATA.calls.forEach((call, index) => {
    const own = keys(call);
    // a run of one call that bears the run's name says nothing more
    if (own.length && call.path.at(-1)[1] === call.label && below.get(own.at(-1)).size === 1) own.pop();
    let above = "";
    own.forEach((key, i) => {
      if (!lists.has(key)) {
        const [id, name] = call.path[i];
        const item = el("li"), list = el("ul");
        item.setAttribute("role", "none");
        list.setAttribute("role", "group");
        item.append(el("div", "run", shown(name) || "run " + id.slice(0, 8)), list);
        lists.get(above).append(item);
        lists.set(key, list);
      }
      above = key;
    });
    const item = el("li");
    item.setAttribute("role", "none");
    item.append(leaf(call, index));
    lists.get(above).append(item);
  });
  $("tree").addEventListener("click", (event) => {
    const button = event.target.closest(".leaf");
    if (button) select(Number(button.dataset.call));
  });
  $("tree").addEventListener("keydown", (event) => {
    const leaves = [...document.querySelectorAll(".leaf")];
    const at = leaves.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: leaves.length - 1 }[event.key];
    if (at < 0 || to === undefined || !leaves[to]) return;
    event.preventDefault();
    leaves[to].focus();
    select(Number(leaves[to].dataset.call));
  });
}

function select(index) {
  const call = DATA.calls[index];
  state.call = call;
  state.kept = null;
  for (const button of document.querySelectorAll(".leaf")) {
    const chosen = Number(button.dataset.call) === index;
    button.setAttribute("aria-selected", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
  }
  hideTip();
  showHead(call, index);
  showAnswer(call);
  showCost(call);
  showArms(call);
  showCharts(call);
}

// -- a call in numbers ------------------------------------------------------------------------------------------------------
function showHead(call, index) {
  $("step").textContent = shown(call.label) || "call " + (index + 1);
  const when = new Date(call.started * 1e3);
  const facts = [call.label === call.step ? "" : "step " + call.step, call.model, call.operation, "policy " + (call.policy || "none"), Number.isNaN(when.getTime()) ? "" : when.toLocaleString(),
    call.stream ? "streamed" : "", "pid " + call.pid];
  $("facts").replaceChildren(shown(facts.filter(Boolean).join(" \u00b7 ")));
  if (call.error) $("facts").append(" ", el("span", "error", shown(call.error)));
  const rounds = call.r.a.length;
  const tiles = [
    ["tokens", count(call.completion_tokens), "prompt " + count(call.prompt_tokens)],
    ["rounds", count(rounds + call.left_out), call.left_out ? "first " + count(rounds) + " shown" : ""],
    ["accepted length", rounds ? accepted(call).toFixed(2) : "-", "tokens a round"],
    ["accepted drafts", sum(call.r.d) ? percent(sum(call.r.a) / sum(call.r.d)) : "-", "of " + count(sum(call.r.d))],
    ["time", seconds(call.total_s), "first token " + seconds(call.first_token_s)],
    ["against plain", call.speedup === null ? "-" : call.speedup.toFixed(2) + " x", call.speedup === null ? "too few plain rounds" : "estimate"],
    ["ended by", shown(call.finish_reason), ""],
  ];
  $("tiles").replaceChildren(...tiles.map(([name, value, more]) => {
    const tile = el("div");
    const number = el("dd", "", value);
    if (more) number.append(" ", el("small", "", more));
    tile.append(el("dt", "", name), number);
    return tile;
  }));
}

function costs(call) {
  const r = call.r;
  const read = call.prefill_s > 0 && r.ss.length ? r.ss[0] : 0; // the first round's forward read the prompt
  const draft = sum(r.ds), verify = Math.max(0, sum(r.ss) - read);
  const other = Math.max(0, sum(r.ts) - sum(r.ds) - sum(r.ss));
  const waiting = Math.max(0, call.total_s - call.prefill_s - draft - verify - other);
  return [["reading the prompt", call.prefill_s], ["drafting", draft], ["verifying", verify], ["other work of rounds", other],
    ["between rounds", waiting]];
}

function showCost(call) {
  const parts = costs(call), total = sum(parts.map((part) => part[1])) || 1;
  const words = parts.map(([name, s]) => name + " " + seconds(s) + " (" + percent(s / total) + ")");
  $("cost").setAttribute("aria-label", words.join(", "));
  $("cost").replaceChildren(...parts.map(([, s], i) => {
    const part = el("i", "c" + i);
    part.style.flexGrow = s / total;
    part.title = words[i];
    return part;
  }));
  $("costlegend").replaceChildren(...parts.map(([name, s], i) => {
    const item = el("span");
    item.append(el("i", "c" + i), name + " ", el("b", "", seconds(s)), " " + percent(s / total));
    return item;
  }));
}

function showArms(call) {
  const r = call.r, table = $("arms");
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  const titles = ["arm", "share of rounds", "rounds", "drafted", "accepted", "tokens a round", "distribution", "draft", "verify", "value"];
  for (const title of titles) head.append(el("th", title === "share of rounds" ? "wide" : title === "distribution" ? "left" : "", title));
  const body = table.createTBody();
  const all = r.arm.length || 1;
  call.names.forEach((name, arm) => {
    const mine = [];
    r.arm.forEach((other, i) => { if (other === arm) mine.push(i); });
    const total = (column) => sum(mine.map((i) => r[column][i]));
    const row = body.insertRow();
    const first = row.insertCell();
    first.append(el("span", "swatch " + armClass(call, arm)), shown(name));
    const share = row.insertCell();
    share.className = "wide";
    const meter = el("div", "meter"), bar = el("i", armClass(call, arm));
    bar.style.width = (72 * mine.length / all) + "%";
    meter.append(bar, percent(mine.length / all));
    share.append(meter);
    const values = call.values[name];
    const last = values ? values.findLast((value) => value !== null) : undefined;
    const drafted = total("d");
    const cells = [count(mine.length), count(drafted), drafted ? count(total("a")) + " (" + percent(total("a") / drafted) + ")" : "-",
      mine.length ? (total("c") / mine.length).toFixed(2) : "-", null, mine.length ? seconds(total("ds") / mine.length) : "-",
      mine.length ? seconds(total("ss") / mine.length) : "-", last === undefined ? "-" : last.toPrecision(3)];
    for (const cell of cells) {
      const made = row.insertCell();
      if (cell === null) made.append(histogram(mine.map((i) => r.c[i]), armClass(call, arm)));
      else made.textContent = cell;
    }
  });
}

function histogram(committed, className) { // how many rounds committed 1, 2, 3 ... tokens
  const SVG = "http://www.w3.org/2000/svg", most = Math.max(16, ...new Set(committed));
  const bins = new Array(most).fill(0);
  for (const tokens of committed) if (tokens) bins[tokens - 1]++;
  const top = Math.max(1, ...bins), svg = document.createElementNS(SVG, "svg");
  const put = (tag, attributes) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    svg.append(node);
    return node;
  };
  svg.setAttribute("class", "hist " + className);
  svg.setAttribute("viewBox", "0 0 140 26");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", bins.map((n, i) => n ? (i + 1) + ": " + n : "").filter(Boolean).join(", ") || "no rounds");
  bins.forEach((n, i) => { if (n) put("rect", { x: i * 138 / most + 1, width: Math.max(1, 138 / most - 1), height: 1 + 15 * n / top, y: 16 - 15 * n / top }); });
  put("text", { x: 1, y: 25 }).textContent = "1";
  put("text", { x: 128, y: 25 }).textContent = most;
  return svg;
}
