// All that is said to the server, and how it is known who asks. The credential stays in this tab: it is sent as a
// header, never by itself as a cookie would be, so no other site can have anything done in our name.

const KEY = "fedqueue-credential";

export class NotAllowed extends Error {}

export function takeKey() {
  const found = new URLSearchParams(location.hash.slice(1));
  if (found.has("key")) {
    sessionStorage.setItem(KEY, found.get("key"));
    found.delete("key");
    history.replaceState(null, "", location.pathname + location.search + (found.size ? `#${found}` : ""));
  }
}

// The credential itself, or an access file that holds one.
export function setKey(text) {
  let key = text.trim();
  try {
    key = JSON.parse(text).credential ?? key;
  } catch { /* it is no file */ }
  sessionStorage.setItem(KEY, key);
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

async function must(response) {
  if (response.ok) return response;
  let reason = `${response.status}`;
  try {
    reason = (await response.json()).reason ?? reason;
  } catch { /* it said nothing more */ }
  throw response.status === 401 || response.status === 403 ? new NotAllowed(reason) : new Error(reason);
}

export async function get(path) {
  const response = await must(await fetch(path, { headers: headers() }));
  return response.json();
}

export async function post(path) {
  const response = await must(await fetch(path, { method: "POST", headers: headers() }));
  return response.json();
}

export async function download(path, name) {
  const response = await must(await fetch(path, { headers: headers() }));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

const SILENT = 40000; // milliseconds: the server speaks every 15 s
const PATIENCE = [500, 1000, 2000, 4000, 8000];

// Server-sent events, read by hand: the browser's own EventSource cannot say who asks. Goes on for ever: whatever ends
// the connection, it is made again, from the event that came last.
export function listen(path, told, link) {
  let last = "", over = false, tries = 0, stop = new AbortController();

  async function once() {
    stop = new AbortController();
    let alarm = setTimeout(() => stop.abort(), SILENT);
    try {
      const more = { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) };
      const response = await must(await fetch(path, { headers: headers(more), signal: stop.signal }));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(alarm);
        alarm = setTimeout(() => stop.abort(), SILENT);
        tries = 0;
        link("live");
        text += value;
        const events = text.split("\n\n");
        text = events.pop();
        for (const event of events) {
          const lines = event.split("\n");
          const of = (name) => lines.filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2)).join("\n");
          if (of("id")) last = of("id");
          if (of("data")) told(JSON.parse(of("data")));
        }
      }
    } finally {
      clearTimeout(alarm);
    }
  }

  async function always() {
    while (!over) {
      try {
        await once();
      } catch (error) {
        if (over) return;
        if (error instanceof NotAllowed) return link("not allowed", error.message);
      }
      if (over) return;
      link("lost");
      await new Promise((resolve) => setTimeout(resolve, PATIENCE[Math.min(tries++, PATIENCE.length - 1)]));
    }
  }
  always();
  return () => { over = true; stop.abort(); };
}
