// What every facility was doing, a row a facility, on a canvas: so many bars are too much for elements.

import { at, colour, fill, make, span, unitOf } from "./words.js";

const LABEL = 17, LANES = 26, GAP = 8, AXIS = 24, MOST_ROWS = 400;
const SAID = { waiting: "waiting in the queue", lingering: "holding nodes without work", training: "training", upload: "transfer of its update" };
const MARK = { failed: "failed", requeued: "queued again", deferred: "deferred: after its cutoff" };
const MARK_COLOURS = { failed: "bad", requeued: "ink", deferred: "lost" };

export class Timeline {
  constructor(canvas, said, table, fetchRange) {
    Object.assign(this, { canvas, said, table, fetchRange, since: 0, until: 1, end: 1, follow: true, data: null });
    this.names = [];
    this.frames = [];
    this.wanted = null;
    this.busy = false;
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.listen();
    table.addEventListener("toggle", () => this.fillTable());
  }

  // The run has got so far.
  reached(end, names) {
    const moved = Math.abs(end - this.end) > 1e-9;
    this.names = names;
    this.end = Math.max(end, 1e-3);
    if (this.data === null) this.ask(null, null);
    else if (this.follow && moved) this.show(this.end - (this.until - this.since), this.end, true);
    else if (moved && this.until > this.data.end) this.ask(this.since, this.until);
  }

  show(since, until, follow = false) {
    const length = Math.min(Math.max(until - since, 1e-2), this.end * 1.05);
    since = Math.max(-0.02 * length, Math.min(since, this.end - 0.1 * length));
    [this.since, this.until, this.follow] = [since, since + length, follow];
    this.draw();
    this.ask(this.since, this.until);
    this.changed?.();
  }

  pan(share) { const by = share * (this.until - this.since); this.show(this.since + by, this.until + by); }

  zoom(factor, where = 0.5) {
    const length = this.until - this.since, point = this.since + where * length;
    this.show(point - where * length * factor, point + (1 - where) * length * factor, this.follow && where === 1);
  }

  whole() { this.show(0, this.end); }

  newest() { this.show(this.end - (this.until - this.since), this.end, true); }

  // One question at a time, the newest last; a little more than is seen, so that moving finds something there.
  async ask(since, until) {
    this.wanted = [since, until];
    if (this.busy) return;
    this.busy = true;
    while (this.wanted !== null) {
      const [begin, end] = this.wanted;
      this.wanted = null;
      const more = begin === null ? 0 : (end - begin) / 2;
      try {
        const data = await this.fetchRange(begin === null ? null : Math.max(0, begin - more), begin === null ? null : end + more);
        this.data = data;
        if (begin === null) [this.since, this.until] = [data.since, data.until];
        this.draw();
        this.fillTable();
      } catch { /* the link says that it is lost; it is asked again with the next news */ }
      await new Promise((resolve) => setTimeout(resolve, 150));
    }
    this.busy = false;
  }

  x(seconds) { return ((seconds - this.since) / (this.until - this.since)) * this.width; }

