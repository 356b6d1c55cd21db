// Curves, tokens and news of the page. Everything that is shown is in the page already, as text or as JSON that is read here; so a page
// works from a file as well. Texts of traces are put in as text, never as HTML.
"use strict";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const make = (tag, attributes = {}, ...content) => {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...content);
  return made;
};
const json = (inside, kind) => JSON.parse(inside.querySelector(`script.${kind}`).textContent);

// ---- curves

const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [1, 3], [10, 2], [3, 1]];
const number = (value, look) => {
  if (value === null || value === undefined) return "–";
  if (look === "percent" || look === "stacked") return `${+(100 * value).toPrecision(3)}%`;
  if (value === 0) return "0";
  return Math.abs(value) >= 1000 || Math.abs(value) < 0.001 ? value.toExponential(1).replace("e+", "e") : String(+value.toPrecision(3));
};

function columns(chart) {
  const steps = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, at) => [step, at]));
  const spread = (line, values) => {
    const column = new Array(steps.length).fill(null);
    line.x.forEach((x, at) => { column[place.get(x)] = values[at]; });
    return column;
  };
  return { steps, spread };
}

function stacked(chart, steps, spread) {
  const parts = chart.lines.map((line) => spread(line, line.y).map((value) => value ?? 0));
  const whole = steps.map((_, at) => parts.reduce((sum, part) => sum + part[at], 0) || 1);
  const under = steps.map(() => 0);
  return parts.map((part) => part.map((value, at) => (under[at] += value / whole[at])));
}

function draw(figure) {
  const chart = json(figure, "chart");
  if (!chart.lines.length || typeof uPlot === "undefined") return;
  const { steps, spread } = columns(chart);
  const data = [steps], series = [{ label: chart.across }], bands = [], stack = chart.look === "stacked";
  const sums = stack ? stacked(chart, steps, spread) : [];
  chart.lines.forEach((line, at) => {
    const stroke = css(`--c${at % 8}`), dash = DASHES[at % DASHES.length];
    const shown = { label: line.name, stroke, dash, width: 2, spanGaps: true, points: { show: steps.length < 40 && !line.smooth },
      value: (_, value, serie, place) => number(stack && place !== null ? value - (at ? sums[at - 1][place] : 0) : value, chart.look) };
    if (stack) {
      data.push(sums[at]); series.push({ ...shown, fill: at ? undefined : stroke + "66" });
      if (at) bands.push({ series: [data.length - 1, data.length - 2], fill: stroke + "66" });
      return;
    }
    if (line.smooth) {
      data.push(spread(line, line.y)); series.push({ ...shown, label: line.name, width: 1, alpha: 0.4, dash: [] });
      data.push(spread(line, line.smooth)); series.push({ ...shown, label: "mean", value: shown.value });
    } else { data.push(spread(line, line.y)); series.push(shown); }
    if (line.low) {
      data.push(spread(line, line.low), spread(line, line.high));
      for (const edge of ["least", "most"]) series.push({ label: edge, stroke, width: 0.5, alpha: 0.3, points: { show: false }, value: shown.value });
      bands.push({ series: [data.length - 1, data.length - 2], fill: stroke + "22" });
    }
  });
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
  const log = chart.look === "log" && chart.lines.every((line) => line.y.every((value) => value > 0));
  const zero = chart.lines.every((line) => line.y.every((value) => value >= 0)) && !log && chart.unit !== "lower is better";
  const options = {
    width: figure.clientWidth - 26, height: 190, legend: { live: true }, cursor: { drag: { x: true, y: false } }, bands,
    scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: zero ? (_, __, high) => [0, stack ? 1 : high * 1.06 || 1] : undefined } },
    axes: [axis, { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, chart.look))) }],
    series,
    hooks: { draw: [(plot) => marks(plot, chart.marks)] },
  };
  figure.plot?.destroy();
  figure.plot = new uPlot(options, data, figure);
}

function marks(plot, places) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = css("--bad"); ctx.fillStyle = css("--bad"); ctx.lineWidth = 2; ctx.font = `${14 * devicePixelRatio}px sans-serif`;
  for (const [at] of places) {
    const x = plot.valToPos(at, "x", true);
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke(); ctx.fillText("⚑", x + 3, bbox.top + 14 * devicePixelRatio);
  }
  ctx.restore();
}

