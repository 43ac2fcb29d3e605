// The page: which run, what it is told, and where it shows it.

import { Charts } from "./charts.js";
import { Log } from "./log.js";
import { NotAllowed, download, get, hasKey, listen, post, setKey, takeKey } from "./server.js";
import { Timeline, legend } from "./timeline.js";
import { at, count, fill, hours, make, percent, span } from "./words.js";

const byId = (id) => document.getElementById(id);
const CHARTS_EVERY = 2000; // milliseconds, at least, between two looks at the curves and the log

let runs = [], run = null, state = null, received = 0, leave = () => {}, due = null, again = null;
const path = (what) => `v1/page/${encodeURIComponent(run)}/${what}`;
const query = (values) => { const found = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== null)); return found.size ? `?${found}` : ""; };

const timeline = new Timeline(byId("timeline"), byId("timeline-said"), byId("timeline-table"), (since, until) => get(path("timeline") + query({ since, until })));
const charts = new Charts(byId);
const log = new Log(byId, (found) => get(`${path("log")}?${found}`));

for (const [id, act] of Object.entries({
  earlier: () => timeline.pan(-0.5), later: () => timeline.pan(0.5), closer: () => timeline.zoom(0.5, timeline.follow ? 1 : 0.5),
  wider: () => timeline.zoom(2, timeline.follow ? 1 : 0.5), whole: () => timeline.whole(), newest: () => timeline.newest(),
})) byId(id).addEventListener("click", act);
timeline.changed = () => byId("newest").setAttribute("aria-pressed", String(timeline.follow));

// Who asks ------------------------------------------------------------------------------------------------

function signIn(why) {
  clearTimeout(again);
  leave();
  byId("main").hidden = true;
  byId("sign-in").hidden = false;
  byId("sign-in-why").textContent = why;
  show("link", "not signed in");
}

byId("access-file").addEventListener("change", async (event) => { byId("credential").value = (await event.target.files[0]?.text()) ?? ""; });
byId("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("credential").value);
  byId("credential").value = "";
  begin();
});

// Which run -----------------------------------------------------------------------------------------------

async function begin() {
  clearTimeout(again);
  let found;
  try {
    found = await get("v1/page");
  } catch (error) {
    if (error instanceof NotAllowed) return signIn(hasKey() ? error.message : "The runs of this server are shown to who may look.");
    show("link", `the server does not answer: ${error.message}`, "lost");
    again = setTimeout(begin, 2000);
    return;
  }
  byId("sign-in").hidden = true;
  byId("main").hidden = false;
  showFederation(found);
  const same = runs.length === found.runs.length && runs.every((one, n) => one.id === found.runs[n].id);
  runs = found.runs;
  if (!same) byId("runs").replaceChildren(...runs.map((one) => make("option", { value: one.id, selected: one.id === run }, one.name)));
  byId("pick").hidden = runs.length < 2;
  if (found.sites !== null) again = setTimeout(begin, 10000);
  const wanted = new URLSearchParams(location.hash.slice(1)).get("run");
  if (runs.length && (run === null || !same)) choose(runs.some((one) => one.id === wanted) ? wanted : run ?? runs[0].id);
  else if (!runs.length) show("link", "live");
}

function choose(id) {
  if (id === run) return;
  run = id;
  state = null;
  byId("runs").value = id;
  if (runs.length > 1) history.replaceState(null, "", `#run=${encodeURIComponent(id)}`);
  Object.assign(timeline, { data: null, follow: true });
  leave();
  leave = listen(path("state"), told, linked);
}

byId("runs").addEventListener("change", (event) => choose(event.target.value));
addEventListener("hashchange", () => { takeKey(); const id = new URLSearchParams(location.hash.slice(1)).get("run"); if (runs.some((one) => one.id === id)) choose(id); });

function linked(how, why) {
  if (how === "not allowed") return signIn(why);
  show("link", how === "live" ? "live" : "connection lost: trying again", how);
}

function showFederation(found) {
  byId("federation").hidden = found.sites === null;
  if (found.sites === null) return;
  const link = (one) => make("a", { href: `#run=${encodeURIComponent(one.id)}` }, one.name);
  fill(byId("all-runs"), "", ["run", "state", "model", "score", "facilities", "owner"],
    found.runs.map((one) => [link(one), one.state, [one.model === null ? "-" : String(one.model)], [percent(one.score)], one.facilities.join(", "), one.owner || "the operator"]));
  fill(byId("sites"), "", ["site", "enrolled", "heard of", "offers"],
    found.sites.map((site) => [site.name, site.enrolled ? "yes" : "no", site.heard_seconds_ago === null ? "not since this server started" : `${span(site.heard_seconds_ago)} ago`, site.offers.join(", ") || "-"]));
}