  draw() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      const began = performance.now();
      this.paint();
      this.frames.push(performance.now() - began);
      if (this.frames.length > 1000) this.frames.shift();
    });
  }

  paint() {
    const { canvas, data } = this, scale = devicePixelRatio || 1;
    this.width = canvas.clientWidth;
    const height = AXIS + this.names.length * (LABEL + LANES + GAP) + 4;
    if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
    if (canvas.width !== Math.round(this.width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(this.width * scale);
      canvas.height = Math.round(height * scale);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.width, height);
    this.colours = Object.fromEntries(["ink", "faint", "line", "paper", "bad", "lost", ...Object.keys(SAID)].map((name) => [name, colour(name)]));
    if (!data) return;
    this.paintAxis(pen, height);
    this.names.forEach((name, row) => this.paintRow(pen, name, AXIS + row * (LABEL + LANES + GAP)));
    const now = this.x(this.end);
    if (now >= 0 && now <= this.width) {
      pen.fillStyle = this.colours.ink;
      pen.fillRect(now - 1, AXIS - 6, 2, height - AXIS + 6);
    }
    canvas.setAttribute("aria-label", `timeline of ${this.names.length} facilities, from ${at(Math.max(0, this.since), this.until)} to ${at(this.until)}`);
  }

  paintAxis(pen, height) {
    const { size, name } = unitOf(this.until - this.since > 0 ? this.until : 1), length = (this.until - this.since) / size;
    const rough = length / Math.max(2, this.width / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((times) => times * power).find((found) => found >= rough) * size;
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.lineWidth = 1;
    for (let tick = Math.ceil(Math.max(0, this.since) / step) * step; tick <= this.until; tick += step) {
      pen.fillStyle = this.colours.faint;
      const text = `${Number((tick / size).toPrecision(6))} ${name}`;
      const x = this.x(tick);
      if (x > 24 && x < this.width - 24) pen.fillText(text, x, 13);
      pen.fillStyle = this.colours.line;
      pen.fillRect(x, 17, 1, height - 17);
    }
    pen.strokeStyle = this.colours.faint;
    pen.setLineDash([4, 3]);
    pen.beginPath();
    const seen = this.data.cutoffs.filter((cutoff) => cutoff >= this.since && cutoff <= this.until);
    if (seen.length < this.width / 4) for (const cutoff of seen) { pen.moveTo(this.x(cutoff), AXIS - 4); pen.lineTo(this.x(cutoff), height); }
    pen.stroke();
    pen.setLineDash([]);
    for (const [facility, what, since, until] of this.data.absences) {
      if (facility !== "" || what === "down") continue;
      const x = this.x(since);
      pen.fillStyle = this.colours.bad;
      pen.fillRect(x - 1, AXIS - 6, 2, height);
    }
  }

  paintRow(pen, name, top) {
    const found = this.data.facilities[name];
    if (!found) return;
    const bars = top + LABEL;
    for (const [facility, what, since, until] of this.data.absences) {
      if (facility !== name) continue;
      const x = this.x(since), right = until === null ? this.x(this.end) : this.x(until);
      pen.fillStyle = what === "away" ? this.colours.bad : this.colours.faint;
      pen.globalAlpha = 0.18;
      pen.fillRect(x, top, Math.max(2, right - x), LABEL + LANES);
      pen.globalAlpha = 1;
    }
    if (found.shares) this.paintShares(pen, found.shares, bars);
    else this.paintBars(pen, found, bars);
    for (const [when, kind] of found.marks) {
      const x = this.x(when), mark = this.data.marks[kind];
      if (x >= 0 && x <= this.width) paintMark(pen, mark, x, bars + LANES / 2, this.colours[MARK_COLOURS[mark]], this.colours.paper);
    }
    pen.textAlign = "left";
    pen.font = "600 12px system-ui, sans-serif";
    pen.fillStyle = this.colours.ink;
    pen.fillText(name, 4, top + 12, this.width - 8);
    pen.fillStyle = this.colours.line;
    pen.fillRect(0, top + LABEL + LANES + GAP / 2, this.width, 1);
  }

  paintBars(pen, found, top) {
    const lanes = found.lanes ??= lanesOf(found), high = LANES / (Math.max(0, ...lanes.values()) + 1);
    this.data.kinds.forEach((kind, which) => {
      pen.fillStyle = this.colours[kind];
      const thin = kind === "upload";
      for (const [job, k, since, until] of found.bars) {
        if (k !== which || until < this.since || since > this.until) continue;
        const x = this.x(since), wide = Math.max(this.x(until) - x - (kind === "training" ? 0.6 : 0), 0.7), lane = top + lanes.get(job) * high;
        pen.fillRect(x, thin ? lane + 0.35 * high : lane + 1, wide, thin ? 0.3 * high : high - 2);
      }
    });
  }

  // Zoomed out: how much of each stretch was spent how, stacked.
  paintShares(pen, shares, top) {
    const { since, until, buckets, kinds } = this.data, wide = ((until - since) / buckets / (this.until - this.since)) * this.width;
    for (let n = 0; n < buckets; n++) {
      const x = this.x(since + ((until - since) * n) / buckets);
      if (x + wide < 0 || x > this.width) continue;
      const all = Math.max(100, kinds.reduce((sum, _, k) => sum + shares[k][n], 0));
      let y = top + LANES - 1;
      for (const kind of ["training", "upload", "lingering", "waiting"]) {
        const high = ((LANES - 2) * shares[kinds.indexOf(kind)][n]) / all;
        pen.fillStyle = this.colours[kind];
        pen.fillRect(x, y - high, wide + 0.5, high);
        y -= high;
      }
    }
  }

  // What is at this place, in words.
  tell(x, y) {
    const row = Math.floor((y - AXIS) / (LABEL + LANES + GAP)), name = this.names[row], found = name && this.data?.facilities[name];
    if (!found) return "";
    const seconds = this.since + (x / this.width) * (this.until - this.since), near = (5 / this.width) * (this.until - this.since);
    const mark = found.marks.find(([when]) => Math.abs(when - seconds) < near);
    if (mark) return `${mark[2]}: ${MARK[this.data.marks[mark[1]]]}, at ${at(mark[0], this.end)}`;
    const gone = this.data.absences.find(([facility, , since, until]) => facility === name && since <= seconds && (until ?? this.end) >= seconds);
    if (found.shares) {
      const n = Math.floor(((seconds - this.data.since) / (this.data.until - this.data.since)) * this.data.buckets);
      const said = this.data.kinds.map((kind, k) => `${SAID[kind]} ${found.shares[k][n] ?? 0} %`).join(", ");
      return `${name}, around ${at(seconds, this.end)}: ${said}${gone ? `; ${gone[1]}: ${gone[4]}` : ""}`;
    }
    const lanes = found.lanes, high = LANES / (Math.max(0, ...(lanes?.values() ?? [])) + 1);
    const lane = Math.floor((y - AXIS - row * (LABEL + LANES + GAP) - LABEL) / high);
    const under = found.bars.filter(([, , since, until]) => since <= seconds && until >= seconds);
    const bar = under.find(([job]) => lanes?.get(job) === lane) ?? under[0];
    const where = bar ? `${found.jobs[bar[0]]}: ${SAID[this.data.kinds[bar[1]]]}, ${at(bar[2], this.end)} to ${at(bar[3], this.end)} (${span(bar[3] - bar[2])})` : `${name}: no job`;
    return gone ? `${where}; ${gone[1]}: ${gone[4]}` : where;
  }

  listen() {
    const { canvas } = this, fingers = new Map();
    let distance = 0;
    canvas.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, event);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId);
      if (before) {
        fingers.set(event.pointerId, event);
        const [one, two] = [...fingers.values()];
        if (two) {
          const now = Math.hypot(one.offsetX - two.offsetX, one.offsetY - two.offsetY);
          if (distance > 0) this.zoom(distance / Math.max(now, 1), (one.offsetX + two.offsetX) / 2 / this.width);
          distance = now;
        } else this.pan((before.offsetX - event.offsetX) / this.width);
      }
      this.said.textContent = this.tell(event.offsetX, event.offsetY);
    });
    for (const word of ["pointerup", "pointercancel"]) canvas.addEventListener(word, (event) => { fingers.delete(event.pointerId); distance = 0; });
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) this.zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, event.offsetX / this.width);
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan((event.deltaX || event.deltaY) / this.width);
      else return; // the page scrolls
      event.preventDefault();
    }, { passive: false });
    const keys = {
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.7), "=": () => this.zoom(0.7),
      "-": () => this.zoom(1 / 0.7), Home: () => this.whole(), End: () => this.newest(),
    };
    canvas.addEventListener("keydown", (event) => {
      if (!keys[event.key] || event.altKey || event.ctrlKey || event.metaKey) return;
      keys[event.key]();
      event.preventDefault();
    });
  }

  fillTable() {
    if (!this.table.open || !this.data) return;
    const rows = [], place = this.table.querySelector("div"), { data } = this;
    for (const [name, found] of Object.entries(data.facilities)) {
      for (const [when, kind, job] of found.marks) rows.push([name, job, MARK[data.marks[kind]], when, null]);
      for (const [job, kind, since, until] of found.bars ?? []) rows.push([name, found.jobs[job], SAID[data.kinds[kind]], since, until]);
      (found.shares ?? []).forEach((shares, kind) => {
        const seconds = shares.reduce((sum, share) => sum + share, 0) / 100 * ((data.until - data.since) / data.buckets);
        rows.push([name, "all jobs", `${SAID[data.kinds[kind]]}, ${span(seconds)} in all`, data.since, data.until]);
      });
    }
    rows.sort((one, other) => one[3] - other[3]);
    const shown = rows.slice(-MOST_ROWS), table = place.firstElementChild ?? place.appendChild(make("table"));
    const left = rows.length - shown.length;
    fill(table, left ? `the last ${MOST_ROWS} of ${rows.length}` : "", ["facility", "job", "what", "from", "to"],
      shown.map(([name, job, what, since, until]) => [name, job, what, [at(since, this.end)], [until === null ? "" : at(until, this.end)]]));
  }
}

