// The timeline: a lane for each channel, replica and node, over one span of time.
//
// Only visible lanes are drawn. A replica's lane has its state above and the version that it serves below;
// a channel's lane has a bar for each sync, in its phases; marks are kills, losses, orders and the like.
// Unhealthy groups and replicas come first. With many replicas, healthy ones share one lane, a row of pixels each.

import { draw, h } from "./elements.js";
import { age, bytes, clock, count, duration, states, tick, words } from "./texts.js";
import { go, to, toTrack } from "./places.js";
import { wantedVersion } from "./model.js";
import { servedRow, servedStrips } from "./served.js";
import { legend } from "./syncs.js";

const WINDOWS = [["1m", 60], ["5m", 300], ["15m", 900], ["1h", 3600], ["6h", 21600], ["all", Infinity]];
const STEPS = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800];
const LANE = 29;
const MANY_LANES = 12; // with more replicas, healthy ones share a lane
const HEALTHY = "healthy"; // its track
const BAD = new Set(["failed", "backoff", "silent", "draining", "lost", "away"]);
const WRONG = new Set(["failed", "silent", "lost", "away"]); // no order leads there
const RESTS = new Set(["finished", "drained"]);
const GLYPHS = {
  exit: "M-4,-4 L4,4 M-4,4 L4,-4", // a cross
  loss: "M0,-4 L4,0 L0,4 L-4,0 Z",
  restart: "M3.5,-2 A4,4 0 1 0 4,1 M4,-4.5 L3.5,-1.5 L0.5,-2",
  scale: "M-4,3 L0,-4 L4,3 Z",
  load_failed: "M-4,3.5 L0,-4 L4,3.5 Z M0,-1 L0,1",
  decision: "M-3,4 L-3,-4 L4,-2 L-3,0", // a flag
  other: "M0,-3 L0,3",
};
const SHOWN = new Set(["exit", "loss", "restart", "scale", "load_failed", "drain", "reset", "reload", "wrong_bytes", "step", "decision", "held_up", "end", "start"]);

export class Lanes {
  #inSight = new Set();
  #width = 600;
  #end = null; // of the shown time; null: the present
  #drag = null;
  #healthy = []; // names of the replicas in the shared lane
  #unfolded = false;

  constructor(model, host, redraw) {
    Object.assign(this, { model, host, redraw });
    this.window = 300;
    this.filter = "";
    this.onlyTrouble = false;
    this.watcher = new IntersectionObserver((entries) => {
      for (const one of entries) this.#inSight[one.isIntersecting ? "add" : "delete"](one.target);
      this.redraw();
    }, { rootMargin: "200px 0px" });
    this.watched = new Set();
    new ResizeObserver(() => this.redraw()).observe(host);
  }

  /** The first and last second that are shown. */
  get range() {
    const now = this.model.now;
    const whole = Math.max(20, (now - this.model.began) * 1.02);
    const width = this.#end === null ? Math.min(this.window, whole) : this.window === Infinity ? whole : this.window;
    const pixel = width / this.#width; // time advances by pixels, so that unmoved parts are not painted again
    const end = this.#end ?? Math.ceil((now + width * 0.01) / pixel) * pixel;
    return [end - width, end];
  }

