// The head of the page, groups, nodes and events.

import { h } from "./elements.js";
import { age, ago, bytes, clock, count, duration, some, words } from "./texts.js";
import { to, toTrack } from "./places.js";

const DOTS = 64;
const LEVELS = ["bad", "warn", "note"];
const CAUSES = { // of restarts
  exit: "exited", signal: "killed", start_timeout: "too slow to start", heartbeat_timeout: "silent", progress_timeout: "without progress", load_timeout: "too slow to load",
  load_failed: "failed to load", lost: "lost", requested: "restarted by an order", group: "restarted with its group", reload: "restarted for its config", node: "moved off a node",
};

export function drawnHead(model, link, { locked, onToken, onTheme, theme }) {
  const { run } = model.doc;
  const state = link.state === "report" ? "report" : link.state === "live" ? "live" : link.state;
  const said = {
    report: `as of ${clock(model.now ?? 0, { date: true })}`, live: "live", opening: "connecting",
    lost: `not connected for ${age(Date.now() / 1000 - link.since)}`, full: "too many viewers: retrying every 10 s",
  }[state];
  return h("div", { class: "head" },
    h("h1", null, h("a", { href: to("run") }, run.run ?? "replicas")), h("span", { class: `link l-${state}`, role: "status" }, said),
    h("span", { class: "muted about" }, [run.endpoint, run.started && state !== "report" ? `up ${age(model.now - run.started)}` : "", run.version ? `replicas ${run.version}` : ""].filter(Boolean).join(" · ")),
    h("span", { class: "buttons" },
      state === "report" ? null : h("button", { type: "button", onclick: onToken, "aria-pressed": String(!locked) }, locked ? "give token" : "forget token"),
      h("button", { type: "button", onclick: onTheme, "aria-label": `Colours: ${theme}` }, { auto: "◐", light: "☀", dark: "☾" }[theme])));
}

export function drawnVerdict(model, link) {
  const { run, verdict } = model.doc;
  let [level, sentence] = [verdict.level ?? "note", verdict.sentence ?? "The run has no status yet."];
  if (run.starting) [level, sentence] = ["note", `The run is starting: ${run.starting}.`];
  if (link.state === "lost" && run.exit_code === undefined)
    [level, sentence] = ["bad", `The supervisor has not answered since ${clock(link.since)}${run.adopt_s ? `; replicas continue until ${clock(link.since + run.adopt_s)}, or longer if another supervisor takes them over` : ""}. Below is the last known state.`];
  if (!model.known) [level, sentence] = link.state === "lost" ? ["bad", "The supervisor does not answer."] : ["note", "Connecting to the supervisor…"];
  if (model.fixed && run.exit_code !== undefined) sentence = course(model);
  const all = Object.entries(verdict.troubles ?? {}).map(([text, about]) => ({ text, ...about })).sort((a, b) => LEVELS.indexOf(a.level) - LEVELS.indexOf(b.level));
  const troubles = all.filter((one) => one.text !== sentence);
  const first = all.find((one) => one.text === sentence);
  return h("div", { class: `verdict is-${level}` },
    model.fixed && run.exit_code === undefined ? h("p", { class: "sentence", key: "course" }, course(model)) : null,
    h("p", { class: "sentence", role: "status" }, first ? h("a", { href: toTrack(first.about) }, sentence) : sentence, since(model, first)),
    troubles.length ? h("ul", { class: "troubles" }, troubles.slice(0, 12).map((one) => h("li", { key: one.about + one.text, class: `is-${one.level}` }, h("a", { href: toTrack(one.about) }, one.text), since(model, one))),
      troubles.length > 12 ? h("li", { key: "more", class: "muted" }, `and ${troubles.length - 12} more`) : null) : null);
}

