// The panel beside the page: details of one replica, group, node, channel, sync or event.

import { draw, h } from "./elements.js";
import { age, bytes, clock, count, duration, some, words } from "./texts.js";
import { wantedVersion } from "./model.js";
import { to } from "./places.js";
import { PHASES, bar, fact, holdUp } from "./syncs.js";
import { drawnEvent } from "./tables.js";
import { drainOrder, drainRunOrder, nodeOrder, reloadOrder, resetOrder, restartOrder, scaleOrder, versionOrder } from "./orders.js";

const LOG_LINES = 200;
const LOG_KEPT_NCHARS = 200_000;
const HISTORY = 40;
const MEMBERS = 300;

export class Panel {
  #asked = ""; // the place whose log, stacks or event was requested
  #output = { log: null, stacks: null, whole: null };
  #stop = null;

  constructor(model, host, orders, redraw) {
    Object.assign(this, { model, host, orders, redraw });
  }

  /** Draw the panel of a place, or hide it without one. */
  draw(place) {
    const key = place ? JSON.stringify(place) : "";
    if (key !== this.#asked) {
      this.#stop?.abort();
      this.#stop = null;
      this.#asked = key;
      this.#output = { log: null, stacks: null, whole: null };
    }
    this.host.hidden = !place;
    if (!place) return draw(this.host);
    const [title, parts] = this[`_${place.kind}`](place);
    return draw(this.host, h("header", null, h("h2", { tabindex: -1, id: "paneltitle" }, title), h("a", { href: "#", class: "close", "aria-label": "Close" }, "×")), parts);
  }

  #button = (text, order) => (this.model.fixed ? null : h("button", { type: "button", key: text, onclick: () => this.orders.give(order()) }, text));
  #unknown = (what) => [what, h("p", { class: "muted" }, "Not found. It may have been removed.")];