// Jobs that overlap lie in different lanes.
function lanesOf(found) {
  const spans = new Map(), lanes = new Map(), free = [];
  for (const [job, , since, until] of found.bars) {
    const [begin, end] = spans.get(job) ?? [since, until];
    spans.set(job, [Math.min(begin, since), Math.max(end, until)]);
  }
  for (const [job, [begin, end]] of [...spans].sort((one, other) => one[1][0] - other[1][0])) {
    let lane = free.findIndex((at) => at <= begin + 1e-6);
    if (lane < 0) lane = free.length;
    free[lane] = end;
    lanes.set(job, lane);
  }
  return lanes;
}

export function paintMark(pen, mark, x, y, ink, paper) {
  pen.beginPath();
  if (mark === "failed") { for (const [dx, dy] of [[-4, -4], [-4, 4]]) { pen.moveTo(x + dx, y + dy); pen.lineTo(x - dx, y - dy); } }
  else if (mark === "requeued") { pen.moveTo(x + 4, y - 5); pen.lineTo(x - 4, y); pen.lineTo(x + 4, y + 5); pen.closePath(); }
  else { pen.moveTo(x, y - 5); pen.lineTo(x + 5, y); pen.lineTo(x, y + 5); pen.lineTo(x - 5, y); pen.closePath(); }
  pen.strokeStyle = mark === "failed" ? paper : ink;
  pen.lineWidth = mark === "failed" ? 5 : 1;
  if (mark === "failed") { pen.stroke(); pen.strokeStyle = ink; pen.lineWidth = 2.6; pen.stroke(); }
  else { pen.fillStyle = ink; pen.fill(); pen.strokeStyle = paper; pen.stroke(); }
}

export function legend(list) {
  const sign = (paint, text) => {
    const canvas = make("canvas", { width: 22, height: 14, "aria-hidden": "true" }), pen = canvas.getContext("2d");
    paint(pen);
    return make("li", {}, canvas, text);
  };
  list.replaceChildren(
    ...Object.entries(SAID).map(([kind, text]) => sign((pen) => {
      pen.fillStyle = colour(kind);
      if (kind === "upload") pen.fillRect(0, 5, 22, 4); else pen.fillRect(0, 0, 22, 14);
    }, text)),
    ...Object.entries(MARK).map(([mark, text]) => sign((pen) => paintMark(pen, mark, 11, 7, colour(MARK_COLOURS[mark]), colour("paper")), text)),
    sign((pen) => { pen.strokeStyle = colour("faint"); pen.setLineDash([4, 3]); pen.moveTo(11, 0); pen.lineTo(11, 14); pen.stroke(); }, "cutoff, or new model"),
  );
}