  zoom(factor) {
    const [first, last] = this.range;
    const width = Math.min(Math.max((last - first) * factor, 2), 31 * 86400);
    if (this.#end !== null) this.#end += (width - (last - first)) / 2;
    this.window = width;
    this.redraw();
  }

  pan(share) {
    const [first, last] = this.range;
    const end = last + (last - first) * share;
    if (this.window === Infinity) this.window = last - first;
    this.#end = end >= this.model.now && !this.model.fixed ? null : end;
    this.redraw();
  }

  /** Show this moment, in the middle. */
  show(at, width) {
    this.window = Math.max(width, 10);
    this.#end = at + this.window / 2 >= this.model.now ? null : at + this.window / 2;
    this.redraw();
  }

  toNow() {
    this.#end = null;
    this.redraw();
  }

  onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "INPUT") return;
    const does = {
      ArrowLeft: () => this.pan(-0.25), ArrowRight: () => this.pan(0.25), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5),
      "-": () => this.zoom(2), End: () => this.toNow(), ArrowDown: () => this.#focus(1), ArrowUp: () => this.#focus(-1),
    }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  };

  #focus(step) {
    const names = [...this.host.querySelectorAll("a.name, button.name")];
    const at = names.indexOf(document.activeElement);
    names[Math.min(Math.max(at + step, 0), names.length - 1)]?.focus();
  }

  draw() {
    const track = this.host.querySelector(".track");
    if (track?.clientWidth) this.#width = track.clientWidth;
    draw(this.host, this.#tools(), legend(this.model), h("div", {
      class: "lanes", key: "lanes", tabindex: 0, role: "group", onkeydown: this.onkeydown,
      "aria-label": "Timeline. Left and right move in time, plus and minus zoom, up and down go from lane to lane.",
      onpointerdown: this.#hold, onpointermove: this.#move, onpointerup: this.#letGo, onpointerleave: this.#letGo, onclick: this.#click,
    }, this.#axis(), this.#rows(), h("div", { class: "cursor", key: "cursor", own: true, "aria-hidden": "true" })));
    const rows = new Set(this.host.querySelectorAll(".track[data-lane]"));
    for (const one of this.watched) if (!rows.has(one)) this.#forget(one);
    for (const one of rows) if (!this.watched.has(one)) {
      this.watched.add(one);
      this.watcher.observe(one);
    }
    const range = this.range;
    for (const one of this.#inSight) this.#drawTrack(one, range);
  }

  #forget(element) {
    this.watched.delete(element);
    this.#inSight.delete(element);
    this.watcher.unobserve(element);
  }

  #tools() {
    const [first, last] = this.range;
    const button = (text, does, about = {}) => h("button", { type: "button", onclick: does, key: text, ...about }, text);
    return h("div", { class: "tools", key: "tools" },
      h("div", { class: "windows", role: "group", "aria-label": "Shown time", key: "windows" }, WINDOWS.map(([text, seconds]) =>
        button(text, () => {
          this.window = seconds;
          this.#end = null;
          this.redraw();
        }, { "aria-pressed": String(this.window === seconds) }))),
      h("div", { class: "windows", role: "group", "aria-label": "Move and zoom", key: "moves" },
        button("‹", () => this.pan(-0.5), { "aria-label": "Earlier" }), button("›", () => this.pan(0.5), { "aria-label": "Later" }),
        button("+", () => this.zoom(0.5), { "aria-label": "Zoom in" }), button("−", () => this.zoom(2), { "aria-label": "Zoom out" }),
        this.#end === null ? null : button("now", () => this.toNow())),
      h("span", { class: "muted readout", key: "readout" }, `${clock(first)} – ${clock(last)}`),
      h("label", { class: "find", key: "find" }, h("span", { class: "hidden" }, "Filter lanes"), h("input", {
        type: "search", placeholder: "filter lanes", value: this.filter, oninput: (event) => {
          this.filter = event.target.value.trim().toLowerCase();
          this.redraw();
        },
      })),
      h("label", { class: "tick", key: "tick" }, h("input", {
        type: "checkbox", checked: this.onlyTrouble, onchange: (event) => {
          this.onlyTrouble = event.target.checked;
          this.redraw();
        },
      }), "only trouble"));
  }

  #axis() {
    const [first, last] = this.range;
    const width = this.#width;
    const step = STEPS.find((one) => (one / (last - first)) * width >= (one < 60 ? 76 : 52)) ?? STEPS.at(-1);
    const edge = step < 60 ? 27 : 16; // half a label
    const ticks = [];
    const zone = new Date(first * 1000).getTimezoneOffset() * 60;
    for (let at = Math.ceil((first - zone) / step) * step + zone; at < last; at += step) {
      const x = ((at - first) / (last - first)) * width;
      const text = tick(at, step);
      ticks.push(h("line", { key: `l${at}`, x1: x, x2: x, y1: 15, y2: 20, class: "tickline" }),
        x > edge && x < width - edge ? h("text", { key: `t${at}`, x, y: 12, "text-anchor": "middle", class: "ticktext" }, text) : null);
    }
    return h("div", { class: "lane axis", key: "axis" }, h("span", { class: "name" }), h("div", { class: "track" },
      h("svg", { width, height: 20, "aria-hidden": "true" }, ticks)), h("span", { class: "meta" }));
  }

  #rows() {
    const { doc } = this.model;
    const rows = [];
    for (const channel of Object.values(doc.channels)) {
      if (this.#wanted(`channel ${channel.name}`, "", !this.#wrong(`channel ${channel.name}`)))
        rows.push(this.#row(`channel ${channel.name}`, channel.name, "channel", this.#channelMeta(channel)), servedRow(this.model, channel));
    }
    const groups = Object.values(doc.groups).map((group) => {
      const all = this.model.replicasOf(group.name).map((one) => ({ one, ill: illness(one), wrong: this.#wrong(`replica ${one.name}`) }));
      const shown = all.filter(({ one, ill, wrong }) => this.#wanted(one.name, one.state, !ill && !wrong)).sort((a, b) => b.ill - a.ill); // else by number
      return { group, all, shown };
    }).sort((a, b) => (b.shown[0]?.ill ?? 0) - (a.shown[0]?.ill ?? 0));
    const healthy = groups.flatMap(({ shown }) => shown.filter(({ ill, wrong }) => !ill && !wrong).map(({ one }) => one));
    const folds = Object.keys(doc.replicas).length > MANY_LANES && healthy.length > 1 && !this.filter;
    this.#healthy = folds ? healthy.map((one) => one.name) : [];
    const inLane = new Set(this.#healthy);
    const lanes = ({ group, all, shown }, wanted, key) => {
      const some = shown.filter(({ one }) => wanted(one.name)).map(({ one }) => one);
      if (!some.length && (all.length || this.onlyTrouble || this.filter)) return;
      rows.push(h("div", { class: "band", key: `${key} ${group.name}` }, h("a", { href: to("group", group.name) }, group.name),
        h("span", { class: "muted" }, ` ${states(all.map(({ one }) => one))}${shown.length < all.length ? ` · ${shown.length} shown` : ""}`)));
      for (const one of some) rows.push(this.#row(`replica ${one.name}`, one.name, one.state, this.#replicaMeta(one)));
    };
    for (const one of groups) lanes(one, (name) => !inLane.has(name), "g");
    if (folds) rows.push(this.#healthyRow(healthy));
    if (folds && this.#unfolded) for (const one of groups) lanes(one, (name) => inLane.has(name), "h");
    const nodes = Object.values(doc.nodes).filter((one) => this.#wanted(one.name, one.state, one.state === "up" && !this.#wrong(`node ${one.name}`)));
    if (nodes.length && Object.keys(doc.nodes).length > 1) {
      rows.push(h("div", { class: "band", key: "nodes" }, "nodes"));
      for (const one of nodes) rows.push(this.#row(`node ${one.name}`, one.name, one.state, one.state === "up" ? count(one.replicas?.length ?? 0, "replica") : one.state));
    }
    if (!rows.length) rows.push(h("p", { class: "muted none", key: "none" }, this.filter || this.onlyTrouble ? "No lanes match." : "No replicas have started yet."));
    return rows;
  }

  /** Return true if there was a fault on this track in the shown time. */
  #wrong(track) {
    const [first, last] = this.range;
    const within = (start, end) => end >= first && start <= last;
    return this.model.marks(track).some((one) => within(one.at, one.at) && (one.tone === "error" || one.tone === "alarm" || (one.kind === "exit" && one.name === "failed")))
      || this.model.spans(track, "sync").some((one) => (one.outcome !== "committed" || one.lost) && within(one.start, one.end))
      || this.model.followed(track, track.startsWith("node ") ? "node" : "state").some((one) => WRONG.has(one.name) && within(one.start, one.end ?? this.model.now));
  }

  #wanted(name, state, well) {
    return (!this.filter || name.toLowerCase().includes(this.filter) || state.includes(this.filter)) && !(this.onlyTrouble && well);
  }

  #row(track, name, state, meta) {
    return h("div", { class: `lane is-${state}`, key: track },
      h("a", { class: "name", href: toTrack(track), title: name }, name),
      h("div", { class: "track", "data-lane": track, own: true, key: "track" }), h("span", { class: "meta" }, meta));
  }

  /** Draw the lane that healthy replicas share, which can be unfolded. */
  #healthyRow(healthy) {
    const served = Object.keys(this.model.doc.channels).map((channel) => healthy.map((one) => one.versions?.[channel]).filter(Boolean)).filter((all) => all.length)
      .map((all) => [...new Set([Math.min(...all), Math.max(...all)])].map((version) => `v${version}`).join("–"));
    const text = `${healthy.length} healthy`;
    return h("div", { class: "lane is-ready", key: HEALTHY },
      h("button", {
        type: "button", class: "name", "aria-expanded": String(this.#unfolded), title: states(healthy), onclick: () => {
          this.#unfolded = !this.#unfolded;
          this.redraw();
        },
      }, this.#unfolded ? "▾ " : "▸ ", text, h("span", { class: "broad" }, " replicas")),
      h("div", { class: "track", "data-lane": HEALTHY, own: true, key: "track" }), h("span", { class: "meta" }, served.length ? served.join(" ") : states(healthy)));
  }

  #channelMeta(channel) {
    const last = channel.last_sync;
    const collectives = Object.values(channel.operations ?? {}).reduce((all, one) => all + one, 0);
    if (!last) return collectives ? count(collectives, "collective") : "no version yet";
    return last.outcome === "committed" ? `v${last.version} · ${duration(last.seconds).replace(" ", "\u00a0")}` : h("b", { class: "bad" }, `v${last.version} failed`);
  }

  #replicaMeta(replica) {
    const versions = Object.entries(replica.versions ?? {}).filter(([, version]) => version);
    const parts = [];
    if (replica.state !== "ready") parts.push(h("b", { class: BAD.has(replica.state) ? "bad" : RESTS.has(replica.state) ? "" : "warn" }, replica.state === "silent" && !this.model.fixed ? `silent ${age(this.model.now - replica.since)}` : replica.state));
    for (const [channel, version] of versions) {
      const behind = wantedVersion(this.model.doc.channels[channel] ?? { current: version }) - version;
      parts.push(h("span", { class: "serves" }, `v${version}`), behind > 0 ? h("span", { class: "warn" }, `−${behind}`) : null);
    }
    if (!versions.length && replica.step !== undefined && replica.state === "ready") parts.push(`step ${replica.step}`);
    return parts.filter(Boolean).flatMap((one, at) => (at ? [" ", one] : [one]));
  }

  // ------------------------------------------------------------ the lane of one track

  #drawTrack(element, [first, last]) {
    const track = element.dataset.lane;
    const width = this.#width;
    const x = (at) => Math.min(Math.max(((at - first) / (last - first)) * width, -3), width + 3);
    const kind = track.split(" ")[0];
    const older = (of, y, height, text) => this.#older(track, of, x, y, height, text);
    const parts = kind === HEALTHY ? this.#healthyStates(first, last, x)
      : kind === "served" ? [this.#older(`channel ${track.replace(/^served /, "")}`, "served", x, 15, 10, "older version"), ...servedStrips(this.model, track.replace(/^served /, ""), first, last, x)]
      : kind === "channel" ? [older("sync", 7, 15, "older version"), older("operation", 7, 15, "older collective"), ...this.#syncs(track, first, last, x)]
      : kind === "node" ? [older("node", 9, 11, "older state"), ...this.#states(track, "node", first, last, x, 9, 11)]
        : [older("version", 17, 9, "older version"), older("state", 4, 11, "older state"), ...this.#versions(track, first, last, x), ...this.#states(track, "state", first, last, x, 4, 11)];
    draw(element, h("svg", { width, height: LANE, "aria-hidden": "true" }, parts, older("mark", 0, 3, "older mark"), this.#unknown(x), this.#glyphs(track, first, last, x)));
  }

  /** Draw the times whose events are missing, in which the state is unknown. */
  #unknown(x) {
    return (this.model.doc.unknown ?? []).map(([start, end]) => this.#gap(x, start, end, 3, 24, `unknown: the events until ${clock(end)} are missing`));
  }

  #gap(x, start, end, y, height, about) {
    const [from, width] = [x(start), Math.max(x(end) - x(start), 1)];
    return h("g", { key: `unknown ${y} ${end}` }, h("rect", { x: from, y, width, height, class: "gap" }, h("title", null, about)),
      width > 70 ? h("text", { x: Math.max(from, 0) + 6, y: y + height / 2 + 3.5, class: "gaptext" }, "unknown") : null);
  }

  /** The states of all replicas in the shared lane, one below the other. */
  #healthyStates(first, last, x) {
    const height = 22 / this.#healthy.length;
    return this.#healthy.map((name, at) => h("g", { key: name }, this.#states(`replica ${name}`, "state", first, last, x, 4 + at * height, height, name)));
  }

  /** Draw one band for the older spans or marks, which are not kept here. */
  #older(track, kind, x, y, height, text) {
    const number = this.model.older(track, kind);
    const kept = kind === "mark" ? this.model.marks(track) : this.model.spans(track, kind);
    const until = kept.find((one) => one.at ?? one.end)?.start ?? kept[0]?.at ?? kept[0]?.start; // open spans are kept however old
    if (!number || until === undefined) return null;
    const from = x(this.model.began);
    const width = Math.max(x(until) - from, 0);
    const said = count(number, text);
    return h("g", { key: `older ${kind}` }, h("rect", { x: from, y, width, height, class: "older" }, h("title", null, `${said}, not shown separately`)),
      kind !== "mark" && width > 7 * said.length + 8 ? h("text", { x: Math.max(from, 0) + 4, y: y + height - 2, class: "statetext" }, said) : null);
  }

  #states(track, kind, first, last, x, y, height, who = "") {
    const now = this.model.now;
    return this.model.followed(track, kind).filter((one) => (one.end ?? now) >= first && one.start <= last).map((one) => {
      const [from, until] = [x(one.start), x(one.end ?? now)];
      const width = Math.max(until - from, BAD.has(one.name) ? 2 : 0.5);
      const why = one.reason ? `: ${one.reason}` : "";
      return h("g", { key: one.key, "data-to": toTrack(track) },
        h("rect", { x: from, y, width, height, rx: Math.min(2, width / 3), class: `state s-${one.name}${one.unknown_end ? " unknown" : ""}` },
          h("title", null, `${who && `${who}: `}${one.name} from ${clock(one.start)}, ${duration((one.end ?? now) - one.start)}${why}`)),
        height > 9 && width > 7 * one.name.length + 8 && one.name !== "ready" && one.name !== "up"
          ? h("text", { x: Math.max(from, 0) + 4, y: y + height - 2.5, class: "statetext" }, one.name) : null);
    });
  }

  #versions(track, first, last, x) {
    const now = this.model.now;
    const all = this.model.followed(track, "version");
    const since = this.model.doc.unknown?.at(-1)?.[1]; // it may have served a version then: the event is missing
    const served = all[0]?.start > since && this.model.followed(track, "state")[0]?.start <= since;
    const shown = served ? [this.#gap(x, since, all[0].start, 17, 9, "unknown: the event with its version is missing")] : [];
    let drawn = -Infinity;
    for (const one of all) {
      if ((one.end ?? now) < first || one.start > last) continue;
      const [from, until] = [x(one.start), x(one.end ?? now)];
      if (until - drawn < 1) continue; // hidden by the one before
      drawn = until;
      const text = String(one.version);
      shown.push(h("g", { key: one.key, "data-to": to("sync", one.channel, one.version) },
        h("rect", { x: from, y: 17, width: Math.max(until - from, 1), height: 9, class: `version v${one.version % 2}` },
          h("title", null, `serves version ${one.version} of ${one.channel} from ${clock(one.start)}`)),
        until - from > 7 * text.length + 8 ? h("text", { x: Math.max(from, 0) + 3, y: 24.6, class: "versiontext" }, text) : null,
        one.load_s ? h("rect", { x: x(one.start - one.load_s), y: 15, width: Math.max(x(one.start) - x(one.start - one.load_s), 0.5), height: 2, class: "load" }) : null));
    }
    return shown;
  }

  #syncs(track, first, last, x) {
    const channel = track.replace(/^channel /, "");
    const shown = [];
    let drawn = -Infinity;
    for (const one of this.model.spans(track, "sync")) {
      if (one.end < first || one.start > last) continue;
      const [from, until] = [x(one.start), x(one.end)];
      const failed = one.outcome !== "committed";
      if (!failed && until - drawn < 0.7) continue;
      drawn = until;
      const width = Math.max(until - from, 1.2);
      const scale = (seconds) => (seconds / Math.max(one.end - one.start, 1e-9)) * width;
      const parts = failed || width < 6 ? [h("rect", { x: from, y: 7, width: failed ? Math.max(width, 2) : width, height: 15, class: failed ? "failed" : "sync" })]
        : one.parts.map(([name, start, end]) => h("rect", { x: from + scale(start), y: 7, width: Math.max(scale(end - start), 0.3), height: 15, class: `phase p-${name}` }));
      shown.push(h("g", { key: one.key, "data-to": to("sync", channel, one.version) },
        h("title", null, `version ${one.version}: ${words(one.outcome)} in ${duration(one.seconds)}, ${bytes(one.nbytes ?? 0)}${one.lost ? `, without ${one.lost.join(", ")}` : ""}`),
        parts, one.lost ? h("path", { d: GLYPHS.loss, transform: `translate(${until} 4) scale(0.7)`, class: "glyph bad" }) : null,
        width > 30 ? h("text", { x: Math.max(from, 0) + 3, y: 18, class: "versiontext" }, String(one.version)) : null));
    }
    for (const one of this.model.spans(track, "operation")) {
      if (one.end < first || one.start > last) continue;
      shown.push(h("rect", { key: one.key, x: x(one.start), y: 9, width: Math.max(x(one.end) - x(one.start), 1), height: 11, class: one.outcome === "ok" ? "sync" : "failed", "data-to": to("event", one.id) },
        h("title", null, `${one.name}: ${one.outcome} after ${duration(one.end - one.start)}`)));
    }
    for (const one of Object.values(this.model.doc.channels[channel]?.under_way ?? {})) {
      shown.push(h("rect", { key: `u${one.version}`, x: x(one.since), y: 7, width: Math.max(x(this.model.now) - x(one.since), 2), height: 15, class: "underway" },
        h("title", null, `version ${one.version} is ${one.state}`)));
    }
    return shown;
  }

  #glyphs(track, first, last, x) {
    const shown = [];
    let drawn = -Infinity;
    for (const one of this.model.marks(track)) {
      if (one.at < first || one.at > last || !SHOWN.has(one.kind)) continue;
      const at = x(one.at);
      if (at - drawn < 3 && one.tone !== "error" && one.tone !== "alarm") continue;
      drawn = at;
      const tone = one.kind === "exit" && one.name === "failed" ? "bad" : { error: "bad", alarm: "bad", warning: "warn" }[one.tone] ?? "plain";
      shown.push(h("g", { key: one.key, "data-to": to("event", one.seq), transform: `translate(${at} 9.5)`, class: `mark ${tone}` },
        h("title", null, `${clock(one.at)} ${one.text}`), h("circle", { r: 7, class: "reach" }),
        h("path", { d: GLYPHS[one.kind] ?? GLYPHS.other, class: "halo" }), h("path", { d: GLYPHS[one.kind] ?? GLYPHS.other, class: "glyph" })));
    }
    return shown;
  }

  // ------------------------------------------------------------ the pointer

  #hold = (event) => {
    if (event.button === 0 && event.target.closest(".track")) this.#drag = { x: event.clientX, range: this.range, moved: false };
  };

  #move = (event) => {
    const track = this.host.querySelector(".track");
    const cursor = this.host.querySelector(".cursor");
    const box = track.getBoundingClientRect();
    const x = event.clientX - box.left;
    const inside = x >= 0 && x <= box.width;
    cursor.style.setProperty("display", inside ? "block" : "none");
    cursor.style.setProperty("left", `${track.offsetLeft + x}px`);
    const [first, last] = this.range;
    const at = first + (x / box.width) * (last - first);
    if (inside) this.host.querySelector(".readout").firstChild.data = `${clock(at, { tenths: last - first < 120 })} · ${age(Math.max(this.model.now - at, 0))} ago`;
    if (!this.#drag || !event.buttons || event.pointerType === "touch") return;
    const by = event.clientX - this.#drag.x;
    if (Math.abs(by) < 4 && !this.#drag.moved) return;
    this.#drag.moved = true;
    const [from, until] = this.#drag.range;
    if (this.window === Infinity) this.window = until - from;
    const end = until - (by / box.width) * (until - from);
    this.#end = end >= this.model.now && !this.model.fixed ? null : end;
    this.redraw();
  };

  #letGo = (event) => {
    if (event.type === "pointerleave") {
      this.host.querySelector(".cursor").style.setProperty("display", "none");
      this.redraw();
    }
    if (!this.#drag?.moved) this.#drag = null;
  };

  #click = (event) => {
    const dragged = this.#drag?.moved;
    this.#drag = null;
    const found = event.target.closest("[data-to]");
    if (found && !dragged) go(found.dataset.to);
  };
}

/** Rank a replica for sorting: 2 has a fault, 1 is not ready yet, 0 is healthy or ended as ordered. */
const illness = (one) => (BAD.has(one.state) ? 2 : one.state === "ready" || RESTS.has(one.state) ? 0 : 1);
