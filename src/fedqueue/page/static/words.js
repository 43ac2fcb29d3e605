// How things are said, and how elements are made: of text alone, so that nothing that a facility sends is ever markup.

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

const UNITS = [[172800, 86400, "days"], [7200, 3600, "h"], [600, 60, "min"], [0, 1, "s"]];

// The unit that suits so many seconds: its size and name.
export function unitOf(seconds) {
  const [, size, name] = UNITS.find(([least]) => seconds >= least);
  return { size, name };
}

export function at(seconds, length) {
  const { size, name } = unitOf(Math.max(length ?? seconds, seconds));
  return `${(seconds / size).toFixed(size > 1 ? 2 : 1)} ${name}`;
}

export const percent = (value) => (value === null || value === undefined ? "-" : `${(100 * value).toFixed(1)} %`);

export const count = (value) => Math.round(value).toLocaleString("en");

export function hours(nodeSeconds) {
  const value = nodeSeconds / 3600;
  return value >= 100 ? count(value) : value.toPrecision(3);
}

export function make(tag, about = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(about)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...inside.filter((part) => part !== null && part !== undefined));
  return made;
}

// Replaces what is in a table. A cell is a text, a number's text in a list of one, or an element.
export function fill(table, caption, heads, rows, about = () => ({})) {
  const isNumber = heads.map((head, place) => place > 0 && rows.some((row) => Array.isArray(row[place])));
  const cell = (value, place) => {
    const inside = Array.isArray(value) ? value[0] : value;
    if (place === 0) return make("th", { scope: "row" }, inside);
    const kind = isNumber[place] ? "number" : inside instanceof Node ? null : "free";
    return make("td", { class: kind, "data-head": heads[place] }, inside);
  };
  const head = make("tr", {}, ...heads.map((text, place) => make("th", { scope: "col", class: isNumber[place] ? "number" : null }, text)));
  table.replaceChildren(
    ...(caption ? [make("caption", {}, caption)] : []),
    make("thead", {}, head),
    make("tbody", {}, ...rows.map((row, n) => make("tr", about(n), ...row.map(cell)))),
  );
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
