// The answer: a span a token, made in pieces as they are scrolled to; one tip for mouse and keyboard.
const PIECE = 1500;
const KIND = { a: "accepted", c: "correction", b: "bonus", p: "plain", f: "forced" };
const MEANS = {
  accepted: "drafted, and the target agreed", correction: "the target's own, where the draft went wrong",
  bonus: "the target's own, after a whole accepted draft", plain: "nothing was drafted", forced: "the grammar left no choice",
};
const GLYPH = { accepted: "\u00b7", correction: "\u00d7", bonus: "+", plain: "\u2013", forced: "=" };
const answer = $("answer");
const made = { tokens: [], first: [], now: -1, sentinel: null };

const seen = new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) grow(made.tokens.length + PIECE); },
  { root: answer, rootMargin: "600px" });

function showAnswer(call) {
  seen.disconnect();
  Object.assign(made, { tokens: [], first: [], now: -1, sentinel: el("span") });
  call.t.r.forEach((round, i) => { if (i === 0 || call.t.r[i - 1] !== round) made.first[round] = i; });
  answer.replaceChildren(made.sentinel);
  answer.classList.remove("filtered");
  answer.removeAttribute("aria-activedescendant");
  answer.scrollTop = 0;
  grow(PIECE);
  legend(call);
  $("asked").hidden = call.prompt === null;
  $("prompt").textContent = call.prompt === null ? "" : shown(call.prompt);
  $("answerhint").textContent = call.t.x ? "Click into the answer and use the arrow keys, or hover."
    : "A box is a token. Its text was not recorded; record(..., capture_content=True) keeps it.";
}

function grow(to) {
  const call = state.call, piece = document.createDocumentFragment(), end = Math.min(to, call.t.r.length);
  seen.disconnect();
  for (let i = made.tokens.length; i < end; i++) piece.append(token(call, i));
  made.sentinel.before(piece);
  if (made.tokens.length < call.t.r.length) seen.observe(made.sentinel);
}

function token(call, i) {
  const arm = call.r.arm[call.t.r[i]], kind = KIND[call.t.k[i]];
  const node = el("span", "t " + kind + " " + armClass(call, arm));
  node.setAttribute("role", "option");
  if (made.first[call.t.r[i]] === i) node.classList.add("first");
  const text = call.t.x ? call.t.x[i] : null;
  if (text === null) {
    node.classList.add("box");
    node.textContent = GLYPH[kind];
  } else if (text === "") {
    node.classList.add("part");
    node.textContent = "\u00b7";
  } else {
    node.textContent = shown(text).replace(/\n/g, "\u23ce\n");
  }
  node.dataset.i = i;
  if (state.kept !== null && state.kept === drafter(call.names[arm])) node.classList.add("kept");
  made.tokens.push(node);
  return node;
}

function legend(call) {
  const totals = new Map();
  call.r.arm.forEach((arm, i) => {
    const name = drafter(call.names[arm]);
    totals.set(name, (totals.get(name) || 0) + call.r.c[i]);
  });
  const all = sum([...totals.values()]) || 1;
  $("drafters").replaceChildren(...[...totals].sort((a, b) => b[1] - a[1]).map(([name, tokens]) => {
    const button = el("button", colour(name));
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.append(el("span", "swatch"), shown(name) + " " + percent(tokens / all));
    button.title = "show this drafter's rounds only";
    button.addEventListener("click", () => keep(state.kept === name ? null : name));
    button.dataset.name = name;
    return button;
  }));
  const kinds = new Set(call.t.k);
  $("kinds").replaceChildren(...Object.entries(KIND).filter(([letter]) => kinds.has(letter)).map(([, kind]) => {
    const item = el("span"), sample = el("span", "t d5 " + kind + (call.t.x ? "" : " box"), call.t.x ? kind : GLYPH[kind]);
    item.append(sample, call.t.x ? MEANS[kind] : kind + ": " + MEANS[kind]);
    return item;
  }));
}

function keep(name) {
  state.kept = name;
  for (const button of $("drafters").children) button.setAttribute("aria-pressed", String(button.dataset.name === name));
  answer.classList.toggle("filtered", name !== null);
  const call = state.call;
  made.tokens.forEach((node, i) => node.classList.toggle("kept", name !== null && drafter(call.names[call.r.arm[call.t.r[i]]]) === name));
}