// The run as it is now ------------------------------------------------------------------------------------

function told(found) {
  const first = state === null || state.read < 1;
  state = found;
  received = performance.now();
  showState();
  if (state.read < 1) return;
  timeline.reached(now(), state.facilities.map((facility) => facility.name));
  log.names(state.facilities.map((facility) => facility.name));
  if (first) { showDownloads(); refresh(); } else due ??= setTimeout(refresh, CHARTS_EVERY);
}

async function refresh() {
  due = null;
  try {
    charts.show(await get(path("charts")));
    if (log.rows.length <= 100) await log.refresh();
  } catch { /* the link says that it is lost; the next news asks again */ }
}

const since = () => (performance.now() - received) / 1000;
const now = () => state.clock + (state.ticking ? since() : 0);
// Of a figure that was told with the state and grows with the run clock.
const grown = (seconds) => seconds + (state.ticking ? since() : 0);

function show(id, text, kind) {
  const place = byId(id);
  if (place.textContent !== text) place.textContent = text;
  if (kind !== undefined) place.className = kind;
}

function tile(name, value, more) {
  return make("div", {}, make("dt", {}, name), make("dd", {}, value), more ? make("dd", { class: "more" }, more) : null);
}

function showState() {
  document.title = `${state.wrong.length ? "(!) " : ""}${state.run}: ${state.state}`;
  show("title", state.run);
  show("reading", `reading the ledger: ${Math.floor(100 * state.read)} %`);
  byId("reading").hidden = state.read === 1;
  byId("known").hidden = state.read < 1; // what was so in the middle of the run would be taken for what is so now
  show("state", state.state);
  showWrong();
  showTiles();
  showFacilities();
  showSteer();
}

function showWrong() {
  byId("wrong").hidden = state.wrong.length === 0;
  byId("wrong-list").replaceChildren(...state.wrong.map((one) => make("li", {},
    make("strong", {}, one.facility ? `${one.facility}: ${one.what}` : one.what), one.seconds === null ? "" : ` for ${span(one.seconds + since())}`, one.at === null ? "" : ` since ${at(one.at)} on the run clock`, one.why ? `: ${one.why}` : "")));
}

function showTiles() {
  const limits = [state.rounds === null ? null : `of ${state.rounds}`, state.seconds === null ? null : `until ${at(state.seconds)}`].filter((text) => text !== null);
  const left = state.cutoff === null ? null : state.cutoff - now();
  const cutoff = left < 0 ? "due" : span(left);
  const targets = state.targets.map(([target, reached]) => `${percent(target)}: ${reached === null ? "not yet" : at(reached, now())}`);
  const held = state.node_seconds;
  byId("glance").replaceChildren(
    tile("run clock", at(now()), state.ticking ? "it runs" : state.over ? "the run is over" : "it stands"),
    tile("model", String(state.model), limits.join(", ")),
    ...(state.cutoff === null ? [] : [tile("next cutoff in", cutoff, `rounds of ${span(state.round_length)}`)]),
    tile("score", percent(state.score), state.best === null ? "no model has a score" : `best ${percent(state.best[1])}, model ${state.best[0]}`),
    ...(targets.length && state.score !== null ? [tile("targets", targets.filter((text) => !text.endsWith("not yet")).length + ` of ${targets.length}`, targets.join("; "))] : []),
    tile("updates", count(state.updates.admitted + state.updates.deferred), [["deferred", state.updates.deferred], ["rejected", state.updates.rejected]].filter(([, n]) => n).map(([what, n]) => `${n} ${what}`).join(", ") || "all on time"),
    tile("jobs", count(state.jobs.submitted), state.jobs.failed ? `${state.jobs.failed} failed` : "none failed"),
    tile("node-hours", hours(held), held ? `${percent(state.idle_node_seconds / held)} idle` : null),
    tile("strategy", state.strategy, `${state.task}, seed ${state.seed}${state.simulated ? ", simulated" : ""}`),
  );
}

const DOING = [[/^(ordered|queued)/, "waiting"], [/^(waiting|about)/, "lingering"], [/^(training|running)/, "training"], [/^handing/, "upload"]];
const JOB = { ordered: "ordered, not at its scheduler yet", queued: "in the queue", running: "training" };
const BAD = ["away", "suspended", "out", "not enrolled", "not seen yet"];