const seen = new IntersectionObserver((entries) => {
  for (const each of entries) if (each.isIntersecting && !each.target.plot) draw(each.target);
}, { rootMargin: "400px" });
const charts = (inside) => inside.querySelectorAll("figure.chart").forEach((each) => seen.observe(each));
const redraw = () => document.querySelectorAll("figure.chart").forEach((each) => { if (each.plot) draw(each); });
let later = 0;
addEventListener("resize", () => { clearTimeout(later); later = setTimeout(redraw, 150); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

// ---- tokens

const WAYS = {
  logprob: ["log-prob", (all, at) => all.logprob[at], (value) => (value === undefined ? "" : `d${Math.min(4, Math.ceil(-value * 1.2))}`)],
  advantage: ["advantage", (all) => (all.learnt ? all.advantage : undefined),
    (value) => (value ? `${value > 0 ? "u" : "d"}${Math.min(4, 1 + Math.floor(Math.abs(value) * 4))}` : "")],
  gap: ["as sampled − at temperature 1", (all, at) => (all.raw.length ? all.logprob[at] - all.raw[at] : undefined),
    (value) => (value ? `${value > 0 ? "u" : "d"}${Math.min(4, Math.ceil(Math.abs(value) * 4))}` : "")],
  difference: ["trainer − sampler", (all, at) => (all.trainer[at] == null ? undefined : all.trainer[at] - all.logprob[at]),
    (value) => (Math.abs(value ?? 0) < 0.005 ? "" : `${value > 0 ? "u" : "d"}${Math.min(4, Math.ceil(Math.abs(value) * 4))}`)],
  version: ["weight version", (all, at) => all.version[at], (value, all) => (value === undefined ? "" : `u${Math.min(4, Math.max(...all.version) - value)}`)],
  mask: ["loss mask", (all, at) => (all.learnt && !all.masked[at] ? 1 : 0), (value) => (value ? "u3" : "")],
};
const spelled = (value) => (value == null ? "–" : Number.isInteger(value) ? String(value) : (value && Math.abs(value) < 0.005 ? value.toExponential(0) : value.toFixed(2)).replaceAll("-", "−"));

function tokens(box) {
  const all = json(box, "tokens"), stream = make("div", { className: "stream" }), about = make("div", { className: "about" });
  about.setAttribute("aria-live", "polite");
  const spans = all.text.map((text, at) => {
    const span = make("span", { className: "token", tabIndex: at ? -1 : 0 }, make("span", {}, text.replace(/\n/g, "↵").replace(/\t/g, "→")), make("small"));
    span.dataset.at = at;
    return span;
  });
  spans.forEach((span, at) => { stream.append(span); if (all.text[at].includes("\n") || all.text[at].includes("\\n")) stream.append(make("span", { className: "break" })); });
  const way = make("fieldset", { className: "by" }, make("legend", {}, "number and colour:"));
  for (const [key, [name]] of Object.entries(WAYS)) {
    const button = make("input", { type: "radio", name: "by", value: key, checked: key === (all.advantage !== null && all.learnt ? "advantage" : "logprob") });
    button.addEventListener("change", () => paint(key));
    way.append(make("label", {}, button, ` ${name}`));
  }
  const paint = (key) => spans.forEach((span, at) => {
    const value = WAYS[key][1](all, at);
    span.className = `token ${WAYS[key][2](value, all)}`;
    span.lastChild.textContent = spelled(value);
  });
  const tell = (at) => {
    const rows = { token: JSON.stringify(all.text[at]), id: all.id[at], place: at, "log-prob as sampled": spelled(all.logprob[at]),
      "probability": all.logprob.length ? `${(100 * Math.exp(all.logprob[at])).toPrecision(3)}%` : "–", "at temperature 1": spelled(all.raw[at]),
      "sampled by weights of version": spelled(all.version[at]), "by the trainer": spelled(all.trainer[at]),
      "loss mask": all.masked[at] ? "0: masked, its probability had changed too much" : all.learnt ? "1: learnt from" : "0: not learnt from",
      advantage: all.advantage === null || !all.learnt ? "–" : spelled(all.advantage) };
    about.replaceChildren(make("dl", { className: "facts" }, ...Object.entries(rows).map(([name, value]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, String(value))))));
  };
  stream.addEventListener("mouseover", (event) => { const span = event.target.closest(".token"); if (span) tell(+span.dataset.at); });
  stream.addEventListener("focusin", (event) => { const span = event.target.closest(".token"); if (span) tell(+span.dataset.at); });
  stream.addEventListener("click", (event) => event.target.closest(".token")?.focus());
  stream.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 }[event.key];
    const span = event.target.closest(".token");
    if (!by || !span) return;
    event.preventDefault();
    const next = spans[Math.max(0, Math.min(spans.length - 1, +span.dataset.at + by))];
    span.tabIndex = -1; next.tabIndex = 0; next.focus();
  });
  box.append(way, stream, about);
  paint(way.querySelector("input:checked").value);
  if (spans.length) tell(0);
}

