// Charts on canvas (uPlot): rounds over time, what the bandit thinks, what it chooses.
const plots = { timeline: null, values: null, shares: null };
const resized = new ResizeObserver(() => {
  for (const [id, plot] of Object.entries(plots)) if (plot) plot.setSize({ width: $(id).clientWidth - 8, height: plot.height });
});
for (const id of Object.keys(plots)) resized.observe($(id));

function showCharts(call) {
  for (const plot of Object.values(plots)) if (plot) plot.destroy();
  Object.assign(plots, { timeline: null, values: null, shares: null });
  $("unzoom").hidden = true;
  if (!call.r.arm.length) return;
  plots.timeline = timeline(call);
  plots.values = values(call);
  plots.shares = shares(call);
}
state.redraw.push(() => { if (state.call) showCharts(state.call); });

function axis(more) {
  return Object.assign({ stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1 },
    font: "11px system-ui, sans-serif" }, more);
}

const cut = (name) => name.length > 20 ? name.slice(0, 19) + "\u2026" : name;

function roundFacts(call, i) {
  const r = call.r;
  const rows = [["arm", shown(call.names[r.arm[i]])]];
  if (r.p[i] !== null) rows.push(["chosen", shown(call.names[r.chosen[i]]) + ", probability " + r.p[i].toPrecision(3)]);
  rows.push(["tokens", r.c[i] + " (" + r.a[i] + " of " + r.d[i] + " drafted accepted" + (r.b[i] ? ", a bonus" : "") + ")"]);
  rows.push(["draft", seconds(r.ds[i])], ["verify", seconds(r.ss[i])], ["whole round", seconds(r.ts[i])]);
  for (const name of Object.keys(call.values)) {
    const value = call.values[name][i];
    if (value !== null && value !== undefined) rows.push(["value of " + shown(name), value.toPrecision(3)]);
  }
  return ["round " + (i + 1), rows];
}

function tell(call, plot, i) {
  if (i === null || i === undefined || plot.cursor.left < 0) { hideTip(); mark(null); return; }
  const box = plot.over.getBoundingClientRect();
  const [title, rows] = roundFacts(call, i);
  mark(i);
  showTip(title, rows, box.left + plot.cursor.left + 14, box.top + plot.cursor.top);
}

function markRound(round) { // a thin line where the round is
  for (const [id, plot] of Object.entries(plots)) {
    if (!plot) continue;
    plot.marked = round;
    if (!plot.over.matches(":hover")) {
      const at = id === "timeline" ? state.call.r.at[round] - state.call.r.ts[round] / 2 : round + 1;
      plot.setCursor({ left: plot.valToPos(at, "x"), top: 2 }, false);
    }
  }
}

function timeline(call) {
  const r = call.r, lanes = call.names.length, ends = r.at, most = Math.max(2, ...new Set(r.c));
  const starts = ends.map((end, i) => end - r.ts[i]);
  const middles = ends.map((end, i) => (end + starts[i]) / 2);
  const inks = call.names.map(ink);
  const whole = [0, Math.max(call.total_s, ends[ends.length - 1]) || 1];
  const nearest = (x) => { // rounds follow one another
    let low = 0, high = ends.length - 1;
    while (low < high) { const middle = (low + high) >> 1; if (ends[middle] < x) low = middle + 1; else high = middle; }
    return low;
  };
  const draw = (u) => {
    const { ctx, bbox } = u, pixels = devicePixelRatio || 1, lane = bbox.height / lanes, from = u.scales.x.min, to = u.scales.x.max;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = css("--grid");
    const read = u.valToPos(Math.max(0, starts[0]), "x", true);
    ctx.fillRect(bbox.left, bbox.top, Math.max(0, read - bbox.left), bbox.height);
    for (let i = from <= 0 ? 0 : nearest(from); i < ends.length && starts[i] <= to; i++) {
      const left = u.valToPos(starts[i], "x", true), right = u.valToPos(ends[i], "x", true);
      const width = Math.max(pixels, right - left - (right - left > 4 * pixels ? pixels : 0));
      const height = Math.max(2 * pixels, (lane - 6 * pixels) * r.c[i] / most);
      const foot = bbox.top + (r.arm[i] + 1) * lane - 2 * pixels;
      ctx.fillStyle = inks[r.arm[i]];
      ctx.fillRect(left, foot - height, width, height);
      const drafting = u.valToPos(starts[i] + r.ds[i], "x", true) - left;
      if (drafting >= pixels) { ctx.fillStyle = css("--ink"); ctx.fillRect(left, foot - 3 * pixels, Math.min(drafting, width), 3 * pixels); }
    }
    ctx.restore();
  };
  const options = {
    width: $("timeline").clientWidth - 8, height: 40 + 38 * lanes, legend: { show: false }, pxAlign: 1,
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: true } },
    scales: { x: { time: false, range: (u, min, max) => u.zoomed ? [min, max] : whole }, y: { range: [0, lanes] } },
    series: [{}, { show: true, stroke: "transparent", points: { show: false }, paths: () => null }],
    axes: [axis({ values: (u, ticks) => ticks.map((tick) => Number(tick.toPrecision(6)) + " s") }),
      axis({ size: 138, grid: { stroke: css("--grid") }, splits: () => call.names.map((_, i) => lanes - i - 0.5),
        values: () => call.names.map((name) => cut(shown(name))) })],
    hooks: {
      draw: [draw],
      setSelect: [(u) => { u.zoomed = u.select.width > 0; $("unzoom").hidden = !u.zoomed; }],
      setCursor: [(u) => { if (u.over.matches(":hover")) tell(call, u, u.cursor.left < 0 ? null : nearest(u.posToVal(u.cursor.left, "x"))); }],
    },
  };
  const plot = new uPlot(options, [middles, middles.map(() => null)], $("timeline"));
  plot.over.addEventListener("click", () => {
    if (plot.cursor.left >= 0) find(nearest(plot.posToVal(plot.cursor.left, "x")));
  });
  plot.over.addEventListener("mouseleave", () => { hideTip(); mark(null); });
  plot.over.addEventListener("dblclick", unzoom, true);
  return plot;
}