function tokenFacts(call, i) {
  const round = call.t.r[i], r = call.r, kind = KIND[call.t.k[i]];
  const rows = [["what", kind + ", " + MEANS[kind]], ["arm", shown(call.names[r.arm[round]])]];
  if (r.p[round] !== null) {
    const other = r.chosen[round] !== r.arm[round] ? shown(call.names[r.chosen[round]]) + ", " : "";
    rows.push(["chosen with", other + "probability " + r.p[round].toPrecision(3)]);
  }
  if (call.t.lp && call.t.lp[i] !== null) rows.push(["token probability", Math.exp(call.t.lp[i]).toPrecision(3)]);
  rows.push(["position", count(i + 1) + " of " + count(call.t.r.length)]);
  rows.push(["round", count(round + 1) + ": " + r.a[round] + " of " + r.d[round] + " drafted accepted"]);
  rows.push(["latency", seconds(r.ts[round] / Math.max(1, r.c[round])) + " (round " + seconds(r.ts[round]) + ", after " + seconds(r.at[round]) + ")"]);
  if (call.t.id && call.t.id[i] !== null) rows.push(["token id", String(call.t.id[i])]);
  const text = call.t.x ? call.t.x[i] : null;
  return [text === null ? "token " + (i + 1) : "\u201c" + shown(text) + "\u201d", rows];
}

function point(i, x, y) {
  const [title, rows] = tokenFacts(state.call, i);
  showTip(title, rows, x, y);
  mark(state.call.t.r[i]);
  return title + ", " + rows.map((row) => row.join(" ")).join(", ");
}

function mark(round) { // outline the tokens of a round, and show where it is in time
  for (const node of answer.querySelectorAll(".same")) node.classList.remove("same");
  if (round === null) return;
  for (let i = made.first[round]; i < made.tokens.length && state.call.t.r[i] === round; i++) made.tokens[i].classList.add("same");
  markRound(round);
}

function find(round) { // bring a round's tokens into view
  const first = made.first[round];
  if (first === undefined) return;
  if (first + 64 >= made.tokens.length) grow(first + PIECE);
  made.tokens[first].scrollIntoView({ block: "center" });
  go(first);
}

function go(i) {
  if (i < 0 || i >= state.call.t.r.length) return;
  if (i >= made.tokens.length) grow(i + PIECE);
  const old = made.tokens[made.now], node = made.tokens[i];
  if (old) { old.classList.remove("now"); old.removeAttribute("id"); old.removeAttribute("aria-selected"); }
  made.now = i;
  node.classList.add("now");
  node.id = "token-now";
  node.setAttribute("aria-selected", "true");
  answer.setAttribute("aria-activedescendant", "token-now");
  node.scrollIntoView({ block: "nearest" });
  const box = node.getBoundingClientRect();
  $("spoken").textContent = point(i, box.left, box.bottom);
}

answer.addEventListener("mouseover", (event) => {
  const node = event.target.closest(".t");
  if (node) point(Number(node.dataset.i), event.clientX, node.getBoundingClientRect().bottom);
});
answer.addEventListener("mouseleave", () => { hideTip(); mark(null); });
answer.addEventListener("scroll", hideTip, { passive: true });
answer.addEventListener("click", (event) => {
  const node = event.target.closest(".t");
  if (node) go(Number(node.dataset.i));
});
answer.addEventListener("blur", hideTip);
answer.addEventListener("focus", () => { if (made.tokens.length && made.now < 0 && answer.matches(":focus-visible")) go(0); });
answer.addEventListener("keydown", (event) => {
  const round = made.now < 0 ? 0 : state.call.t.r[made.now];
  const to = { ArrowRight: made.now + 1, ArrowLeft: made.now - 1, Home: 0, End: state.call.t.r.length - 1,
    ArrowDown: made.first[round + 1], ArrowUp: made.first[round - 1] }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  go(to);
});
$("marks").addEventListener("change", () => answer.classList.toggle("marked", $("marks").checked));
