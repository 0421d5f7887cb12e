// Each channel: the replicas that its newest version waits for, and its last syncs as bars of their phases.

import { h } from "./elements.js";
import { age, ago, bytes, clock, count, duration, some, words } from "./texts.js";
import { wantedVersion } from "./model.js";
import { to } from "./places.js";

export const PHASES = {
  begin: "waits until the last rank of the source calls publish",
  wait: "waits for a free slot",
  pack: "copies the weights into the slot",
  queue: "waits for the previous version, or for min_targets replicas",
  form: "connects the hosts",
  map: "offers the slot on its own host",
  transfer: "moves the bytes to other hosts",
  verify: "compares digests",
  acknowledge: "waits until each target has answered or is left out",
  commit: "writes the decision to disk",
  hold: "holds the GPU's streams, during the other phases",
};
const FEW = 10;
const MANY = 100;
const opened = new Set();

export function drawnChannels(model, redraw) {
  return Object.values(model.doc.channels).map((channel) => h("section", { key: channel.name, class: "card", "aria-label": `Channel ${channel.name}` },
    h("header", null, h("h2", null, h("a", { href: to("channel", channel.name) }, channel.name)), h("span", { class: "muted" }, route(channel))),
    facts(model, channel), holdUp(model, channel), table(model, channel, redraw)));
}

function route(channel) {
  if (channel.peers?.length) return `peers ${channel.peers.join(", ")}`;
  return channel.sources?.length || channel.targets?.length ? `${(channel.sources ?? []).join(", ") || "none"} → ${(channel.targets ?? []).join(", ") || "none"}` : "";
}

export const fact = (name, value, about) => (value === undefined || value === null || value === "" ? null
  : h("div", { key: name, class: "fact", title: about }, h("dt", null, name), h("dd", null, value)));

function facts(model, channel) {
  const failed = Object.entries(channel.syncs ?? {}).filter(([outcome]) => outcome !== "committed").reduce((all, [, number]) => all + number, 0);
  const behind = model.laggards(channel);
  const late = behind.filter((one) => one.version);
  const since = Math.min(...late.map((one) => one.since ?? Infinity));
  const lag = [late.length ? `${count(Math.max(...late.map((one) => one.behind)), "version")}${since < Infinity ? `, ${age(model.now - since)}` : ""}` : "",
    behind.length > late.length ? `${behind.length - late.length} without any` : ""].filter(Boolean).join("; ");
  const collectives = Object.entries(channel.operations ?? {}).map(([outcome, number]) => `${number} ${words(outcome)}`).join(", ");
  if (channel.peers?.length || (collectives && !channel.committed_version))
    return h("dl", { class: "facts" }, fact("collectives", collectives || "none yet"), fact("epoch", String(channel.epoch)));
  return h("dl", { class: "facts" },
    fact("newest version", channel.committed_version ? String(channel.committed_version) : "none yet"),
    fact("committed", channel.committed_at ? ago(model, channel.committed_at) : undefined),
    fact("step", channel.step !== undefined ? String(channel.step) : undefined, "meta[\"step\"] of the newest version"),
    fact("size", channel.version_nbytes ? bytes(channel.version_nbytes) : undefined),
    fact("lag", lag || "none", "of the target that is furthest behind"),
    fact("committed in total", String(channel.syncs?.committed ?? 0)), fact("failed", failed ? h("b", { class: "bad" }, String(failed)) : "0"),
    fact("sent between hosts", bytes(channel.bytes_total ?? 0)), fact("epoch", String(channel.epoch)),
    fact("wrong bytes served", channel.wrong_total ? h("b", { class: "bad" }, String(channel.wrong_total)) : undefined));
}

/** Describe what open versions wait for, and which targets have not loaded the newest version. */
export function holdUp(model, channel) {
  const found = [];
  for (const one of Object.values(channel.under_way ?? {})) {
    const more = (one.waiting ?? 0) - (one.waits_for?.length ?? 0);
    const waits = one.waits_for?.length ? h("span", null, " Waiting for ", replicasIn(one.waits_for), more > 0 ? ` and ${more} more` : "", one.kept ? ` to release version ${one.kept}` : "", one.until > model.now ? `, at most ${duration(one.until - model.now)} left.` : ".") : "";
    found.push(h("p", { key: `u${one.version}`, class: "hold" }, h("b", null, `Version ${one.version}`), ` of ${one.publisher} is ${one.state} for ${age(model.now - one.since)}.`, waits));
  }
  const behind = model.laggards(channel);
  if (wantedVersion(channel) && behind.length) {
    const alike = new Map(); // targets by version and reason
    for (const one of behind) {
      const key = `${one.version ? `at ${one.version}` : "none yet"}: ${one.why}`;
      alike.set(key, [...(alike.get(key) ?? []), one]);
    }
    const shown = [...alike].slice(0, 5).map(([key, some], at) => {
      const since = Math.min(...some.map((one) => one.since ?? Infinity));
      return [at ? "; " : "", replicasIn(some.slice(0, 4).map((one) => one.replica.name)), some.length > 4 ? ` and ${some.length - 4} more` : "",
        ` (${key}${since < Infinity ? `, ${age(model.now - since)}` : ""})`];
    });
    const more = [...alike.values()].slice(shown.length).flat().length;
    found.push(h("p", { key: "behind", class: "hold" }, h("b", null, `Version ${wantedVersion(channel)}`), " is not loaded by ", shown, more ? `; and ${more} more` : "", "."));
  }
  return found.length ? found : wantedVersion(channel) ? h("p", { key: "all", class: "muted hold" }, `All targets serve version ${wantedVersion(channel)}.`) : null;
}