// ---- news: the page fetches itself anew, and parts of it that are different are replaced

async function renew() {
  const reply = await fetch(location.href, { headers: { accept: "text/html" } });
  if (!reply.ok) return;
  const fresh = new DOMParser().parseFromString(await reply.text(), "text/html");
  for (const part of fresh.querySelectorAll("[data-live]")) {
    const old = document.getElementById(part.id);
    if (!old || old.dataset.said === part.outerHTML || (!old.dataset.said && old.outerHTML === part.outerHTML)) continue;
    if (old.contains(document.activeElement) && old.querySelector("input:checked")) continue;
    if ([...old.querySelectorAll("textarea")].some((each) => each.value)) continue; // somebody writes
    const open = [...old.querySelectorAll("details")].map((each) => each.open), at = [scrollX, scrollY];
    const said = part.outerHTML, mine = document.importNode(part, true);
    mine.dataset.said = said;
    mine.querySelectorAll("details").forEach((each, place) => { if (place in open) each.open = open[place]; });
    old.replaceWith(mine);
    mine.classList.add("fresh");
    start(mine); scrollTo(...at);
  }
}

function listen(address) {
  const events = new EventSource(address);
  let busy = false, again = false;
  events.onmessage = async () => {
    again = true;
    if (busy) return;
    busy = true;
    while (again) { again = false; await renew().catch(() => {}); await new Promise((done) => setTimeout(done, 500)); }
    busy = false;
  };
  const state = document.getElementById("state"), before = state.textContent;
  events.onerror = () => { state.textContent = "the server does not answer; what is shown may be old"; };
  events.onopen = () => { state.textContent = before; };
}

// ---- what changes something: sent as JSON, with the token of this page

const token = () => document.querySelector('meta[name="etude-token"]')?.content ?? "";
async function act(form, button) {
  const said = form.querySelector("output") ?? form.appendChild(make("output"));
  const values = Object.fromEntries([...new FormData(form, button)].filter(([, value]) => value !== ""));
  said.textContent = "…";
  const reply = await fetch(form.dataset.action, { method: "POST", body: JSON.stringify(values),
    headers: { "content-type": "application/json", "x-etude-token": token() } });
  const answer = await reply.json().catch(() => ({}));
  said.textContent = reply.ok ? answer.said ?? "done" : answer.error?.message ?? `refused (${reply.status})`;
  if (reply.ok && answer.to) location.href = answer.to;
  else if (reply.ok) { form.reset(); renew(); }
}

function start(inside) {
  charts(inside);
  inside.querySelectorAll("[data-tokens]").forEach(tokens);
  inside.querySelectorAll("form[data-action]").forEach((form) => form.addEventListener("submit", (event) => { event.preventDefault(); act(form, event.submitter); }));
  inside.querySelectorAll("form.login").forEach((form) => form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const reply = await fetch("/login", { method: "POST", body: new FormData(form).get("token") });
    if (reply.ok) location.reload(); else form.append(make("output", {}, " this is not the token"));
  }));
}

document.addEventListener("DOMContentLoaded", () => {
  start(document);
  if (document.body.dataset.events) listen(document.body.dataset.events);
});