  _run() {
    const { run } = this.model.doc;
    const facts = [["supervisor", `process ${run.pid}`], ["at", run.endpoint], ["release", run.version], ["state in", run.state_dir], ["up", run.started && !this.model.fixed ? age(this.model.now - run.started) : undefined],
      ["exit code", run.exit_code === undefined ? undefined : String(run.exit_code)], ["ended by", run.ended_by], ["event loop lag", run.lag_s ? duration(run.lag_s) : undefined]];
    const refused = Object.entries(run.refused ?? {}).filter(([, number]) => number);
    return [`run ${run.run ?? ""}`, [h("p", { class: "buttons", key: "orders" }, this.#button("reload config", reloadOrder), this.#button("reset failed", () => resetOrder(this.model)), this.#button("drain the run", () => drainRunOrder(this.model))),
      h("dl", { class: "facts", key: "facts" }, facts.map(([name, value]) => fact(name, value))),
      refused.length ? h("p", { key: "refused" }, `Refused connections: ${refused.map(([reason, number]) => `${number} ${words(reason)}`).join(", ")}.`) : null, this.#history("run", "supervisor")]];
  }

  _group({ name }) {
    const group = this.model.doc.groups[name];
    if (!group) return this.#unknown(`group ${name}`);
    const all = this.model.replicasOf(name);
    const restarts = Object.entries(group.restarts ?? {}).filter(([, number]) => number).map(([reason, number]) => `${number} ${words(reason)}`).join(", ");
    const facts = [["replicas", String(all.length)], ["ranks each", String(group.world_size)], ["launcher", group.launcher || undefined], ["needs ready", this.model.fixed ? undefined : String(group.min_ready ?? "all")],
      ["restart budget left", this.model.fixed ? undefined : `${Math.round((group.restart_budget_remaining_ratio ?? 1) * 100)} %`], ["restarts", restarts || "none"], ["on failure ends", this.model.fixed ? undefined : group.on_failure],
      ["failures without progress", group.no_progress_cycles ? `${Math.max(0, ...all.map((one) => one.cycles ?? 0))} of ${group.no_progress_cycles}` : undefined]];
    const external = group.launcher === "external";
    return [`group ${name}`, [h("p", { class: "buttons", key: "orders" }, this.#button("scale", () => scaleOrder(this.model, group)), external ? null : [this.#button("restart, rolling", () => restartOrder(this.model, name, { rolling: true })),
      this.#button("restart all", () => restartOrder(this.model, name)), this.#button("reset failed", () => resetOrder(this.model, name))], this.#button("drain", () => drainOrder(this.model, name))),
    h("dl", { class: "facts", key: "facts" }, facts.map(([label, value]) => fact(label, value))),
    h("ul", { class: "plain", key: "replicas" }, all.map((one) => h("li", { key: one.name }, h("a", { href: to("replica", one.name) }, one.name), " ", h("span", { class: `pill s-${one.state}` }, one.state), one.reason ? ` ${one.reason}` : ""))), this.#history(`group ${name}`, "drain")]];
  }

  _replica({ name }) {
    const one = this.model.doc.replicas[name];
    if (!one) return this.#unknown(name);
    const { now } = this.model;
    const facts = [["state", h("span", { class: `pill s-${one.state}` }, one.state)], ["for", one.since && !this.model.fixed ? age(now - one.since) : undefined], ["generation", String(one.generation)], ["restarts", String(one.restarts ?? 0)],
      ["heartbeat", this.model.fixed ? undefined : one.state === "silent" ? h("b", { class: "bad" }, `late: ${age(now - one.since)}`) : one.state === "ready" || one.state === "starting" ? "in time" : undefined],
      ["step", one.step === undefined ? undefined : String(one.step)], ["node", one.nodes?.join(", ")], ["process", one.pid ? String(one.pid) : undefined], ["runs for", one.started && one.pid && !this.model.fixed ? age(now - one.started) : undefined],
      ["failures without progress", one.cycles ? String(one.cycles) : undefined], ["last exit", one.last_exit]];
    const external = this.model.doc.groups[one.group]?.launcher === "external";
    return [name, [external ? null : h("p", { class: "buttons", key: "orders" }, this.#button("restart", () => restartOrder(this.model, name)), this.#button("drain", () => drainOrder(this.model, name)),
      ["failed", "backoff"].includes(one.state) ? this.#button("reset", () => resetOrder(this.model, name)) : null),
    one.reason ? h("p", { class: "reason", key: "reason" }, one.reason) : null, h("dl", { class: "facts", key: "facts" }, facts.map(([label, value]) => fact(label, value))),
    this.#versions(one), this.#ranks(one), this.#history(`replica ${name}`, "generation"), this.#programs(name)]];
  }

  #versions(one) {
    const channels = Object.values(this.model.doc.channels).filter((channel) => one.versions?.[channel.name] !== undefined);
    if (!channels.length) return null;
    const { now } = this.model;
    return h("div", { class: "scroll", key: "versions", tabindex: 0, role: "group", "aria-label": "Versions" }, h("table", null, h("thead", null, h("tr", null, ["channel", "serves", "behind", "update open", "slots", "received"].map((name) => h("th", { key: name }, name)))),
      h("tbody", null, channels.map((channel) => {
        const version = one.versions[channel.name];
        const behind = wantedVersion(channel) - version;
        const since = one.behind_since?.[channel.name];
        const open = one.open_since?.[channel.name];
        return h("tr", { key: channel.name }, h("td", null, h("a", { href: to("channel", channel.name) }, channel.name)), h("td", null, version ? h("a", { href: to("sync", channel.name, version) }, String(version)) : "none"),
          h("td", null, behind > 0 ? `${count(behind, "version")}${since ? `, ${age(now - since)}` : ""}` : "–"), h("td", null, open && now - open > 1 ? age(now - open) : "–"), h("td", null, String(one.slots?.[channel.name] ?? "–")), h("td", null, bytes(one.received_nbytes?.[channel.name] ?? 0)));
      }))));
  }

  #ranks(one) {
    const rows = Object.values(this.model.doc.channels).flatMap((channel) => Object.values(channel.members ?? {}).filter((member) => member.name.startsWith(`${one.name}/`)).map((member) => ({ channel, member, rank: member.name.split("/").at(-1) })));
    if (!rows.length) return null;
    return h("div", { class: "scroll", key: "ranks", tabindex: 0, role: "group", "aria-label": "Ranks" }, h("table", null, h("thead", null, h("tr", null, ["rank", "process", "channel", "state", "host", "holds", "loaded", "more"].map((name) => h("th", { key: name }, name)))),
      h("tbody", null, rows.map(({ channel, member, rank }) => h("tr", { key: `${channel.name} ${rank}` }, h("td", null, rank), h("td", null, String(one.pids?.[rank] ?? "–")), h("td", null, channel.name), h("td", null, member.state), h("td", null, member.host ? String(member.host) : "–"),
        h("td", null, (member.held ?? []).join(", ") || "–"), h("td", null, member.loaded ? String(member.loaded) : "–"), h("td", { class: "wide" }, [member.note, ...Object.entries(member.info ?? {}).map(([key, value]) => `${key} ${value}`)].filter(Boolean).join(", ")))))));
  }

  #history(track, kind) {
    const spans = this.model.spans(track, kind).map((one) => ({ at: one.start, one }));
    const marks = this.model.marks(track).map((one) => ({ at: one.at, mark: one }));
    const known = [...spans, ...marks].sort((a, b) => b.at - a.at);
    const all = known.slice(0, HISTORY);
    const older = known.length - all.length + this.model.older(track, kind) + this.model.older(track, "mark");
    if (!all.length) return null;
    return h("div", { key: "history" }, h("h3", null, "History"), h("ol", { class: "events" }, all.map(({ one, mark }) => (mark
      ? drawnEvent({ seq: mark.seq, at: mark.at, who: words(mark.kind), what: mark.text, tone: mark.tone })
      : h("li", { key: one.key }, h("a", { class: "when", href: to("event", one.id) }, clock(one.start)), h("span", { class: "who" }, one.name),
        h("span", { class: "what" }, [one.end === undefined ? (this.model.fixed ? "" : `for ${age(this.model.now - one.start)}`) : `lasted ${duration(one.end - one.start)}`, one.nodes?.length ? `on ${one.nodes.join(", ")}` : "",
          one.start_s !== undefined ? `ready after ${duration(one.start_s)}` : "", one.outcome ? `ended: ${one.outcome}` : "", one.reason].filter(Boolean).join(", ")))))), older ? h("p", { class: "muted" }, `${older} older not listed`) : null);
  }

  // ------------------------------------------------------------ output of programs, which needs the token

  #programs(name) {
    if (this.model.fixed) return h("p", { class: "muted", key: "programs" }, "Logs are in the state folder: replicas logs prints them.");
    const { log, stacks } = this.#output;
    return h("div", { key: "programs" }, h("h3", null, "Output"), h("p", { class: "buttons" },
      h("button", { type: "button", key: "log", onclick: () => this.#follow(name) }, log === null ? "show log" : "reload log"), h("button", { type: "button", key: "stacks", onclick: () => this.#stacks(name) }, "stacks now")),
    stacks === null ? null : h("pre", { key: "stacks", tabindex: 0, "aria-label": "Stacks" }, stacks), log === null ? null : h("pre", { key: "log", class: "log", tabindex: 0, "aria-label": "Log" }, log || "(no output yet)"));
  }

  async #follow(name) {
    this.#stop?.abort();
    const stop = new AbortController();
    this.#stop = stop;
    const asked = this.#asked;
    this.#output.log = "loading…";
    this.redraw();
    try {
      const response = await this.orders.fetch(`logs?${new URLSearchParams({ target: name, lines: LOG_LINES, follow: 1 })}`, { signal: stop.signal });
      this.#output.log = "";
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        if (this.#asked !== asked) break;
        this.#output.log = plain(this.#output.log + part.value).slice(-LOG_KEPT_NCHARS);
        this.redraw();
        const shown = this.host.querySelector("pre.log");
        if (shown && shown.scrollHeight - shown.scrollTop - shown.clientHeight < 200) requestAnimationFrame(() => shown.scrollTo(0, shown.scrollHeight));
      }
    } catch (error) {
      if (!stop.signal.aborted && this.#asked === asked) this.#output.log = error.message;
    }
    this.redraw();
  }

  async #stacks(name) {
    const asked = this.#asked;
    this.#output.stacks = "loading…";
    this.redraw();
    let text;
    try {
      const answer = JSON.parse((await (await this.orders.fetch("stacks", { method: "POST", body: JSON.stringify({ target: name }) })).text()).trim());
      text = answer.error ? answer.error.message : Object.entries(answer.result ?? {}).map(([rank, stack]) => `── ${rank}\n${stack.trimEnd()}`).join("\n\n") || "It has no running ranks.";
    } catch (error) {
      text = error.message;
    }
    if (this.#asked === asked) this.#output.stacks = plain(text);
    this.redraw();
  }

  // ------------------------------------------------------------ the others

  _node({ name }) {
    const node = this.model.doc.nodes[name];
    if (!node) return this.#unknown(`node ${name}`);
    const facts = [["state", node.state], ["address", node.address], ["heard", node.local || this.model.fixed ? undefined : age(this.model.now - node.heard)], ["GPUs free", node.gpus ? `${node.gpus_free} of ${node.gpus}` : undefined], ["CPUs", node.cpus ? String(node.cpus) : undefined],
      ["memory", node.memory_nbytes ? bytes(node.memory_nbytes) : undefined], ["release", node.release], ["labels", Object.entries(node.labels ?? {}).map(([key, value]) => `${key}=${value}`).join(", ")]];
    return [`node ${name}`, [h("p", { class: "buttons", key: "orders" }, this.#button(node.state === "draining" ? "take back" : "drain", () => nodeOrder(this.model, node))), h("dl", { class: "facts", key: "facts" }, facts.map(([label, value]) => fact(label, value))),
      h("ul", { class: "plain", key: "replicas" }, (node.replicas ?? []).map((one) => h("li", { key: one }, h("a", { href: to("replica", one) }, one)))), this.#history(`node ${name}`, "node")]];
  }

  _channel({ name }) {
    const channel = this.model.doc.channels[name];
    if (!channel) return this.#unknown(`channel ${name}`);
    const members = Object.values(channel.members ?? {});
    const served = Object.entries(channel.served ?? {}).sort(([a], [b]) => b - a).map(([version, number]) => `version ${version} on ${number}`);
    const counts = (found) => Object.entries(found ?? {}).filter(([, number]) => number).map(([key, number]) => `${number} ${words(key)}`).join(", ");
    const facts = [["newest version", String(channel.committed_version)], ["digest", channel.digest], ["epoch", String(channel.epoch)], ["slots", channel.slots ? String(channel.slots) : undefined], ["served", some(served, 5)], ["mixed since", channel.mixed_since ? clock(channel.mixed_since) : undefined],
      ["adopted", channel.adopt_together ? "together" : "one by one"], ["syncs", counts(channel.syncs)], ["retries", counts(channel.retries)], ["collectives", counts(channel.operations)]];
    return [`channel ${name}`, [holdUp(this.model, channel), h("dl", { class: "facts", key: "facts" }, facts.map(([label, value]) => fact(label, value))), this.#steering(name, channel),
      !members.length ? null : h("div", { class: "scroll", key: "members", tabindex: 0, role: "group", "aria-label": "Members" }, h("table", null, h("thead", null, h("tr", null, ["member", "role", "state", "host", "holds", "loaded", "note"].map((key) => h("th", { key }, key)))),
        h("tbody", null, members.slice(0, MEMBERS).map((one) => h("tr", { key: one.name }, h("td", null, h("a", { href: to("replica", one.name.split("/").slice(0, 2).join("/")) }, one.name)), h("td", null, one.role), h("td", null, one.state), h("td", null, one.host ? String(one.host) : "–"), h("td", null, (one.held ?? []).join(", ") || "–"), h("td", null, one.loaded ? String(one.loaded) : "–"), h("td", { class: "wide" }, one.note ?? "")))), members.length > MEMBERS ? h("p", { class: "muted" }, `${members.length - MEMBERS} more not listed`) : null)),
      this.#history(`channel ${name}`, "catch_up")]];
  }

  #steering(name, channel) {
    const versions = Object.values(channel.versions ?? {}).sort((a, b) => b.number - a.number);
    if (!versions.length) return null;
    const said = (one) => [one.content_of ? `content of ${one.content_of}` : "", ...Object.entries(one.scores ?? {}).map(([key, value]) => `${key} ${Number(value.toPrecision(4))}`), one.rejected ? `rejected: ${one.rejected}` : "",
      ...(one.leases ?? []).map((lease) => `kept by ${lease.name}${lease.until ? ` until ${clock(lease.until)}` : ""}`)].filter(Boolean).join("; ");
    const may = (one) => {
      const labels = one.labels ?? [];
      if (!one.held) return [];
      const served = labels.includes("current") ? [] : labels.includes("candidate") ? ["promote", "reject"] : one.rejected ? [] : ["rollback"];
      return [...served, "hold"];
    };
    return h("div", { class: "scroll", key: "versions", tabindex: 0, role: "group", "aria-label": "Versions" }, h("table", null, h("thead", null, h("tr", null, ["version", "labels", "step", "held", "served by", "", ""].map((key, at) => h("th", { key: at }, key)))),
      h("tbody", null, versions.map((one) => h("tr", { key: one.number, class: one.held ? undefined : "muted" }, h("td", null, this.model.sync(name, one.number) ? h("a", { href: to("sync", name, one.number) }, String(one.number)) : String(one.number)), h("td", null, (one.labels ?? []).map((label) => h("b", { key: label }, `${label} `))), h("td", null, one.step === undefined ? "" : String(one.step)), h("td", null, one.held ? String(one.held) : "gone"), h("td", null, some(one.serving ?? [], 2)), h("td", { class: "wide" }, said(one)),
        h("td", { class: "buttons" }, may(one).map((kind) => this.#button(kind, () => versionOrder(kind, name, one.number)))))))));
  }

  _sync({ channel, version }) {
    const one = this.model.sync(channel, version);
    if (!one) return this.#unknown(`version ${version} of ${channel}`);
    const facts = [["outcome", one.outcome === "committed" ? "committed" : h("b", { class: "bad" }, words(one.outcome))], ["at", clock(one.end, { date: true })], ["took", duration(one.end - one.start)], ["size", bytes(one.nbytes ?? 0)], ["sent", bytes(one.moved_nbytes ?? 0)],
      ["publisher", one.publisher ? h("a", { href: to("replica", one.publisher) }, one.publisher) : undefined], ["step", one.step === undefined ? undefined : String(one.step)], ["members", String(one.members ?? 0)],
      ["waited last for", one.slowest ? h("a", { href: to("replica", one.slowest.split("/").slice(0, 2).join("/")) }, one.slowest) : undefined],
      ["loaded by", one.loads ? count(one.loads, "replica") : undefined], ["last loaded by", one.last_loaded ? `${one.last_loaded}, ${duration(one.last_loaded_s)} after the commit` : undefined]];
    const total = one.end - one.start;
    const most = Math.max(1, ...(one.between ?? []).map(([, , nbytes]) => nbytes));
    const part = (name, ...found) => h("div", { key: name }, h("h3", null, name), found);
    const phases = part("Phases", bar(one, total || 1), h("table", null, h("tbody", null, (one.parts ?? []).map(([name, start, end]) => h("tr", { key: name }, h("td", null, h("svg", { width: 10, height: 10, "aria-hidden": "true" }, h("rect", { width: 10, height: 10, class: `phase p-${name}` })), ` ${name}`), h("td", null, duration(end - start)), h("td", { class: "muted wide" }, PHASES[name] ?? ""))))));
    const between = one.between?.length ? part("Bytes between nodes", h("ul", { class: "ways" }, one.between.map(([from, target, nbytes]) => h("li", { key: `${from} ${target}` }, h("span", null, `${from} → ${target}`), h("span", null, bytes(nbytes)), h("svg", { width: "100%", height: 4, "aria-hidden": "true" }, h("rect", { width: `${(nbytes / most) * 100}%`, height: 4, class: "phase p-transfer" })))))) : null;
    const held = Object.keys(one.held ?? {}).length ? part("Slowest to receive it", h("ul", { class: "plain" }, Object.entries(one.held).map(([name, seconds]) => h("li", { key: name }, h("a", { href: to("replica", name) }, name), ` after ${duration(seconds)}`)))) : null;
    const lost = one.lost?.length ? part("Lost during the sync", h("ul", { class: "plain" }, one.lost.map((name) => h("li", { key: name }, h("b", { class: "warn" }, name), one.reasons?.[name] ? `: ${one.reasons[name]}` : "")))) : null;
    const others = [version - 1, version + 1].filter((number) => this.model.sync(channel, number)).map((number) => h("a", { key: number, href: to("sync", channel, number) }, `version ${number}`));
    return [`version ${version} of ${channel}`, [one.error ? h("p", { class: "reason", key: "error" }, one.error) : null, h("dl", { class: "facts", key: "facts" }, facts.map(([label, value]) => fact(label, value))), phases, between, held, lost, h("p", { class: "buttons", key: "others" }, others, h("a", { href: to("event", one.id) }, "its event"))]];
  }

  _event({ seq }) {
    const event = this.model.events.find((one) => one.seq === seq);
    const mark = [...this.model.markers.values()].flat().find((one) => one.seq === seq);
    const found = event ?? (mark && { ...mark, who: mark.track.replace(/^replica /, ""), what: mark.text });
    const whole = event?.whole ? JSON.stringify(event.whole, null, 1) : this.#output.whole;
    if (whole === null && !this.model.fixed) this.#whole(seq);
    return [`event ${seq}`, [found ? [h("p", { class: "reason", key: "what" }, h("b", null, found.who), ` ${found.what}`), h("p", { class: "muted", key: "at" }, clock(found.at, { date: true, tenths: true }))] : h("p", { class: "muted", key: "none" }, "It is not among the newest events."),
      whole ? h("pre", { key: "whole", tabindex: 0, "aria-label": "The event as JSON" }, whole) : null]];
  }

  /** Fetch the whole event; with the token if there is one, because it may contain output. */
  async #whole(seq) {
    const asked = this.#asked;
    this.#output.whole = "";
    try {
      const path = `events?after=${seq - 1}&follow=0`;
      const stop = new AbortController();
      const response = this.orders.locked ? await fetch(path, { cache: "no-store", signal: stop.signal }) : await this.orders.fetch(path, { signal: stop.signal });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (let part = await reader.read(); !part.done && !/^data: .*\n\n/m.test(text); part = await reader.read()) text += part.value;
      stop.abort();
      const record = JSON.parse(/^data: (.*)$/m.exec(text)[1]);
      if (this.#asked === asked && record.seq === seq) this.#output.whole = JSON.stringify(record.event, null, 1);
    } catch {
      if (this.#asked === asked) this.#output.whole = "The whole event is no longer available.";
    }
    this.redraw();
  }
}

/** Remove escape sequences of terminals, and other control characters. */
const plain = (text) => text.replace(/\u001b\[[0-9;?]*[ -/]*[@-~]|\u001b[P\]X^_][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, "");