/** Summarize the run of a report in one line: duration, end, versions, restarts and faults. */
function course(model) {
  const { run, groups, channels, replicas } = model.doc;
  const sums = (all, name) => Object.values(all).flatMap((one) => Object.entries(one[name] ?? {})).reduce((found, [key, number]) => ({ ...found, [key]: (found[key] ?? 0) + number }), {});
  const total = (found) => Object.values(found).reduce((all, one) => all + one, 0);
  const spansOf = (of, kind) => [...model.tracks].filter(([track]) => track.startsWith(`${of} `)).flatMap(([track, kinds]) => (kinds.get(kind) ?? []).map((one) => ({ ...one, who: track.slice(of.length + 1) })));
  const [syncs, restarts] = [sums(channels, "syncs"), sums(groups, "restarts")];
  const causes = Object.entries(restarts).filter(([, number]) => number).map(([cause, number]) => `${number} ${CAUSES[cause] ?? words(cause)}`);
  const times = spansOf("replica", "generation").map((one) => one.recovery_s).filter((one) => one !== undefined);
  const [number, slowest] = [total(restarts), duration(Math.max(...times, 0))];
  const restarted = number > 1 ? `${number} restarts of replicas (${causes.length > 1 ? causes.join(", ") : `all ${causes[0].replace(/^\d+ /, "")}`})${times.length ? `, ${times.length < number ? times.length : "all"} back after ${slowest} at most` : ""}`
    : number ? `1 replica ${causes[0].slice(2)}${times.length ? ` and back after ${slowest}` : ""}` : "no replica restarted";
  const failed = Object.values(replicas).filter((one) => one.state === "failed").map((one) => one.name);
  const lost = [...new Set(spansOf("node", "node").filter((one) => one.name === "lost").map((one) => one.who))];
  const wrong = Object.values(channels).reduce((all, one) => all + (one.wrong_total ?? 0), 0);
  const parts = [total(syncs) ? `${count(syncs.committed ?? 0, "version")} committed${total(syncs) > (syncs.committed ?? 0) ? `, ${total(syncs) - (syncs.committed ?? 0)} failed` : ""}` : "",
    restarted, lost.length ? `${lost.length > 1 ? "nodes" : "node"} ${some(lost)} lost` : "", wrong ? `wrong bytes served ${count(wrong, "time")}` : "", failed.length ? `${some(failed)} failed for good` : ""];
  const end = run.exit_code === undefined ? "Not over after" : "Over after";
  return `${end} ${duration(model.now - run.started)}${run.exit_code === undefined ? "" : ` with exit code ${run.exit_code}${run.ended_by ? ` (${run.ended_by})` : ""}`}: ${parts.filter(Boolean).join("; ")}.`;
}

function since(model, trouble) {
  const parts = [trouble?.since ? `for ${trouble.about.startsWith("group ") ? "up to " : ""}${age(model.now - trouble.since)}` : "", trouble?.until > model.now ? `at most ${duration(trouble.until - model.now)} more${trouble.then ? `, then ${trouble.then}` : ""}` : ""].filter(Boolean);
  return parts.length && !model.fixed ? h("span", { class: "muted" }, ` · ${parts.join(", ")}`) : null;
}

export function drawnFigures(model) {
  const { doc } = model;
  return h("div", { class: "figures" }, Object.values(doc.groups).map((group) => groupFigure(model, group)),
    Object.values(doc.channels).filter((channel) => channel.committed_version || !channel.peers && !channel.operations).map((channel) => h("a", { class: "figure", key: `c ${channel.name}`, href: to("channel", channel.name) },
      h("span", { class: "what" }, channel.name), h("span", { class: "number" }, channel.committed_version ? `v${channel.committed_version}` : "–"),
      h("span", { class: "muted" }, channel.committed_at ? `${ago(model, channel.committed_at)}${channel.last_sync ? ` · ${duration(channel.last_sync.seconds)}` : ""}` : "no version yet"))));
}

