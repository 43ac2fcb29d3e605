// The event log: filtered by the server, shown newest first.

import { at, fill, make } from "./words.js";

export class Log {
  constructor(byId, fetchRows) {
    Object.assign(this, { fetchRows, rows: [], more: false, asked: 0, end: 1 });
    for (const [name, id] of [["form", "log-form"], ["group", "log-group"], ["facility", "log-facility"], ["text", "log-text"], ["said", "log-said"], ["table", "log"], ["button", "log-more"]]) this[name] = byId(id);
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.refresh(); });
    this.form.addEventListener("input", () => { clearTimeout(this.timer); this.timer = setTimeout(() => this.refresh(), 250); });
    this.button.addEventListener("click", () => this.read(this.rows.at(-1)?.seq));
  }

  names(facilities) {
    if (this.facility.options.length === facilities.length + 1) return;
    this.facility.replaceChildren(make("option", { value: "" }, "everywhere"), ...facilities.map((name) => make("option", { value: name }, name)));
  }

  refresh() { return this.read(null); }

  async read(before) {
    const asked = ++this.asked, query = new URLSearchParams();
    if (before !== null && before !== undefined) query.set("before", before);
    for (const name of ["group", "facility", "text"]) if (this[name].value) query.set(name, this[name].value);
    let found;
    try {
      found = await this.fetchRows(query);
    } catch (error) {
      this.said.textContent = error.message;
      return;
    }
    if (asked !== this.asked) return; // another question has been asked since
    this.rows = before === null || before === undefined ? found.rows : [...this.rows, ...found.rows];
    this.end = Math.max(1, ...this.rows.map((row) => row.at));
    const filtered = this.group.value || this.facility.value || this.text.value;
    this.said.textContent = this.rows.length ? `${this.rows.length}${found.more ? " newest" : ""} ${filtered ? "events that fit" : "events"}` : filtered ? "nothing fits" : "nothing has happened yet";
    this.button.hidden = !found.more;
    fill(this.table, "", ["at", "what", "where", "more"], this.rows.map((row) => [at(row.at, this.end), row.what, row.job || row.facility, row.text]), (n) => ({ class: this.rows[n].bad ? "bad" : null }));
  }
}