function unzoom() {
  plots.timeline.zoomed = false;
  $("unzoom").hidden = true;
  plots.timeline.setScale("x", { min: 0, max: 1 });
}
$("unzoom").addEventListener("click", unzoom);

function byRound(call, id, series, data, bands, scale) {
  const options = {
    width: $(id).clientWidth - 8, height: 210, legend: { show: false }, bands,
    cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
    scales: { x: { time: false }, y: scale },
    series: [{}, ...series], axes: [axis({ values: (u, ticks) => ticks.map((tick) => Number.isInteger(tick) ? count(tick) : "") }), axis({ size: 48 })],
    hooks: { setCursor: [(u) => { if (u.over.matches(":hover")) tell(call, u, u.cursor.idx); }] },
  };
  const plot = new uPlot(options, [call.r.arm.map((_, i) => i + 1), ...data], $(id));
  plot.over.addEventListener("mouseleave", () => { hideTip(); mark(null); });
  plot.over.addEventListener("click", () => { if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) find(plot.cursor.idx); });
  return plot;
}

function values(call) {
  const names = call.names.filter((name) => call.values[name]);
  if (!names.length) return null;
  const series = names.map((name) => ({ stroke: ink(name), width: 2, points: { show: false }, spanGaps: true,
    dash: shade(call, call.names.indexOf(name)) ? [6, 4] : name === "plain" ? [2, 3] : undefined }));
  return byRound(call, "values", series, names.map((name) => call.values[name]), [], {});
}

function shares(call) { // of the last rounds, stacked, the first arm on top
  const r = call.r, rounds = r.arm.length, wide = Math.max(8, Math.round(rounds / 30));
  const played = call.names.map((_, arm) => arm).filter((arm) => r.chosen.includes(arm));
  const ahead = call.names.map(() => 0), stacked = played.map(() => new Array(rounds));
  for (let i = 0; i < rounds; i++) {
    if (r.chosen[i] >= 0) ahead[r.chosen[i]]++;
    if (i >= wide && r.chosen[i - wide] >= 0) ahead[r.chosen[i - wide]]--;
    const all = sum(ahead) || 1;
    let height = 0;
    for (let k = played.length - 1; k >= 0; k--) { height += ahead[played[k]] / all; stacked[k][i] = 100 * height; }
  }
  const series = played.map((arm) => {
    const hue = ink(call.names[arm]);
    return { stroke: hue, width: 1.5, points: { show: false }, dash: shade(call, arm) ? [6, 4] : undefined, fill: hue + (shade(call, arm) ? "30" : "66") };
  });
  const bands = played.slice(1).map((_, k) => ({ series: [k + 1, k + 2] }));
  return byRound(call, "shares", series, stacked, bands, { range: [0, 100] });
}

// -- begin ------------------------------------------------------------------------------------------------------------------
paint();
$("file").textContent = shown(DATA.name);
const tokens = sum(DATA.calls.map((call) => call.completion_tokens));
const rounds = sum(DATA.calls.map((call) => call.r.a.length));
$("totals").textContent = count(DATA.calls.length) + (DATA.calls.length === 1 ? " call, " : " calls, ") + count(tokens) + " tokens in "
  + count(rounds) + " rounds, accepted length " + (rounds ? 1 + sum(DATA.calls.map((call) => sum(call.r.a))) / rounds : 0).toFixed(2);
if (DATA.notes.length) {
  $("notes").textContent = DATA.notes.join(" ");
  $("notes").hidden = false;
}
buildTree();
if (DATA.calls.length) select(DATA.first);
document.documentElement.dataset.ready = "1";