function groupFigure(model, group) {
  const replicas = model.replicasOf(group.name);
  const over = model.doc.run.exit_code !== undefined;
  const good = ["ready", "finished", over ? "drained" : ""]; // at the end of a run all are
  const ready = replicas.filter((one) => good.includes(one.state)).length;
  const budget = group.restart_budget_remaining_ratio ?? 1;
  const restarts = Object.values(group.restarts ?? {}).reduce((all, one) => all + one, 0);
  const about = group.launcher === "external" ? "started externally" : model.fixed ? count(restarts, "restart") : `budget ${Math.round(budget * 100)} %${restarts ? ` · ${count(restarts, "restart")}` : ""}`;
  return h("a", { class: "figure", key: `g ${group.name}`, href: to("group", group.name) }, h("span", { class: "what" }, group.name),
    h("span", { class: `number${ready < (group.min_ready ?? replicas.length) ? " warn" : ""}` }, `${ready}/${replicas.length}`),
    replicas.length <= DOTS ? h("svg", { class: "dots", width: Math.min(replicas.length, 16) * 8, height: Math.ceil(replicas.length / 16) * 8, role: "img", "aria-label": `${ready} of ${replicas.length} ready` },
      replicas.map((one, at) => h("rect", { key: one.name, x: (at % 16) * 8, y: Math.floor(at / 16) * 8, width: 6, height: 6, class: `state s-${one.state}` }))) : null,
    h("span", { class: budget < 0.5 ? "warn" : "muted" }, about));
}

export function drawnNodes(model) {
  const nodes = Object.values(model.doc.nodes);
  if (!nodes.length) return null;
  return h("section", { class: "card", "aria-label": "Nodes" }, h("header", null, h("h2", null, "Nodes")),
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Nodes" }, h("table", null,
      h("thead", null, h("tr", null, ["node", "state", "heard", "GPUs free", "CPUs", "memory", "address", "replicas"].map((name) => h("th", { key: name }, name)))),
      h("tbody", null, nodes.map((one) => h("tr", { key: one.name, class: one.state === "lost" ? "badrow" : "" },
        h("td", null, h("a", { href: to("node", one.name) }, one.name), one.local ? h("span", { class: "muted" }, " (supervisor)") : ""),
        h("td", null, h("span", { class: `pill s-${one.state}` }, one.state)), h("td", null, one.local || model.fixed ? "–" : age(model.now - one.heard)),
        h("td", null, one.gpus ? `${one.gpus_free} of ${one.gpus}` : "–"), h("td", null, one.cpus ? String(one.cpus) : "–"), h("td", null, one.memory_nbytes ? bytes(one.memory_nbytes) : "–"),
        h("td", null, one.address ?? "–"), h("td", { class: "wide" }, one.replicas?.length ? some(one.replicas, 6) : "–")))))));
}

export function drawnEvents(model, choice, redraw) {
  const shown = model.events.filter((one) => choice.all || !one.routine).filter((one) => !choice.text || `${one.who} ${one.what} ${one.type}`.toLowerCase().includes(choice.text)).slice(-choice.most).reverse();
  return h("section", { class: "card", "aria-label": "Events" }, h("header", null, h("h2", null, "Newest events"),
    h("span", { class: "buttons" }, h("label", { class: "find" }, h("span", { class: "hidden" }, "Filter events"), h("input", {
      type: "search", placeholder: "filter events", oninput: (event) => {
        choice.text = event.target.value.trim().toLowerCase();
        redraw();
      },
    })), h("label", { class: "tick" }, h("input", {
      type: "checkbox", checked: choice.all, onchange: (event) => {
        choice.all = event.target.checked;
        redraw();
      },
    }), "every sync"))),
  shown.length ? h("ol", { class: "events" }, shown.map((one) => drawnEvent(one))) : h("p", { class: "muted" }, "No events match."));
}

export const drawnEvent = (one) => h("li", { key: one.seq, class: `tone-${one.tone ?? "plain"}` },
  h("a", { class: "when", href: to("event", one.seq), title: `event ${one.seq}` }, clock(one.at)), h("span", { class: "who" }, one.who), h("span", { class: "what" }, one.what));
