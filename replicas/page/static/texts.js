// Numbers and times in words.

const UNITS = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]];

/** At most two units: 35 ms, 2.5 s, 3m 20s, 4d 1h. */
export function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s > 0 && s < 0.9995) return `${Number((s * 1000).toPrecision(s < 0.01 ? 2 : 3))} ms`;
  if (s < 59.95) return `${s < 10 ? Number(s.toFixed(1)) : Math.round(s)} s`;
  let rest = Math.round(s);
  const parts = [];
  for (const [unit, name] of UNITS) {
    if (rest >= unit || parts.length) parts.push([Math.floor(rest / unit), name]);
    rest %= unit;
  }
  return parts.slice(0, 2).filter(([number]) => number).map(([number, name]) => `${number}${name}`).join(" ");
}

/** An age in whole seconds or larger units. */
export const age = (seconds) => (seconds < 1 ? "now" : duration(seconds < 60 ? Math.round(seconds) : seconds));

/** How long ago a time was, or the time itself in a finished run. */
export const ago = (model, at) => (model.fixed ? clock(at) : model.now - at < 1 ? "now" : `${age(model.now - at)} ago`);

/** Count replicas by state: 3 ready, 1 starting. */
export function states(replicas) {
  const counts = new Map();
  for (const one of replicas) counts.set(one.state, (counts.get(one.state) ?? 0) + 1);
  return [...counts].map(([state, number]) => `${number} ${state}`).join(", ");
}

/** A size with three digits and a binary unit. */
export function bytes(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let [size, at] = [nbytes, 0];
  while (size >= 1000 && at < units.length - 1) [size, at] = [size / 1024, at + 1];
  return `${Number(size.toPrecision(3))} ${units[at]}`;
}

const two = (number) => String(number).padStart(2, "0");

let day = ""; // of the newest time on the page

const dayOf = (at) => `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;

/** Set the day whose times are shown without a date. */
export function setDay(seconds) {
  day = dayOf(new Date(seconds * 1000));
}

/** The local time of day; with the date if it is another day, or `date` is set. */
export function clock(seconds, { date = false, tenths = false } = {}) {
  const at = new Date(seconds * 1000);
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}${tenths ? `.${Math.floor((seconds % 1) * 10)}` : ""}`;
  return date || dayOf(at) !== day ? `${dayOf(at)} ${time}` : time;
}

/** The label of a tick: a date at midnight, otherwise the time as precise as the step. */
export function tick(seconds, step) {
  const at = new Date(seconds * 1000);
  if (at.getHours() + at.getMinutes() + at.getSeconds() === 0 && step >= 60) return dayOf(at).slice(5);
  const text = `${two(at.getHours())}:${two(at.getMinutes())}`;
  return step >= 60 ? text : `${text}:${two(at.getSeconds())}${step < 1 ? `.${Math.floor((seconds % 1) * 10)}` : ""}`;
}

export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

/** The first names of a list: a, b and 3 more. */
export const some = (names, most = 3) =>
  names.slice(0, most).join(", ") + (names.length > most ? ` and ${names.length - most} more` : "");

export const words = (name) => String(name).replaceAll("_", " ");
