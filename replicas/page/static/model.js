// The document of the run, updated by merge patches, and look-ups in it.

const EVENTS = 200; // of each kind, so that routine ones displace no others
const MOST = 100; // spans of one kind and track; fewer with many tracks
const TIMES = { sync: 3, mark: 2 };

function merge(tree, patch) {
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete tree[name];
    else if (typeof value === "object" && !Array.isArray(value) && typeof tree[name] === "object" && tree[name] !== null)
      merge(tree[name], value);
    else tree[name] = value;
  }
}

/** The version that targets are to serve: the newest one, or the one that was promoted last. */
export const wantedVersion = (channel) => channel.current || (channel.follow === "promoted" ? 0 : channel.committed_version);

export class Model {
  #offset = 0; // of the server's clock
  #oldest = Infinity;

  constructor() {
    this.known = false; // true once there is a document
    this.replace({});
  }

  /** Replace the document. `fixed`: the run is over, and `now` is its end. */
  replace(found, fixed = false) {
    const doc = { run: {}, verdict: {}, groups: {}, replicas: {}, channels: {}, nodes: {}, totals: {}, ...found };
    this.doc = doc;
    this.fixed = fixed;
    this.tracks = new Map(); // track -> kind -> spans, the oldest first
    this.markers = new Map(); // track -> marks, the oldest first
    [this.routine, this.unusual] = [[], []]; // events, the oldest first
    this.#oldest = Infinity;
    this.#grow(doc);
    if (found.now) this.#clock(found.now);
  }

  merge(patch) {
    const { spans, marks, events, now, ...rest } = patch;
    merge(this.doc, rest);
    this.#grow({ spans, marks, events });
    this.#clock(now);
  }

  #clock(now) {
    this.#offset = now - Date.now() / 1000;
  }

  beat(now) {
    this.#clock(now);
  }

  /** The server's present time, or the end of a finished run. */
  get now() {
    return this.fixed ? this.doc.now : Date.now() / 1000 + this.#offset;
  }

  /** Add spans, marks and events; drop old ones, so that a page that stays open does not grow. */
  #grow({ spans = {}, marks = {}, events = {} }) {
    const kept = (kind) => this.fixed ? Infinity : Math.min(MOST, this.doc.kept ?? MOST) * (TIMES[kind] ?? 1);
    for (const [key, span] of Object.entries(spans)) {
      span.key = key;
      this.#oldest = Math.min(this.#oldest, span.start);
      if (!this.tracks.has(span.track)) this.tracks.set(span.track, new Map());
      const kinds = this.tracks.get(span.track);
      if (!kinds.has(span.kind)) kinds.set(span.kind, []);
      put(kinds.get(span.kind), span, (one) => one.key === key, kept(span.kind));
    }
    for (const [key, mark] of Object.entries(marks)) {
      mark.key = key;
      if (!this.markers.has(mark.track)) this.markers.set(mark.track, []);
      put(this.markers.get(mark.track), mark, (one) => one.key === key, kept("mark"));
    }
    for (const event of Object.values(events)) {
      const kind = event.routine ? this.routine : this.unusual;
      put(kind, event, (one) => one.seq === event.seq, EVENTS);
    }
    this.events = [...this.routine, ...this.unusual].sort((a, b) => a.seq - b.seq);
  }

  /** Return how many older spans of the kind, or marks, are not kept here. */
  older(track, kind) {
    const kept = kind === "mark" ? this.marks(track) : this.spans(track, kind);
    return Math.max((this.doc.totals[track]?.[kind] ?? 0) - kept.length, 0);
  }

  spans(track, kind) {
    return this.tracks.get(track)?.get(kind) ?? [];
  }

  /** Return the spans, and those that follow from the present state after missing events. */
  followed(track, kind) {
    const found = this.spans(track, kind).flatMap((one) => (one.before
      ? [{ key: `${one.key} before`, name: one.before, start: one.before_since, end: one.start }, one] : [one]));
    const start = this.doc.unknown?.at(-1)?.[1];
    const [of, name] = track.split(/ (.*)/);
    const now = { replica: this.doc.replicas, node: this.doc.nodes }[of]?.[name];
    if (start === undefined || !now) return found;
    const told = (channel) => found.some((one) => one.channel === channel && (one.end ?? Infinity) > start);
    if (kind !== "version") return told() ? found : [...found, { key: `${kind} now`, name: now.state, start }];
    return [...Object.entries(now.versions ?? {}).filter(([channel, version]) => version && !told(channel))
      .map(([channel, version]) => ({ key: `${channel} now`, channel, version, start })), ...found];
  }

  marks(track) {
    return this.markers.get(track) ?? [];
  }

  /** The time of the oldest known span. */
  get began() {
    return Math.min(this.#oldest, this.doc.run.started ?? this.now - 60);
  }

  replicasOf(group) {
    return Object.values(this.doc.replicas).filter((one) => one.group === group).sort((a, b) => a.replica - b.replica);
  }

  /** Return the targets that have not loaded the version that they are to serve, their lag in versions and seconds, and the reason. */
  laggards(channel) {
    const found = [];
    for (const replica of Object.values(this.doc.replicas)) {
      if (!(channel.targets ?? []).includes(replica.group) || ["finished", "drained", "failed"].includes(replica.state)) continue;
      const version = replica.versions?.[channel.name] ?? 0;
      if (version >= wantedVersion(channel)) continue;
      const since = replica.behind_since?.[channel.name] ?? channel.committed_at;
      const open = replica.open_since?.[channel.name];
      const why = replica.state !== "ready" ? replica.reason || replica.state
        : open ? "has an update open" : "has not loaded it yet";
      found.push({ replica, version, behind: wantedVersion(channel) - version, since, why });
    }
    return found.sort((a, b) => b.behind - a.behind || (a.since ?? 0) - (b.since ?? 0));
  }

  /** The version that is committed and neither served nor rejected, or undefined. */
  candidate(channel) {
    return Object.values(this.doc.channels[channel]?.versions ?? {}).find((one) => one.labels?.includes("candidate"));
  }

  sync(channel, version) {
    return this.spans(`channel ${channel}`, "sync").findLast((one) => one.version === version);
  }
}

/** Replace a thing in a list, or append it; drop the oldest closed ones beyond `most`. */
function put(list, thing, same, most) {
  // a report's document has no duplicates
  for (let at = most === Infinity ? -1 : list.length - 1; at >= 0 && at > list.length - 1 - most; at--) {
    if (same(list[at])) {
      list[at] = thing;
      return;
    }
  }
  list.push(thing);
  while (list.length > most) list.splice(Math.max(list.findIndex((one) => one.end !== undefined), 0), 1); // keep open ones
}