function doing(facility) {
  const jobs = facility.open_jobs.map((job) => make("div", { class: `doing ${(DOING.find(([word]) => word.test(job.state)) ?? [, ""])[1]}` },
    `${JOB[job.state] ?? job.state} for ${span(grown(job.seconds))}`, ` (${job.job}${job.attempt ? `, attempt ${job.attempt + 1}` : ""})`));
  if (facility.jobs > jobs.length) jobs.push(make("div", {}, `and ${facility.jobs - jobs.length} more jobs`));
  if (facility.idle_because !== null && !state.over) {
    const left = facility.until_seconds === null ? "" : ` for another ${span(Math.max(0, facility.until_seconds - (state.ticking ? since() : 0)))}`;
    jobs.push(make("div", { class: `doing${BAD.includes(facility.state) ? " wrong" : ""}` }, `idle${left}: ${facility.idle_because}`));
  }
  return make("div", {}, ...(jobs.length ? jobs : [state.over ? "over" : "-"]));
}

function showFacilities() {
  const selected = getSelection();
  if (!selected.isCollapsed && byId("facilities").contains(selected.anchorNode)) return; // somebody copies from it
  const heard = state.facilities.some((facility) => facility.heard_seconds_ago !== null);
  fill(byId("facilities"), "", ["facility", "state", "now", ...(heard ? ["heard of"] : []), "failures", "nodes", "idle"], state.facilities.map((facility) => [
    facility.name, facility.state, doing(facility), ...(heard ? [[facility.heard_seconds_ago === null ? "not yet" : `${span(facility.heard_seconds_ago + since())} ago`]] : []),
    [String(facility.failures)], [String(facility.nodes)], [facility.node_seconds ? percent(facility.idle_node_seconds / facility.node_seconds) : "-"]]));
}

setInterval(() => {
  if (state === null || state.read < 1 || document.hidden || !(state.ticking || state.wrong.length)) return;
  showWrong();
  showTiles();
  showFacilities();
  if (timeline.follow) timeline.reached(now(), timeline.names);
}, 1000);

// Steering ------------------------------------------------------------------------------------------------

const WORDS = { pause: ["pause", "no new work; the run clock stands still"], resume: ["resume", ""], stop: ["stop", "end the run now; jobs under way are cancelled"] };

function showSteer() {
  const place = byId("steer"), words = state.steer === null || state.over ? [] : [/^paused/.test(state.state) ? "resume" : "pause", "stop"];
  const drains = state.facilities.map((facility) => [facility.name, facility.state === "drained" ? "join" : "drain"]);
  const key = JSON.stringify([state.steer, words, words.length ? drains : []]);
  place.hidden = words.length === 0;
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  const button = (text, address, kind, ask) => {
    const made = make("button", { type: "button", class: kind }, text);
    made.addEventListener("click", () => steer(text, address, ask));
    return made;
  };
  byId("steer-run").replaceChildren(
    ...words.map((word) => button(WORDS[word][0], `run/${word}`, word === "stop" ? "bad" : null, word === "stop" ? `Stop ${state.run} for good? Jobs under way are cancelled.` : null)));
  byId("steer-facilities").replaceChildren(
    ...drains.map(([name, word]) => button(`${word} ${name}`, `facilities/${encodeURIComponent(name)}/${word}`, null, null)));
}

async function steer(text, address, ask) {
  if (ask && !confirm(ask)) return;
  show("steered", `${text} ...`);
  try {
    const done = await post(`${state.steer}/${address}`);
    show("steered", `${text}: done${done.hindrance ? `, but ${done.hindrance}` : ""}`);
  } catch (error) {
    show("steered", `${text}: ${error.message}`);
  }
}

// Downloads -----------------------------------------------------------------------------------------------

async function showDownloads() {
  const name = (runs.find((one) => one.id === run)?.name ?? run).replace(/[^\w.-]/g, "-");
  const button = (text, what, file) => {
    const made = make("button", { type: "button" }, text);
    made.addEventListener("click", async () => {
      show("downloaded", `${text} ...`);
      try {
        await download(path(what), file);
        show("downloaded", `${text}: here`);
      } catch (error) {
        show("downloaded", `${text}: ${error.message}`);
      }
    });
    return made;
  };
  const place = byId("downloads");
  place.replaceChildren(...(hasKey() ? [] : ["With a credential alone."]));
  if (!hasKey()) return;
  try {
    const kept = await get(path("models"));
    place.append(button("ledger (JSON lines)", "ledger", `${name}.jsonl`));
    if (kept.report) place.append(button("report", "report", `${name}-report.html`));
    for (const model of kept.models) {
      const words = [model.best ? "best" : null, model.newest ? "newest" : null].filter((word) => word !== null).join(", ");
      if (words) place.append(button(`model ${model.version} (${words})`, `models/${model.version}`, `${name}-model-${model.version}.safetensors`));
    }
  } catch (error) {
    show("downloaded", error.message);
  }
}

legend(byId("legend"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => legend(byId("legend")));
window.fedqueue = { timeline }; // for who measures how long frames take
takeKey();
begin();