const replicasIn = (members) => members.map((member, at) => [at ? ", " : "", h("a", { href: to("replica", member.split("/").slice(0, 2).join("/")) }, member)]);

function table(model, channel, redraw) {
  const all = model.spans(`channel ${channel.name}`, "sync");
  if (!all.length) return null;
  const open = opened.has(channel.name);
  const shown = all.slice(-(open ? MANY : FEW)).reverse();
  const most = Math.max(...shown.map((one) => one.end - one.start), 1e-6);
  const older = model.older(`channel ${channel.name}`, "sync") + all.length - shown.length;
  return h("div", { key: "syncs" },
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": `Syncs of ${channel.name}` }, h("table", { class: "syncs" },
      h("thead", null, h("tr", null, h("th", null, "version"), h("th", null, "at"), h("th", { class: "wide" }, "phases"), h("th", null, "took"), h("th", null, "size"),
        h("th", null, "between nodes"), h("th", null, "slowest"), h("th", null, "lost"))),
      h("tbody", null, shown.map((one) => h("tr", { key: one.key, class: one.outcome === "committed" ? "" : "badrow" },
        h("td", null, h("a", { href: to("sync", channel.name, one.version) }, String(one.version))), h("td", null, clock(one.end)),
        h("td", { class: "wide" }, bar(one, most)), h("td", null, duration(one.end - one.start)), h("td", null, bytes(one.nbytes ?? 0)),
        h("td", null, flow(one)), h("td", null, slowest(one)),
        h("td", null, one.outcome === "committed" ? (one.lost ? h("b", { class: "warn" }, some(one.lost, 2)) : "–") : h("b", { class: "bad" }, words(one.outcome)))))))),
    h("p", { class: "more" }, all.length > FEW ? h("button", {
      type: "button", onclick: () => {
        opened[open ? "delete" : "add"](channel.name);
        redraw();
      },
    }, open ? "show fewer" : `show ${Math.min(all.length, MANY)}`) : "", older ? h("span", { class: "muted" }, ` ${count(older, "older sync")} not listed`) : ""));
}

export function bar(sync, most) {
  const width = (share) => `${Math.max(share * 100, 0.15).toFixed(3)}%`;
  const lasts = Math.max(sync.end - sync.start, 1e-9);
  const text = (sync.parts ?? []).map(([name, start, end]) => `${name} ${duration(end - start)}`).join(", ");
  return h("svg", { class: "bar", width: "100%", height: 12, role: "img", "aria-label": text || "no phases known" },
    (sync.parts ?? []).length ? sync.parts.map(([name, start, end], at) => h("rect", { key: at, x: width(start / most), y: name === "hold" ? 10 : 0, width: width((end - start) / most), height: name === "hold" ? 2 : 10, class: `phase p-${name}` },
      h("title", null, `${name}: ${duration(end - start)}`))) : h("rect", { x: 0, y: 0, width: width(lasts / most), height: 10, class: sync.outcome === "committed" ? "sync" : "failed" }));
}

/** Draw the colours of all phases that occur, and of a version too narrow to show its phases. */
export function legend(model) {
  const syncs = Object.keys(model.doc.channels).flatMap((name) => model.spans(`channel ${name}`, "sync"));
  const names = new Set(syncs.flatMap((one) => (one.parts ?? []).map(([name]) => name)));
  const item = (name, style, about) => h("li", { key: name, title: about }, h("svg", { width: 10, height: 10, "aria-hidden": "true" }, h("rect", { width: 10, height: 10, class: style })), name);
  return names.size ? h("ul", { class: "legend", key: "legend", "aria-label": "Phases of a version" }, item("version", "sync", "a version that is too narrow to show its phases"),
    Object.keys(PHASES).filter((name) => names.has(name)).map((name) => item(name, `phase p-${name}`, PHASES[name]))) : null;
}

function flow(sync) {
  const ways = sync.between ?? [];
  if (!ways.length) return sync.moved_nbytes ? bytes(sync.moved_nbytes) : "–";
  const [from, target, nbytes] = ways[0];
  return `${from} → ${target} ${bytes(nbytes)}${ways.length > 1 ? ` +${ways.length - 1}` : ""}`;
}

function slowest(sync) {
  const [first] = Object.keys(sync.held ?? {});
  const name = sync.slowest ? sync.slowest.split("/").slice(0, 2).join("/") : first;
  return name ? h("span", null, h("a", { href: to("replica", name) }, name), ` ${duration(sync.held?.[name] ?? sync.end - sync.start)}`) : "–";
}
