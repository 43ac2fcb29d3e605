// The curves of a run, drawn by uPlot. Each has a table of the same numbers for who does not see it.

import { at, colour, fill, hours, make, percent, span, unitOf } from "./words.js";

const uPlot = window.uPlot;
const HEIGHT = 230;
const COLOURS = ["#4477aa", "#cc6677", "#44aa99", "#aa8833", "#aa4499", "#117733", "#88a0dd", "#999944", "#b03030", "#7a7a7a", "#5ab4d8", "#6a3d7c"];
export const colourOf = (place) => COLOURS[place % COLOURS.length];

class Chart {
  constructor(place, empty) {
    Object.assign(this, { place, empty, plot: null, asked: null });
    this.chart = make("div");
    this.table = make("table");
    this.details = make("details", {}, make("summary", {}, "as a table"),
      make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${place.id} as a table` }, this.table));
    this.details.addEventListener("toggle", () => this.fillTable());
    place.replaceChildren(this.chart, this.details);
    new ResizeObserver(() => this.plot?.setSize({ width: this.width, height: HEIGHT })).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.again(true));
  }

  get width() { return Math.max(260, this.place.clientWidth); }

  // `look`: a function of the settings for uPlot, whose colours are of now; `kind`: where it differs, all is drawn anew.
  show(data, kind, look, said, table) {
    this.asked = { data, kind, look, said, table };
    this.again(false);
  }

  again(anew) {
    if (!this.asked) return;
    const { data, kind, look, said } = this.asked;
    if (data[0].length === 0) {
      this.plot?.destroy();
      this.plot = null;
      this.chart.replaceChildren(make("p", { class: "none" }, this.empty));
    } else if (!anew && this.plot && this.kind === kind) this.plot.setData(data);
    else {
      this.plot?.destroy();
      this.chart.replaceChildren();
      this.kind = kind;
      this.plot = new uPlot({ width: this.width, height: HEIGHT, ...look() }, data, this.chart);
    }
    this.chart.setAttribute("role", "img");
    this.chart.setAttribute("aria-label", said);
    this.details.hidden = data[0].length === 0;
    this.fillTable();
  }

  fillTable() {
    if (this.details.open && this.asked) fill(this.table, "", ...this.asked.table());
  }
}

const axis = (more) => ({ stroke: colour("faint"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, ...more });

const STEPS = [-3, -2, -1, 0, 1, 2, 3, 4, 5].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const models = () => axis({ label: "model", labelSize: 18, size: 32, incrs: STEPS.filter((step) => step >= 1) });

function axes(length, y, more = []) {
  const { size, name } = unitOf(length);
  const x = axis({ label: `run clock, ${name}`, labelSize: 18, size: 32, incrs: STEPS.map((step) => step * size), values: (_, ticks) => ticks.map((tick) => Number((tick / size).toPrecision(5))) });
  return [x, axis({ size: 56, ...y }), ...more.map(axis)];
}

const clock = (length) => ({ label: "at", value: (_, value) => (value === null || value === undefined ? "-" : at(value, length)) });
const scales = { x: { time: false } };
const cursor = { drag: { x: true, y: false } };

export class Charts {
  constructor(byId) {
    this.score = new Chart(byId("score"), "No model has a score yet.");
    this.waits = new Chart(byId("waits"), "No job with a forecast has started yet.");
    this.weights = new Chart(byId("weights"), "No model was made yet.");
    this.agreement = new Chart(byId("agreement"), "No model was made yet.");
    this.costs = byId("costs");
    this.of = byId("waits-of");
    this.of.addEventListener("change", () => this.showWaits());
  }

  show(data) {
    this.data = data;
    const names = data.facilities;
    if (this.of.options.length !== names.length) this.of.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    this.showScore();
    this.showWaits();
    this.showWeights();
    this.showAgreement();
    this.showCosts();
  }

  showScore() {
    const [when, scores, versions] = this.data.scores, { targets } = this.data, end = when.at(-1) ?? 1;
    const best = scores.length ? Math.max(...scores) : null;
    const low = Math.min(...scores, ...targets), high = Math.max(...scores, ...targets);
    this.score.show([when, scores, ...targets.map((target) => when.map(() => target))], `${targets} ${low} ${high} ${unitOf(end).name}`, () => ({
      scales: { ...scales, y: { range: [Math.max(0, low - 0.03), Math.min(Math.max(1, high), high + 0.03)] } }, cursor,
      axes: axes(end, { values: (_, ticks) => ticks.map((tick) => `${Math.round(100 * tick)} %`) }),
      series: [clock(end),
        { label: "score", stroke: colour("training"), width: 2, paths: uPlot.paths.stepped({ align: 1 }), value: (_, value) => percent(value) },
        ...targets.map((target) => ({ label: `target ${percent(target)}`, stroke: colour("faint"), width: 1, dash: [3, 4], points: { show: false }, value: () => "" }))],
    }), best === null ? "no score yet" : `score against time: ${scores.length} scores, the last ${percent(scores.at(-1))}, the best ${percent(best)}`,
    () => [["model", "at", "score"], when.map((time, n) => [String(versions[n]), [at(time, end)], [percent(scores[n])]]).reverse().slice(0, 200)]);
  }

  showWaits() {
    const name = this.of.value || this.data.facilities[0], waits = this.data.waits[name] ?? [[], [], [], [], []];
    const [when, expected, real, low, high] = waits, end = when.at(-1) ?? 1;
    const sorted = [...waits[0].keys()].sort((one, other) => when[one] - when[other]);
    const data = [when, real, expected, low, high].map((column) => sorted.map((n) => column[n]));
    const late = data[1].filter((value, n) => value > (data[4][n] ?? Infinity)).length, known = data[4].filter((value) => value !== null).length;
    this.waits.show(data, `${name} ${unitOf(end).name}`, () => ({
      scales: { ...scales, y: { range: (_, min, max) => [0, Math.max(max, 1) * 1.05] } }, cursor,
      axes: axes(end, { values: (_, ticks) => ticks.map((tick) => (tick ? span(tick) : "0")) }),
      bands: [{ series: [4, 3], fill: `${colour("lingering")}33` }],
      series: [clock(end),
        { label: "real wait", stroke: colour("ink"), width: 0, paths: () => null, points: { show: true, size: 5, fill: colour("ink") }, value: (_, value) => span(value) },
        { label: "forecast", stroke: colour("lost"), width: 2, points: { show: false }, value: (_, value) => span(value) },
        { label: "8 of 10, from", stroke: colour("lingering"), width: 1, points: { show: false }, value: (_, value) => span(value) },
        { label: "to", stroke: colour("lingering"), width: 1, points: { show: false }, value: (_, value) => span(value) }],
    }), `forecasts and real waits of ${name}: ${when.length} jobs` + (known ? `; ${late} of ${known} waited longer than nine of ten were to, by the errors before` : ""),
    () => [["started at", "real wait", "forecast", "8 of 10, from", "to"], data[0].map((time, n) => [at(time, end), [span(data[1][n])], [span(data[2][n])], [span(data[3][n])], [span(data[4][n])]]).reverse()]);
  }

  showWeights() {
    const { rounds, facilities } = this.data, sums = rounds.version.map(() => 0), stacked = [];
    for (const weights of rounds.weights) stacked.push(weights.map((weight, n) => (sums[n] += weight)));
    const order = facilities.map((_, n) => facilities.length - 1 - n); // the highest is drawn first
    this.weights.show([rounds.version, ...order.map((n) => stacked[n])], facilities.join(" "), () => ({
      scales: { ...scales, y: { range: (_, min, max) => [0, Math.max(max, 0.01)] } }, cursor,
      axes: [models(), axis({ size: 56 })],
      bands: order.slice(0, -1).map((_, n) => ({ series: [n + 1, n + 2], fill: `${colourOf(order[n])}99` })),
      series: [{ label: "model" }, ...order.map((n, place) => ({ label: facilities[n], stroke: colourOf(n), width: 1, points: { show: false },
        fill: place === order.length - 1 ? `${colourOf(n)}99` : undefined, paths: uPlot.paths.stepped({ align: -1 }),
        value: (_, value, __, point) => (point === null ? "-" : percent(rounds.weights[n][point])) }))],
    }), `weights of the facilities in the last ${rounds.version.length} models`,
    () => [["model", ...facilities, "updates"], rounds.version.map((version, n) => [String(version), ...facilities.map((_, f) => [percent(rounds.weights[f][n])]), [String(rounds.updates[n])]]).reverse()]);
  }

  showAgreement() {
    const { rounds } = this.data;
    this.agreement.show([rounds.version, rounds.agreement, rounds.staleness, rounds.deferred], "agreement", () => ({
      scales: { ...scales, y: { range: [0, 1] }, number: { range: (_, min, max) => [0, Math.max(max, 2)] } }, cursor,
      axes: [models(), axis({ size: 56 }), axis({ scale: "number", side: 1, size: 40, grid: { show: false } })],
      series: [{ label: "model" },
        { label: "agreement (left)", stroke: colour("upload"), width: 2, spanGaps: true, value: (_, value) => (value === null || value === undefined ? "-" : value.toFixed(2)) },
        { label: "staleness, most (right)", scale: "number", stroke: colour("lost"), width: 1.5, paths: uPlot.paths.stepped({ align: -1 }), points: { show: false } },
        { label: "deferred (right)", scale: "number", stroke: colour("ink"), width: 0, paths: uPlot.paths.bars({ size: [0.5, 8] }), fill: `${colour("faint")}66`, points: { show: false } }],
    }), `agreement of updates, staleness and deferred updates of the last ${rounds.version.length} models`,
    () => [["model", "agreement", "staleness, most", "updates", "deferred"], rounds.version.map((version, n) => [String(version), [rounds.agreement[n] === null ? "-" : rounds.agreement[n].toFixed(2)], [String(rounds.staleness[n])], [String(rounds.updates[n])], [String(rounds.deferred[n])]]).reverse()]);
  }

  showCosts() {
    const rows = Object.entries(this.data.costs).map(([name, cost]) => {
      const held = cost.training + cost.idle + cost.lost, bar = make("div", { class: "split", "aria-hidden": "true" });
      for (const what of ["training", "idle", "lost"]) {
        const part = make("span", { class: what });
        part.style.width = held ? `${(100 * cost[what]) / held}%` : "0";
        bar.append(part);
      }
      const node = (seconds) => [hours(seconds * cost.nodes)], mean = (seconds) => [cost.jobs ? span(seconds / cost.jobs) : "-"];
      return [name, [String(cost.jobs)], bar, node(cost.training), node(cost.idle), node(cost.lost), mean(cost.waiting), mean(cost.upload)];
    });
    fill(this.costs, "of jobs that are over", ["facility", "jobs", "nodes held", "training, node h", "idle, node h", "lost, node h", "in the queue, each", "transfer, each"], rows);
  }
}
